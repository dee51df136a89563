#include "linear_attention/linear_attention.h"

#include <ATen/ops/empty.h>

#include <array>
#include <string_view>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "linear_attention/linear_attention_checks.h"

namespace memcheck::linear_attention_operators {
namespace {

using namespace linear_attention_glue;

constexpr const char* kForward = "linear_attention";
constexpr const char* kBackward = "linear_attention_backward";
constexpr const char* kStep = "linear_attention_step";

at::Tensor forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                        std::string_view feature_map, double eps) {
  return empty_output(check_inputs(kForward, q, k, v, causal, feature_map, eps), q);
}

at::Tensor forward(const LinearAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   bool causal, std::string_view feature_map, double eps) {
  const Sizes n = check_inputs(kForward, q, k, v, causal, feature_map, eps);
  const LinearAttentionShape shape = n.shape();
  const at::Tensor y = empty_output(n, q);
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch states(plan.forward_states_bytes, q);
  const Scratch scratch(plan.forward_scratch_bytes, q);
  const LinearAttentionForward p{shape,        eps,           reads<4>(q),    reads<4>(k),   reads<4>(v),
                                 writes<4>(y), states.data(), scratch.data(), device.threads};
  kernels.forward(p, dtype_of(q), device.stream);
  return y;
}

Sizes check_backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     bool causal, std::string_view feature_map, double eps, const std::array<bool, 3>& wanted) {
  const bool needs_v = wanted[0] || wanted[1];
  check_rank(kBackward, "grad_y", grad_y, 4, "(B,H,S,Dv)");
  const Sizes n = check_inputs(kBackward, q, k, v, causal, feature_map, eps, needs_v ? at::Tensor() : grad_y);
  check_shape(kBackward, "grad_y", grad_y, "(B,H,S,Dv)", {n.B, n.H, n.S, n.Dv}, "q and v");
  check_like(kBackward, "grad_y", grad_y, q, "q");
  return n;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Those that are not wanted are undefined.
Gradients empty_gradients(const Sizes& n, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::array<bool, 3>& wanted) {
  return {empty_gradient(wanted[0], q), empty_gradient(wanted[1], k),
          empty_gradient(wanted[2], v, {n.B, n.Hkv, n.T, n.Dv}, k.options())};
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& k,
                        const std::optional<at::Tensor>& v_or_none, bool causal, std::string_view feature_map,
                        double eps, std::array<bool, 3> output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  return empty_gradients(check_backward(grad_y, q, k, v, causal, feature_map, eps, output_mask), q, k, v, output_mask);
}

Gradients backward(const LinearAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                   const at::Tensor& k, const std::optional<at::Tensor>& v_or_none, bool causal,
                   std::string_view feature_map, double eps, std::array<bool, 3> output_mask) {
  const at::Tensor v = v_or_none.value_or(at::Tensor());
  const Sizes n = check_backward(grad_y, q, k, v, causal, feature_map, eps, output_mask);
  const LinearAttentionShape shape = n.shape();
  const Gradients gradients = empty_gradients(n, q, k, v, output_mask);
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch rows(plan.rows_bytes, q);
  const Scratch states(plan.backward_states_bytes, q);
  const Scratch scratch(plan.backward_scratch_bytes, q);
  const LinearAttentionBackward p{shape,
                                  eps,
                                  reads<4>(grad_y),
                                  reads<4>(q),
                                  reads<4>(k),
                                  reads<4>(v),
                                  writes<4>(std::get<0>(gradients)),
                                  writes<4>(std::get<1>(gradients)),
                                  writes<4>(std::get<2>(gradients)),
                                  rows.data(),
                                  states.data(),
                                  scratch.data(),
                                  device.threads};
  kernels.backward(p, dtype_of(q), device.stream);
  return gradients;
}

using StepResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Sizes check_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& m,
                 const at::Tensor& z, std::string_view feature_map, double eps) {
  const Sizes n = check_inputs(kStep, q, k, v, false, feature_map, eps);
  TORCH_CHECK_VALUE(n.S == 1, kStep, ": q must be one position, (B,H,1,D), got ", q.sym_sizes());
  check_tensor(kStep, "m", m);
  check_tensor(kStep, "z", z);
  check_shape(kStep, "m", m, "(B,Hkv,D,Dv)", {n.B, n.Hkv, n.D, n.Dv}, "k and v");
  check_shape(kStep, "z", z, "(B,Hkv,D)", {n.B, n.Hkv, n.D}, "k");
  for (const auto& [name, state] : {std::pair{"m", m}, std::pair{"z", z}}) {
    check_dtype(kStep, name, state, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
    check_device(kStep, name, state, q, "q");
  }
  return n;
}

StepResult empty_step(const Sizes& n, const at::Tensor& q, const at::Tensor& m) {
  return {empty_output(n, q), at::empty_symint({n.B, n.Hkv, n.D, n.Dv}, m.options()),
          at::empty_symint({n.B, n.Hkv, n.D}, m.options())};
}

StepResult step_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& m,
                     const at::Tensor& z, std::string_view feature_map, double eps) {
  return empty_step(check_step(q, k, v, m, z, feature_map, eps), q, m);
}

StepResult step(const LinearAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& m, const at::Tensor& z, std::string_view feature_map, double eps) {
  const Sizes n = check_step(q, k, v, m, z, feature_map, eps);
  const LinearAttentionShape shape = n.shape();
  StepResult result = empty_step(n, q, m);
  const auto& [y, new_m, new_z] = result;
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const Scratch scratch(plan.forward_scratch_bytes, q);
  const LinearAttentionStep p{shape,
                              eps,
                              reads<4>(q),
                              reads<4>(k),
                              reads<4>(v),
                              reads<4>(m),
                              with_dimension(reads<3>(z), 2),
                              writes<4>(y),
                              writes<4>(new_m),
                              with_dimension(writes<3>(new_z), 2),
                              scratch.data(),
                              device.threads};
  kernels.step(p, dtype_of(q), device.stream);
  return result;
}

const Registration registration(
    MEMCHECK_KERNELS(linear_attention),
    OperatorRow{"linear_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, str feature_map=\"elu+1\","
                " float eps=1e-06) -> Tensor",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"linear_attention_backward(Tensor grad_y, Tensor q, Tensor k, Tensor? v, *, bool causal,"
                " str feature_map, float eps, bool[3] output_mask) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
                backward_meta, backward},
    OperatorRow{"linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor m, Tensor z, *,"
                " str feature_map=\"elu+1\", float eps=1e-06) -> (Tensor y, Tensor new_m, Tensor new_z)",
                step_meta, step, /*cast_inputs=*/3});

}  // namespace
}  // namespace memcheck::linear_attention_operators
