#include "softplus_attention/softplus_attention_cpu.h"

#include "common/parallel.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

using softplus_cpu::splits;

SoftplusAttentionPlan softplus_attention_plan_cpu(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t blocks = shape.B * softplus_cpu::channel_blocks(shape);
  const bool split_keys = splits(shape, shape.key_chunks());
  if (!shape.causal) {
    const bool split_queries = splits(shape, shape.query_chunks());
    return {true, split_keys ? 2 * shape.key_chunks() * slot : 0, (split_queries ? shape.query_chunks() : 1) * slot, 0};
  }
  const int64_t workers = parallel_workers(split_keys ? blocks * shape.key_chunks() : blocks, threads);
  return {split_keys, 0, split_keys ? 2 * (shape.key_chunks() - 1) * slot : 0,
          softplus_cpu::backward_scratch_bytes(dtype) * workers};
}

void softplus_attention_forward_cpu(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t) {
  softplus_cpu::forward(p, dtype);
}

void softplus_attention_backward_cpu(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t) {
  softplus_cpu::backward(p, dtype);
}

void softplus_attention_step_cpu(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t) {
  softplus_cpu::step(p, dtype);
}

const SoftplusAttentionKernels softplus_attention_cpu{softplus_attention_plan_cpu, softplus_attention_forward_cpu,
                                                      softplus_attention_backward_cpu, softplus_attention_step_cpu};

}  // namespace memcheck
