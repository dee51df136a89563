#include <cmath>

#include "common/half.h"
#include "common/parallel.h"
#include "common/tile.h"
#include "gated_sum/gated_sum.h"

namespace memcheck {
namespace {

template <typename acc_t>
acc_t sigmoid(acc_t g) {
  return 1 / (1 + std::exp(-g));
}

template <typename scalar_t, typename acc_t>
void forward_channel(const GatedSumForward& p, int64_t b, int64_t r) {
  acc_t sum = 0;
  for (int64_t t = 0; t < p.T; ++t)
    sum += sigmoid<acc_t>(*p.g.at<scalar_t>(b, t, r)) * acc_t(*p.x.at<scalar_t>(b, t, r));
  *p.y.at<scalar_t>(b, r) = scalar_t(sum);
}

// y = sigmoid(g) x: grad_g = grad_y x sigmoid(g) (1 - sigmoid(g)), grad_x = grad_y sigmoid(g).
template <typename scalar_t, typename acc_t>
void backward_channel(const GatedSumBackward& p, int64_t b, int64_t r) {
  const acc_t grad_y = *p.grad_y.at<scalar_t>(b, r);
  for (int64_t t = 0; t < p.T; ++t) {
    const acc_t gate = sigmoid<acc_t>(*p.g.at<scalar_t>(b, t, r));
    if (p.grad_g)
      *p.grad_g.at<scalar_t>(b, t, r) = scalar_t(grad_y * acc_t(*p.x.at<scalar_t>(b, t, r)) * gate * (1 - gate));
    if (p.grad_x) *p.grad_x.at<scalar_t>(b, t, r) = scalar_t(grad_y * gate);
  }
}

void forward(const GatedSumForward& p, Dtype dtype, cudaStream_t) {
  with_scalar_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    parallel_tasks(p.B * p.R, p.B * p.R, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) forward_channel<scalar_t, acc_type<scalar_t>>(p, i / p.R, i % p.R);
    });
  });
}

void backward(const GatedSumBackward& p, Dtype dtype, cudaStream_t) {
  with_scalar_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    parallel_tasks(p.B * p.R, p.B * p.R, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) backward_channel<scalar_t, acc_type<scalar_t>>(p, i / p.R, i % p.R);
    });
  });
}

}  // namespace

const GatedSumKernels gated_sum_cpu{forward, backward};

}  // namespace memcheck
