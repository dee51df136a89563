#include "common/compensated_sum.h"
#include "compressed_attention/compressed_attention_work_cuda.cuh"

// The gradients of sinks. A sink is a score with a value of 0, so that its gradient is the sum over queries of -p
// delta, where p = exp(sink - lse) is its weight and delta = grad_y . y - grad_lse.

namespace memcheck {
namespace compressed_cuda {

namespace {

constexpr int kSinkThreads = 256;

template <typename acc_t>
struct SinkShared {
  acc_t sums[kSinkThreads];
};

// A block of threads for each head. A thread has every kSinkThreads-th query of all batch entries; then the sums are
// added in pairs.
template <typename acc_t>
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(CompressedAttentionBackward p) {
  auto& memory = shared<SinkShared<acc_t>>();
  const int thread = static_cast<int>(threadIdx.x);
  const CompressedAttentionShape& shape = p.shape;
  const int64_t head = blockIdx.x;
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t query = thread; query < shape.B * shape.S; query += kSinkThreads) {
    const int64_t b = query / shape.S, s = query % shape.S;
    const acc_t weight = softmax_weight<CudaMaths<acc_t>>(sink, softmax_shift(*p.lse.at<acc_t>(b, head, s)));
    add_to_sum(-weighted(weight, *p.delta.at<acc_t>(b, head, s)), sum, rest);
  }
  memory.sums[thread] = sum + rest;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) memory.sums[thread] += memory.sums[thread + half];
  }
  if (thread == 0) static_cast<acc_t*>(p.grad_sink)[head] = memory.sums[0];
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_sink_gradients_cuda(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  using namespace compressed_cuda;
  with_device_type(dtype, [&](auto type) {
    using acc_t = acc_type<decltype(type)>;
    launch({"compressed_attention_backward_sinks", dim3(static_cast<unsigned>(p.shape.H)), dim3(kSinkThreads),
            sizeof(SinkShared<acc_t>), stream},
           sink_gradient_kernel<acc_t>, p);
  });
}

}  // namespace memcheck
