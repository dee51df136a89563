#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace memcheck {

// Whether GEMM reads the matrix without a copy: one stride is 1, and the other is at least as large as a row or column.
inline bool is_matrix(const at::Tensor& x) {
  const auto leads = [&](int64_t fast, int64_t slow) {
    return x.stride(fast) == 1 && x.stride(slow) >= std::max<int64_t>(1, x.size(fast));
  };
  return leads(0, 1) || leads(1, 0);
}

}  // namespace memcheck
