#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/empty.h>
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

// ---- double backward

[[noreturn]] inline void raise_no_double_backward(const std::string& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": double backward is not implemented here; differentiate ", op,
                              " of memcheck.ops.reference, which is plain PyTorch");
}

// The gradients of a backward operator, such that they can be differentiated: by memcheck::<name>_double_backward,
// which memcheck/ops/derivatives.py defines in plain PyTorch. It takes a gradient (or none) for each result of the
// backward operator, and that operator's arguments. It returns a gradient for each of these that is a tensor.
struct DoubleBackward : Function<DoubleBackward> {
  // `shown` is the operator's name in messages. `arguments` are those of the backward operator with none in place of
  // tensors, which are `inputs`, each with its position.
  static variable_list forward(AutogradContext* ctx, const std::string& name, const std::string& shown,
                               const variable_list& gradients, const std::vector<c10::IValue>& arguments,
                               const std::vector<int64_t>& positions, at::TensorList inputs) {
    c10::List<bool> defined;
    variable_list results;
    for (const Tensor& x : gradients) {
      defined.push_back(x.defined());
      if (x.defined()) results.push_back(x);
    }
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["name"] = name;
    ctx->saved_data["shown"] = shown;
    ctx->saved_data["defined"] = defined;
    ctx->saved_data["arguments"] = c10::ivalue::Tuple::create(arguments);
    ctx->saved_data["positions"] = positions;
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list inputs = ctx->get_saved_variables();
    variable_list result(5);  // the arguments of forward before `inputs` have no gradients
    c10::List<std::optional<Tensor>> grad_gradients;
    size_t next = 0;
    for (const bool defined : ctx->saved_data["defined"].toBoolList())
      grad_gradients.push_back(defined ? if_defined(grads[next++]) : std::nullopt);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& x) { return x.defined(); })) {
      result.resize(result.size() + inputs.size());
      return result;
    }
    torch::jit::Stack stack{grad_gradients};
    for (const c10::IValue& argument : ctx->saved_data["arguments"].toTupleRef().elements()) stack.push_back(argument);
    const std::vector<int64_t> positions = ctx->saved_data["positions"].toIntVector();
    for (size_t i = 0; i < inputs.size(); ++i) stack[1 + positions[i]] = inputs[i];
    const std::string name = "memcheck::" + ctx->saved_data["name"].toStringRef() + "_double_backward";
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    if (!op) raise_no_double_backward(ctx->saved_data["shown"].toStringRef());
    op->callBoxed(stack);
    for (const Tensor& x : stack[0].toTensorVector()) result.push_back(x);
    return result;
  }
};

// The gradients that a backward operator computed from these arguments. They can be differentiated if a tensor among
// the arguments requires a gradient.
inline variable_list gradients_to_differentiate(const std::string& name, const char* shown, variable_list gradients,
                                                std::vector<c10::IValue> arguments) {
  std::vector<int64_t> positions;
  variable_list inputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    positions.push_back(static_cast<int64_t>(i));
    inputs.push_back(arguments[i].toTensor());
  }
  if (!wants_gradient(inputs)) return gradients;
  refuse_torch_func(shown);
  for (const int64_t i : positions) arguments[i] = c10::IValue();
  const auto results =
      DoubleBackward::apply(name, std::string(shown), gradients, arguments, positions, at::TensorList(inputs));
  size_t next = 0;
  for (Tensor& x : gradients)
    if (x.defined()) x = results[next++];
  return gradients;
}

// In a backward that may be differentiated: stands for an input of its forward, counted among its tensors. A gradient
// of the result goes where that input's gradient goes. The result has no elements.
inline Tensor stands_for_input(size_t input, const Tensor& like) {
  const Tensor x = at::empty({0}, like.options());
  const auto& edge = torch::autograd::get_current_node()->next_edges()[input];
  if (edge.is_valid()) torch::autograd::impl::set_gradient_edge(x, edge);
  return x;
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
    results.resize(std::tuple_size_v<typename Op::Results>);  // the last ones may be undefined
    for (Tensor& x : results) stack->emplace_back(std::move(x));
  }

  static void backward(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    refuse_forward_mode(shown_name(), arguments_of(op, *stack));
    if (!wants_gradient(arguments_of(op, *stack))) return below(op, stack);
    std::vector<c10::IValue> arguments = arguments_of(op, *stack).vec();
    below(op, stack);
    static const std::string all = operator_name(Op::schema), name = all.substr(0, all.rfind("_backward"));
    constexpr size_t kResults = std::tuple_size_v<typename Op::Results>;
    variable_list gradients;
    for (const c10::IValue& x : torch::jit::last(*stack, kResults)) gradients.push_back(x.toTensor());
    gradients = gradients_to_differentiate(name, shown_name(), std::move(gradients), std::move(arguments));
    torch::jit::drop(*stack, kResults);
    for (Tensor& x : gradients) stack->emplace_back(std::move(x));
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
void register_gradients(torch::Library& m) {
  m.impl(operator_name(Op::schema).c_str(), torch::CppFunction::makeFromBoxedFunction<&AutogradOf<Op>::backward>());
}

template <typename Op>
void register_no_gradient(torch::Library& m) {
  m.impl(operator_name(Op::schema).c_str(),
         torch::CppFunction::makeFromBoxedFunction<&AutogradOf<Op>::without_gradient>());
}

}  // namespace memcheck
