#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "common/torch/huge_pages.h"

namespace memcheck {

// Memory for a result.
inline at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(c10::multiply_integers(sizes), options, [&] { return at::empty_symint(sizes, options); });
}

// Memory for the gradient of x; undefined if it is not wanted. It has the strides of x if x is dense and does not
// overlap itself, else it is contiguous: AccumulateGrad keeps such a gradient without a copy. Strides of dimensions of
// size 1 do not count: a gradient is the same whether x was saved or, being contiguous, was not.
inline at::Tensor empty_gradient(bool wanted, const at::Tensor& x) {
  if (!wanted) return {};
  return in_huge_pages(x.sym_numel(), x.options(), [&] {
    if (!x.is_contiguous() && x.is_non_overlapping_and_dense())
      return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
    return at::empty_symint(x.sym_sizes(), x.options());
  });
}

// The same for an input of these sizes that is undefined if it was not saved for backward. Only contiguous inputs are
// left out, so its gradient is contiguous.
inline at::Tensor empty_gradient(bool wanted, const at::Tensor& x, c10::SymIntArrayRef sizes,
                                 const at::TensorOptions& options) {
  if (!wanted || x.defined()) return empty_gradient(wanted, x);
  return empty_result(sizes, options);
}

// Scratch of a kernel. To make a tensor takes as long as a small kernel runs, so there is none for 0 bytes.
class Scratch {
 public:
  Scratch() = default;
  // So many bytes, on the device of x.
  Scratch(int64_t bytes, const at::Tensor& x) {
    if (bytes > 0) memory_ = at::empty({bytes}, x.options().dtype(at::kByte));
  }
  void* data() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }

 private:
  at::Tensor memory_;
};

}  // namespace memcheck
