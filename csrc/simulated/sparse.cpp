// Sparse tensors of a simulated GPU: their indices and values are dense, and operators that only arrange them are those
// of the CPU, which look at no number.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <unordered_set>

#include "simulated/contents.h"
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
                                                            "aten::zero_",
                                                            "aten::copy_sparse_to_sparse_"};
  TORCH_CHECK_NOT_IMPLEMENTED(arranging.count(op.operator_name().name) > 0, op.operator_name(),
                              " of sparse tensors has no kernel on the simulated GPU");
  Running running(&op.operator_name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), stack);
}

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
}
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&memcheck::simulated::arrange>());
}
