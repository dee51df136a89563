#pragma once

#include <cstdint>

namespace memcheck {

// a / b rounded up, for a from 0 and b from 1.
inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace memcheck
