#pragma once

#include <cstdint>

#include "common/macros.h"

namespace memcheck {

// The numbers from begin on, and before end.
struct Span {
  int64_t begin, end;

  MEMCHECK_INLINE int64_t size() const { return end - begin; }
};

}  // namespace memcheck
