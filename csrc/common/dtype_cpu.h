#pragma once

#include "common/dtype.h"
#include "common/half.h"

namespace memcheck {

// run(scalar_t{}) for the C++ type of a dtype.
template <typename Run>
auto with_scalar_type(Dtype dtype, const Run& run) {
  return with_type<Half, BFloat16>(dtype, run);
}

}  // namespace memcheck
