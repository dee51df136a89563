#include "compressed_attention/compressed_attention_cpu.h"

#include "common/sequence_tasks.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

namespace {

using namespace compressed_cpu;

CompressedAttentionPlan plan_of_dense(const CompressedAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t used = useful_threads(shape, threads);
  const int64_t query_workers = parallel_workers(query_tasks(shape), used);
  const int64_t key_workers = parallel_workers(key_tasks(shape), used);
  const int64_t pool_workers = parallel_workers(pool_tasks(shape), used);
  const int64_t forward_bytes = query_workers * forward_scratch_bytes(shape, dtype);
  const int64_t pool_bytes = pool_workers * pool_scratch_bytes(shape, dtype);
  return {std::max(forward_bytes, pool_bytes), forward_bytes, shape.B * shape.H * shape.S * acc_bytes(dtype),
          std::max(query_workers * query_gradient_scratch_bytes(shape, dtype),
                   key_workers * key_gradient_scratch_bytes(shape, dtype)),
          pool_bytes};
}

// ---- one sequence of a batch

// The shape of one sequence: a dense batch of one row.
CompressedAttentionShape shape_of(const CompressedAttentionShape& n, const Sequence& x) {
  CompressedAttentionShape one = memcheck::shape_of(n, x);
  one.C = n.blocks_of(x);
  return one;
}

// Where sequence i is in the tensors of a batch.
struct CompressedAttentionSequence {
  const CompressedAttentionShape& n;
  Dtype dtype;
  int64_t i;
  const Sequence& x;

  Strided<4> queries(const Strided<4>& of) const { return starting_at(of, dtype, {x.row, 0, x.first_query, 0}); }
  Strided<4> keys(const Strided<4>& of) const { return starting_at(of, dtype, {x.row, 0, x.first_key, 0}); }
  Strided<4> blocks(const Strided<4>& of) const { return starting_at(of, dtype, {x.row, 0, n.first_block(i, x), 0}); }
  Strided<3> numbers(const Strided<3>& of) const {
    return starting_at(of, acc_dtype(dtype), {x.row, 0, x.first_query});
  }
};

// The parameters of a dense call on sequence i.
CompressedAttentionPooling parameters_of(const CompressedAttentionPooling& p, Dtype dtype, int64_t i,
                                         const Sequence& x) {
  const CompressedAttentionSequence one{p.shape, dtype, i, x};
  return {shape_of(p.shape, x), one.keys(p.k), one.keys(p.v), one.blocks(p.kc), one.blocks(p.vc), p.scratch, p.threads};
}

CompressedAttentionForward parameters_of(const CompressedAttentionForward& p, Dtype dtype, int64_t i,
                                         const Sequence& x) {
  const CompressedAttentionSequence one{p.shape, dtype, i, x};
  return {
      shape_of(p.shape, x), p.scale,   one.queries(p.q), one.blocks(p.kc), one.blocks(p.vc), p.sink, one.queries(p.y),
      one.numbers(p.lse),   p.scratch, p.threads};
}

CompressedAttentionBackward parameters_of(const CompressedAttentionBackward& p, Dtype dtype, int64_t i,
                                          const Sequence& x) {
  const CompressedAttentionSequence one{p.shape, dtype, i, x};
  CompressedAttentionBackward of_one = p;
  of_one.shape = shape_of(p.shape, x);
  for (auto member : {&CompressedAttentionBackward::grad_y, &CompressedAttentionBackward::q,
                      &CompressedAttentionBackward::y, &CompressedAttentionBackward::grad_q})
    of_one.*member = one.queries(p.*member);
  for (auto member : {&CompressedAttentionBackward::kc, &CompressedAttentionBackward::vc})
    of_one.*member = one.blocks(p.*member);
  for (auto member : {&CompressedAttentionBackward::grad_k, &CompressedAttentionBackward::grad_v})
    of_one.*member = p.pooled ? one.blocks(p.*member) : one.keys(p.*member);
  for (auto member :
       {&CompressedAttentionBackward::grad_lse, &CompressedAttentionBackward::lse, &CompressedAttentionBackward::delta})
    of_one.*member = one.numbers(p.*member);
  return of_one;
}

// ---- all sequences

SequenceTasks tasks_of(const CompressedAttentionShape& n, int64_t threads) {
  return SequenceTasks(n.sequences, threads,
                       [&](const Sequence& x) { return (n.H * x.queries * n.blocks_of(x) + n.Hkv * x.keys) * n.D; });
}

// The bytes of a part of the plan for one sequence.
auto bytes_of(const CompressedAttentionShape& n, Dtype dtype, int64_t CompressedAttentionPlan::* part) {
  return [=, &n](const Sequence& x, int64_t threads) { return plan_of_dense(shape_of(n, x), dtype, threads).*part; };
}

// Calls run for the batch, or for each of its sequences as for a batch of its own. scratch: what it needs.
template <typename Parameters>
void each_sequence(const Parameters& p, Dtype dtype, int64_t CompressedAttentionPlan::* scratch,
                   void (*run)(const Parameters&, Dtype)) {
  if (!p.shape.sequences) return run(p, dtype);
  tasks_of(p.shape, p.threads)
      .each(
          bytes_of(p.shape, dtype, scratch), p.scratch,
          [&](int64_t i, const Sequence& x) { return parameters_of(p, dtype, i, x); },
          [&](const Parameters& one) { run(one, dtype); });
}

// All but those of sinks.
void gradients(const CompressedAttentionBackward& p, Dtype dtype) {
  if (p.grad_q || p.delta) query_gradients(p, dtype);  // and delta, which the others read
  if (p.grad_k || p.grad_v) key_gradients(p, dtype);
}

}  // namespace

CompressedAttentionPlan compressed_attention_plan_cpu(const CompressedAttentionShape& shape, Dtype dtype,
                                                      int64_t threads) {
  if (!shape.sequences) return plan_of_dense(shape, dtype, threads);
  using Plan = CompressedAttentionPlan;
  const SequenceTasks tasks = tasks_of(shape, threads);
  const auto most = [&](int64_t Plan::* part) { return tasks.scratch_bytes(bytes_of(shape, dtype, part)); };
  return {most(&Plan::forward_scratch_bytes), most(&Plan::pooled_forward_scratch_bytes),
          shape.B * shape.H * shape.S * acc_bytes(dtype), most(&Plan::backward_scratch_bytes)};
}

std::vector<TaskList> compressed_attention_tasks_cpu(const CompressedAttentionShape& shape, int64_t threads) {
  const int64_t used = compressed_cpu::useful_threads(shape, threads);
  return {{"pooling", compressed_cpu::pool_work(shape), used},
          {"queries", compressed_cpu::query_work(shape), used},
          {"gradients of keys", compressed_cpu::key_work(shape), used}};
}

void compressed_attention_pool_cpu(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::forward_scratch_bytes, pool);
}

void compressed_attention_forward_cpu(const CompressedAttentionForward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::pooled_forward_scratch_bytes, forward);
}

void compressed_attention_backward_cpu(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::backward_scratch_bytes, gradients);
  if (p.grad_sink != nullptr) sink_gradients(p, dtype);
}

const CompressedAttentionKernels compressed_attention_cpu{compressed_attention_plan_cpu,
                                                          compressed_attention_pool_cpu,
                                                          compressed_attention_forward_cpu,
                                                          compressed_attention_backward_cpu,
                                                          extend,
                                                          extend_backward,
                                                          &sequences_cpu};

}  // namespace memcheck
