#pragma once

#include <cstdint>

#include "common/macros.h"

namespace memcheck {

// a / b rounded up, for a from 0 and b from 1.
MEMCHECK_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace memcheck
