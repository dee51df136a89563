#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/empty.h>
#include <ATen/TensorOperators.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/torch/arguments.h"
#include "common/torch/checks.h"

namespace memcheck {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The Python function of an operator. Operators of the backward have an ending more.
inline std::string function_name(const std::string& op) {
  return op.substr(0, op.rfind("_backward"));
}

// ---- tensors among arguments and results

inline void append_tensor(variable_list& list, const Tensor& x) {
  list.push_back(x);
}
inline void append_tensor(variable_list& list, const std::optional<Tensor>& x) {
  list.push_back(x.value_or(Tensor()));
}
inline void append_tensor(variable_list& list, at::TensorList x) {
  list.insert(list.end(), x.begin(), x.end());
}

// The tensors among some values; those that are missing are undefined.
template <typename... Values>
variable_list tensors_among(const Values&... values) {
  variable_list list;
  list.reserve(sizeof...(values));
  (append_tensor(list, values), ...);
  return list;
}

template <typename... Tensors>
variable_list list_of(const std::tuple<Tensors...>& result) {
  return std::apply([](const Tensors&... tensors) { return variable_list{tensors...}; }, result);
}

// An argument of the backward operator that may not have been saved.
inline std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional<Tensor>(x) : std::nullopt;
}

inline void add_gradient(Tensor& sum, const Tensor& x) {
  sum = sum.defined() ? sum + x : x;
}

// What a forward kept for its backward, as an output: without elements unless it was asked for. How many elements are
// kept may depend on a length, and tracing notes whether an output is contiguous, which would fix the length.
inline Tensor kept_output(const Tensor& kept, bool asked_for, int64_t dimension) {
  if (asked_for) return kept;
  std::vector<c10::SymInt> sizes = kept.sym_sizes().vec();
  sizes[dimension] = 0;
  return at::empty_symint(sizes, kept.options());
}

// ---- what operators refuse

// Each of the first arguments is a tensor, and all are on one device. Checked first, because the dispatcher chooses a
// kernel by the devices of all arguments together. Arguments that may be None are checked by the operator.
inline void check_arguments(const char* op, const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  static const Tensor none;
  const auto tensor_at = [&](size_t i) -> const Tensor& { return values[i].isNone() ? none : values[i].toTensor(); };
  for (size_t i = 0; i < values.size() && schema.arguments()[i].type()->kind() == c10::TypeKind::TensorType; ++i) {
    const char* name = schema.arguments()[i].name().c_str();
    check_tensor(op, name, tensor_at(i));
    check_device(op, name, tensor_at(i), tensor_at(0), schema.arguments()[0].name().c_str());
  }
}

inline bool requires_gradient(const MaybeTensor& x) {
  return x && x->requires_grad();
}

// IValue::isTensorList alone is a call for every number.
inline bool is_tensor_list(const c10::IValue& x) {
  return x.isList() && x.isTensorList();
}

// Whether a tensor among these passes the test.
template <typename Test>
bool any_tensor(const variable_list& tensors, const Test& test) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& x) { return x.defined() && test(x); });
}
template <typename Test>
bool any_tensor(c10::ArrayRef<c10::IValue> arguments, const Test& test) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& x) {
    if (x.isTensor()) return x.toTensor().defined() && test(x.toTensor());
    return is_tensor_list(x) && any_tensor(x.toTensorVector(), test);
  });
}

template <typename Inputs>
bool wants_gradient(const Inputs& inputs) {
  return at::GradMode::is_enabled() && any_tensor(inputs, [](const Tensor& x) { return x.requires_grad(); });
}

// Whether a transform of torch.func is active. It cannot run an autograd function of C++.
inline bool in_torch_func() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return false;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

// The message of torch.func itself does not name the operator.
inline void refuse_torch_func(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!in_torch_func(), op,
                              ": torch.func (grad, vjp, jacrev, hessian) differentiates it through memcheck.", op,
                              ", not through torch.ops; else use torch.autograd.grad, or ", op,
                              " of memcheck.ops.reference, which is plain PyTorch");
}

template <typename Inputs>
void refuse_gradient(const char* op, const Inputs& inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient(inputs), op,
                              ": has no gradient, and an argument requires one; call it under torch.no_grad()");
}

template <typename Inputs>
bool has_tangent(const Inputs& inputs) {
  return c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
         any_tensor(inputs, [](const Tensor& x) { return x._fw_grad(/*level=*/0).defined(); });
}

// No operator computes tangents. If no input requires a gradient, nothing else would notice that a tangent is lost.
template <typename Inputs>
void refuse_forward_mode(const char* op, const Inputs& inputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(inputs), op, ": forward-mode differentiation is not implemented");
}

// ---- what is registered for the Autograd key

// The tensors among arguments, each with its position. A list has as many positions as tensors.
struct Inputs {
  variable_list tensors;
  std::vector<int64_t> positions;

  explicit Inputs(c10::ArrayRef<c10::IValue> arguments) {
    int64_t position = 0;
    for (const c10::IValue& x : arguments) {
      if (is_tensor_list(x)) {
        for (const Tensor& one : x.toTensorVector()) add(one, position++);
      } else {
        if (x.isTensor() && x.toTensor().defined()) add(x.toTensor(), position);
        ++position;
      }
    }
  }

 private:
  void add(const Tensor& x, int64_t position) {
    tensors.push_back(x);
    positions.push_back(position);
  }
};

// What autograd runs in place of an operator if an argument requires a gradient. A node derives from it:
//
//     struct Node : Differentiable<Node, Op> {
//       // Calls the operator below autograd, and saves what the backward reads.
//       static variable_list run(AutogradContext* ctx, const Arguments& x);
//       // Gradients of the first arguments, undefined where there is none.
//       static variable_list differentiate(const Saved& saved, const variable_list& grads);
//     };
template <typename Node, typename Op>
struct Differentiable : Function<Node> {
  using Arguments = typename Op::Arguments;

  struct Saved {
    variable_list tensors;
    Arguments options;         // arguments, of which the tensors are left out
    std::vector<bool> wanted;  // which gradients, by the positions of Inputs
    AutogradContext* ctx;      // with what else the forward saved

    MaybeTensor given(size_t i) const { return if_defined(tensors[i]); }
    template <size_t kCount>
    std::array<bool, kCount> wanted_of() const {
      std::array<bool, kCount> first{};
      std::copy_n(wanted.begin(), std::min(kCount, wanted.size()), first.begin());
      return first;
    }
  };

  // `call`: the arguments with none in place of tensors, and the positions of `inputs` among them.
  static variable_list forward(AutogradContext* ctx, Arguments x, const c10::IValue& call, at::TensorList /*inputs*/) {
    ctx->saved_data["call"] = call;
    ctx->set_materialize_grads(false);
    return Node::run(ctx, std::move(x));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    torch::jit::Stack options = ctx->saved_data["call"].toTupleRef().elements().vec();
    const std::vector<int64_t> positions = torch::jit::pop(options).toIntVector();
    constexpr size_t kOthers = 2;  // the arguments of forward before `inputs` have no gradients
    variable_list results(kOthers + positions.size());
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& x) { return x.defined(); })) return results;
    static const std::string op = function_name(operator_name(Op::schema));
    refuse_forward_mode(op.c_str(), grads);
    const int64_t count = positions.empty() ? 0 : positions.back() + 1;
    Saved saved{ctx->get_saved_variables(), take_arguments<Arguments>(options), std::vector<bool>(count), ctx};
    for (size_t i = 0; i < positions.size(); ++i) saved.wanted[positions[i]] = ctx->needs_input_grad(i);
    const variable_list gradients = Node::differentiate(saved, grads);
    for (size_t i = 0; i < positions.size(); ++i)
      if (positions[i] < static_cast<int64_t>(gradients.size())) results[kOthers + i] = gradients[positions[i]];
    return results;
  }
};

// The results of an operator's kernel of the device.
template <typename Op>
typename Op::Results call_below(typename Op::Arguments x) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call<Op>(std::move(x));
}

// The gradients that a backward operator computes. Where they may be differentiated, memcheck/ops/derivatives.py has
// registered how.
template <typename Op>
typename Op::Results call_backward(typename Op::Arguments x) {
  if (!at::GradMode::is_enabled()) return call_below<Op>(std::move(x));
  static const std::string op = function_name(operator_name(Op::schema));
  refuse_torch_func(op.c_str());
  TORCH_CHECK_NOT_IMPLEMENTED(handle_of<Op>().hasKernelForDispatchKey(c10::DispatchKey::Autograd), op,
                              ": double backward is not implemented here; differentiate ", op,
                              " of memcheck.ops.reference, which is plain PyTorch");
  return call<Op>(std::move(x));
}

// Kernels of the Autograd key for an operator.
template <typename Op>
struct AutogradOf {
  using Stack = torch::jit::Stack;

  // Runs Node if an input requires a gradient.
  template <typename Node>
  static void differentiable(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    if (!wants_gradient(checked_arguments(op, *stack))) return below(op, stack);
    refuse_torch_func(shown_name());
    const auto values = arguments_of(op, *stack);
    const Inputs inputs(values);
    std::vector<c10::IValue> call(values.size() + 1);
    for (size_t i = 0; i < values.size(); ++i)
      if (!values[i].isTensor() && !is_tensor_list(values[i])) call[i] = values[i];
    call.back() = inputs.positions;
    auto arguments = take_arguments<typename Op::Arguments>(*stack);
    variable_list results =
        Node::apply(std::move(arguments), c10::ivalue::Tuple::create(std::move(call)), at::TensorList(inputs.tensors));
    results.resize(std::tuple_size_v<typename Op::Results>);  // the last ones may be undefined, or the node's own
    for (Tensor& x : results) stack->emplace_back(std::move(x));
  }

  static void without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    refuse_gradient(shown_name(), checked_arguments(op, *stack));
    below(op, stack);
  }

 private:
  static void below(const c10::OperatorHandle& op, Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }

  // As messages have it.
  static const char* shown_name() {
    static const std::string name = function_name(operator_name(Op::schema));
    return name.c_str();
  }

  static c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
    return torch::jit::last(stack, op.schema().arguments().size());
  }

  static c10::ArrayRef<c10::IValue> checked_arguments(const c10::OperatorHandle& op, const Stack& stack) {
    const auto arguments = arguments_of(op, stack);
    check_arguments(shown_name(), op.schema(), arguments);
    refuse_forward_mode(shown_name(), arguments);
    return arguments;
  }
};

template <typename Op, typename Node>
void register_node(torch::Library& m) {
  m.impl(operator_name(Op::schema).c_str(),
         torch::CppFunction::makeFromBoxedFunction<&AutogradOf<Op>::template differentiable<Node>>());
}

template <typename Op>
void register_no_gradient(torch::Library& m) {
  m.impl(operator_name(Op::schema).c_str(),
         torch::CppFunction::makeFromBoxedFunction<&AutogradOf<Op>::without_gradient>());
}

}  // namespace memcheck
