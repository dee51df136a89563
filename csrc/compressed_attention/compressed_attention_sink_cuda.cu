#include "common/compensated_sum.h"
#include "compressed_attention/compressed_attention_work_cuda.cuh"

// The gradients of sinks. A sink is a score with a value of 0, so that its gradient is the sum over queries of -p
// delta, where p = exp(sink - lse) is its weight and delta = grad_y . y - grad_lse.

namespace memcheck {
namespace compressed_cuda {

namespace {

constexpr int kSinkThreads = 256;
constexpr int64_t kSlice = 8 * kSinkThreads;  // queries of a head

template <typename acc_t>
struct SinkShared {
  acc_t sums[kSinkThreads];
};

// The queries of a row of the batch that are in a sequence.
MEMCHECK_INLINE PositionRange queries_of_row(const CompressedAttentionShape& shape, int64_t b) {
  const SequenceTable& table = shape.sequences;
  if (!table) return {0, shape.S};
  if (table.count == 0) return {0, 0};
  const Sequence& first = table.sequences[table.packed ? 0 : b];
  const Sequence& last = table.sequences[table.packed ? table.count - 1 : b];
  return {first.first_query, last.first_query + last.queries};
}

// The sum over the block's threads, in thread 0.
template <typename acc_t>
__device__ __forceinline__ acc_t sum_of_block(acc_t x, SinkShared<acc_t>& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  memory.sums[thread] = x;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) memory.sums[thread] += memory.sums[thread + half];
  }
  return memory.sums[0];
}

// Queries (b, s) of a head.
template <typename acc_t>
MEMCHECK_INLINE acc_t& delta_of(const CompressedAttentionBackward& p, int64_t head, int64_t query) {
  return *p.delta.at<acc_t>(query / p.shape.S, head, query % p.shape.S);
}

// A block of threads for each head and slice of the queries. No kernel reads delta after this one, so each of several
// slices leaves its sum in the place of its first query.
template <typename acc_t>
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(CompressedAttentionBackward p, int64_t slices) {
  auto& memory = shared<SinkShared<acc_t>>();
  const CompressedAttentionShape& shape = p.shape;
  const int64_t head = blockIdx.x % shape.H;
  const int64_t first = blockIdx.x / shape.H * kSlice;
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t query = first + threadIdx.x; query < first + kSlice && query < shape.B * shape.S;
       query += kSinkThreads) {
    const int64_t b = query / shape.S, s = query % shape.S;
    const PositionRange inside = queries_of_row(shape, b);
    if (s < inside.begin || s >= inside.end) continue;
    const acc_t weight = sink_gradient_weight<CudaMaths<acc_t>>(sink, *p.lse.at<acc_t>(b, head, s));
    add_to_sum(-weighted(weight, delta_of<acc_t>(p, head, query)), sum, rest);
  }
  const acc_t total = sum_of_block(sum + rest, memory);
  if (threadIdx.x == 0)
    (slices == 1 ? static_cast<acc_t*>(p.grad_sink)[head] : delta_of<acc_t>(p, head, first)) = total;
}

// A block of threads for each head adds its slices.
template <typename acc_t>
__global__ void __launch_bounds__(kSinkThreads) join_sinks_kernel(CompressedAttentionBackward p, int64_t slices) {
  auto& memory = shared<SinkShared<acc_t>>();
  const int64_t head = blockIdx.x;
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t slice = threadIdx.x; slice < slices; slice += kSinkThreads)
    add_to_sum(delta_of<acc_t>(p, head, slice * kSlice), sum, rest);
  const acc_t total = sum_of_block(sum + rest, memory);
  if (threadIdx.x == 0) static_cast<acc_t*>(p.grad_sink)[head] = total;
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_sink_gradients_cuda(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  using namespace compressed_cuda;
  const int64_t slices = larger<int64_t>(1, ceil_div(p.shape.B * p.shape.S, kSlice));
  with_device_type(dtype, [&](auto type) {
    using acc_t = acc_type<decltype(type)>;
    constexpr size_t kBytes = sizeof(SinkShared<acc_t>);
    launch({"compressed_attention_backward_sinks", p.shape.H * slices, dim3(kSinkThreads), kBytes, stream},
           sink_gradient_kernel<acc_t>, p, slices);
    if (slices > 1)
      launch({"compressed_attention_backward_sinks_join", p.shape.H, dim3(kSinkThreads), kBytes, stream},
             join_sinks_kernel<acc_t>, p, slices);
  });
}

}  // namespace memcheck
