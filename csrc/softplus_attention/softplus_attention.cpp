#include "softplus_attention/softplus_attention.h"

#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "softplus_attention/softplus_attention_checks.h"

namespace memcheck::softplus_attention_operators {
namespace {

using namespace softplus_attention_glue;

constexpr const char* kForward = "softplus_attention";
constexpr const char* kBackward = "softplus_attention_backward";
constexpr const char* kStep = "softplus_attention_step";

Strided<3> given(const MaybeTensor& x) {
  return x ? reads<3>(*x) : Strided<3>{};
}

// ---- forward

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // y, carries, new_state, new_rest

Sizes check_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& state,
                    const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                    const MaybeTensor& lengths, bool left_padded, bool causal, double eps) {
  Sizes n = check_inputs(kForward, q, k, v, causal, eps);
  n.sequences = check_sequences(kForward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  n.N = n.sequences.count(n.B);
  check_state(kForward, "state", state, q, n);
  check_state(kForward, "rest", rest, q, n);
  return n;
}

Results empty_results(const Sizes& n, const at::Tensor& q, bool return_state, bool keep_carries) {
  return {empty_output(n, q), empty_carries(n, keep_carries, q), empty_state(n, return_state, q),
          empty_state(n, return_state, q)};
}

Results forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& state,
                     const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                     const MaybeTensor& lengths, bool left_padded, bool causal, double eps, bool return_state,
                     bool keep_carries) {
  const Sizes n = check_forward(q, k, v, state, rest, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal, eps);
  return empty_results(n, q, return_state, keep_carries);
}

Results forward(const SoftplusAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const MaybeTensor& state, const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q,
                const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, bool causal, double eps,
                bool return_state, bool keep_carries) {
  const Sizes n = check_forward(q, k, v, state, rest, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal, eps);
  SoftplusAttentionShape shape = n.shape();
  const DeviceScope device(q);
  const Sequences sequences(kForward, n.sequences, *kernels.sequences, q, shape.S, shape.T, causal, device.stream);
  shape.sequences = sequences.table();
  const Results results = empty_results(n, q, return_state, keep_carries);
  const auto& [y, carries, new_state, new_rest] = results;
  if (keep_carries && causal && shape.sequences) carries.zero_();  // some are of no sequence
  sequences.fill_padded_queries(y, 1);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch scratch(plan.forward_scratch_bytes + (keep_carries ? 0 : plan.forward_carries_bytes), q);
  const SoftplusAttentionForward p{
      shape,
      eps,
      reads<3>(q),
      reads<3>(k),
      reads<3>(v),
      writes<3>(y),
      keep_carries ? carries.mutable_data_ptr() : nullptr,
      scratch.data(),
      device.threads,
      {given(state), given(rest), writes<3>(new_state), writes<3>(new_rest)}};  // null without elements
  kernels.forward(p, dtype_of(q), device.stream);
  return results;
}

// ---- backward

Sizes check_backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k, const MaybeTensor& v,
                     const at::Tensor& carries, const MaybeTensor& state, const MaybeTensor& grad_state,
                     const MaybeTensor& grad_rest, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                     const MaybeTensor& lengths, bool left_padded, bool causal, double eps, const Mask& wanted) {
  Sizes n = check_inputs(kBackward, q, k, v.value_or(at::Tensor()), causal, eps, wanted[0] || wanted[1] || wanted[3]);
  n.sequences = check_sequences(kBackward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  n.N = n.sequences.count(n.B);
  check_rank(kBackward, "grad_y", grad_y, 3, "(B,S,R)");
  check_shape(kBackward, "grad_y", grad_y, "(B,S,R)", {n.B, n.S, n.R}, "q");
  check_like(kBackward, "grad_y", grad_y, q, "q");
  check_tensor(kBackward, "carries", carries);
  check_shape(kBackward, "carries", carries, "(B,C,2,R)", {n.B, n.carries(), 2, n.R}, "q and k");
  check_dtype(kBackward, "carries", carries, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(kBackward, "carries", carries, q, "q");
  check_state(kBackward, "state", state, q, n);
  check_state(kBackward, "grad_state", grad_state, q, n);
  check_state(kBackward, "grad_rest", grad_rest, q, n);
  TORCH_CHECK_VALUE(!grad_rest || grad_state, kBackward, ": grad_rest needs grad_state");
  TORCH_CHECK_VALUE(!wanted[4] || wanted[3], kBackward,
                    ": output_mask must want the gradient of the state with that of its rest");
  return n;
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k, const MaybeTensor& v,
                        const at::Tensor& carries, const MaybeTensor& state, const MaybeTensor& grad_state,
                        const MaybeTensor& grad_rest, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                        const MaybeTensor& lengths, bool left_padded, bool causal, double eps, Mask output_mask) {
  const Sizes n = check_backward(grad_y, q, k, v, carries, state, grad_state, grad_rest, cu_seqlens_q, cu_seqlens_k,
                                 lengths, left_padded, causal, eps, output_mask);
  return empty_gradients(n, q, k, v.value_or(at::Tensor()), output_mask);
}

Gradients backward(const SoftplusAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                   const at::Tensor& k, const MaybeTensor& v, const at::Tensor& carries, const MaybeTensor& state,
                   const MaybeTensor& grad_state, const MaybeTensor& grad_rest, const MaybeTensor& cu_seqlens_q,
                   const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, bool causal,
                   double eps, Mask output_mask) {
  const Sizes n = check_backward(grad_y, q, k, v, carries, state, grad_state, grad_rest, cu_seqlens_q, cu_seqlens_k,
                                 lengths, left_padded, causal, eps, output_mask);
  SoftplusAttentionShape shape = n.shape();
  const DeviceScope device(q);
  const Sequences sequences(kBackward, n.sequences, *kernels.sequences, q, shape.S, shape.T, causal, device.stream);
  shape.sequences = sequences.table();
  const Gradients gradients = empty_gradients(n, q, k, v.value_or(at::Tensor()), output_mask);
  const auto& [grad_q, grad_k, grad_v, grad_before, grad_before_rest] = gradients;
  if (grad_before_rest.defined() && !causal) grad_before_rest.zero_();
  sequences.fill_padded_queries(grad_q, 1);
  sequences.fill_padded_keys(grad_k, 2);
  sequences.fill_padded_keys(grad_v, 2);
  const at::Tensor dense_carries = carries.contiguous();
  const Scratch scratch(kernels.plan(shape, dtype_of(q), device.threads).backward_scratch_bytes, q);
  const SoftplusAttentionBackward p{shape,
                                    eps,
                                    reads<3>(grad_y),
                                    reads<3>(q),
                                    reads<3>(k),
                                    given(v),
                                    writes<3>(grad_q),
                                    writes<3>(grad_k),
                                    writes<3>(grad_v),
                                    dense_carries.const_data_ptr(),
                                    scratch.data(),
                                    device.threads,
                                    given(state),
                                    given(grad_state),
                                    given(grad_rest),
                                    writes<3>(grad_before),
                                    writes<3>(grad_before_rest)};
  kernels.backward(p, dtype_of(q), device.stream);
  return gradients;
}

// ---- one step

using StepResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Sizes check_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& z,
                 const at::Tensor& a, double eps) {
  const Sizes n = check_inputs(kStep, q, k, v, false, eps);
  TORCH_CHECK_VALUE(n.S == 1, kStep, ": q must be one position, (B,1,R), got ", q.sym_sizes());
  check_shape(kStep, "z", z, "(B,R)", {n.B, n.R}, "q");
  check_shape(kStep, "a", a, "(B,R)", {n.B, n.R}, "q");
  for (const auto& [name, state] : {std::pair{"z", z}, std::pair{"a", a}}) {
    check_dtype(kStep, name, state, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
    check_device(kStep, name, state, q, "q");
  }
  return n;
}

StepResult empty_step(const Sizes& n, const at::Tensor& q, const at::Tensor& z) {
  return {empty_output(n, q), at::empty_symint({n.B, n.R}, z.options()), at::empty_symint({n.B, n.R}, z.options())};
}

StepResult step_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& z,
                     const at::Tensor& a, double eps) {
  return empty_step(check_step(q, k, v, z, a, eps), q, z);
}

StepResult step(const SoftplusAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& z, const at::Tensor& a, double eps) {
  const Sizes n = check_step(q, k, v, z, a, eps);
  const SoftplusAttentionShape shape = n.shape();
  StepResult result = empty_step(n, q, z);
  const auto& [y, new_z, new_a] = result;
  const DeviceScope device(q);
  const SoftplusAttentionStep p{shape.B,
                                shape.T,
                                shape.R,
                                eps,
                                reads<3>(q),
                                reads<3>(k),
                                reads<3>(v),
                                with_dimension(reads<2>(z), 1),
                                with_dimension(reads<2>(a), 1),
                                writes<3>(y),
                                with_dimension(writes<2>(new_z), 1),
                                with_dimension(writes<2>(new_a), 1),
                                device.threads};
  kernels.step(p, dtype_of(q), device.stream);
  return result;
}

const Registration registration(
    MEMCHECK_KERNELS(softplus_attention),
    OperatorRow{"softplus_attention(Tensor q, Tensor k, Tensor v, Tensor? state=None, Tensor? rest=None, *,"
                " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False,"
                " bool causal=True, float eps=1e-06, bool return_state=False, bool keep_carries=False)"
                " -> (Tensor y, Tensor carries, Tensor new_state, Tensor new_rest)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"softplus_attention_backward(Tensor grad_y, Tensor q, Tensor k, Tensor? v, Tensor carries,"
                " Tensor? state=None, Tensor? grad_state=None, Tensor? grad_rest=None, *, Tensor? cu_seqlens_q=None,"
                " Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False, bool causal, float eps,"
                " bool[5] output_mask)"
                " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_initial, Tensor grad_initial_rest)",
                backward_meta, backward},
    OperatorRow{"softplus_attention_step(Tensor q, Tensor k, Tensor v, Tensor z, Tensor a, *, float eps=1e-06)"
                " -> (Tensor y, Tensor new_z, Tensor new_a)",
                step_meta, step, /*cast_inputs=*/3});

}  // namespace
}  // namespace memcheck::softplus_attention_operators
