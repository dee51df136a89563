#include "softplus_attention/softplus_attention_cpu.h"

#include "common/sequence_tasks.h"

// The CPU's side of the contract: the plan and the entry points. The sequences of a table are dense batches of one row,
// which share the threads.

namespace memcheck {

namespace softplus_cpu {
namespace {

SequenceTasks<SoftplusAttentionShape> tasks_of(const SoftplusAttentionShape& shape, int64_t threads) {
  return {shape, threads, multiplications};
}

int64_t forward_bytes(const SoftplusAttentionPlan& plan, bool keeps_carries) {
  return plan.forward_scratch_bytes + (keeps_carries ? 0 : plan.forward_carries_bytes);
}

// Where a sequence is in a batch.
struct SequenceInBatch {
  const SoftplusAttentionShape& shape;
  Dtype dtype;
  int64_t index;
  Sequence x;

  Strided<3> queries(const Strided<3>& all) const { return starting_at(all, dtype, {x.row, x.first_query, 0}); }
  Strided<3> keys(const Strided<3>& all) const { return starting_at(all, dtype, {x.row, 0, x.first_key}); }
  Strided<3> state(const Strided<3>& all) const {
    return starting_at(all, dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32, {0, index, 0});
  }
  int64_t first_carry_byte() const { return shape.first_carry(x, index) * 2 * shape.R * acc_bytes(dtype); }
};

// The parameters of one sequence: a dense batch of one row.
SoftplusAttentionForward parameters_of(SoftplusAttentionForward p, const SequenceInBatch& one) {
  p.q = one.queries(p.q);
  p.k = one.keys(p.k);
  p.v = one.keys(p.v);
  p.y = one.queries(p.y);
  if (p.carries) p.carries = static_cast<char*>(p.carries) + one.first_carry_byte();
  for (Strided<3>* x : {&p.state.before, &p.state.before_rest, &p.state.after, &p.state.after_rest}) *x = one.state(*x);
  return p;
}

SoftplusAttentionBackward parameters_of(SoftplusAttentionBackward p, const SequenceInBatch& one) {
  for (Strided<3>* x : {&p.grad_y, &p.q, &p.grad_q}) *x = one.queries(*x);
  for (Strided<3>* x : {&p.k, &p.v, &p.grad_k, &p.grad_v}) *x = one.keys(*x);
  p.carries = static_cast<const char*>(p.carries) + one.first_carry_byte();
  for (Strided<3>* x : {&p.before, &p.grad_after, &p.grad_after_rest, &p.grad_before, &p.grad_before_rest})
    *x = one.state(*x);
  return p;
}

// Calls run for the batch, or for each of its sequences as for a batch of its own. bytes_of(plan): of a dense batch.
template <typename Parameters, typename BytesOf, typename Run>
void each_sequence(const Parameters& p, Dtype dtype, const BytesOf& bytes_of, const Run& run) {
  tasks_of(p.shape, p.threads)
      .each(
          p, [&](const SoftplusAttentionShape& n, int64_t threads) { return bytes_of(plan(n, dtype, threads)); },
          [&](int64_t i) { return parameters_of(p, {p.shape, dtype, i, p.shape.sequences.sequences[i]}); },
          [&](const Parameters& one) { run(one, dtype); });
}

}  // namespace

SoftplusAttentionPlan plan(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t carries = shape.carries_bytes(dtype);
  const bool split_keys = splits(shape, shape.key_chunks(), threads);
  const int64_t workers = workers_bytes(shape, dtype, threads);
  if (shape.causal)
    return {.forward_carries_bytes = split_keys ? carries : 0,
            .forward_scratch_bytes = 0,
            .backward_scratch_bytes = workers + (split_keys ? 2 * (shape.key_chunks() - 1) * slot : 0)};
  const bool split_queries = splits(shape, shape.query_chunks(), threads);
  return {.forward_carries_bytes = carries,
          .forward_scratch_bytes = split_keys ? 2 * shape.key_chunks() * slot : 0,
          .backward_scratch_bytes = (split_queries ? shape.query_chunks() : 1) * slot};
}

}  // namespace softplus_cpu

using namespace softplus_cpu;

SoftplusAttentionPlan softplus_attention_plan_cpu(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  const auto tasks = tasks_of(shape, threads);
  const auto most = [&](auto bytes_of) {
    return tasks.scratch_bytes(
        [&](const SoftplusAttentionShape& n, int64_t threads) { return bytes_of(plan(n, dtype, threads)); });
  };
  const int64_t kept = most([](const auto& plan) { return forward_bytes(plan, true); });
  const int64_t not_kept = most([](const auto& plan) { return forward_bytes(plan, false); });
  return {.forward_carries_bytes = not_kept - kept,
          .forward_scratch_bytes = kept,
          .backward_scratch_bytes = most([](const auto& plan) { return plan.backward_scratch_bytes; })};
}

void softplus_attention_forward_cpu(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t) {
  const bool keeps_carries = p.carries != nullptr;
  const auto bytes_of = [=](const SoftplusAttentionPlan& plan) { return forward_bytes(plan, keeps_carries); };
  each_sequence(p, dtype, bytes_of, forward);
}

void softplus_attention_backward_cpu(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t) {
  const auto bytes_of = [](const SoftplusAttentionPlan& plan) { return plan.backward_scratch_bytes; };
  each_sequence(p, dtype, bytes_of, backward);
}

void softplus_attention_step_cpu(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t) {
  softplus_cpu::step(p, dtype);
}

const SoftplusAttentionKernels softplus_attention_cpu{softplus_attention_plan_cpu, softplus_attention_forward_cpu,
                                                      softplus_attention_backward_cpu, softplus_attention_step_cpu,
                                                      nullptr};

}  // namespace memcheck
