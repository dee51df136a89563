#pragma once

#include "common/types.h"

namespace memcheck {

// Compensated summation (Kahan): sum += x, where `rest` is what rounding has left out of the sum so far. The error is
// that of a few additions, however many there were. T is a number or a vector of numbers. When a sum overflows its rest
// is dropped, so that the sum stays infinite, as a plain sum does, instead of becoming NaN.
template <typename T>
MEMCHECK_INLINE void add_to_sum(const T& x, T& sum, T& rest) {
  const T with_rest = x + rest;
  const T next = sum + with_rest;
  const T lost = with_rest - (next - sum);
  rest = lost - lost == T{} ? lost : T{};
  sum = next;
}

}  // namespace memcheck
