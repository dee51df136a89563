#pragma once

#include <cstdint>

#include "common/macros.h"

// Tiles: kTileRows rows of kTileLanes numbers in the accumulation type, one row after the other.

namespace memcheck {

constexpr int kTileRows = 32;
constexpr int kTileLanes = 32;
constexpr int kTileElements = kTileRows * kTileLanes;

// Takes one element of each of kParts parts in turn. A part is kTileRows / kParts rows of `from`. As an index of an
// element in binary, this rotates it by log2(kParts) bits, which compilers turn into vector shuffles.
template <int kParts, typename acc_t>
MEMCHECK_INLINE void interleave_parts(const acc_t* __restrict from, int64_t row_stride, acc_t* __restrict to) {
  constexpr int kPartRows = kTileRows / kParts;
  for (int64_t row = 0; row < kPartRows; ++row)
    for (int64_t i = 0; i < kTileLanes; ++i)
      for (int64_t part = 0; part < kParts; ++part)
        to[(row * kTileLanes + i) * kParts + part] = from[(part * kPartRows + row) * row_stride + i];
}

// to[j][i] = from[i][j]. The index of an element has 5 bits for its row and 5 for its lane: this rotates it by 3 bits,
// then by 2.
template <typename acc_t>
MEMCHECK_INLINE void transpose_tile(const acc_t* from, acc_t* to, int64_t from_stride = kTileLanes) {
  static_assert(kTileRows == 32 && kTileLanes == 32);
  alignas(64) acc_t half[kTileElements];
  interleave_parts<8>(from, from_stride, half);
  interleave_parts<4>(half, kTileLanes, to);
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
