#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string_view>

#include "common/autocast.h"
#include "common/autograd.h"
#include "common/checks.h"

namespace memcheck {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using ForwardSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, bool, std::string_view, double);
using BackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                          const std::optional<Tensor>&, bool, std::string_view, double,
                                                          std::array<bool, 3>);
using StepSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                      const Tensor&, std::string_view, double);

auto forward_op() {
  static const auto op = find_operator<ForwardSchema>("memcheck::linear_attention");
  return op;
}

auto backward_op() {
  static const auto op = find_operator<BackwardSchema>("memcheck::linear_attention_backward");
  return op;
}

auto step_op() {
  static const auto op = find_operator<StepSchema>("memcheck::linear_attention_step");
  return op;
}

struct LinearAttention : Function<LinearAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               std::string_view feature_map, double eps) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor y = forward_op().call(q, k, v, causal, feature_map, eps);
    // q, k, v: the states are formed again, and neither phi(q), phi(k) nor y is kept. grad_v alone reads no v, and
    // needs it only to take its strides.
    const bool reads_v = q.requires_grad() || k.requires_grad() || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor()});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["feature_map"] = std::string(feature_map);
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    const auto v = if_defined(saved[2]);
    const std::array<bool, 3> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
    const auto [grad_q, grad_k, grad_v] =
        backward_op().call(grads[0], saved[0], saved[1], v, ctx->saved_data["causal"].toBool(),
                           ctx->saved_data["feature_map"].toStringRef(), ctx->saved_data["eps"].toDouble(), wanted);
    return {grad_q, grad_k, grad_v, Tensor(), Tensor(), Tensor()};
  }
};

Tensor forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::string_view feature_map,
                        double eps) {
  check_tensors("linear_attention", {{"q", q}, {"k", k}, {"v", v}});
  refuse_forward_mode("linear_attention", {q, k, v});
  if (will_be_differentiated("linear_attention", {q, k, v}))
    return LinearAttention::apply(q, k, v, causal, feature_map, eps)[0];
  const at::AutoDispatchBelowADInplaceOrView guard;
  return forward_op().call(q, k, v, causal, feature_map, eps);
}

std::tuple<Tensor, Tensor, Tensor> backward_autograd(const Tensor& grad_y, const Tensor& q, const Tensor& k,
                                                     const std::optional<Tensor>& v, bool causal,
                                                     std::string_view feature_map, double eps,
                                                     std::array<bool, 3> output_mask) {
  refuse_forward_mode("linear_attention", {grad_y, q, k, v.value_or(Tensor())});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(grad_y, q, k, v, causal, feature_map, eps, output_mask);
  };
  const auto [grad_q, grad_k, grad_v] = run();
  const auto guarded =
      refuse_double_backward("linear_attention", {grad_q, grad_k, grad_v}, grad_y, q, k, v.value_or(Tensor()));
  return {guarded[0], guarded[1], guarded[2]};
}

std::tuple<Tensor, Tensor, Tensor> step_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& m,
                                                 const Tensor& z, std::string_view feature_map, double eps) {
  check_tensors("linear_attention_step", {{"q", q}, {"k", k}, {"v", v}, {"m", m}, {"z", z}});
  refuse_forward_mode("linear_attention_step", {q, k, v, m, z});
  refuse_gradient("linear_attention_step", {q, k, v, m, z});
  const at::AutoDispatchBelowADInplaceOrView guard;
  return step_op().call(q, k, v, m, z, feature_map, eps);
}

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  m.impl("linear_attention", forward_autograd);
  m.impl("linear_attention_backward", backward_autograd);
  m.impl("linear_attention_step", step_autograd);
}

template <c10::DeviceType device>
Tensor forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::string_view feature_map,
                        double eps) {
  const Autocast<device> cast;
  return forward_op().call(cast(q), cast(k), cast(v), causal, feature_map, eps);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor, Tensor> step_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& m,
                                                 const Tensor& z, std::string_view feature_map, double eps) {
  const Autocast<device> cast;
  return step_op().call(cast(q), cast(k), cast(v), m, z, feature_map, eps);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCPU, m) {
  m.impl("linear_attention", forward_autocast<c10::kCPU>);
  m.impl("linear_attention_step", step_autocast<c10::kCPU>);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCUDA, m) {
  m.impl("linear_attention", forward_autocast<c10::kCUDA>);
  m.impl("linear_attention_step", step_autocast<c10::kCUDA>);
}

}  // namespace
}  // namespace memcheck
