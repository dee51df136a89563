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

// to[j][i] = from[i][j] for a square of kTileRows == kTileLanes.
template <typename acc_t>
MEMCHECK_INLINE void transpose_tile(const acc_t* from, acc_t* to) {
  static_assert(kTileRows == kTileLanes);
  constexpr int kSide = 8;
  for (int i = 0; i < kTileRows; i += kSide)
    for (int j = 0; j < kTileRows; j += kSide)
      for (int a = 0; a < kSide; ++a)
        for (int b = 0; b < kSide; ++b) to[(j + b) * kTileLanes + i + a] = from[(i + a) * kTileLanes + j + b];
}

// tile[row][lane] = from[row * row_stride + lane * lane_stride]; lanes beyond `lanes` are 0, rows beyond `rows` stay as
// they are.
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_tile(const scalar_t* from, int64_t row_stride, int64_t lane_stride, int rows, int lanes,
                               acc_t* tile) {
  if (row_stride == 1 && lane_stride != 1) {
    alignas(64) acc_t lines[kTile];
    for (int lane = 0; lane < lanes; ++lane)
      for (int row = 0; row < rows; ++row)
        lines[lane * kTileRows + row] = static_cast<acc_t>(from[lane * lane_stride + row]);
    for (int lane = lanes; lane < kTileLanes; ++lane)
      for (int row = 0; row < kTileRows; ++row) lines[lane * kTileRows + row] = acc_t(0);
    transpose_tile(lines, tile);
    return;
  }
  for (int row = 0; row < rows; ++row) {
    const scalar_t* line = from + row * row_stride;
    if (lane_stride == 1) {
      for (int lane = 0; lane < lanes; ++lane) tile[row * kTileLanes + lane] = static_cast<acc_t>(line[lane]);
    } else {
      for (int lane = 0; lane < lanes; ++lane)
        tile[row * kTileLanes + lane] = static_cast<acc_t>(line[lane * lane_stride]);
    }
    for (int lane = lanes; lane < kTileLanes; ++lane) tile[row * kTileLanes + lane] = acc_t(0);
  }
}

// Asks for the cache lines of a tile that will be loaded or stored soon. Tiles walk many rows at once, a few lines of
// each: too many streams for the hardware to foresee.
template <typename scalar_t>
MEMCHECK_INLINE void prefetch_tile(const scalar_t* from, int64_t row_stride, int64_t lane_stride, int64_t rows,
                                   int64_t lanes) {
  const bool along_rows = row_stride == 1 && lane_stride != 1;
  const int64_t lines = along_rows ? lanes : rows;
  const int64_t stride = along_rows ? lane_stride : row_stride;
  const int64_t bytes = (along_rows ? rows : lanes) * static_cast<int64_t>(sizeof(scalar_t));
  for (int64_t line = 0; line < lines; ++line) {
    const char* first = reinterpret_cast<const char*>(from + line * stride);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(first + byte, 0, 2);
  }
}

// to[row * row_stride + lane * lane_stride] = tile[row][lane], rounded to the dtype.
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_tile(scalar_t* to, int64_t row_stride, int64_t lane_stride, int rows, int lanes,
                                const acc_t* tile) {
  if (row_stride == 1 && lane_stride != 1) {
    alignas(64) acc_t lines[kTile];
    transpose_tile(tile, lines);
    for (int lane = 0; lane < lanes; ++lane)
      for (int row = 0; row < rows; ++row)
        to[lane * lane_stride + row] = static_cast<scalar_t>(lines[lane * kTileRows + row]);
    return;
  }
  for (int row = 0; row < rows; ++row) {
    scalar_t* line = to + row * row_stride;
    if (lane_stride == 1) {
      for (int lane = 0; lane < lanes; ++lane) line[lane] = static_cast<scalar_t>(tile[row * kTileLanes + lane]);
    } else {
      for (int lane = 0; lane < lanes; ++lane)
        line[lane * lane_stride] = static_cast<scalar_t>(tile[row * kTileLanes + lane]);
    }
  }
}

}  // namespace memcheck
