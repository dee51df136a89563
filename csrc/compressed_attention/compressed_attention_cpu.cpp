#include "compressed_attention/compressed_attention_cpu.h"

#include <initializer_list>

#include "common/sequence_tasks.h"

// The CPU's side of the contract: the plan and the entry points.

namespace memcheck {

// The shape of one sequence: a dense batch of one row. Found by SequenceTasks.
static CompressedAttentionShape shape_of(const CompressedAttentionShape& n, const Sequence& x) {
  CompressedAttentionShape one = shape_of<CompressedAttentionShape>(n, x);
  one.C = n.blocks_of(x);
  return one;
}

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

// Moves tensors of a batch to where sequence i begins in them.
struct SequenceStart {
  const CompressedAttentionShape& n;
  Dtype dtype;
  int64_t i;
  Sequence at = n.sequences.sequences[i];

  void queries(std::initializer_list<Strided<4>*> all) const { move(all, at.first_query); }
  void keys(std::initializer_list<Strided<4>*> all) const { move(all, at.first_key); }
  void blocks(std::initializer_list<Strided<4>*> all) const { move(all, n.first_block(i, at)); }
  void numbers(std::initializer_list<Strided<3>*> all) const {
    for (Strided<3>* x : all) *x = starting_at(*x, acc_dtype(dtype), {at.row, 0, at.first_query});
  }
  void window(CompressedAttentionWindow& x) const { keys({&x.k, &x.v, &x.grad_k, &x.grad_v}); }

 private:
  void move(std::initializer_list<Strided<4>*> all, int64_t first) const {
    for (Strided<4>* x : all) *x = starting_at(*x, dtype, {at.row, 0, first, 0});
  }
};

// The parameters of a dense call on a sequence, but for its shape.
CompressedAttentionPooling parameters_of(CompressedAttentionPooling p, const SequenceStart& start) {
  start.keys({&p.k, &p.v});
  start.blocks({&p.kc, &p.vc});
  return p;
}

CompressedAttentionWindowForward parameters_of(CompressedAttentionWindowForward p, const SequenceStart& start) {
  start.queries({&p.q, &p.y});
  start.blocks({&p.kc, &p.vc});
  start.numbers({&p.lse});
  start.window(p.window);
  return p;
}

CompressedAttentionWindowBackward parameters_of(CompressedAttentionWindowBackward p, const SequenceStart& start) {
  start.queries({&p.grad_y, &p.q, &p.y, &p.grad_q});
  start.blocks({&p.kc, &p.vc});
  p.pooled ? start.blocks({&p.grad_k, &p.grad_v}) : start.keys({&p.grad_k, &p.grad_v});
  start.numbers({&p.grad_lse, &p.lse, &p.delta});
  start.window(p.window);
  return p;
}

// ---- all sequences

SequenceTasks<CompressedAttentionShape> tasks_of(const CompressedAttentionShape& n,
                                                 const CompressedAttentionWindow& window, int64_t threads) {
  return {n, threads, [&](const CompressedAttentionShape& one) {
            return (one.H * one.S * (one.C + std::min(window.size, one.T)) + one.Hkv * one.T) * one.D;
          }};
}

// The bytes of a part of the plan for a dense batch.
auto bytes_of(const CompressedAttentionWindow& window, Dtype dtype, int64_t CompressedAttentionPlan::* part) {
  return [=](const CompressedAttentionShape& n, int64_t threads) {
    return plan_of_dense(n, window, dtype, threads).*part;
  };
}

// Calls run for the batch, or for each of its sequences as for a batch of its own. scratch: what it needs.
template <typename Parameters>
void each_sequence(const Parameters& p, Dtype dtype, int64_t CompressedAttentionPlan::* scratch,
                   void (*run)(const Parameters&, Dtype)) {
  tasks_of(p.shape, window_of(p), p.threads)
      .each(
          p, bytes_of(window_of(p), dtype, scratch),
          [&](int64_t i) { return parameters_of(p, SequenceStart{p.shape, dtype, i}); },
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
  const auto tasks = tasks_of(shape, window, threads);
  const auto most = [&](int64_t Plan::* part) { return tasks.scratch_bytes(bytes_of(window, dtype, part)); };
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
