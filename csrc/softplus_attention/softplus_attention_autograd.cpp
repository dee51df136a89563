#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "common/autocast.h"
#include "common/autograd.h"
#include "common/checks.h"

namespace memcheck {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using ForwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, bool, double, bool);
using BackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                          const std::optional<Tensor>&, const Tensor&, bool, double,
                                                          std::array<bool, 3>);
using StepSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                      const Tensor&, double);

auto forward_op() {
  static const auto op = find_operator<ForwardSchema>("memcheck::softplus_attention");
  return op;
}

auto backward_op() {
  static const auto op = find_operator<BackwardSchema>("memcheck::softplus_attention_backward");
  return op;
}

auto step_op() {
  static const auto op = find_operator<StepSchema>("memcheck::softplus_attention_step");
  return op;
}

struct SoftplusAttention : Function<SoftplusAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               double eps, bool returns_carries) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, carries] = forward_op().call(q, k, v, causal, eps, true);
    // q: its softplus and sigmoid. k: the sums are formed again. v: the same, and grad_k reads it; grad_v alone needs
    // it only to take its strides. carries: where each chunk of sums begins.
    const bool reads_v = q.requires_grad() || k.requires_grad() || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor(), carries});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    const Tensor returned = kept_output(carries, returns_carries, /*dimension=*/2);
    ctx->mark_non_differentiable({returned});
    return {y, returned};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    const auto v = if_defined(saved[2]);
    const std::array<bool, 3> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
    const auto [grad_q, grad_k, grad_v] =
        backward_op().call(grads[0], saved[0], saved[1], v, saved[3], ctx->saved_data["causal"].toBool(),
                           ctx->saved_data["eps"].toDouble(), wanted);
    return {grad_q, grad_k, grad_v, Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double eps,
                                            bool keep_carries) {
  check_tensors("softplus_attention", {{"q", q}, {"k", k}, {"v", v}});
  refuse_forward_mode("softplus_attention", {q, k, v});
  if (will_be_differentiated("softplus_attention", {q, k, v})) {
    const auto outputs = SoftplusAttention::apply(q, k, v, causal, eps, keep_carries);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return forward_op().call(q, k, v, causal, eps, keep_carries);
}

std::tuple<Tensor, Tensor, Tensor> backward_autograd(const Tensor& grad_y, const Tensor& q, const Tensor& k,
                                                     const std::optional<Tensor>& v, const Tensor& carries, bool causal,
                                                     double eps, std::array<bool, 3> output_mask) {
  refuse_forward_mode("softplus_attention", {grad_y, q, k, v.value_or(Tensor()), carries});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(grad_y, q, k, v, carries, causal, eps, output_mask);
  };
  const auto [grad_q, grad_k, grad_v] = run();
  const auto guarded =
      refuse_double_backward("softplus_attention", {grad_q, grad_k, grad_v}, grad_y, q, k, v.value_or(Tensor()));
  return {guarded[0], guarded[1], guarded[2]};
}

std::tuple<Tensor, Tensor, Tensor> step_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                                 const Tensor& a, double eps) {
  check_tensors("softplus_attention_step", {{"q", q}, {"k", k}, {"v", v}, {"z", z}, {"a", a}});
  refuse_forward_mode("softplus_attention_step", {q, k, v, z, a});
  refuse_gradient("softplus_attention_step", {q, k, v, z, a});
  const at::AutoDispatchBelowADInplaceOrView guard;
  return step_op().call(q, k, v, z, a, eps);
}

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  m.impl("softplus_attention", forward_autograd);
  m.impl("softplus_attention_backward", backward_autograd);
  m.impl("softplus_attention_step", step_autograd);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double eps,
                                            bool keep_carries) {
  const Autocast<device> cast;
  return forward_op().call(cast(q), cast(k), cast(v), causal, eps, keep_carries);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor, Tensor> step_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                                 const Tensor& a, double eps) {
  const Autocast<device> cast;
  return step_op().call(cast(q), cast(k), cast(v), z, a, eps);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCPU, m) {
  m.impl("softplus_attention", forward_autocast<c10::kCPU>);
  m.impl("softplus_attention_step", step_autocast<c10::kCPU>);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCUDA, m) {
  m.impl("softplus_attention", forward_autocast<c10::kCUDA>);
  m.impl("softplus_attention_step", step_autocast<c10::kCUDA>);
}

}  // namespace
}  // namespace memcheck
