#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <string>
#include <vector>

namespace memcheck {

template <typename Schema>
c10::TypedOperatorHandle<Schema> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Schema>();
}

// What was not saved for backward, as an argument of the backward operator.
inline std::optional<at::Tensor> if_defined(const at::Tensor& x) {
  return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
}

// What a forward kept for its backward, as an output: without elements where nobody asked for it. How many are kept may
// depend on a length, and tracing notes whether an output is contiguous, which would fix the length.
inline at::Tensor kept_output(const at::Tensor& kept, bool asked_for, int64_t dimension) {
  if (asked_for) return kept;
  std::vector<c10::SymInt> sizes = kept.sym_sizes().vec();
  sizes[dimension] = 0;
  return at::empty_symint(sizes, kept.options());
}

inline bool wants_gradient(const torch::autograd::variable_list& inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& x : inputs)
    if (x.defined() && x.requires_grad()) return true;
  return false;
}

// torch.func's transforms know no autograd function of C++, and say so without a name.
inline void refuse_torch_func(const char* op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  bool supported = true;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    supported = false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(supported, op,
                              ": torch.func (grad, vjp, jacrev, hessian) cannot differentiate it; use "
                              "torch.autograd.grad, or ",
                              op, " of memcheck.ops.reference, which is plain PyTorch");
}

// Whether an autograd function must run, which keeps what the backward reads.
inline bool will_be_differentiated(const char* op, const torch::autograd::variable_list& inputs) {
  if (!wants_gradient(inputs)) return false;
  refuse_torch_func(op);
  return true;
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
    const std::string& op = ctx->saved_data["op"].toStringRef();
    TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": double backward is not implemented; differentiate ", op,
                                " of memcheck.ops.reference, which is plain PyTorch");
    return {};
  }
};

// Gradients, which may be undefined, that raise when they are differentiated for any of the inputs.
template <typename... Inputs>
torch::autograd::variable_list raise_when_differentiated(const char* op, torch::autograd::variable_list gradients,
                                                         const Inputs&... inputs) {
  refuse_torch_func(op);
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

// Whether the backward that is running is that of a forward whose input, among the tensors, required a gradient: asked
// for now or not.
inline bool required_gradient(size_t input) {
  const auto running = torch::autograd::get_current_node();
  return running && running->next_edges()[input].is_valid();
}

// The same for gradients that depend on inputs through what the forward computed from them and kept: autograd does not
// know of it, and would take those inputs for constants, also where the gradients require a gradient through grad_y or
// another input. Stand-ins for the inputs lead where the backward that is running leads.
inline torch::autograd::variable_list refuse_double_backward_through_kept(
    const char* op, const torch::autograd::variable_list& gradients, const at::Tensor& grad_y) {
  const auto running = torch::autograd::get_current_node();
  if (!at::GradMode::is_enabled() || !running) return gradients;
  torch::autograd::variable_list inputs{grad_y};
  for (const auto& edge : running->next_edges()) {
    if (!edge.is_valid()) continue;
    inputs.push_back(at::empty({0}, grad_y.options()));
    torch::autograd::impl::set_gradient_edge(inputs.back(), edge);
  }
  return raise_when_differentiated(op, gradients, at::TensorList(inputs));
}

}  // namespace memcheck
