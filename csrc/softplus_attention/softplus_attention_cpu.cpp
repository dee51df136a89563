#include "softplus_attention/softplus_attention_cpu.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

using softplus_cpu::splits;

SoftplusAttentionPlan softplus_attention_plan_cpu(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t blocks = shape.B * softplus_cpu::channel_blocks(shape);
  const bool split_keys = splits(shape, shape.key_chunks(), threads);
  if (!shape.causal) {
    const bool split_queries = splits(shape, shape.query_chunks(), threads);
    return {true, split_keys ? 2 * shape.key_chunks() * slot : 0, (split_queries ? shape.query_chunks() : 1) * slot, 0};
  }
  const int64_t tasks = split_keys ? blocks * shape.key_chunks() : blocks;
  const int64_t workers = parallel_workers(tasks, softplus_cpu::useful_threads(shape, threads));
  return {split_keys, 0, split_keys ? 2 * (shape.key_chunks() - 1) * slot : 0,
          softplus_cpu::backward_scratch_bytes(dtype) * workers};
}

std::vector<TaskList> softplus_attention_tasks_cpu(const SoftplusAttentionShape& shape, int64_t threads) {
  const int64_t blocks = shape.B * softplus_cpu::channel_blocks(shape);
  std::vector<TaskList> lists;
  const auto add = [&](const char* pass, int64_t length, bool split, int64_t first_chunk, int64_t left_out) {
    lists.push_back({pass, {}, softplus_cpu::useful_threads(shape, threads)});
    const int64_t chunks = split ? ceil_div(length, kCarrySpacing) - left_out : 1;
    for (int64_t index = 0; index < blocks * chunks; ++index) {
      const int64_t begin = (first_chunk + index % chunks) * kCarrySpacing;
      lists.back().work.push_back(static_cast<double>(split ? std::min(kCarrySpacing, length - begin) : length));
    }
  };
  const bool split_keys = splits(shape, shape.key_chunks(), threads);
  if (!shape.causal) {
    add("sums of keys", shape.T, split_keys, 0, 0);
    add("queries", shape.S, true, 0, 0);
    add("sums of queries", shape.S, splits(shape, shape.query_chunks(), threads), 0, 0);
    add("gradients of keys", shape.T, true, 0, 0);
    return lists;
  }
  if (split_keys) add("sums of keys", shape.T, true, 0, shape.key_chunks() - shape.carries());
  add("queries", shape.T, split_keys, 0, 0);
  if (split_keys) add("sums of queries", shape.T, true, 1, 1);
  add("gradients", shape.T, split_keys, 0, 0);
  return lists;
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
