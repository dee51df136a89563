#include "linear_attention/linear_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <string_view>
#include <tuple>

#include "common/parallel.h"
#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "common/torch/sequences.h"
#include "linear_attention/linear_attention_operators.h"
#include "linear_attention/linear_attention_plan_cuda.h"

namespace memcheck::linear_attention_operators {
namespace {

using Op = operators::LinearAttention;
using BackwardOp = operators::LinearAttentionBackward;
using StepOp = operators::LinearAttentionStep;

constexpr const char* kForward = "linear_attention";
constexpr const char* kBackward = "linear_attention_backward";
constexpr const char* kStep = "linear_attention_step";

// ---- what the operators check

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, H, Hkv, S, T, D, Dv;
  bool causal;
  FeatureMap feature_map;
  bool normalize = true, decayed = false, decays_learn = false, continued = false;

  LinearAttentionShape shape() const {
    return {.B = B.expect_int(),
            .H = H.expect_int(),
            .Hkv = Hkv.expect_int(),
            .S = S.expect_int(),
            .T = T.expect_int(),
            .D = D.expect_int(),
            .Dv = Dv.expect_int(),
            .causal = causal,
            .feature_map = feature_map,
            .normalize = normalize,
            .decayed = decayed,
            .decays_learn = decays_learn,
            .continued = continued};
  }
};

// Arguments after all checks that need no values. Tensors that are not given are undefined.
struct Call {
  const char* op;
  Sizes n;
  SequenceArguments sequences;
  at::Tensor decay, initial_m, initial_z;
  bool log_decay;

  const char* decay_name() const { return log_decay ? "log_decay" : "decay"; }
  c10::SymInt N() const { return sequences.count(n.B); }
};

FeatureMap feature_map_named(const char* op, std::string_view name) {
  const bool identity = name == "identity";
  TORCH_CHECK_VALUE(identity || name == "elu+1", op, ": feature_map must be 'elu+1' or 'identity', got '", name, "'");
  return identity ? FeatureMap::Identity : FeatureMap::EluPlusOne;
}

// Dv is that of v, or of another tensor if v is not needed.
Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                   std::string_view feature_map, double eps, const at::Tensor& instead_of_v = {}) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  check_rank(op, "k", k, 4, "(B,Hkv,T,D)");
  if (v.defined() || !instead_of_v.defined()) check_rank(op, "v", v, 4, "(B,Hkv,T,Dv)");
  const at::Tensor& has_Dv = v.defined() ? v : instead_of_v;
  Sizes n{.B = q.sym_size(0),
          .H = q.sym_size(1),
          .Hkv = k.sym_size(1),
          .S = q.sym_size(2),
          .T = k.sym_size(2),
          .D = q.sym_size(3),
          .Dv = has_Dv.sym_size(3),
          .causal = causal,
          .feature_map = feature_map_named(op, feature_map)};
  check_shape(op, "k", k, "(B,Hkv,T,D)", {n.B, n.Hkv, n.T, n.D}, "q");
  check_groups(op, n.H, n.Hkv);
  check_floating(op, "q", q);
  check_like(op, "k", k, q, "q");
  if (v.defined()) {
    check_shape(op, "v", v, "(B,Hkv,T,Dv)", {n.B, n.Hkv, n.T, n.Dv}, "k");
    check_like(op, "v", v, q, "q");
  }
  check_causal(op, causal, n.S, n.T);
  check_eps(op, eps, q.scalar_type());
  return n;
}

void check_causal_for(const char* op, const char* argument, bool causal) {
  TORCH_CHECK_VALUE(causal, op, ": ", argument, " needs causal=True, got causal=False");
}

void check_state(const Call& x, const char* m_name, const at::Tensor& m, const char* z_name, const at::Tensor& z,
                 const at::Tensor& q) {
  if (m.defined()) {
    check_shape(x.op, m_name, m, "(N,Hkv,D,Dv)", {x.N(), x.n.Hkv, x.n.D, x.n.Dv}, "k and v");
    check_acc(x.op, m_name, m, q);
  }
  TORCH_CHECK_VALUE(x.n.normalize || !z.defined(), x.op, ": ", z_name, " must be None if normalize is False, got ",
                    z.sym_sizes());
  if (z.defined()) {
    check_shape(x.op, z_name, z, "(N,Hkv,D)", {x.N(), x.n.Hkv, x.n.D}, "k");
    check_acc(x.op, z_name, z, q);
  }
}

void check_decay(const Call& x, const at::Tensor& q) {
  check_causal_for(x.op, x.decay_name(), x.n.causal);
  if (x.decay.dim() == 1) {
    check_shape(x.op, x.decay_name(), x.decay, "(Hkv,)", {x.n.Hkv}, "k");
  } else {
    check_shape(x.op, x.decay_name(), x.decay, "(Hkv,) or (B,Hkv,T)", {x.n.B, x.n.Hkv, x.n.T}, "k");
  }
  check_acc(x.op, x.decay_name(), x.decay, q);
}

// Arguments of the forward or the backward.
template <typename Arguments>
Call check_call(const char* op, const Arguments& in, const at::Tensor& v, const at::Tensor& instead_of_v = {}) {
  const Sizes n = check_inputs(op, in.q, in.k, v, in.causal, in.feature_map, in.eps, instead_of_v);
  Call x{.op = op,
         .n = n,
         .sequences = check_sequences(op, in.cu_seqlens_q, in.cu_seqlens_k, in.lengths, in.left_padded, in.q, n.B),
         .decay = tensor_or_none(in.decay),
         .initial_m = tensor_or_none(in.initial_m),
         .initial_z = tensor_or_none(in.initial_z),
         .log_decay = in.log_decay};
  x.n.normalize = in.normalize;
  x.n.decayed = x.decay.defined();
  x.n.continued = x.initial_m.defined();
  if (x.n.decayed) check_decay(x, in.q);
  if (x.n.continued || x.initial_z.defined()) {
    check_causal_for(op, "initial_state", n.causal);
    TORCH_CHECK_VALUE(x.n.continued && x.initial_z.defined() == in.normalize, op, ": initial_state must be ",
                      in.normalize ? "a pair (m, z)" : "(m, None) if normalize is False");
    check_state(x, "m of initial_state", x.initial_m, "z of initial_state", x.initial_z, in.q);
  }
  return x;
}

// ---- what kernels get

LinearAttentionDecay reads_decay(const Call& call) {
  const at::Tensor& x = call.decay;
  if (!x.defined() || x.dim() == 3) return {reads<3>(x), call.log_decay};
  const Strided<1> heads = reads<1>(x);
  return {{heads.data, {0, heads.stride[0], 0}}, call.log_decay};
}

LinearAttentionState reads_state(const at::Tensor& m, const at::Tensor& z) {
  return {reads<4>(m), with_dimension(reads<3>(z), 2)};
}

LinearAttentionState writes_state(const at::Tensor& m, const at::Tensor& z) {
  return {writes<4>(m), with_dimension(writes<3>(z), 2)};
}

// ---- forward

at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.H, n.S, n.Dv}, q.options());
}

// y, and the last state: without elements if it is not wanted; its z is undefined if y is not normalized.
Op::Results empty_results(const Call& x, const at::Tensor& q, bool return_state) {
  const at::Tensor y = empty_output(x.n, q);
  const auto acc = q.options().dtype(acc_scalar_type(q.scalar_type()));
  const c10::SymInt N = return_state ? x.N() : c10::SymInt(0);
  const at::Tensor m = at::empty_symint({N, x.n.Hkv, x.n.D, x.n.Dv}, acc);
  const bool has_z = !return_state || x.n.normalize;
  return {y, m, has_z ? at::empty_symint({N, x.n.Hkv, x.n.D}, acc) : at::Tensor()};
}

Call check_forward(const Op::Arguments& in) {
  Call x = check_call(kForward, in, in.v);
  if (in.return_state) check_causal_for(kForward, "return_state", in.causal);
  x.n.continued |= in.return_state;
  return x;
}

Op::Results forward_meta(const Op::Arguments& in) {
  return empty_results(check_forward(in), in.q, in.return_state);
}

// Raises for a value that is no decay, of the first key head that has one. Those of padding are not read.
void check_decays(Call call, LinearAttentionShape n, const Sequences& sequences, int64_t threads) {
  if (!call.decay.defined() || !checks_values(call.decay.device())) return;
  call.decay = call.decay.cpu();
  n.sequences = sequences.host_table();
  const LinearAttentionDecay decay = reads_decay(call);
  const int64_t heads = sequence_count(n) * n.Hkv;
  with_acc_type(dtype_of(call.decay), [&](auto acc) {
    const auto first_wrong = [&](int64_t index) -> std::optional<double> {
      const Sequence x = sequence_of(n, index / n.Hkv);
      const int64_t count = decay.given.stride[2] == 0 ? std::min<int64_t>(1, x.keys) : x.keys;
      for (int64_t t = x.first_key; t < x.first_key + count; ++t) {
        const double value = *decay.given.at<const decltype(acc)>(x.row, index % n.Hkv, t);
        if (!decay.allows(value)) return value;
      }
      return std::nullopt;
    };
    std::atomic<bool> found{false};
    parallel_tasks(heads, useful_threads(n.B * n.Hkv * n.T, threads), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        if (first_wrong(i)) found = true;
    });
    for (int64_t i = 0; i < heads && found; ++i)
      if (const auto value = first_wrong(i))
        TORCH_CHECK_VALUE(false, call.op, ": ", call.decay_name(),
                          call.log_decay ? " must be at most 0" : " must be in (0, 1]", ", got ", *value);
  });
}

Op::Results forward(const LinearAttentionKernels& kernels, const Op::Arguments& in) {
  const Call call = check_forward(in);
  const at::Tensor& q = in.q;
  LinearAttentionShape shape = call.n.shape();
  const DeviceScope device(q);
  Op::Results results = empty_results(call, q, in.return_state);
  const auto& [y, m, z] = results;
  const Sequences sequences = sequences_of(call.op, call.sequences, kernels.build_sequences, q, device, shape);
  check_decays(call, shape, sequences, device.threads);
  sequences.fill_if_padded(y);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch states(plan.forward_states_bytes, q);
  const Scratch scratch(plan.forward_scratch_bytes, q);
  const LinearAttentionForward p{.shape = shape,
                                 .eps = in.eps,
                                 .q = reads<4>(q),
                                 .k = reads<4>(in.k),
                                 .v = reads<4>(in.v),
                                 .y = writes<4>(y),
                                 .states = states.data(),
                                 .scratch = scratch.data(),
                                 .threads = device.threads,
                                 .decay = reads_decay(call),
                                 .initial = reads_state(call.initial_m, call.initial_z),
                                 .last = in.return_state ? writes_state(m, z) : LinearAttentionState{}};
  kernels.forward(p, dtype_of(q), device.stream);
  return results;
}

// ---- backward

using Gradients = BackwardOp::Results;

bool has_state_gradient(const BackwardOp::Arguments& in) {
  return in.grad_m.has_value() || in.grad_z.has_value();
}

// v may be undefined if grad_v alone is wanted, which depends only on its size.
Call check_backward(const BackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  const bool needs_v = wanted[0] || wanted[1] || wanted[3] || wanted[4] || wanted[5];
  if (in.grad_y) check_rank(kBackward, "grad_y", *in.grad_y, 4, "(B,H,S,Dv)");
  Call x = check_call(kBackward, in, tensor_or_none(in.v), needs_v ? at::Tensor() : tensor_or_none(in.grad_y));
  if (in.grad_y) {
    check_shape(kBackward, "grad_y", *in.grad_y, "(B,H,S,Dv)", {x.n.B, x.n.H, x.n.S, x.n.Dv}, "q and v");
    check_like(kBackward, "grad_y", *in.grad_y, in.q, "q");
  }
  check_state(x, "grad_m", tensor_or_none(in.grad_m), "grad_z", tensor_or_none(in.grad_z), in.q);
  if (wanted[3] && has_state_gradient(in)) {
    TORCH_CHECK_VALUE(in.m && in.z.has_value() == in.normalize, kBackward,
                      ": the gradient of decay needs m and z of the last state");
    check_state(x, "m", *in.m, "z", tensor_or_none(in.z), in.q);
  }
  x.n.decays_learn = wanted[3] && x.n.decayed;
  x.n.continued |= has_state_gradient(in);
  return x;
}

// Those that are not wanted are undefined.
Gradients empty_gradients(const Call& x, const BackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  return {empty_gradient(wanted[0], in.q),
          empty_gradient(wanted[1], in.k),
          empty_gradient(wanted[2], tensor_or_none(in.v), {x.n.B, x.n.Hkv, x.n.T, x.n.Dv}, in.k.options()),
          empty_gradient(wanted[3], x.decay),
          empty_gradient(wanted[4], x.initial_m),
          empty_gradient(wanted[5], x.initial_z)};
}

Gradients backward_meta(const BackwardOp::Arguments& in) {
  return empty_gradients(check_backward(in), in);
}

// The gradient of a result, or zeros where it has none.
at::Tensor or_zeros(const MaybeTensor& x, c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return x ? *x : at::zeros({}, options).expand_symint(sizes);
}

Gradients backward(const LinearAttentionKernels& kernels, const BackwardOp::Arguments& in) {
  const Call call = check_backward(in);
  const Sizes& n = call.n;
  const at::Tensor &q = in.q, none;
  LinearAttentionShape shape = n.shape();
  const DeviceScope device(q);
  const Gradients gradients = empty_gradients(call, in);
  const auto& [grad_q, grad_k, grad_v, grad_decay, grad_initial_m, grad_initial_z] = gradients;
  const Sequences sequences = sequences_of(call.op, call.sequences, kernels.build_sequences, q, device, shape);
  const auto acc = q.options().dtype(acc_scalar_type(q.scalar_type()));
  const bool has_state = has_state_gradient(in);
  const at::Tensor of_y = or_zeros(in.grad_y, {n.B, n.H, n.S, n.Dv}, q.options());
  const at::Tensor of_m = has_state ? or_zeros(in.grad_m, {call.N(), n.Hkv, n.D, n.Dv}, acc) : none;
  const at::Tensor of_z = has_state && in.normalize ? or_zeros(in.grad_z, {call.N(), n.Hkv, n.D}, acc) : none;
  // The gradient of a decay for each head is a sum over that for each position.
  const bool per_head = grad_decay.defined() && grad_decay.dim() == 1;
  const at::Tensor grad_decays = per_head ? at::empty({shape.B, shape.Hkv, shape.T}, acc) : grad_decay;
  sequences.fill_if_padded(grad_q);
  for (const at::Tensor* x : {&grad_k, &grad_v, &grad_decays}) sequences.fill_if_padded(*x);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch rows(plan.rows_bytes, q), states(plan.backward_states_bytes, q);
  const Scratch scratch(plan.backward_scratch_bytes, q);
  const bool reads_last = grad_decay.defined() && has_state;
  const LinearAttentionBackward p{
      .shape = shape,
      .eps = in.eps,
      .grad_y = reads<4>(of_y),
      .q = reads<4>(q),
      .k = reads<4>(in.k),
      .v = reads<4>(in.v),
      .grad_q = writes<4>(grad_q),
      .grad_k = writes<4>(grad_k),
      .grad_v = writes<4>(grad_v),
      .rows = rows.data(),
      .states = states.data(),
      .scratch = scratch.data(),
      .threads = device.threads,
      .decay = reads_decay(call),
      .initial = reads_state(call.initial_m, call.initial_z),
      .last = reads_last ? reads_state(*in.m, tensor_or_none(in.z)) : LinearAttentionState{},
      .grad_last = reads_state(of_m, of_z),
      .grad_initial = writes_state(grad_initial_m, grad_initial_z),
      .grad_decay = writes<3>(grad_decays)};
  kernels.backward(p, dtype_of(q), device.stream);
  if (per_head) {
    const LinearAttentionDecaySum sum{
        .B = shape.B, .Hkv = shape.Hkv, .T = shape.T, .from = p.grad_decay, .to = writes<1>(grad_decay)};
    kernels.sum_decays(sum, dtype_of(q), device.stream);
  }
  return gradients;
}

// ---- one step

Sizes check_step(const StepOp::Arguments& in) {
  const Sizes n = check_inputs(kStep, in.q, in.k, in.v, false, in.feature_map, in.eps);
  TORCH_CHECK_VALUE(n.S == 1, kStep, ": q must be one position, (B,H,1,D), got ", in.q.sym_sizes());
  check_tensor(kStep, "m", in.m);
  check_tensor(kStep, "z", in.z);
  check_shape(kStep, "m", in.m, "(B,Hkv,D,Dv)", {n.B, n.Hkv, n.D, n.Dv}, "k and v");
  check_shape(kStep, "z", in.z, "(B,Hkv,D)", {n.B, n.Hkv, n.D}, "k");
  check_acc(kStep, "m", in.m, in.q);
  check_acc(kStep, "z", in.z, in.q);
  return n;
}

StepOp::Results empty_step(const Sizes& n, const StepOp::Arguments& in) {
  return {empty_output(n, in.q), at::empty_symint({n.B, n.Hkv, n.D, n.Dv}, in.m.options()),
          at::empty_symint({n.B, n.Hkv, n.D}, in.m.options())};
}

StepOp::Results step_meta(const StepOp::Arguments& in) {
  return empty_step(check_step(in), in);
}

StepOp::Results step(const LinearAttentionKernels& kernels, const StepOp::Arguments& in) {
  const Sizes n = check_step(in);
  const LinearAttentionShape shape = n.shape();
  StepOp::Results result = empty_step(n, in);
  const auto& [y, new_m, new_z] = result;
  const DeviceScope device(in.q);
  const auto plan = kernels.plan(shape, dtype_of(in.q), device.threads);
  const Scratch scratch(plan.forward_scratch_bytes, in.q);
  const LinearAttentionForward p{.shape = shape,
                                 .eps = in.eps,
                                 .q = reads<4>(in.q),
                                 .k = reads<4>(in.k),
                                 .v = reads<4>(in.v),
                                 .y = writes<4>(y),
                                 .states = nullptr,
                                 .scratch = scratch.data(),
                                 .threads = device.threads,
                                 .initial = reads_state(in.m, in.z),
                                 .last = writes_state(new_m, new_z)};
  kernels.forward(p, dtype_of(in.q), device.stream);
  return result;
}

const Registration registration(MEMCHECK_KERNELS(linear_attention, linear_attention_plan_cuda),
                                kernels_of<Op>(forward_meta, forward, /*cast_inputs=*/3),
                                kernels_of<BackwardOp>(backward_meta, backward),
                                kernels_of<StepOp>(step_meta, step, /*cast_inputs=*/3));

}  // namespace
}  // namespace memcheck::linear_attention_operators
