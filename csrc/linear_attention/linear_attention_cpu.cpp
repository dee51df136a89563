#include "linear_attention/linear_attention_cpu.h"

#include <initializer_list>

#include "common/half.h"
#include "common/sequence_tasks.h"

// The CPU's side of the contract: how a call is dealt out, the plan, and the entry points.

namespace memcheck {
namespace linear_cpu {
namespace {

int64_t multiplications(const LinearAttentionShape& n) {
  return n.B * (n.H * n.S + n.Hkv * n.T) * n.D * n.Dv;
}

LinearAttentionShape shape_of_head(const LinearAttentionShape& n, const Sequence& x) {
  LinearAttentionShape one = shape_of(n, x);
  one.H = n.group();
  one.Hkv = 1;
  return one;
}

// Moves addresses to where a head begins.
struct HeadStart {
  const Head& head;
  Dtype dtype, acc;
  int64_t first_query_head;

  HeadStart(const Head& of, Dtype dtype)
      : head(of),
        dtype(dtype),
        acc(dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32),
        first_query_head(of.key_head * of.shape.H) {}

  void move(std::initializer_list<Strided<4>*> of_queries, std::initializer_list<Strided<4>*> of_keys,
            std::initializer_list<Strided<3>*> decays, std::initializer_list<LinearAttentionState*> states) const {
    const Sequence& at = head.place;
    for (Strided<4>* x : of_queries) *x = starting_at(*x, dtype, {at.row, first_query_head, at.first_query, 0});
    for (Strided<4>* x : of_keys) *x = starting_at(*x, dtype, {at.row, head.key_head, at.first_key, 0});
    for (Strided<3>* x : decays) *x = starting_at(*x, acc, {at.row, head.key_head, at.first_key});
    for (LinearAttentionState* x : states)
      *x = {starting_at(x->m, acc, {head.sequence, head.key_head, 0, 0}),
            starting_at(x->z, acc, {head.sequence, head.key_head, 0, 0})};
  }
};

}  // namespace

Head head_at(const LinearAttentionShape& n, int64_t index) {
  const Sequence place = sequence_of(n, index / n.Hkv);
  return {.place = place, .sequence = index / n.Hkv, .key_head = index % n.Hkv, .shape = shape_of_head(n, place)};
}

LinearAttentionForward parameters_of(const LinearAttentionForward& batch, const Head& head, Dtype dtype) {
  LinearAttentionForward p = batch;
  p.shape = head.shape;
  HeadStart(head, dtype).move({&p.q, &p.y}, {&p.k, &p.v}, {&p.decay.given}, {&p.initial, &p.last});
  return p;
}

LinearAttentionBackward parameters_of(const LinearAttentionBackward& batch, const Head& head, Dtype dtype) {
  LinearAttentionBackward p = batch;
  p.shape = head.shape;
  HeadStart(head, dtype)
      .move({&p.grad_y, &p.q, &p.grad_q}, {&p.k, &p.v, &p.grad_k, &p.grad_v}, {&p.decay.given, &p.grad_decay},
            {&p.initial, &p.last, &p.grad_last, &p.grad_initial});
  return p;
}

// ---- how a call is dealt out

Deal::Deal(const LinearAttentionShape& shape, Dtype dtype, int64_t available_threads, bool backward)
    : n(shape),
      head(shape_of_head(shape, sequence_of(shape, 0))),
      dtype(dtype),
      backward(backward),
      heads(shape.B * shape.Hkv),
      threads(useful_threads(multiplications(shape), available_threads)),
      cut(cuts(heads, std::max(segments(head, head.T), segments(head, head.S)), threads, n.causal)) {
  const int64_t slots = pieces(Phase::KeySums) + (backward && !sums_share_slots(n) ? pieces(Phase::QuerySums) : 0);
  workers =
      parallel_workers(heads * std::max({pieces(Phase::Whole), pieces(Phase::Queries), pieces(Phase::Keys)}), threads);
  worker_bytes = backward ? backward_scratch_bytes(head, dtype, cut) : forward_scratch_bytes(head, dtype);
  state_bytes = slots * state_shape(n, backward).slot_size() * acc_bytes(dtype);
  row_bytes = backward ? 2 * head.H * head.S * acc_bytes(dtype) : 0;
}

int64_t Deal::pieces(Phase phase) const {
  if (cut == (phase == Phase::Whole)) return 0;
  switch (phase) {
    case Phase::Whole:
      return 1;
    case Phase::KeySums:
      return key_slots(head);
    case Phase::Queries:
      return query_segments(head);
    case Phase::QuerySums:
      return query_slots(head);
    case Phase::Keys:
      return segments(head, head.T);
    default:
      return scan_parts(state_shape(head, backward));
  }
}

}  // namespace linear_cpu

namespace {

using linear_cpu::Deal;

// How the sequences of a batch are dealt out, and the scratch of one.
SequenceTasks<LinearAttentionShape> tasks_of(const LinearAttentionShape& n, int64_t threads) {
  return {n, threads, linear_cpu::multiplications};
}
auto bytes_of(Dtype dtype, bool backward) {
  return
      [=](const LinearAttentionShape& n, int64_t threads) { return Deal(n, dtype, threads, backward).scratch_bytes(); };
}

// Calls run for the batch, or for each of its sequences as for a batch of its own.
template <typename Parameters>
void each_sequence(const Parameters& p, Dtype dtype, bool backward, void (*run)(const Parameters&, Dtype)) {
  const auto parameters_of = [&](int64_t i) {
    const Sequence x = p.shape.sequences.sequences[i];
    return linear_cpu::parameters_of(p, {.place = x, .sequence = i, .key_head = 0, .shape = shape_of(p.shape, x)},
                                     dtype);
  };
  tasks_of(p.shape, p.threads).each(p, bytes_of(dtype, backward), parameters_of, [&](const Parameters& one) {
    run(one, dtype);
  });
}

}  // namespace

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  const SequenceTasks<LinearAttentionShape> tasks = tasks_of(shape, threads);
  return {.forward_states_bytes = 0,
          .forward_scratch_bytes = tasks.scratch_bytes(bytes_of(dtype, false)),
          .rows_bytes = 0,
          .backward_states_bytes = 0,
          .backward_scratch_bytes = tasks.scratch_bytes(bytes_of(dtype, true))};
}

void linear_attention_forward_cpu(const LinearAttentionForward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, false, linear_cpu::forward);
}

void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t) {
  each_sequence(p, dtype, true, linear_cpu::backward);
}

void linear_attention_sum_decays_cpu(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    parallel_tasks(p.Hkv, useful_threads(p.B * p.Hkv * p.T, p.Hkv), [&](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head) {
        double sum = 0;
        for (int64_t b = 0; b < p.B; ++b)
          for (int64_t t = 0; t < p.T; ++t) sum += *p.from.template at<const acc_t>(b, head, t);
        *p.to.template at<acc_t>(head) = static_cast<acc_t>(sum);
      }
    });
  });
}

const LinearAttentionKernels linear_attention_cpu{linear_attention_plan_cpu, nullptr, linear_attention_forward_cpu,
                                                  linear_attention_backward_cpu, linear_attention_sum_decays_cpu};

}  // namespace memcheck
