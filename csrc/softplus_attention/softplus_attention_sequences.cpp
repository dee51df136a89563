#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "common/arena.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "common/torch/sequence_runs.h"
#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_checks.h"

// Softplus attention on packed, padded and continued sequences: the kernels of softplus_attention, once for each
// sequence.

namespace memcheck::softplus_attention_sequences_operators {
namespace {

using namespace softplus_attention_glue;
using MaybeTensor = std::optional<at::Tensor>;

constexpr const char* kForward = "softplus_attention";
constexpr const char* kBackward = "softplus_attention_sequences_backward";

// The sequences of one call. Each has its carries, (2,rows,carries,R), behind those of the sequence before.
struct Batch {
  const SequenceArguments& arguments;
  std::vector<SequenceView> sequences;
  std::vector<int64_t> first_carries;  // of each sequence, and the end: elements
  int64_t R;
  bool causal;
  Dtype dtype;

  Batch(const char* op, const SequenceArguments& arguments, const Sizes& n, Dtype dtype)
      : arguments(arguments), first_carries{0}, causal(n.causal), dtype(dtype) {
    const SoftplusAttentionShape shape = n.shape();
    R = shape.R;
    sequences = read_sequences(op, arguments, shape.B, shape.S, shape.T, causal);
    for (const SequenceView& x : sequences) first_carries.push_back(first_carries.back() + carries(x));
  }

  SoftplusAttentionShape shape(const SequenceView& x) const { return {x.rows, x.queries, x.keys, R, causal}; }
  int64_t carries(const SequenceView& x) const { return 2 * x.rows * shape(x).carries() * R; }
  // The carries of a sequence among those of all.
  void* carries_in(const at::Tensor& all, const SequenceView& x) const {
    return static_cast<char*>(all.mutable_data_ptr()) + first_carries[x.index] * acc_bytes(dtype);
  }
  // As in useful_threads of the kernels: a softplus takes as long as some 32 multiplications.
  SequenceRun run(const at::Tensor& q) const {
    return SequenceRun(sequences, q.device(),
                       [this](const SequenceView& x) { return 32 * x.rows * R * (x.queries + 2 * x.keys); });
  }

  Strided<3> queries_of(const Strided<3>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, one.first_query, 0});
  }
  // Of the states of all sequences, (2,N,R).
  Strided<3> state_of(const Strided<3>& x, const SequenceView& one) const {
    return starting_at(x, dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32, {0, one.index, 0});
  }
  Strided<3> keys_of(const Strided<3>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_key});
  }
};

// (slots,2,R). The number of slots does not depend on the lengths of the sequences: causal, each has at most one for
// kCarrySpacing positions.
at::Tensor empty_carries(const Sizes& n, const SequenceArguments& arguments, bool keep, const at::Tensor& q) {
  const c10::SymInt slots = n.causal ? n.B * (n.T / kCarrySpacing) : arguments.count(n.B);
  return at::empty_symint({keep ? slots : 0, 2, n.R}, q.options().dtype(acc_scalar_type(q.scalar_type())));
}

// Z and A of N sequences, or their rests, or gradients of them: (2,N,R).
void check_state(const char* op, const char* name, const MaybeTensor& x, const at::Tensor& q, const c10::SymInt& N) {
  if (!x) return;
  check_shape(op, name, *x, "(2,N,R)", {2, N, q.sym_size(2)}, "q and the sequences");
  check_dtype(op, name, *x, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(op, name, *x, q, "q");
}

at::Tensor empty_state(bool wanted, const at::Tensor& q, const c10::SymInt& N) {
  return at::empty_symint({2, wanted ? N : 0, q.sym_size(2)}, q.options().dtype(acc_scalar_type(q.scalar_type())));
}

// ---- forward

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // y, carries, new_state, new_rest

Results forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& state,
                     const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                     const MaybeTensor& lengths, bool left_padded, bool causal, double eps, bool return_state,
                     bool keep_carries) {
  const Sizes n = check_inputs(kForward, q, k, v, causal, eps);
  const auto arguments = check_sequences(kForward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  const c10::SymInt N = arguments.count(n.B);
  check_state(kForward, "state", state, q, N);
  check_state(kForward, "rest", rest, q, N);
  return {empty_output(n, q), empty_carries(n, arguments, keep_carries, q), empty_state(return_state, q, N),
          empty_state(return_state, q, N)};
}

// Carries that are not kept lie in the scratch.
struct ForwardScratch {
  void* carries;
  void* sums;

  ForwardScratch(Arena& arena, const SoftplusAttentionPlan& plan, int64_t carries_bytes)
      : carries(carries_bytes > 0 ? arena.take<char>(carries_bytes) : nullptr),
        sums(arena.take<char>(plan.forward_sums_bytes)) {}
};

Results forward(const SoftplusAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const MaybeTensor& state, const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q,
                const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, bool causal, double eps,
                bool return_state, bool keep_carries) {
  const Sizes n = check_inputs(kForward, q, k, v, causal, eps);
  const auto arguments = check_sequences(kForward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  const c10::SymInt N = arguments.count(n.B);
  check_state(kForward, "state", state, q, N);
  check_state(kForward, "rest", rest, q, N);
  const Batch batch(kForward, arguments, n, dtype_of(q));
  const at::Tensor y = empty_output(n, q);
  const at::Tensor carries = empty_carries(n, arguments, keep_carries, q);
  const at::Tensor new_state = empty_state(return_state, q, N), new_rest = empty_state(return_state, q, N);
  if (keep_carries) carries.flatten().slice(0, batch.first_carries.back()).zero_();  // of no sequence
  zero_padded_queries(arguments, batch.sequences, y, 1);
  const DeviceScope device(q);
  const auto scratch_of = [&](Arena& arena, const SequenceView& x, int64_t threads) {
    const auto plan = kernels.plan(batch.shape(x), batch.dtype, threads);
    const bool in_scratch = !keep_carries && plan.forward_uses_carries;
    return ForwardScratch(arena, plan, in_scratch ? batch.carries(x) * acc_bytes(batch.dtype) : 0);
  };
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    Arena arena{nullptr};
    scratch_of(arena, x, threads);
    return arena.bytes;
  });
  const Strided<3> q_all = reads<3>(q), k_all = reads<3>(k), v_all = reads<3>(v), y_all = writes<3>(y);
  const Strided<3> none;
  const SoftplusAttentionState states{state ? reads<3>(*state) : none, rest ? reads<3>(*rest) : none,
                                      return_state ? writes<3>(new_state) : none,
                                      return_state ? writes<3>(new_rest) : none};
  run.each([&](const SequenceView& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const ForwardScratch scratch = scratch_of(arena, x, threads);
    const SoftplusAttentionForward p{batch.shape(x),
                                     eps,
                                     batch.queries_of(q_all, x),
                                     batch.keys_of(k_all, x),
                                     batch.keys_of(v_all, x),
                                     batch.queries_of(y_all, x),
                                     keep_carries ? batch.carries_in(carries, x) : scratch.carries,
                                     scratch.sums,
                                     threads,
                                     {batch.state_of(states.before, x), batch.state_of(states.before_rest, x),
                                      batch.state_of(states.after, x), batch.state_of(states.after_rest, x)}};
    kernels.forward(p, batch.dtype, device.stream);
  });
  return {y, carries, new_state, new_rest};
}

// ---- backward

// Of q, k, v, the state before and its rest.
using Mask = std::array<bool, 5>;
using StateGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& carries, const MaybeTensor& state,
                    const MaybeTensor& grad_state, const MaybeTensor& grad_rest, const Sizes& n,
                    const SequenceArguments& arguments, const Mask& wanted) {
  check_rank(kBackward, "grad_y", grad_y, 3, "(B,S,R)");
  check_shape(kBackward, "grad_y", grad_y, "(B,S,R)", {n.B, n.S, n.R}, "q");
  check_like(kBackward, "grad_y", grad_y, q, "q");
  check_tensor(kBackward, "carries", carries);
  const c10::SymInt slots = n.causal ? n.B * (n.T / kCarrySpacing) : arguments.count(n.B);
  check_shape(kBackward, "carries", carries, "(slots,2,R)", {slots, 2, n.R}, "q and k");
  check_dtype(kBackward, "carries", carries, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(kBackward, "carries", carries, q, "q");
  check_state(kBackward, "state", state, q, arguments.count(n.B));
  check_state(kBackward, "grad_state", grad_state, q, arguments.count(n.B));
  check_state(kBackward, "grad_rest", grad_rest, q, arguments.count(n.B));
  TORCH_CHECK_VALUE(!grad_rest || grad_state, kBackward, ": grad_rest needs grad_state");
  TORCH_CHECK_VALUE(!wanted[4] || wanted[3], kBackward,
                    ": output_mask must want the gradient of the state with that of its rest");
}

StateGradients empty_state_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Mask& wanted,
                                     const c10::SymInt& N) {
  return std::tuple_cat(empty_gradients(q, k, v, {wanted[0], wanted[1], wanted[2]}),
                        std::tuple(wanted[3] ? empty_state(true, q, N) : at::Tensor(),
                                   wanted[4] ? empty_state(true, q, N) : at::Tensor()));
}

StateGradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k,
                             const MaybeTensor& v_or_none, const at::Tensor& carries, const MaybeTensor& state,
                             const MaybeTensor& grad_state, const MaybeTensor& grad_rest,
                             const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                             const MaybeTensor& lengths, bool left_padded, bool causal, double eps, Mask output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  const Sizes n = check_inputs(kBackward, q, k, v, causal, eps, output_mask[0] || output_mask[1] || output_mask[3]);
  const auto arguments = check_sequences(kBackward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  check_backward(grad_y, q, carries, state, grad_state, grad_rest, n, arguments, output_mask);
  return empty_state_gradients(q, k, v, output_mask, arguments.count(n.B));
}

struct BackwardScratch {
  void* sums;
  void* scratch;

  BackwardScratch(Arena& arena, const SoftplusAttentionPlan& plan)
      : sums(arena.take<char>(plan.backward_sums_bytes)), scratch(arena.take<char>(plan.backward_scratch_bytes)) {}
};

StateGradients backward(const SoftplusAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                        const at::Tensor& k, const MaybeTensor& v_or_none, const at::Tensor& carries,
                        const MaybeTensor& state, const MaybeTensor& grad_state, const MaybeTensor& grad_rest,
                        const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                        bool left_padded, bool causal, double eps, Mask output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  const Sizes n = check_inputs(kBackward, q, k, v, causal, eps, output_mask[0] || output_mask[1] || output_mask[3]);
  const auto arguments = check_sequences(kBackward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  check_backward(grad_y, q, carries, state, grad_state, grad_rest, n, arguments, output_mask);
  const Batch batch(kBackward, arguments, n, dtype_of(q));
  const StateGradients gradients = empty_state_gradients(q, k, v, output_mask, arguments.count(n.B));
  const auto& [grad_q, grad_k, grad_v, grad_before, grad_before_rest] = gradients;
  if (grad_before_rest.defined() && !causal) grad_before_rest.zero_();
  zero_padded_queries(arguments, batch.sequences, grad_q, 1);
  zero_padded_keys(arguments, batch.sequences, grad_k, 2);
  zero_padded_keys(arguments, batch.sequences, grad_v, 2);
  const at::Tensor dense_carries = carries.contiguous();
  const DeviceScope device(q);
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    return scratch_bytes<BackwardScratch>(kernels.plan(batch.shape(x), batch.dtype, threads));
  });
  const Strided<3> g_all = reads<3>(grad_y), q_all = reads<3>(q), k_all = reads<3>(k), v_all = reads<3>(v);
  const Strided<3> dq_all = writes<3>(grad_q), dk_all = writes<3>(grad_k), dv_all = writes<3>(grad_v);
  const Strided<3> none, before = state ? reads<3>(*state) : none, after = grad_state ? reads<3>(*grad_state) : none,
                         after_rest = grad_rest ? reads<3>(*grad_rest) : none;
  const Strided<3> dbefore_all = writes<3>(grad_before), dbefore_rest_all = writes<3>(grad_before_rest);
  run.each([&](const SequenceView& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const BackwardScratch scratch(arena, kernels.plan(batch.shape(x), batch.dtype, threads));
    const SoftplusAttentionBackward p{batch.shape(x),
                                      eps,
                                      batch.queries_of(g_all, x),
                                      batch.queries_of(q_all, x),
                                      batch.keys_of(k_all, x),
                                      batch.keys_of(v_all, x),
                                      batch.queries_of(dq_all, x),
                                      batch.keys_of(dk_all, x),
                                      batch.keys_of(dv_all, x),
                                      batch.carries_in(dense_carries, x),
                                      scratch.sums,
                                      scratch.scratch,
                                      threads,
                                      batch.state_of(before, x),
                                      batch.state_of(after, x),
                                      batch.state_of(after_rest, x),
                                      batch.state_of(dbefore_all, x),
                                      batch.state_of(dbefore_rest_all, x)};
    kernels.backward(p, batch.dtype, device.stream);
  });
  return gradients;
}

const Registration registration(
    MEMCHECK_KERNELS(softplus_attention),
    OperatorRow{"softplus_attention_sequences(Tensor q, Tensor k, Tensor v, Tensor? state=None, Tensor? rest=None, *,"
                " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False,"
                " bool causal=True, float eps=1e-06, bool return_state=False, bool keep_carries=False)"
                " -> (Tensor y, Tensor carries, Tensor new_state, Tensor new_rest)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"softplus_attention_sequences_backward(Tensor grad_y, Tensor q, Tensor k, Tensor? v, Tensor carries,"
                " Tensor? state, Tensor? grad_state, Tensor? grad_rest=None, *, Tensor? cu_seqlens_q,"
                " Tensor? cu_seqlens_k, Tensor? lengths, bool left_padded, bool causal, float eps,"
                " bool[5] output_mask)"
                " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_initial, Tensor grad_initial_rest)",
                backward_meta, backward});

}  // namespace
}  // namespace memcheck::softplus_attention_sequences_operators
