#include "compressed_attention/compressed_attention_cpu.h"

#include "common/sequence_tasks.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

namespace {

using namespace compressed_cpu;

CompressedAttentionPlan plan_of_dense(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                                      Dtype dtype, int64_t threads) {
  const int64_t used = useful_threads(shape, window, threads);
  const int64_t columns = std::max(shape.C, window.size > 0 ? shape.T - window.first : 0);
  const int64_t query_workers = parallel_workers(query_tasks(shape), used);
  const int64_t key_workers = parallel_workers(key_tasks(shape, columns), used);
  const int64_t pool_workers = parallel_workers(pool_tasks(shape), useful_threads(shape, {}, threads));
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

CompressedAttentionWindow window_in(const CompressedAttentionSequence& one, const CompressedAttentionWindow& window) {
  return {window.size,
          window.first,
          one.keys(window.k),
          one.keys(window.v),
          one.keys(window.grad_k),
          one.keys(window.grad_v)};
}

CompressedAttentionWindowForward parameters_of(const CompressedAttentionWindowForward& p, Dtype dtype, int64_t i,
                                               const Sequence& x) {
  const CompressedAttentionSequence one{p.shape, dtype, i, x};
  return {{shape_of(p.shape, x), p.scale, one.queries(p.q), one.blocks(p.kc), one.blocks(p.vc), p.sink,
           one.queries(p.y), one.numbers(p.lse), p.scratch, p.threads},
          window_in(one, p.window)};
}

CompressedAttentionWindowBackward parameters_of(const CompressedAttentionWindowBackward& p, Dtype dtype, int64_t i,
                                                const Sequence& x) {
  const CompressedAttentionSequence one{p.shape, dtype, i, x};
  CompressedAttentionWindowBackward of_one = p;
  of_one.window = window_in(one, p.window);
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

SequenceTasks tasks_of(const CompressedAttentionShape& n, const CompressedAttentionWindow& window, int64_t threads) {
  return SequenceTasks(n.sequences, threads, [&](const Sequence& x) {
    const int64_t seen = n.blocks_of(x) + std::min(window.size, x.keys);
    return (n.H * x.queries * seen + n.Hkv * x.keys) * n.D;
  });
}

// The bytes of a part of the plan for one sequence.
auto bytes_of(const CompressedAttentionShape& n, const CompressedAttentionWindow& window, Dtype dtype,
              int64_t CompressedAttentionPlan::* part) {
  return [=, &n](const Sequence& x, int64_t threads) {
    return plan_of_dense(shape_of(n, x), window, dtype, threads).*part;
  };
}

// Calls run for the batch, or for each of its sequences as for a batch of its own. scratch: what it needs.
template <typename Parameters>
void each_sequence(const Parameters& p, Dtype dtype, int64_t CompressedAttentionPlan::* scratch,
                   void (*run)(const Parameters&, Dtype)) {
  if (!p.shape.sequences) return run(p, dtype);
  tasks_of(p.shape, window_of(p), p.threads)
      .each(
          bytes_of(p.shape, window_of(p), dtype, scratch), p.scratch,
          [&](int64_t i, const Sequence& x) { return parameters_of(p, dtype, i, x); },
          [&](const Parameters& one) { run(one, dtype); });
}

// All but those of sinks.
void gradients(const CompressedAttentionWindowBackward& p, Dtype dtype) {
  if (p.grad_q || p.delta) query_gradients(p, dtype);  // and delta, which the others read
  key_gradients(p, dtype);
}

CompressedAttentionPlan plan(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                             Dtype dtype, int64_t threads) {
  if (!shape.sequences) return plan_of_dense(shape, window, dtype, threads);
  using Plan = CompressedAttentionPlan;
  const SequenceTasks tasks = tasks_of(shape, window, threads);
  const auto most = [&](int64_t Plan::* part) { return tasks.scratch_bytes(bytes_of(shape, window, dtype, part)); };
  // Pooling deals out its work as without a window.
  const int64_t pooling = window.size > 0 ? plan(shape, {}, dtype, threads).forward_scratch_bytes : 0;
  return {std::max(most(&Plan::forward_scratch_bytes), pooling), most(&Plan::pooled_forward_scratch_bytes),
          shape.B * shape.H * shape.S * acc_bytes(dtype), most(&Plan::backward_scratch_bytes)};
}

void forward_of_all(const CompressedAttentionWindowForward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::pooled_forward_scratch_bytes, forward);
}

void backward_of_all(const CompressedAttentionWindowBackward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::backward_scratch_bytes, gradients);
  if (p.grad_sink != nullptr) sink_gradients(p, dtype);
}

}  // namespace

void compressed_attention_pool_cpu(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, &CompressedAttentionPlan::forward_scratch_bytes, pool);
}

const CompressedAttentionKernels compressed_attention_cpu{
    plan, compressed_attention_pool_cpu, forward_of_all, backward_of_all, extend, extend_backward, nullptr};

}  // namespace memcheck
