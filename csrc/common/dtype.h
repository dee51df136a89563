#pragma once

#include <cstdint>
#include <type_traits>

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

// The type of sums, states and intermediates: float64 for float64, else float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// run(scalar_t{}) for the type of a dtype. half_t and bfloat16_t: the types of 16 bits, which the CPU and CUDA have
// their own of.
template <typename half_t, typename bfloat16_t, typename Run>
auto with_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::Float64:
      return run(double{});
    case Dtype::Float16:
      return run(half_t{});
    case Dtype::BFloat16:
      return run(bfloat16_t{});
    case Dtype::Float32:
      break;
  }
  return run(float{});
}

// run(acc_t{}) for the accumulation type of a dtype.
template <typename Run>
auto with_acc_type(Dtype dtype, const Run& run) {
  return dtype == Dtype::Float64 ? run(double{}) : run(float{});
}

}  // namespace memcheck
