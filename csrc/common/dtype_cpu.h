#pragma once

#include <type_traits>

#include "common/dtype.h"
#include "common/half.h"

namespace memcheck {

// The type of sums, states and intermediates: float64 for float64, else float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// run(scalar_t{}) for the C++ type of a dtype.
template <typename Run>
auto with_scalar_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::Float64:
      return run(double{});
    case Dtype::Float16:
      return run(Half{});
    case Dtype::BFloat16:
      return run(BFloat16{});
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
