// The operands of a call, as they lie on the stack.
#pragma once

#include <ATen/core/stack.h>

#include <algorithm>
#include <initializer_list>
#include <string>

namespace memcheck::simulated {

inline bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* each) { return name == each; });
}

// Calls f(tensor) for each defined tensor in a value: itself, or those of a list.
template <typename F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toListRef())
      if (part.isTensor() && part.toTensor().defined()) f(part.toTensor());
  }
}

// The value with f(tensor) for each defined tensor in it, and f_device for a device.
template <typename F>
c10::IValue map_tensors(const c10::IValue& value, c10::DeviceType device, F f) {
  auto mapped = [&](const at::Tensor& tensor) { return tensor.defined() ? f(tensor) : tensor; };
  if (value.isTensor()) return mapped(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(mapped(tensor));
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(device);
  const bool is_optional_list = value.isList() && !value.toListRef().empty() &&
                                (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone());
  if (!is_optional_list) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& part : value.toListRef())
    list.push_back(part.isNone() ? std::optional<at::Tensor>() : mapped(part.toTensor()));
  return list;
}

}  // namespace memcheck::simulated
