#include "softplus_attention/softplus_attention.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "common/torch/sequences.h"
#include "softplus_attention/softplus_attention_operators.h"
#include "softplus_attention/softplus_attention_plan_cuda.h"

namespace memcheck::softplus_attention_operators {
namespace {

using Op = operators::SoftplusAttention;
using BackwardOp = operators::SoftplusAttentionBackward;
using StepOp = operators::SoftplusAttentionStep;

constexpr const char* kForward = "softplus_attention";
constexpr const char* kBackward = "softplus_attention_backward";
constexpr const char* kStep = "softplus_attention_step";

// ---- what the operators check, and results

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, S, T, R;
  c10::SymInt N;  // sequences
  bool causal;
  SequenceArguments sequences;

  // From the arguments of an operator.
  template <typename Arguments>
  void set_sequences(const char* op, const Arguments& in) {
    sequences = check_sequences(op, in.cu_seqlens_q, in.cu_seqlens_k, in.lengths, in.left_padded, in.q, B);
    N = sequences.count(B);
  }
  c10::SymInt carries() const { return causal ? T / kCarrySpacing : sequences.packed() ? N : c10::SymInt(1); }
  SoftplusAttentionShape shape() const {
    return {.B = B.expect_int(), .S = S.expect_int(), .T = T.expect_int(), .R = R.expect_int(), .causal = causal};
  }
};

at::TensorOptions sum_options(const at::Tensor& q) {
  return q.options().dtype(acc_scalar_type(q.scalar_type()));
}

Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                   double eps, bool needs_v = true) {
  check_rank(op, "q", q, 3, "(B,S,R)");
  check_rank(op, "k", k, 3, "(B,R,T)");
  // Keys or values of other attentions, (B,T,R).
  const auto token_major = [&](const at::Tensor& x) {
    return x.sym_size(1) != q.sym_size(2) && x.sym_size(2) == q.sym_size(2) && x.sym_size(0) == q.sym_size(0);
  };
  Sizes n{.B = q.sym_size(0),
          .S = q.sym_size(1),
          .T = k.sym_size(2),
          .R = q.sym_size(2),
          .N = q.sym_size(0),
          .causal = causal,
          .sequences = {}};
  check_shape(op, "k", k, "(B,R,T)", {n.B, n.R, n.T}, "q", token_major(k) ? "; pass k.mT" : "");
  check_floating(op, "q", q);
  check_like(op, "k", k, q, "q");
  if (v.defined() || needs_v) {
    check_rank(op, "v", v, 3, "(B,R,T)");
    check_shape(op, "v", v, "(B,R,T)", {n.B, n.R, n.T}, "k",
                token_major(v) && v.sym_size(1) == n.T ? "; pass v.mT" : "");
    check_like(op, "v", v, q, "q");
  }
  check_causal(op, causal, n.S, n.T);
  check_eps(op, eps, q.scalar_type());
  return n;
}

// Z and A of N sequences, or their rests, or gradients of them: (2,N,R).
void check_state(const char* op, const char* name, const MaybeTensor& x, const at::Tensor& q, const Sizes& n) {
  if (!x) return;
  check_shape(op, name, *x, "(2,N,R)", {2, n.N, n.R}, "q and the sequences");
  check_acc(op, name, *x, q);
}

at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.S, n.R}, q.options());
}

// Carries and states are undefined if they are not wanted: to make a tensor takes as long as to attend to a few
// positions.
at::Tensor empty_state(const Sizes& n, bool wanted, const at::Tensor& q) {
  return wanted ? at::empty_symint({2, n.N, n.R}, sum_options(q)) : at::Tensor();
}

// ---- forward

Sizes check_forward(const Op::Arguments& in) {
  Sizes n = check_inputs(kForward, in.q, in.k, in.v, in.causal, in.eps);
  n.set_sequences(kForward, in);
  check_state(kForward, "state", in.state, in.q, n);
  check_state(kForward, "rest", in.rest, in.q, n);
  return n;
}

Op::Results empty_results(const Sizes& n, const Op::Arguments& in) {
  const c10::SymInt C = in.keep_carries ? n.carries() : c10::SymInt(0), N = in.return_state ? n.N : c10::SymInt(0);
  const auto sums = sum_options(in.q);
  return {empty_output(n, in.q), at::empty_symint({n.B, C, 2, n.R}, sums), at::empty_symint({2, N, n.R}, sums),
          at::empty_symint({2, N, n.R}, sums)};
}

Op::Results forward_meta(const Op::Arguments& in) {
  return empty_results(check_forward(in), in);
}

Op::Results forward(const SoftplusAttentionKernels& kernels, const Op::Arguments& in) {
  const Sizes n = check_forward(in);
  SoftplusAttentionShape shape = n.shape();
  const DeviceScope device(in.q);
  const Sequences sequences = sequences_of(kForward, n.sequences, kernels.build_sequences, in.q, device, shape);
  const Op::Results results = empty_results(n, in);
  const auto& [y, carries, new_state, new_rest] = results;
  if (in.keep_carries && shape.causal && shape.sequences) carries.zero_();  // some are of no sequence
  sequences.fill_if_padded(y);
  const auto plan = kernels.plan(shape, dtype_of(in.q), device.threads);
  const Scratch scratch(plan.forward_scratch_bytes + (in.keep_carries ? 0 : plan.forward_carries_bytes), in.q);
  const SoftplusAttentionForward p{.shape = shape,
                                   .eps = in.eps,
                                   .q = reads<3>(in.q),
                                   .k = reads<3>(in.k),
                                   .v = reads<3>(in.v),
                                   .y = writes<3>(y),
                                   .carries = in.keep_carries ? data_to_write(carries) : nullptr,
                                   .scratch = scratch.data(),
                                   .threads = device.threads,
                                   .state = {.before = reads<3>(in.state),
                                             .before_rest = reads<3>(in.rest),
                                             .after = writes<3>(new_state),
                                             .after_rest = writes<3>(new_rest)}};
  kernels.forward(p, dtype_of(in.q), device.stream);
  return results;
}

// ---- backward

using Gradients = BackwardOp::Results;

Sizes check_backward(const BackwardOp::Arguments& in) {
  const auto& [grad_y, q, carries, wanted] = std::tie(in.grad_y, in.q, in.carries, in.output_mask);
  Sizes n =
      check_inputs(kBackward, q, in.k, tensor_or_none(in.v), in.causal, in.eps, wanted[0] || wanted[1] || wanted[3]);
  n.set_sequences(kBackward, in);
  check_rank(kBackward, "grad_y", grad_y, 3, "(B,S,R)");
  check_shape(kBackward, "grad_y", grad_y, "(B,S,R)", {n.B, n.S, n.R}, "q");
  check_like(kBackward, "grad_y", grad_y, q, "q");
  check_tensor(kBackward, "carries", carries);
  check_shape(kBackward, "carries", carries, "(B,C,2,R)", {n.B, n.carries(), 2, n.R}, "q and k");
  check_acc(kBackward, "carries", carries, q);
  check_state(kBackward, "state", in.state, q, n);
  check_state(kBackward, "grad_state", in.grad_state, q, n);
  check_state(kBackward, "grad_rest", in.grad_rest, q, n);
  TORCH_CHECK_VALUE(!in.grad_rest || in.grad_state, kBackward, ": grad_rest needs grad_state");
  TORCH_CHECK_VALUE(!wanted[4] || wanted[3], kBackward,
                    ": output_mask must want the gradient of the state with that of its rest");
  return n;
}

// Those that are not wanted are undefined.
Gradients empty_gradients(const Sizes& n, const BackwardOp::Arguments& in) {
  const auto& wanted = in.output_mask;
  return {empty_gradient(wanted[0], in.q), empty_gradient(wanted[1], in.k),
          empty_gradient(wanted[2], tensor_or_none(in.v), in.k.sym_sizes(), in.k.options()),
          empty_state(n, wanted[3], in.q), empty_state(n, wanted[4], in.q)};
}

Gradients backward_meta(const BackwardOp::Arguments& in) {
  return empty_gradients(check_backward(in), in);
}

Gradients backward(const SoftplusAttentionKernels& kernels, const BackwardOp::Arguments& in) {
  const Sizes n = check_backward(in);
  SoftplusAttentionShape shape = n.shape();
  const DeviceScope device(in.q);
  const Sequences sequences = sequences_of(kBackward, n.sequences, kernels.build_sequences, in.q, device, shape);
  const Gradients gradients = empty_gradients(n, in);
  const auto& [grad_q, grad_k, grad_v, grad_before, grad_before_rest] = gradients;
  if (grad_before_rest.defined() && !shape.causal) grad_before_rest.zero_();
  sequences.fill_if_padded(grad_q);
  sequences.fill_if_padded(grad_k);
  sequences.fill_if_padded(grad_v);
  const at::Tensor dense_carries = in.carries.contiguous();
  const Scratch scratch(kernels.plan(shape, dtype_of(in.q), device.threads).backward_scratch_bytes, in.q);
  const SoftplusAttentionBackward p{.shape = shape,
                                    .eps = in.eps,
                                    .grad_y = reads<3>(in.grad_y),
                                    .q = reads<3>(in.q),
                                    .k = reads<3>(in.k),
                                    .v = reads<3>(in.v),
                                    .grad_q = writes<3>(grad_q),
                                    .grad_k = writes<3>(grad_k),
                                    .grad_v = writes<3>(grad_v),
                                    .carries = dense_carries.const_data_ptr(),
                                    .scratch = scratch.data(),
                                    .threads = device.threads,
                                    .before = reads<3>(in.state),
                                    .grad_after = reads<3>(in.grad_state),
                                    .grad_after_rest = reads<3>(in.grad_rest),
                                    .grad_before = writes<3>(grad_before),
                                    .grad_before_rest = writes<3>(grad_before_rest)};
  kernels.backward(p, dtype_of(in.q), device.stream);
  return gradients;
}

// ---- one step

Sizes check_step(const StepOp::Arguments& in) {
  const Sizes n = check_inputs(kStep, in.q, in.k, in.v, false, in.eps);
  TORCH_CHECK_VALUE(n.S == 1, kStep, ": q must be one position, (B,1,R), got ", in.q.sym_sizes());
  check_shape(kStep, "z", in.z, "(B,R)", {n.B, n.R}, "q");
  check_shape(kStep, "a", in.a, "(B,R)", {n.B, n.R}, "q");
  check_acc(kStep, "z", in.z, in.q);
  check_acc(kStep, "a", in.a, in.q);
  return n;
}

StepOp::Results empty_step(const Sizes& n, const StepOp::Arguments& in) {
  return {empty_output(n, in.q), at::empty_symint({n.B, n.R}, in.z.options()),
          at::empty_symint({n.B, n.R}, in.z.options())};
}

StepOp::Results step_meta(const StepOp::Arguments& in) {
  return empty_step(check_step(in), in);
}

StepOp::Results step(const SoftplusAttentionKernels& kernels, const StepOp::Arguments& in) {
  const Sizes n = check_step(in);
  const SoftplusAttentionShape shape = n.shape();
  const StepOp::Results result = empty_step(n, in);
  const auto& [y, new_z, new_a] = result;
  const DeviceScope device(in.q);
  const SoftplusAttentionStep p{.B = shape.B,
                                .T = shape.T,
                                .R = shape.R,
                                .eps = in.eps,
                                .q = reads<3>(in.q),
                                .k = reads<3>(in.k),
                                .v = reads<3>(in.v),
                                .z = with_dimension(reads<2>(in.z), 1),
                                .a = with_dimension(reads<2>(in.a), 1),
                                .y = writes<3>(y),
                                .new_z = with_dimension(writes<2>(new_z), 1),
                                .new_a = with_dimension(writes<2>(new_a), 1),
                                .threads = device.threads};
  kernels.step(p, dtype_of(in.q), device.stream);
  return result;
}

const Registration registration(MEMCHECK_KERNELS(softplus_attention, softplus_attention_plan_cuda),
                                kernels_of<Op>(forward_meta, forward, /*cast_inputs=*/3),
                                kernels_of<BackwardOp>(backward_meta, backward),
                                kernels_of<StepOp>(step_meta, step, /*cast_inputs=*/3));

}  // namespace
}  // namespace memcheck::softplus_attention_operators
