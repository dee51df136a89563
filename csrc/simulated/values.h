// The numbers of results: what runs on the host because its operands are known there, and what stands in for the rest.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace memcheck::simulated {

// An operand that an operator writes to.
struct Written {
  at::Tensor tensor;
  bool overwrites;  // without reading it
  size_t argument;
};

// What of an operator decides the numbers of its results.
struct Values {
  explicit Values(const c10::OperatorHandle& op);

  std::string name;    // without its namespace
  bool mixes_devices;  // It takes operands of the CPU beside those of a GPU.
  bool has_sizes_by_contents;
  bool is_random, has_cpu, is_pointwise;
  // Of results that are not known: bools that are answered, and integers that count or are places.
  enum class Kind { kOther, kComparison, kNegation, kFinite, kNotFinite, kNonzero, kCount, kPlace } kind = Kind::kOther;
  std::vector<char> is_status;  // of results: the `info` of linalg, which reads 0
  std::vector<char> keeps;      // of arguments: written, but not where everything is finite
};

// A call whose results are allocated.
struct Finished {
  const c10::OperatorHandle& op;
  const Values& values;
  const c10::IValue* arguments;
  size_t count;
  const std::vector<Written>& written;
  torch::jit::Stack& results;
};
void update_values(const Finished& call);

// Runs an operator whose results have sizes that numbers decide. False: they do not in this call.
bool run_sizes_by_contents(const c10::OperatorHandle& op, const Values& values, torch::jit::Stack* stack, int device);

std::string name_of(at::ScalarType dtype);

// What aten::_local_scalar_dense and aten::equal answer.
at::Scalar read_number(const at::Tensor& self);
bool are_equal(const at::Tensor& self, const at::Tensor& other);

at::Tensor zeros_on_host(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace memcheck::simulated
