#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <string_view>
#include <tuple>
#include <vector>

#include "common/arena.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "common/torch/sequence_runs.h"
#include "linear_attention/linear_attention_checks.h"

// Linear attention on packed and padded batches, from a state and to one, with decays, and not normalized: the kernels
// of linear_attention, once for each sequence.

namespace memcheck::linear_attention_sequences_operators {
namespace {

using namespace linear_attention_glue;
using MaybeTensor = std::optional<at::Tensor>;

constexpr const char* kForward = "linear_attention";
constexpr const char* kBackward = "linear_attention_sequences_backward";

// The arguments beside q, k and v, as the schemas have them.
struct Arguments {
  const MaybeTensor &decay, &initial_m, &initial_z, &cu_seqlens_q, &cu_seqlens_k, &lengths;
  bool left_padded, causal;
  std::string_view feature_map;
  bool normalize;
  double eps;
};

// Arguments after all checks that need no values. Tensors that are not given are undefined.
struct Call {
  const char* op;
  Sizes n;
  double eps;
  SequenceArguments sequences;
  at::Tensor decay, initial_m, initial_z;

  // Of states: (N,Hkv,D,Dv) and (N,Hkv,D).
  std::vector<c10::SymInt> m_sizes() const { return {sequences.count(n.B), n.Hkv, n.D, n.Dv}; }
  std::vector<c10::SymInt> z_sizes() const { return {sequences.count(n.B), n.Hkv, n.D}; }
};

void check_causal_for(const char* op, const char* argument, bool causal) {
  TORCH_CHECK_VALUE(causal, op, ": ", argument, " needs causal=True, got causal=False");
}

void check_acc(const char* op, const char* name, const at::Tensor& x, const at::Tensor& q) {
  check_dtype(op, name, x, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(op, name, x, q, "q");
}

void check_state(const Call& x, const char* m_name, const at::Tensor& m, const char* z_name, const at::Tensor& z,
                 const at::Tensor& q) {
  if (m.defined()) {
    check_shape(x.op, m_name, m, "(N,Hkv,D,Dv)", {x.sequences.count(x.n.B), x.n.Hkv, x.n.D, x.n.Dv}, "k and v");
    check_acc(x.op, m_name, m, q);
  }
  TORCH_CHECK_VALUE(x.n.normalize || !z.defined(), x.op, ": ", z_name, " must be None if normalize is False, got ",
                    z.sym_sizes());
  if (z.defined()) {
    check_shape(x.op, z_name, z, "(N,Hkv,D)", {x.sequences.count(x.n.B), x.n.Hkv, x.n.D}, "k");
    check_acc(x.op, z_name, z, q);
  }
}

void check_decay(const Call& x, const at::Tensor& q) {
  check_causal_for(x.op, "decay", x.n.causal);
  if (x.decay.dim() == 1) {
    check_shape(x.op, "decay", x.decay, "(Hkv,)", {x.n.Hkv}, "k");
  } else {
    check_shape(x.op, "decay", x.decay, "(Hkv,) or (B,Hkv,T)", {x.n.B, x.n.Hkv, x.n.T}, "k");
  }
  check_acc(x.op, "decay", x.decay, q);
}

Call check_call(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Arguments& given) {
  const Sizes n = check_inputs(op, q, k, v, given.causal, given.feature_map, given.eps);
  Call x{op,
         n,
         given.eps,
         check_sequences(op, given.cu_seqlens_q, given.cu_seqlens_k, given.lengths, given.left_padded, q, n.B),
         given.decay.value_or(at::Tensor()),
         given.initial_m.value_or(at::Tensor()),
         given.initial_z.value_or(at::Tensor())};
  x.n.normalize = given.normalize;
  x.n.decayed = x.decay.defined();
  x.n.continued = x.initial_m.defined();
  if (x.n.decayed) check_decay(x, q);
  if (x.n.continued || x.initial_z.defined()) {
    check_causal_for(op, "initial_state", n.causal);
    TORCH_CHECK_VALUE(x.n.continued && x.initial_z.defined() == given.normalize, op, ": initial_state must be ",
                      given.normalize ? "a pair (m, z)" : "(m, None) if normalize is False");
    check_state(x, "m of initial_state", x.initial_m, "z of initial_state", x.initial_z, q);
  }
  return x;
}

void check_decay_values(const char* op, const at::Tensor& decay) {
  if (decay.numel() == 0) return;
  const auto [least, most] = at::aminmax(decay);
  const double low = least.item<double>(), high = most.item<double>();
  TORCH_CHECK_VALUE(low > 0 && high <= 1, op, ": decay must be in (0, 1], got values from ", low, " to ", high);
}

// The sequences of one call, and what of its tensors belongs to which.
struct Batch {
  LinearAttentionShape all;
  Dtype dtype, acc;
  std::vector<SequenceView> sequences;

  Batch(const Call& x, const at::Tensor& q)
      : all(x.n.shape()),
        dtype(dtype_of(q)),
        acc(dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32),
        sequences(read_sequences(x.op, x.sequences, all.B, all.S, all.T, all.causal)) {}

  // Waits for the device.
  void check_decays(const Call& call) const {
    if (!call.decay.defined()) return;
    const at::Tensor decay = call.decay.detach();
    if (decay.dim() == 1 || !call.sequences.padded()) return check_decay_values(call.op, decay);
    for (const SequenceView& x : sequences)  // padding is not read
      check_decay_values(call.op, decay.select(0, x.row).narrow(1, x.first_key, x.keys));
  }

  LinearAttentionShape shape(const SequenceView& x) const {
    LinearAttentionShape one = all;
    one.B = x.rows;
    one.S = x.queries;
    one.T = x.keys;
    return one;
  }
  // As in useful_threads of the kernels.
  SequenceRun run(const at::Tensor& q) const {
    return SequenceRun(sequences, q.device(), [this](const SequenceView& x) {
      return x.rows * (all.H * x.queries + all.Hkv * x.keys) * all.D * all.Dv;
    });
  }

  Strided<4> queries_of(const Strided<4>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_query, 0});
  }
  Strided<4> keys_of(const Strided<4>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_key, 0});
  }
  Strided<3> decays_of(const Strided<3>& x, const SequenceView& one) const {
    return starting_at(x, acc, {one.row, 0, one.first_key});
  }
  LinearAttentionState state_of(const LinearAttentionState& x, const SequenceView& one) const {
    return {starting_at(x.m, acc, {one.index, 0, 0, 0}), starting_at(x.z, acc, {one.index, 0, 0, 0})};
  }
};

Strided<3> reads_decay(const at::Tensor& x) {
  if (!x.defined() || x.dim() == 3) return reads<3>(x);
  const Strided<1> heads = reads<1>(x);
  return {heads.data, {0, heads.stride[0], 0}};
}

LinearAttentionState reads_state(const at::Tensor& m, const at::Tensor& z) {
  return {reads<4>(m), with_dimension(reads<3>(z), 2)};
}

LinearAttentionState writes_state(const at::Tensor& m, const at::Tensor& z) {
  return {writes<4>(m), with_dimension(writes<3>(z), 2)};
}

// ---- forward

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// y, and the last state; without elements where it is not wanted, and its z too if y is not normalized.
ForwardResult empty_results(const Call& x, const at::Tensor& q, bool return_state) {
  const auto options = q.options().dtype(acc_scalar_type(q.scalar_type()));
  const std::vector<c10::SymInt> none{0};
  return {empty_output(x.n, q), at::empty_symint(return_state ? x.m_sizes() : none, options),
          at::empty_symint(return_state && x.n.normalize ? x.z_sizes() : none, options)};
}

Call check_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Arguments& given,
                   bool return_state) {
  Call x = check_call(kForward, q, k, v, given);
  if (return_state) check_causal_for(kForward, "return_state", given.causal);
  x.n.continued |= return_state;
  return x;
}

ForwardResult forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& decay,
                           const MaybeTensor& initial_m, const MaybeTensor& initial_z, const MaybeTensor& cu_seqlens_q,
                           const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, bool causal,
                           std::string_view feature_map, bool normalize, double eps, bool return_state) {
  const Arguments given{decay,       initial_m, initial_z,   cu_seqlens_q, cu_seqlens_k, lengths,
                        left_padded, causal,    feature_map, normalize,    eps};
  return empty_results(check_forward(q, k, v, given, return_state), q, return_state);
}

struct ForwardScratch {
  void* states;
  void* scratch;

  ForwardScratch(Arena& arena, const LinearAttentionPlan& plan)
      : states(arena.take<char>(plan.forward_states_bytes)), scratch(arena.take<char>(plan.forward_scratch_bytes)) {}
};

ForwardResult forward(const LinearAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, const MaybeTensor& decay, const MaybeTensor& initial_m,
                      const MaybeTensor& initial_z, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                      const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map,
                      bool normalize, double eps, bool return_state) {
  const Arguments given{decay,       initial_m, initial_z,   cu_seqlens_q, cu_seqlens_k, lengths,
                        left_padded, causal,    feature_map, normalize,    eps};
  const Call call = check_forward(q, k, v, given, return_state);
  const Batch batch(call, q);
  batch.check_decays(call);
  ForwardResult results = empty_results(call, q, return_state);
  const auto& [y, m, z] = results;
  zero_padded_queries(call.sequences, batch.sequences, y, 2);
  const DeviceScope device(q);
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    return scratch_bytes<ForwardScratch>(kernels.plan(batch.shape(x), batch.dtype, threads));
  });
  const Strided<4> q_all = reads<4>(q), k_all = reads<4>(k), v_all = reads<4>(v), y_all = writes<4>(y);
  const Strided<3> decay_all = reads_decay(call.decay);
  const LinearAttentionState initial = reads_state(call.initial_m, call.initial_z);
  const at::Tensor none;
  const LinearAttentionState last = writes_state(return_state ? m : none, return_state && normalize ? z : none);
  run.each([&](const SequenceView& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const ForwardScratch scratch(arena, kernels.plan(batch.shape(x), batch.dtype, threads));
    const LinearAttentionForward p{batch.shape(x),
                                   eps,
                                   batch.queries_of(q_all, x),
                                   batch.keys_of(k_all, x),
                                   batch.keys_of(v_all, x),
                                   batch.queries_of(y_all, x),
                                   scratch.states,
                                   scratch.scratch,
                                   threads,
                                   batch.decays_of(decay_all, x),
                                   batch.state_of(initial, x),
                                   batch.state_of(last, x)};
    kernels.forward(p, batch.dtype, device.stream);
  });
  return results;
}

// ---- backward

constexpr size_t kInputs = 6;
using Wanted = std::array<bool, kInputs>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The gradients of the results, and the last state, as far as there are any.
struct FromResults {
  const MaybeTensor &grad_y, &grad_m, &grad_z, &m, &z;

  bool has_state() const { return grad_m.has_value() || grad_z.has_value(); }
};

Call check_backward(const FromResults& from, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const Arguments& given, const Wanted& wanted) {
  Call x = check_call(kBackward, q, k, v, given);
  if (from.grad_y) {
    check_shape(kBackward, "grad_y", *from.grad_y, "(B,H,S,Dv)", {x.n.B, x.n.H, x.n.S, x.n.Dv}, "q and v");
    check_like(kBackward, "grad_y", *from.grad_y, q, "q");
  }
  const auto given_or_none = [](const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); };
  check_state(x, "grad_m", given_or_none(from.grad_m), "grad_z", given_or_none(from.grad_z), q);
  if (wanted[3] && from.has_state()) {
    TORCH_CHECK_VALUE(from.m && from.z.has_value() == given.normalize, kBackward,
                      ": the gradient of decay needs m and z of the last state");
    check_state(x, "m", *from.m, "z", given_or_none(from.z), q);
  }
  x.n.continued |= from.has_state();
  return x;
}

// Those that are not wanted are undefined.
Gradients empty_gradients(const Call& x, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const Wanted& wanted) {
  return {empty_gradient(wanted[0], q),           empty_gradient(wanted[1], k),
          empty_gradient(wanted[2], v),           empty_gradient(wanted[3], x.decay),
          empty_gradient(wanted[4], x.initial_m), empty_gradient(wanted[5], x.initial_z)};
}

Gradients backward_meta(const MaybeTensor& grad_y, const MaybeTensor& grad_m, const MaybeTensor& grad_z,
                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& decay,
                        const MaybeTensor& initial_m, const MaybeTensor& initial_z, const MaybeTensor& m,
                        const MaybeTensor& z, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                        const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map,
                        bool normalize, double eps, Wanted output_mask) {
  const Arguments given{decay,       initial_m, initial_z,   cu_seqlens_q, cu_seqlens_k, lengths,
                        left_padded, causal,    feature_map, normalize,    eps};
  const Call call = check_backward({grad_y, grad_m, grad_z, m, z}, q, k, v, given, output_mask);
  return empty_gradients(call, q, k, v, output_mask);
}

struct BackwardScratch {
  void* rows;
  void* states;
  void* scratch;

  BackwardScratch(Arena& arena, const LinearAttentionPlan& plan)
      : rows(arena.take<char>(plan.rows_bytes)),
        states(arena.take<char>(plan.backward_states_bytes)),
        scratch(arena.take<char>(plan.backward_scratch_bytes)) {}
};

// The gradient of a result, or zeros where it has none.
at::Tensor or_zeros(const MaybeTensor& x, c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return x ? *x : at::zeros({}, options).expand_symint(sizes);
}

// What sequence x has of the parameters for the whole batch.
LinearAttentionBackward part_of(const LinearAttentionBackward& all, const Batch& batch, const SequenceView& x) {
  LinearAttentionBackward p = all;
  p.shape = batch.shape(x);
  p.grad_y = batch.queries_of(all.grad_y, x);
  p.q = batch.queries_of(all.q, x);
  p.k = batch.keys_of(all.k, x);
  p.v = batch.keys_of(all.v, x);
  p.grad_q = batch.queries_of(all.grad_q, x);
  p.grad_k = batch.keys_of(all.grad_k, x);
  p.grad_v = batch.keys_of(all.grad_v, x);
  p.decay = batch.decays_of(all.decay, x);
  p.initial = batch.state_of(all.initial, x);
  p.last = batch.state_of(all.last, x);
  p.grad_last = batch.state_of(all.grad_last, x);
  p.grad_initial = batch.state_of(all.grad_initial, x);
  p.grad_decay = batch.decays_of(all.grad_decay, x);
  return p;
}

// The kernels of the backward, once for each sequence.
void run_backward(const LinearAttentionKernels& kernels, const LinearAttentionBackward& all, const Batch& batch,
                  const at::Tensor& q) {
  const DeviceScope device(q);
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    return scratch_bytes<BackwardScratch>(kernels.plan(batch.shape(x), batch.dtype, threads));
  });
  run.each([&](const SequenceView& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const BackwardScratch scratch(arena, kernels.plan(batch.shape(x), batch.dtype, threads));
    LinearAttentionBackward p = part_of(all, batch, x);
    p.rows = scratch.rows;
    p.states = scratch.states;
    p.scratch = scratch.scratch;
    p.threads = threads;
    kernels.backward(p, batch.dtype, device.stream);
  });
}

Gradients backward(const LinearAttentionKernels& kernels, const MaybeTensor& grad_y, const MaybeTensor& grad_m,
                   const MaybeTensor& grad_z, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const MaybeTensor& decay, const MaybeTensor& initial_m, const MaybeTensor& initial_z,
                   const MaybeTensor& m, const MaybeTensor& z, const MaybeTensor& cu_seqlens_q,
                   const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, bool causal,
                   std::string_view feature_map, bool normalize, double eps, Wanted output_mask) {
  const Arguments given{decay,       initial_m, initial_z,   cu_seqlens_q, cu_seqlens_k, lengths,
                        left_padded, causal,    feature_map, normalize,    eps};
  const FromResults from{grad_y, grad_m, grad_z, m, z};
  const Call call = check_backward(from, q, k, v, given, output_mask);
  const Batch batch(call, q);
  const Gradients gradients = empty_gradients(call, q, k, v, output_mask);
  const auto& [grad_q, grad_k, grad_v, grad_decay, grad_initial_m, grad_initial_z] = gradients;
  const auto acc = q.options().dtype(acc_scalar_type(q.scalar_type()));
  const at::Tensor none;
  const bool has_state = from.has_state();
  const at::Tensor of_y = or_zeros(grad_y, {call.n.B, call.n.H, call.n.S, call.n.Dv}, q.options());
  const at::Tensor of_m = has_state ? or_zeros(grad_m, call.m_sizes(), acc) : none;
  const at::Tensor of_z = has_state && normalize ? or_zeros(grad_z, call.z_sizes(), acc) : none;
  // The gradient of a decay for each head is a sum over that for each position.
  const bool per_head = grad_decay.defined() && grad_decay.dim() == 1;
  const at::Tensor grad_decays =
      per_head ? at::empty_symint({call.n.B, call.n.Hkv, call.n.T}, grad_decay.options()) : grad_decay;
  zero_padded_queries(call.sequences, batch.sequences, grad_q, 2);
  for (const at::Tensor& x : {grad_k, grad_v, grad_decays}) zero_padded_keys(call.sequences, batch.sequences, x, 2);
  LinearAttentionBackward all{batch.all,
                              eps,
                              reads<4>(of_y),
                              reads<4>(q),
                              reads<4>(k),
                              reads<4>(v),
                              writes<4>(grad_q),
                              writes<4>(grad_k),
                              writes<4>(grad_v),
                              nullptr,
                              nullptr,
                              nullptr,
                              1};
  all.decay = reads_decay(call.decay);
  all.initial = reads_state(call.initial_m, call.initial_z);
  if (grad_decay.defined() && has_state) all.last = reads_state(*m, normalize ? *z : none);
  all.grad_last = reads_state(of_m, of_z);
  all.grad_initial = writes_state(grad_initial_m, grad_initial_z);
  all.grad_decay = writes<3>(grad_decays);
  run_backward(kernels, all, batch, q);
  if (per_head) {
    const LinearAttentionDecaySum p{batch.all.B, batch.all.Hkv, batch.all.T, all.grad_decay, writes<1>(grad_decay)};
    kernels.sum_decays(p, batch.dtype, DeviceScope(q).stream);
  }
  return gradients;
}

const Registration registration(
    MEMCHECK_KERNELS(linear_attention),
    OperatorRow{"linear_attention_sequences(Tensor q, Tensor k, Tensor v, Tensor? decay=None, Tensor? initial_m=None,"
                " Tensor? initial_z=None, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
                " Tensor? lengths=None, bool left_padded=False, bool causal=False, str feature_map=\"elu+1\","
                " bool normalize=True, float eps=1e-06, bool return_state=False) -> (Tensor y, Tensor m, Tensor z)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"linear_attention_sequences_backward(Tensor? grad_y, Tensor? grad_m, Tensor? grad_z, Tensor q,"
                " Tensor k, Tensor v, Tensor? decay, Tensor? initial_m, Tensor? initial_z, Tensor? m, Tensor? z, *,"
                " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? lengths, bool left_padded, bool causal,"
                " str feature_map, bool normalize, float eps, bool[6] output_mask) -> (Tensor grad_q, Tensor grad_k,"
                " Tensor grad_v, Tensor grad_decay, Tensor grad_initial_m, Tensor grad_initial_z)",
                backward_meta, backward});

}  // namespace
}  // namespace memcheck::linear_attention_sequences_operators
