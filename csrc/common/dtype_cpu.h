#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "common/dtype.h"

namespace memcheck {

// run(scalar_t{}) for the C++ type of a dtype.
template <typename Run>
auto with_scalar_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::Float64:
      return run(double{});
    case Dtype::Float16:
      return run(c10::Half{});
    case Dtype::BFloat16:
      return run(c10::BFloat16{});
    case Dtype::Float32:
      break;
  }
  return run(float{});
}

// The same for its accumulation type.
template <typename Run>
auto with_acc_type(Dtype dtype, const Run& run) {
  return dtype == Dtype::Float64 ? run(double{}) : run(float{});
}

}  // namespace memcheck
