#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/TensorUtils.h>

#include <algorithm>
#include <cstdint>

namespace memcheck {

// Whether GEMM reads a matrix without a copy: one stride is 1, and the other is at least as large as a row or column.
inline bool is_matrix(const at::Tensor& x) {
  return (x.stride(1) == 1 && x.stride(0) >= std::max<int64_t>(1, x.size(1))) ||
         (x.stride(0) == 1 && x.stride(1) >= std::max<int64_t>(1, x.size(0)));
}

// x (...,E) as a matrix (N,E), undefined if its strides do not allow that.
inline at::Tensor rows_in_place(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  const at::DimVector sizes{c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)};
  const auto strides = at::detail::computeStride(x.sizes(), x.strides(), sizes);
  return strides ? x.as_strided(sizes, *strides) : at::Tensor();
}

// The same; a copy if its strides do not allow that.
inline at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = rows_in_place(x);
  return rows.defined() ? rows : rows_in_place(x.contiguous());
}

}  // namespace memcheck
