#include "linear_attention/linear_attention_cpu.h"

#include <atomic>
#include <stdexcept>

#include "common/dtype_cpu.h"
#include "common/finding.h"
#include "common/sequence_tasks.h"

// The CPU's side of the contract: the plan, the sequences of a batch, and the entry points.

namespace memcheck {
namespace {

LinearAttentionPlan plan_of_dense(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
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

// ---- sequences

SequenceTasks tasks_of(const LinearAttentionShape& shape, int64_t threads) {
  return SequenceTasks(shape.sequences, threads,
                       [&](const Sequence& x) { return linear_cpu::work(shape_of(shape, x)); });
}

// The scratch of one sequence, piece by piece.
struct ForwardMemory {
  void* states;
  void* scratch;

  ForwardMemory(Arena& arena, const LinearAttentionPlan& plan)
      : states(arena.take<char>(plan.forward_states_bytes)), scratch(arena.take<char>(plan.forward_scratch_bytes)) {}
  void give_to(LinearAttentionForward& p) const {
    p.states = states;
    p.scratch = scratch;
  }
};

struct BackwardMemory {
  void* rows;
  void* states;
  void* scratch;

  BackwardMemory(Arena& arena, const LinearAttentionPlan& plan)
      : rows(arena.take<char>(plan.rows_bytes)),
        states(arena.take<char>(plan.backward_states_bytes)),
        scratch(arena.take<char>(plan.backward_scratch_bytes)) {}
  void give_to(LinearAttentionBackward& p) const {
    p.rows = rows;
    p.states = states;
    p.scratch = scratch;
  }
};

template <typename Memory>
auto bytes_of_one(const LinearAttentionShape& shape, Dtype dtype) {
  return [&shape, dtype](const Sequence& x, int64_t threads) {
    return scratch_bytes<Memory>(plan_of_dense(shape_of(shape, x), dtype, threads));
  };
}

// Runs a pass on the whole batch if it is dense, else on each sequence.
template <typename Memory, typename Params>
void run(const Params& p, Dtype dtype, void (*pass)(const Params& p, Dtype dtype)) {
  if (!p.shape.sequences) return pass(p, dtype);
  const auto run_one = [&](int64_t index, const Sequence& x, int64_t threads, void* memory) {
    Params one = part_of(p, index, x, dtype);
    one.threads = threads;
    Arena arena{static_cast<char*>(memory)};
    Memory(arena, plan_of_dense(one.shape, dtype, threads)).give_to(one);
    pass(one, dtype);
  };
  tasks_of(p.shape, p.threads).each(bytes_of_one<Memory>(p.shape, dtype), p.scratch, run_one);
}

// ---- decays

// Of one key head of a sequence.
template <typename acc_t>
Finding check_decays_of_head(const Strided<3>& decay, const Sequence& x, int64_t head) {
  for (int64_t t = x.first_key; t < x.first_key + x.keys; ++t) {
    const double value = *decay.at<const acc_t>(x.row, head, t);
    if (!(value > 0 && value <= 1)) return {Rule::DecayInRange, "linear_attention", "decay", ' ', t, 0, 0, value};
    if (decay.stride[2] == 0) break;
  }
  return {};
}

template <typename acc_t>
void check_decays(const LinearAttentionForward& p) {
  const LinearAttentionShape& n = p.shape;
  std::atomic<bool> found{false};
  const int64_t heads = sequence_count(n) * n.Hkv;
  const auto finding = [&](int64_t head) {
    return check_decays_of_head<acc_t>(p.decay, sequence_of(n, head / n.Hkv), head % n.Hkv);
  };
  parallel_tasks(heads, memcheck::useful_threads(n.B * n.Hkv * n.T, p.threads), [&](int64_t begin, int64_t end, int) {
    for (int64_t head = begin; head < end; ++head)
      if (finding(head).rule != Rule::None) found = true;
  });
  for (int64_t head = 0; head < heads && found; ++head)
    if (const Finding first = finding(head); first.rule != Rule::None) throw std::invalid_argument(message_of(first));
}

}  // namespace

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  if (!shape.sequences) return plan_of_dense(shape, dtype, threads);
  const SequenceTasks tasks = tasks_of(shape, threads);
  return {0, tasks.scratch_bytes(bytes_of_one<ForwardMemory>(shape, dtype)), 0, 0,
          tasks.scratch_bytes(bytes_of_one<BackwardMemory>(shape, dtype))};
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
  if (p.decay) with_acc_type(dtype, [&](auto acc) { check_decays<decltype(acc)>(p); });
  run<ForwardMemory>(p, dtype, linear_cpu::forward);
}

void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t) {
  run<BackwardMemory>(p, dtype, linear_cpu::backward);
}

void linear_attention_step_cpu(const LinearAttentionStep& p, Dtype dtype, cudaStream_t) {
  linear_cpu::step(p, dtype);
}

void linear_attention_sum_decays_cpu(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t) {
  linear_cpu::sum_decays(p, dtype);
}

const LinearAttentionKernels linear_attention_cpu{linear_attention_plan_cpu,    &sequences_cpu,
                                                  linear_attention_forward_cpu, linear_attention_backward_cpu,
                                                  linear_attention_step_cpu,    linear_attention_sum_decays_cpu};

}  // namespace memcheck
