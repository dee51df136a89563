#include "linear_attention/linear_attention_cpu.h"

#include "common/parallel.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t heads = shape.B * shape.Hkv;
  const bool split = linear_cpu::splits(shape);
  const int64_t key_slots = split ? linear_cpu::segments(shape, shape.T) : 0;
  const int64_t query_slots = split ? linear_cpu::query_segments(shape) : 0;
  const int64_t workers = parallel_workers(heads * std::max<int64_t>({1, key_slots, query_slots}), threads);
  const int64_t item = acc_bytes(dtype);
  return {
      heads * key_slots * linear_cpu::forward_state(shape).size() * item,
      linear_cpu::forward_scratch_bytes(shape, dtype) * workers, 2 * shape.B * shape.H * shape.S * item,
      heads * (shape.causal ? key_slots : key_slots + query_slots) * linear_cpu::backward_state(shape).size() * item,
      linear_cpu::backward_scratch_bytes(shape, dtype) * workers};
}

void linear_attention_forward_cpu(const LinearAttentionForward& p, Dtype dtype, cudaStream_t) {
  linear_cpu::forward(p, dtype);
}

void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t) {
  linear_cpu::backward(p, dtype);
}

void linear_attention_step_cpu(const LinearAttentionStep& p, Dtype dtype, cudaStream_t) {
  linear_cpu::step(p, dtype);
}

const LinearAttentionKernels linear_attention_cpu{linear_attention_plan_cpu, linear_attention_forward_cpu,
                                                  linear_attention_backward_cpu, linear_attention_step_cpu};

}  // namespace memcheck
