#include "linear_attention/linear_attention_cpu.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t heads = shape.B * shape.Hkv;
  const bool split = linear_cpu::splits(shape, threads);
  const int64_t key_slots = split ? linear_cpu::key_slots(shape) : 0;
  const int64_t query_slots = split ? linear_cpu::query_slots(shape) : 0;
  const int64_t pieces = split ? std::max(linear_cpu::segments(shape, shape.T), linear_cpu::query_segments(shape)) : 1;
  const int64_t workers = parallel_workers(heads * pieces, linear_cpu::useful_threads(shape, threads));
  const int64_t item = acc_bytes(dtype);
  return {heads * key_slots * linear_cpu::forward_state(shape).slot_size() * item,
          linear_cpu::forward_scratch_bytes(shape, dtype) * workers, 2 * shape.B * shape.H * shape.S * item,
          heads * (shape.causal ? key_slots : key_slots + query_slots) * linear_cpu::backward_state(shape).slot_size() *
              item,
          linear_cpu::backward_scratch_bytes(shape, dtype) * workers};
}

std::vector<TaskList> linear_attention_tasks_cpu(const LinearAttentionShape& shape, int64_t threads) {
  using namespace linear_cpu;
  std::vector<TaskList> lists;
  const auto add = [&](const char* pass, int64_t length, int64_t pieces, int64_t first_segment) {
    lists.push_back({pass, {}, useful_threads(shape, threads)});
    for (int64_t index = 0; index < shape.B * shape.Hkv * pieces; ++index) {
      const int64_t segment = first_segment + index % pieces;
      lists.back().work.push_back(static_cast<double>(segment_range(shape, length, segment).count()));
    }
  };
  if (!splits(shape, threads)) {
    lists.push_back({"whole", {}, useful_threads(shape, threads)});
    lists.back().work.assign(shape.B * shape.Hkv, static_cast<double>(shape.T + shape.group() * shape.S));
    return lists;
  }
  const int64_t queries = shape.causal ? shape.T : shape.S;
  add("sums of keys", shape.T, key_slots(shape), 0);
  add("queries", queries, query_segments(shape), 0);
  if (shape.causal) add("sums of queries", queries, query_slots(shape), 1);
  add("gradients of keys", shape.T, segments(shape, shape.T), 0);
  return lists;
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

void linear_attention_sum_decays_cpu(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t) {
  linear_cpu::sum_decays(p, dtype);
}

const LinearAttentionKernels linear_attention_cpu{linear_attention_plan_cpu, linear_attention_forward_cpu,
                                                  linear_attention_backward_cpu, linear_attention_step_cpu,
                                                  linear_attention_sum_decays_cpu};

}  // namespace memcheck
