#pragma once

#include <cstdint>
#include <type_traits>

#include "common/macros.h"

// Tiles: kTileRows positions by kTileLanes channels, in the accumulation type, lanes contiguous. Kernels compute on
// tiles; memory of any strides and dtype is turned into one, and back, here.

namespace memcheck {

constexpr int kTileRows = 32;
constexpr int kTileLanes = 32;
constexpr int kTile = kTileRows * kTileLanes;

// Sums, states and intermediates: float64 for float64, else float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// Deals kWays packs of elements into one, a card of each in turn. That turns the bits of an element's index by
// log2(kWays), and compilers make vector shuffles of it.
template <int kWays, typename acc_t>
MEMCHECK_INLINE void deal(const acc_t* __restrict from, acc_t* __restrict to) {
  constexpr int kPack = kTile / kWays;
  for (int64_t i = 0; i < kPack; ++i)
    for (int64_t way = 0; way < kWays; ++way) to[kWays * i + way] = from[kPack * way + i];
}

// to[j][i] = from[i][j]: the index of an element has 5 bits for its row and 5 for its lane, and is turned by 5.
template <typename acc_t>
MEMCHECK_INLINE void transpose_tile(const acc_t* from, acc_t* to) {
  static_assert(kTileRows == 32 && kTileLanes == 32);
  alignas(64) acc_t half[kTile];
  deal<8>(from, half);
  deal<4>(half, to);
}

// Asks for the cache lines of `count` elements that will be loaded or stored soon: tiles walk many rows at once, a few
// lines of each, which is too many streams for the hardware to foresee. Any address may be asked for.
template <bool writes, typename scalar_t>
MEMCHECK_INLINE void prefetch_line(const scalar_t* line, int64_t count) {
  const char* first = reinterpret_cast<const char*>(line);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(scalar_t));
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(first + byte, writes, 2);
}

// tile[row][lane] = from[row * row_stride + lane * lane_stride]; lanes beyond `lanes` are 0, rows beyond `rows` are
// undefined. `ahead` is how many elements further the next tile begins.
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_tile(const scalar_t* from, int64_t row_stride, int64_t lane_stride, int64_t ahead,
                               int64_t rows, int64_t lanes, acc_t* tile) {
  if (row_stride == 1 && lane_stride != 1) {
    alignas(64) acc_t lines[kTile];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const scalar_t* line = from + lane * lane_stride;
      prefetch_line<false>(line + ahead, kTileRows);
      for (int64_t row = 0; row < rows; ++row) lines[lane * kTileRows + row] = static_cast<acc_t>(line[row]);
    }
    for (int64_t lane = lanes; lane < kTileLanes; ++lane)
      for (int64_t row = 0; row < kTileRows; ++row) lines[lane * kTileRows + row] = acc_t(0);
    transpose_tile(lines, tile);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const scalar_t* line = from + row * row_stride;
    acc_t* to = tile + row * kTileLanes;
    if (lane_stride == 1) {
      prefetch_line<false>(line + ahead, lanes);
      for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = static_cast<acc_t>(line[lane]);
    } else {
      for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = static_cast<acc_t>(line[lane * lane_stride]);
    }
    for (int64_t lane = lanes; lane < kTileLanes; ++lane) to[lane] = acc_t(0);
  }
}

// to[row * row_stride + lane * lane_stride] = tile[row][lane], rounded to the dtype.
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_tile(scalar_t* to, int64_t row_stride, int64_t lane_stride, int64_t ahead, int64_t rows,
                                int64_t lanes, const acc_t* tile) {
  if (row_stride == 1 && lane_stride != 1) {
    alignas(64) acc_t lines[kTile];
    transpose_tile(tile, lines);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      scalar_t* line = to + lane * lane_stride;
      prefetch_line<true>(line + ahead, kTileRows);
      for (int64_t row = 0; row < rows; ++row) line[row] = static_cast<scalar_t>(lines[lane * kTileRows + row]);
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    scalar_t* line = to + row * row_stride;
    const acc_t* from = tile + row * kTileLanes;
    if (lane_stride == 1) {
      prefetch_line<true>(line + ahead, lanes);
      for (int64_t lane = 0; lane < lanes; ++lane) line[lane] = static_cast<scalar_t>(from[lane]);
    } else {
      for (int64_t lane = 0; lane < lanes; ++lane) line[lane * lane_stride] = static_cast<scalar_t>(from[lane]);
    }
  }
}

}  // namespace memcheck
