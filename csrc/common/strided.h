#pragma once

#include <cstdint>

namespace memcheck {

// A tensor of three dimensions as a kernel sees it: where it begins, and its strides in elements. Null where there is
// none.
struct Strided {
  void* data = nullptr;
  int64_t stride[3] = {0, 0, 0};

  template <typename scalar_t>
  scalar_t* at(int64_t i, int64_t j, int64_t k) const {
    return static_cast<scalar_t*>(data) + i * stride[0] + j * stride[1] + k * stride[2];
  }
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace memcheck
