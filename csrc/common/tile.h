#pragma once

#include <cstdint>
#include <cstring>

#include "common/types.h"

// Tiles: kTileRows rows of kTileLanes numbers in the accumulation type, one row after the other.

namespace memcheck {

constexpr int kTileRows = 32;
constexpr int kTileLanes = 32;
constexpr int kTileElements = kTileRows * kTileLanes;

// Vectors of 16 bytes, which every processor has, with instructions that interleave their halves.
template <typename acc_t>
struct ShortVector {
  typedef acc_t type __attribute__((vector_size(16)));
};

MEMCHECK_INLINE ShortVector<float>::type interleave_low(ShortVector<float>::type a, ShortVector<float>::type b) {
  return ShortVector<float>::type{a[0], b[0], a[1], b[1]};
}
MEMCHECK_INLINE ShortVector<float>::type interleave_high(ShortVector<float>::type a, ShortVector<float>::type b) {
  return ShortVector<float>::type{a[2], b[2], a[3], b[3]};
}
MEMCHECK_INLINE ShortVector<double>::type interleave_low(ShortVector<double>::type a, ShortVector<double>::type b) {
  return ShortVector<double>::type{a[0], b[0]};
}
MEMCHECK_INLINE ShortVector<double>::type interleave_high(ShortVector<double>::type a, ShortVector<double>::type b) {
  return ShortVector<double>::type{a[1], b[1]};
}

// Transposes a square of 16 bytes a row, 4 x 4 floats or 2 x 2 doubles. Interleaving the rows of its upper half with
// those of its lower half, as many times as the number of rows has bits, transposes it.
template <typename acc_t>
MEMCHECK_INLINE void transpose_square(const acc_t* from, int64_t from_stride, acc_t* to, int64_t to_stride) {
  using Vector = typename ShortVector<acc_t>::type;
  constexpr int kSide = 16 / sizeof(acc_t);
  Vector x[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&x[i], from + i * from_stride, sizeof(Vector));
  for (int side = 1; side < kSide; side *= 2) {
    Vector y[kSide];
    for (int i = 0; i < kSide / 2; ++i) {
      y[2 * i] = interleave_low(x[i], x[i + kSide / 2]);
      y[2 * i + 1] = interleave_high(x[i], x[i + kSide / 2]);
    }
    for (int i = 0; i < kSide; ++i) x[i] = y[i];
  }
  for (int i = 0; i < kSide; ++i) std::memcpy(to + i * to_stride, &x[i], sizeof(Vector));
}

// to[j][i] = from[i][j].
template <typename acc_t>
MEMCHECK_INLINE void transpose_tile(const acc_t* __restrict from, acc_t* __restrict to,
                                    int64_t from_stride = kTileLanes) {
  constexpr int64_t kSide = 16 / sizeof(acc_t);
  for (int64_t i = 0; i < kTileRows; i += kSide)
    for (int64_t j = 0; j < kTileLanes; j += kSide)
      transpose_square(from + i * from_stride + j, from_stride, to + j * kTileRows + i, kTileRows);
}

// to[i] = from[i], converted. The length of a full line is known to the compiler, so that a full line becomes a few
// vectors instead of a call or a string instruction.
template <typename from_t, typename to_t>
MEMCHECK_INLINE void convert_line(const from_t* from, int64_t count, to_t* to) {
  static_assert(kTileRows == kTileLanes);
  if (count == kTileLanes) {
    for (int64_t i = 0; i < kTileLanes; ++i) to[i] = static_cast<to_t>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<to_t>(from[i]);
  }
}

// The same of rows of `count` numbers.
template <typename from_t, typename to_t>
MEMCHECK_INLINE void convert_lines(const from_t* from, int64_t from_stride, int64_t rows, int64_t count, to_t* to,
                                   int64_t to_stride) {
  for (int64_t row = 0; row < rows; ++row) convert_line(from + row * from_stride, count, to + row * to_stride);
}

}  // namespace memcheck
