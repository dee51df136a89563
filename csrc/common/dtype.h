#pragma once

#include <cstdint>

namespace memcheck {

// The dtypes of all operators.
enum class Dtype { Float64, Float32, Float16, BFloat16 };

// Bytes of one element.
inline int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::Float64 ? 8 : dtype == Dtype::Float32 ? 4 : 2;
}

// Bytes of one element of the accumulation type: float64 for float64, else float32.
inline int64_t acc_bytes(Dtype dtype) {
  return dtype == Dtype::Float64 ? 8 : 4;
}

}  // namespace memcheck
