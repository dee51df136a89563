#include "linear_attention/linear_attention_cpu.h"

#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>

#include "common/half.h"
#include "common/parallel.h"

// The CPU's side of the contract: how a call is dealt out, the plan, and the entry points.

namespace memcheck {
namespace linear_cpu {
namespace {

LinearAttentionShape shape_of_head(const LinearAttentionShape& n, const Sequence& x) {
  LinearAttentionShape one = shape_of(n, x);
  one.H = n.group();
  one.Hkv = 1;
  return one;
}

// In multiplications, of a head.
double work(const LinearAttentionShape& n) {
  return static_cast<double>(n.H * n.S + n.T) * static_cast<double>(n.D * n.Dv);
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
  const int64_t outer = n.sequences.packed ? n.sequences.count : n.Hkv;
  const int64_t sequence = n.sequences.packed ? index % outer : index / outer;
  const Sequence place = sequence_of(n, sequence);
  return {.place = place,
          .sequence = sequence,
          .key_head = n.sequences.packed ? index / outer : index % outer,
          .shape = shape_of_head(n, place)};
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

int64_t pieces_of(Phase phase, const LinearAttentionShape& head) {
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
      return std::max(scan_parts(state_shape(head, false)), scan_parts(state_shape(head, true)));
  }
}

// Heads are cut where the threads would be busy for too small a share of their time: the longest first, which would
// keep one thread busy while the others have nothing to do, and all where there are too few for an even share. Causal,
// the states of segments cost two fifths more products. Else they cost nothing but memory, and a fifth of the time may
// be lost.
Deal::Deal(const LinearAttentionShape& shape, int64_t available_threads)
    : n(shape), longest(shape_of_head(shape, {})), heads(sequence_count(shape) * shape.Hkv) {
  // The heads of a dense batch are all alike.
  const int64_t kinds = n.sequences ? n.sequences.count : std::min<int64_t>(1, n.B);
  const int64_t heads_of_kind = kinds == 0 ? 0 : heads / kinds;
  std::vector<double> kind_work(kinds);
  for (int64_t i = 0; i < kinds; ++i) {
    const LinearAttentionShape head = shape_of_head(n, sequence_of(n, i));
    longest.S = std::max(longest.S, head.S);
    longest.T = std::max(longest.T, head.T);
    kind_work[i] = work(head);
  }
  std::sort(kind_work.begin(), kind_work.end(), std::greater<>());
  double rest = std::accumulate(kind_work.begin(), kind_work.end(), 0.) * heads_of_kind;
  threads = useful_threads(static_cast<int64_t>(rest), available_threads);
  const double least_share = n.causal ? 5. / 7 : 4. / 5;
  int64_t longer = 0;
  for (; longer < kinds && rest < least_share * threads * kind_work[longer]; ++longer)
    rest -= heads_of_kind * kind_work[longer];
  if (busy_share(heads_of_kind * (kinds - longer), threads) < least_share) longer = kinds;
  most_work = longer < kinds ? kind_work[longer] : -1;
  for (int64_t index = 0; index < heads && longer > 0; ++index) {
    const LinearAttentionShape head = head_at(n, index).shape;
    if (!is_cut(head)) continue;
    cut.push_back(index);
    for (int phase = 0; phase < kPhases; ++phase)
      pieces[phase] = std::max(pieces[phase], pieces_of(static_cast<Phase>(phase), head));
  }
}

void Deal::keep_whole() {
  cut.clear();
  most_work = std::numeric_limits<double>::infinity();
}

bool Deal::is_cut(const LinearAttentionShape& head) const {
  return work(head) > most_work && (segments(head, head.T) > 1 || segments(head, head.S) > 1);
}

int64_t Deal::tasks(Phase phase) const {
  const int64_t cut_heads = static_cast<int64_t>(cut.size());
  if (phase == Phase::Whole) return all_cut() ? 0 : heads;
  return cut_heads * pieces[static_cast<int>(phase)];
}

int64_t Deal::workers() const {
  return parallel_workers(std::max({tasks(Phase::Whole), tasks(Phase::Queries), tasks(Phase::Keys)}), threads);
}

double Deal::work_of(Phase phase, int64_t task) const {
  if (phase != Phase::Whole || !n.sequences) return 1;
  const LinearAttentionShape head = head_at(n, task).shape;
  return is_cut(head) ? 0 : work(head);
}

int64_t Deal::state_bytes(Dtype dtype, bool backward) const {
  const int64_t keys = pieces[static_cast<int>(Phase::KeySums)], queries = pieces[static_cast<int>(Phase::QuerySums)];
  const int64_t slots = keys + (backward && !sums_share_slots(n) ? queries : 0);
  return slots * state_shape(n, backward).slot_size() * acc_bytes(dtype);
}

int64_t Deal::row_bytes(Dtype dtype) const {
  return 2 * longest.H * longest.S * acc_bytes(dtype);
}

int64_t Deal::heads_with_rows() const {
  if (!n.sequences) return heads;
  const int64_t whole = tasks(Phase::Whole) == 0 ? 0 : parallel_workers(tasks(Phase::Whole), threads);
  return std::max(whole, static_cast<int64_t>(cut.size()));
}

}  // namespace linear_cpu

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  const linear_cpu::Deal deal(shape, threads);
  const int64_t cut = static_cast<int64_t>(deal.cut.size());
  const int64_t workers = deal.workers();
  return {.forward_states_bytes = cut * deal.state_bytes(dtype, false),
          .forward_scratch_bytes = linear_cpu::forward_scratch_bytes(deal.longest, dtype) * workers,
          .rows_bytes = deal.heads_with_rows() * deal.row_bytes(dtype),
          .backward_states_bytes = cut * deal.state_bytes(dtype, true),
          .backward_scratch_bytes = linear_cpu::backward_scratch_bytes(deal.longest, dtype, deal.all_cut()) * workers};
}

void linear_attention_forward_cpu(const LinearAttentionForward& p, Dtype dtype, cudaStream_t) {
  linear_cpu::forward(p, dtype);
}

void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t) {
  linear_cpu::backward(p, dtype);
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
