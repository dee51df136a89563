#include "compressed_attention/compressed_attention_cpu.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

CompressedAttentionPlan compressed_attention_plan_cpu(const CompressedAttentionShape& shape, Dtype dtype,
                                                      int64_t threads) {
  using namespace compressed_cpu;
  const int64_t used = useful_threads(shape, threads);
  const int64_t query_workers = parallel_workers(query_tasks(shape), used);
  const int64_t key_workers = parallel_workers(key_tasks(shape), used);
  const int64_t pool_workers = parallel_workers(pool_tasks(shape), used);
  const int64_t forward_bytes = query_workers * forward_scratch_bytes(shape, dtype);
  return {std::max(forward_bytes, pool_workers * pool_scratch_bytes(shape, dtype)), forward_bytes,
          shape.B * shape.H * shape.S * acc_bytes(dtype),
          std::max(query_workers * query_gradient_scratch_bytes(shape, dtype),
                   key_workers * key_gradient_scratch_bytes(shape, dtype))};
}

std::vector<TaskList> compressed_attention_tasks_cpu(const CompressedAttentionShape& shape, int64_t threads) {
  const int64_t used = compressed_cpu::useful_threads(shape, threads);
  return {{"pooling", compressed_cpu::pool_work(shape), used},
          {"queries", compressed_cpu::query_work(shape), used},
          {"gradients of keys", compressed_cpu::key_work(shape), used}};
}

void compressed_attention_pool_cpu(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t) {
  compressed_cpu::pool(p, dtype);
}

void compressed_attention_forward_cpu(const CompressedAttentionForward& p, Dtype dtype, cudaStream_t) {
  compressed_cpu::forward(p, dtype);
}

void compressed_attention_backward_cpu(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t) {
  // grad_k and grad_sink read the delta that comes with grad_q.
  if (p.grad_q || p.grad_k || p.grad_sink) compressed_cpu::query_gradients(p, dtype);
  if (p.grad_k || p.grad_v) compressed_cpu::key_gradients(p, dtype);
  if (p.grad_sink) compressed_cpu::sink_gradients(p, dtype);
}

const CompressedAttentionKernels compressed_attention_cpu{compressed_attention_plan_cpu, compressed_attention_pool_cpu,
                                                          compressed_attention_forward_cpu,
                                                          compressed_attention_backward_cpu};

}  // namespace memcheck
