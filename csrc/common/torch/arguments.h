#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// Operators of the dispatcher, each described once:
//
//     struct LinearR {
//       static constexpr const char* schema = "linear_r(Tensor x, Tensor w) -> Tensor";
//       struct Arguments {
//         Tensor x;  // (B,S,E)
//         Tensor w;  // (E,R)
//         auto fields() { return std::tie(x, w); }  // in the order of the schema
//       };
//       using Results = std::tuple<Tensor>;
//     };
//
// Kernels of every dispatch key take the arguments from the dispatcher's stack as this struct.

namespace memcheck {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The name in a schema.
inline std::string operator_name(const char* schema) {
  const std::string text = schema;
  return text.substr(0, text.find('('));
}

// ---- the dispatcher's stack

template <typename T>
struct FromStack {
  static T take(c10::IValue& value) { return std::move(value).to<T>(); }
};
// The dispatcher accepts None for a tensor, which operators refuse by name.
template <>
struct FromStack<Tensor> {
  static Tensor take(c10::IValue& value) { return value.isNone() ? Tensor() : std::move(value).toTensor(); }
};
template <>
struct FromStack<c10::SymInt> {
  static c10::SymInt take(c10::IValue& value) { return value.toSymInt(); }
};
template <>
struct FromStack<std::vector<c10::SymInt>> {
  static std::vector<c10::SymInt> take(c10::IValue& value) {
    if (!value.isIntList()) return value.toSymIntVector();
    const std::vector<int64_t> numbers = value.toIntVector();
    return {numbers.begin(), numbers.end()};
  }
};

// The last values of the stack as a struct of arguments, and removes them.
template <typename Arguments>
Arguments take_arguments(torch::jit::Stack& stack) {
  Arguments x;
  std::apply(
      [&](auto&... field) {
        auto value = stack.end() - sizeof...(field);
        ((field = FromStack<std::decay_t<decltype(field)>>::take(*value++)), ...);
        stack.erase(stack.end() - sizeof...(field), stack.end());
      },
      x.fields());
  return x;
}

template <typename Arguments>
torch::jit::Stack stack_of(Arguments x) {
  return std::apply(
      [](auto&... field) {
        torch::jit::Stack stack;
        stack.reserve(sizeof...(field));
        (stack.emplace_back(std::move(field)), ...);
        return stack;
      },
      x.fields());
}

template <typename... Tensors>
void push_results(torch::jit::Stack& stack, std::tuple<Tensors...> results) {
  std::apply([&](auto&... result) { (stack.emplace_back(std::move(result)), ...); }, results);
}

template <typename Results, size_t... i>
Results results_of(torch::jit::Stack& stack, std::index_sequence<i...>) {
  return {std::move(stack[i]).toTensor()...};
}

// ---- calls

template <typename Op>
const c10::OperatorHandle& handle_of() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(("memcheck::" + operator_name(Op::schema)).c_str(), "");
  return handle;
}

// The operator with all that dispatch adds, such as autograd.
template <typename Op>
typename Op::Results call(typename Op::Arguments x) {
  torch::jit::Stack stack = stack_of(std::move(x));
  handle_of<Op>().callBoxed(stack);
  return results_of<typename Op::Results>(stack, std::make_index_sequence<std::tuple_size_v<typename Op::Results>>());
}

}  // namespace memcheck
