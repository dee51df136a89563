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

at::Tensor empty_carries(const Sizes& n, const c10::SymInt& slots, const at::Tensor& q) {
  return at::empty_symint({2, n.B, slots, n.R}, q.options().dtype(acc_scalar_type(q.scalar_type())));
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                bool causal, double eps, bool keep_carries) {
  const Sizes n = check_inputs(kForward, q, k, v, causal, eps);
  return {empty_output(n, q), empty_carries(n, keep_carries ? n.carries() : 0, q)};
}

std::tuple<at::Tensor, at::Tensor> forward(const SoftplusAttentionKernels& kernels, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v, bool causal, double eps,
                                           bool keep_carries) {
  const Sizes n = check_inputs(kForward, q, k, v, causal, eps);
  const SoftplusAttentionShape shape = n.shape();
  const at::Tensor y = empty_output(n, q);
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const bool uses_carries = keep_carries || plan.forward_uses_carries;
  const at::Tensor carries = empty_carries(n, uses_carries ? n.carries() : 0, q);
  const Scratch sums(plan.forward_sums_bytes, q);
  const SoftplusAttentionForward p{shape,
                                   eps,
                                   reads<3>(q),
                                   reads<3>(k),
                                   reads<3>(v),
                                   writes<3>(y),
                                   uses_carries ? carries.mutable_data_ptr() : nullptr,
                                   sums.data(),
                                   device.threads};
  kernels.forward(p, dtype_of(q), device.stream);
  return {y, keep_carries || !uses_carries ? carries : empty_carries(n, 0, q)};
}

Sizes check_backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& carries, bool causal, double eps, const std::array<bool, 3>& wanted) {
  const Sizes n = check_inputs(kBackward, q, k, v, causal, eps, wanted[0] || wanted[1]);
  check_rank(kBackward, "grad_y", grad_y, 3, "(B,S,R)");
  check_shape(kBackward, "grad_y", grad_y, "(B,S,R)", {n.B, n.S, n.R}, "q");
  check_like(kBackward, "grad_y", grad_y, q, "q");
  check_tensor(kBackward, "carries", carries);
  check_shape(kBackward, "carries", carries, "(2,B,C,R)", {2, n.B, n.carries(), n.R}, "q and k");
  check_dtype(kBackward, "carries", carries, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(kBackward, "carries", carries, q, "q");
  return n;
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k,
                        const std::optional<at::Tensor>& v_or_none, const at::Tensor& carries, bool causal, double eps,
                        std::array<bool, 3> output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  check_backward(grad_y, q, k, v, carries, causal, eps, output_mask);
  return empty_gradients(q, k, v, output_mask);
}

Gradients backward(const SoftplusAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                   const at::Tensor& k, const std::optional<at::Tensor>& v_or_none, const at::Tensor& carries,
                   bool causal, double eps, std::array<bool, 3> output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  const Sizes n = check_backward(grad_y, q, k, v, carries, causal, eps, output_mask);
  const SoftplusAttentionShape shape = n.shape();
  const Gradients gradients = empty_gradients(q, k, v, output_mask);
  const at::Tensor dense_carries = carries.contiguous();
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch sums(plan.backward_sums_bytes, q);
  const Scratch scratch(plan.backward_scratch_bytes, q);
  const SoftplusAttentionBackward p{shape,
                                    eps,
                                    reads<3>(grad_y),
                                    reads<3>(q),
                                    reads<3>(k),
                                    reads<3>(v),
                                    writes<3>(std::get<0>(gradients)),
                                    writes<3>(std::get<1>(gradients)),
                                    writes<3>(std::get<2>(gradients)),
                                    dense_carries.const_data_ptr(),
                                    sums.data(),
                                    scratch.data(),
                                    device.threads};
  kernels.backward(p, dtype_of(q), device.stream);
  return gradients;
}

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
    OperatorRow{"softplus_attention(Tensor q, Tensor k, Tensor v, *, bool causal=True, float eps=1e-06,"
                " bool keep_carries=False) -> (Tensor y, Tensor carries)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"softplus_attention_backward(Tensor grad_y, Tensor q, Tensor k, Tensor? v, Tensor carries, *,"
                " bool causal, float eps, bool[3] output_mask) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
                backward_meta, backward},
    OperatorRow{"softplus_attention_step(Tensor q, Tensor k, Tensor v, Tensor z, Tensor a, *, float eps=1e-06)"
                " -> (Tensor y, Tensor new_z, Tensor new_a)",
                step_meta, step, /*cast_inputs=*/3});

}  // namespace
}  // namespace memcheck::softplus_attention_operators
