#pragma once

#include <cstdint>

#include "common/macros.h"

namespace memcheck {

// A tensor of kRank dimensions for a kernel: the address of its first element, and its strides in elements. Null stands
// for no tensor.
template <int kRank>
struct Strided {
  void* data = nullptr;
  int64_t stride[kRank] = {};

  template <typename scalar_t, typename... Index>
  MEMCHECK_INLINE scalar_t* at(Index... index) const {
    static_assert(sizeof...(index) == kRank);
    const int64_t indices[kRank] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int i = 0; i < kRank; ++i) offset += indices[i] * stride[i];
    return static_cast<scalar_t*>(data) + offset;
  }
  MEMCHECK_INLINE explicit operator bool() const { return data != nullptr; }
};

// x with a dimension of length 1 before dimension d.
template <int kRank>
Strided<kRank + 1> with_dimension(const Strided<kRank>& x, int d) {
  Strided<kRank + 1> result{x.data};
  for (int i = 0; i < kRank; ++i) result.stride[i < d ? i : i + 1] = x.stride[i];
  return result;
}

}  // namespace memcheck
