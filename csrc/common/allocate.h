#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "common/huge_pages.h"

namespace memcheck {

// Room for the gradient of x. AccumulateGrad takes it over without a copy when its strides are those of x, if x is
// dense and does not overlap itself, else when it is contiguous.
inline at::Tensor empty_gradient(const at::Tensor& x) {
  return in_huge_pages(x.sym_numel(), x.options(), [&] {
    if (x.is_non_overlapping_and_dense()) return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
    return at::empty_symint(x.sym_sizes(), x.options());
  });
}

// Room for a result.
inline at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(c10::multiply_integers(sizes), options, [&] { return at::empty_symint(sizes, options); });
}

// Scratch of so many bytes beside x.
inline at::Tensor empty_bytes(int64_t bytes, const at::Tensor& x) {
  return at::empty({bytes}, x.options().dtype(at::kByte));
}

}  // namespace memcheck
