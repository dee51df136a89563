// Tensors of a simulated GPU that are no dense ones. Indices and values of a sparse tensor are dense, and operators
// that only arrange them are those of the CPU, which look at no number. Others are refused.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_set>

#include "simulated/contents.h"
#include "simulated/exports.h"
#include "simulated/kernels.h"
#include "simulated/memory.h"

namespace memcheck::simulated {
namespace {

void arrange(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const std::unordered_set<std::string> arranging = {"aten::_sparse_coo_tensor_with_dims_and_tensors",
                                                            "aten::_sparse_coo_tensor_with_dims",
                                                            "aten::empty",
                                                            "aten::_indices",
                                                            "aten::_values",
                                                            "aten::_nnz",
                                                            "aten::sparse_dim",
                                                            "aten::_dimI",
                                                            "aten::dense_dim",
                                                            "aten::_dimV",
                                                            "aten::is_coalesced",
                                                            "aten::_coalesced_",
                                                            "aten::indices",
                                                            "aten::values",
                                                            "aten::clone",
                                                            "aten::copy_",
                                                            "aten::empty_like",
                                                            "aten::zero_",
                                                            "aten::copy_sparse_to_sparse_"};
  TORCH_CHECK_NOT_IMPLEMENTED(arranging.count(op.operator_name().name) > 0, op.operator_name(),
                              " of sparse tensors has no kernel on the simulated GPU");
  Running running(&op.operator_name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), stack);
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), " of such tensors has no kernel on the simulated GPU");
}

auto& replaced = *new std::vector<c10::RegistrationHandleRAII>();

// dense += sparse, as an optimizer does: add_out_dense_sparse_cuda of ATen/native/sparse/cuda/SparseCUDATensorMath.cu.
at::Tensor& add_to_dense(at::Tensor& self, const at::Tensor& other, const at::Scalar&) {
  TORCH_CHECK_NOT_IMPLEMENTED(!self.is_sparse() && other.is_sparse(),
                              "aten::add_ of sparse tensors has no kernel on the simulated GPU");
  forget(self);
  return self;
}

}  // namespace
}  // namespace memcheck::simulated

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("add_.Tensor", memcheck::simulated::add_to_dense);
  // These have kernels for any kind of tensor, so that the fallback is not asked.
  for (const char* name :
       {"clone", "copy_", "empty_like", "sparse_dim", "dense_dim", "is_coalesced", "indices", "values"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&memcheck::simulated::arrange>());
}
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&memcheck::simulated::arrange>());
}

using namespace memcheck::simulated;

// Replaces the kernels of a CUDA build. key: of kinds of tensors that are not dense. names: of operators, a line each.
MEMCHECK_EXPORT void memcheck_simulated_replace(const char* key, const char* names) {
  Silence silence;
  const c10::DispatchKey its_key = c10::parseDispatchKey(key);
  const bool is_sparse = its_key == c10::DispatchKey::SparseCUDA;
  std::istringstream lines(names);
  for (std::string line; std::getline(lines, line);) {
    if (is_sparse && line == "aten::add_.Tensor") continue;
    const size_t dot = line.find('.');
    auto kernel = is_sparse ? c10::KernelFunction::makeFromBoxedFunction<&arrange>()
                            : c10::KernelFunction::makeFromBoxedFunction<&refuse>();
    replaced.push_back(c10::Dispatcher::singleton().registerImpl(
        {line.substr(0, dot), dot == std::string::npos ? "" : line.substr(dot + 1)}, its_key, std::move(kernel),
        std::nullopt, nullptr, "memcheck's simulated GPU"));
  }
}
