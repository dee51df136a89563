#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace memcheck {

// Whether GEMM reads a matrix without a copy: one stride is 1, and the other is at least as large as a row or column.
inline bool is_matrix(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  return (column_stride == 1 && row_stride >= std::max<int64_t>(1, columns)) ||
         (row_stride == 1 && column_stride >= std::max<int64_t>(1, rows));
}

inline bool is_matrix(const at::Tensor& x) {
  return is_matrix(x.size(0), x.size(1), x.stride(0), x.stride(1));
}

}  // namespace memcheck
