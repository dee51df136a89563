#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <string>

namespace memcheck {

template <typename Schema>
c10::TypedOperatorHandle<Schema> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Schema>();
}

// What was not saved for backward, as an argument of the backward operator.
inline std::optional<at::Tensor> if_defined(const at::Tensor& x) {
  return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
}

inline bool wants_gradient(const torch::autograd::variable_list& inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& x : inputs)
    if (x.defined() && x.requires_grad()) return true;
  return false;
}

inline void refuse_gradient(const char* op, const torch::autograd::variable_list& inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient(inputs), op,
                              ": has no gradient, and an argument requires one; call it under torch.no_grad()");
}

// No operator here carries a tangent on. Where no input requires a gradient nothing else would notice that one is lost.
inline void refuse_forward_mode(const char* op, const torch::autograd::variable_list& inputs) {
  if (!c10::AutogradState::get_tls_state().get_fw_grad_mode()) return;
  for (const at::Tensor& x : inputs)
    TORCH_CHECK_NOT_IMPLEMENTED(!x.defined() || !x._fw_grad(/*level=*/0).defined(), op,
                                ": forward-mode differentiation is not implemented");
}

// Passes gradients on; whoever differentiates them gets an error, not silence.
struct NoDoubleBackward : torch::autograd::Function<NoDoubleBackward> {
  template <typename... Inputs>
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const std::string& op,
                                                const torch::autograd::variable_list& gradients, const Inputs&...) {
    ctx->saved_data["op"] = op;
    return gradients;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, ctx->saved_data["op"].toStringRef(), ": double backward is not implemented");
    return {};
  }
};

// Gradients, which may be undefined, that raise when they are differentiated for any of the inputs.
template <typename... Inputs>
torch::autograd::variable_list raise_when_differentiated(const char* op, torch::autograd::variable_list gradients,
                                                         const Inputs&... inputs) {
  torch::autograd::variable_list defined;
  for (const at::Tensor& x : gradients)
    if (x.defined()) defined.push_back(x);
  const auto guarded = NoDoubleBackward::apply(std::string(op), defined, inputs...);
  size_t next = 0;
  for (at::Tensor& x : gradients)
    if (x.defined()) x = guarded[next++];
  return gradients;
}

// The gradients that a backward operator computed from grad_y and these inputs, which may be undefined. So may
// gradients be: those that were not wanted.
template <typename... Inputs>
torch::autograd::variable_list refuse_double_backward(const char* op, const torch::autograd::variable_list& gradients,
                                                      const at::Tensor& grad_y, const Inputs&... inputs) {
  if (!wants_gradient({grad_y, inputs...})) return gradients;
  // A Function takes no undefined tensor.
  return raise_when_differentiated(op, gradients, grad_y, (inputs.defined() ? inputs : grad_y)...);
}

// The same for gradients that depend on inputs only through what the forward computed from them and kept: autograd has
// no other way to know, and would take them for constants. Stand-ins for the inputs lead where the backward that is
// running leads.
inline torch::autograd::variable_list refuse_double_backward_through_kept(
    const char* op, const torch::autograd::variable_list& gradients, const at::Tensor& grad_y) {
  if (!at::GradMode::is_enabled() || wants_gradient(gradients)) return gradients;
  torch::autograd::variable_list stand_ins;
  if (const auto running = torch::autograd::get_current_node()) {
    for (const auto& edge : running->next_edges()) {
      if (!edge.is_valid()) continue;
      stand_ins.push_back(at::empty({0}, grad_y.options()));
      torch::autograd::impl::set_gradient_edge(stand_ins.back(), edge);
    }
  }
  return stand_ins.empty() ? gradients : raise_when_differentiated(op, gradients, at::TensorList(stand_ins));
}

}  // namespace memcheck
