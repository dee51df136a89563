#include "common/kernel.cuh"
#include "common/types.h"
#include "gated_sum/gated_sum.h"

namespace memcheck {
namespace {

constexpr int kThreads = 64;

template <typename acc_t>
__device__ acc_t sigmoid(acc_t g) {
  return 1 / (1 + exp(-g));
}

// One thread for each channel of each batch entry, along the x of the grid: y and z end at 65,535 blocks.
template <typename scalar_t>
__global__ void gated_sum_forward_kernel(const GatedSumForward p) {
  using acc_t = acc_type<scalar_t>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.B * p.R) return;
  const int64_t b = i / p.R, r = i % p.R;
  acc_t sum = 0;
  for (int64_t t = 0; t < p.T; ++t)
    sum += sigmoid(to_acc(*p.g.at<scalar_t>(b, t, r))) * to_acc(*p.x.at<scalar_t>(b, t, r));
  *p.y.at<scalar_t>(b, r) = from_acc<scalar_t>(sum);
}

// y = sigmoid(g) x: grad_g = grad_y x sigmoid(g) (1 - sigmoid(g)), grad_x = grad_y sigmoid(g).
template <typename scalar_t>
__global__ void gated_sum_backward_kernel(const GatedSumBackward p) {
  using acc_t = acc_type<scalar_t>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.B * p.R) return;
  const int64_t b = i / p.R, r = i % p.R;
  const acc_t grad_y = to_acc(*p.grad_y.at<scalar_t>(b, r));
  for (int64_t t = 0; t < p.T; ++t) {
    const acc_t gate = sigmoid(to_acc(*p.g.at<scalar_t>(b, t, r)));
    if (p.grad_g)
      *p.grad_g.at<scalar_t>(b, t, r) =
          from_acc<scalar_t>(grad_y * to_acc(*p.x.at<scalar_t>(b, t, r)) * gate * (1 - gate));
    if (p.grad_x) *p.grad_x.at<scalar_t>(b, t, r) = from_acc<scalar_t>(grad_y * gate);
  }
}

template <typename Parameters>
Launch launch_of(const char* kernel, const Parameters& p, cudaStream_t stream) {
  return {kernel, ceil_div(p.B * p.R, kThreads), dim3(kThreads), 0, stream};
}

void forward(const GatedSumForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    launch(launch_of("gated_sum_forward", p, stream), gated_sum_forward_kernel<decltype(scalar)>, p);
  });
}

void backward(const GatedSumBackward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    launch(launch_of("gated_sum_backward", p, stream), gated_sum_backward_kernel<decltype(scalar)>, p);
  });
}

}  // namespace

const GatedSumKernels gated_sum_cuda{forward, backward};

}  // namespace memcheck
