#pragma once

#include <cstddef>
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
// log2(kWays), and compilers make vector shuffles of it. A pack is some rows, so far apart.
template <int kWays, typename acc_t>
MEMCHECK_INLINE void deal(const acc_t* __restrict from, int64_t row_stride, acc_t* __restrict to) {
  constexpr int kPackRows = kTileRows / kWays;
  for (int64_t row = 0; row < kPackRows; ++row)
    for (int64_t i = 0; i < kTileLanes; ++i)
      for (int64_t way = 0; way < kWays; ++way)
        to[(row * kTileLanes + i) * kWays + way] = from[(way * kPackRows + row) * row_stride + i];
}

// to[j][i] = from[i][j]: the index of an element has 5 bits for its row and 5 for its lane, and is turned by 5.
template <typename acc_t>
MEMCHECK_INLINE void transpose_tile(const acc_t* from, acc_t* to, int64_t from_stride = kTileLanes) {
  static_assert(kTileRows == 32 && kTileLanes == 32);
  alignas(64) acc_t half[kTile];
  deal<8>(from, from_stride, half);
  deal<4>(half, kTileLanes, to);
}

// Of a full line the compiler knows the length: it becomes a few vectors, and not a call or a string instruction.
template <typename from_t, typename to_t>
MEMCHECK_INLINE void convert_line(const from_t* from, int64_t count, to_t* to) {
  static_assert(kTileRows == kTileLanes);
  if (count == kTileLanes) {
    for (int64_t i = 0; i < kTileLanes; ++i) to[i] = static_cast<to_t>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<to_t>(from[i]);
  }
}

// The cache lines of a tile that will be used next. A tile is a few lines each of many rows, too many streams for the
// hardware to foresee; asked for row by row between arithmetic, they do not wait for each other.
template <typename scalar_t>
struct TileLines {
  const char* first;
  int64_t stride;

  // Any address may be asked for.
  MEMCHECK_INLINE void expect(int64_t row) const {
    for (std::size_t byte = 0; byte < kTileLanes * sizeof(scalar_t); byte += 64)
      __builtin_prefetch(first + row * stride + byte, 0, 2);
  }
};

// Where a tile lies in memory: element (row, lane) at first[row * row_stride + lane * lane_stride].
template <typename scalar_t>
struct TilePlace {
  scalar_t* first;
  int64_t row_stride;
  int64_t lane_stride;

  // Lanes beyond `lanes` become 0; rows beyond `rows` are undefined.
  template <typename acc_t>
  MEMCHECK_INLINE void load(int64_t rows, int64_t lanes, acc_t* tile) const {
    if (has_contiguous_rows()) {
      alignas(64) acc_t lines[kTile];
      for (int64_t lane = 0; lane < lanes; ++lane)
        convert_line(first + lane * lane_stride, rows, lines + lane * kTileRows);
      for (int64_t lane = lanes; lane < kTileLanes; ++lane)
        for (int64_t row = 0; row < kTileRows; ++row) lines[lane * kTileRows + row] = acc_t(0);
      transpose_tile(lines, tile);
      return;
    }
    for (int64_t row = 0; row < rows; ++row) {
      const scalar_t* line = first + row * row_stride;
      acc_t* to = tile + row * kTileLanes;
      if (lane_stride == 1) {
        convert_line(line, lanes, to);
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = static_cast<acc_t>(line[lane * lane_stride]);
      }
      for (int64_t lane = lanes; lane < kTileLanes; ++lane) to[lane] = acc_t(0);
    }
  }

  // Rounds to the dtype.
  template <typename acc_t>
  MEMCHECK_INLINE void store(int64_t rows, int64_t lanes, const acc_t* tile) const {
    if (has_contiguous_rows()) {
      alignas(64) acc_t lines[kTile];
      transpose_tile(tile, lines);
      for (int64_t lane = 0; lane < lanes; ++lane)
        convert_line(lines + lane * kTileRows, rows, first + lane * lane_stride);
      return;
    }
    for (int64_t row = 0; row < rows; ++row) {
      scalar_t* line = first + row * row_stride;
      const acc_t* from = tile + row * kTileLanes;
      if (lane_stride == 1) {
        convert_line(from, lanes, line);
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) line[lane * lane_stride] = static_cast<scalar_t>(from[lane]);
      }
    }
  }

  MEMCHECK_INLINE TileLines<scalar_t> lines(int64_t rows_further) const {
    return {reinterpret_cast<const char*>(first + rows_further * row_stride),
            (has_contiguous_rows() ? lane_stride : row_stride) * static_cast<int64_t>(sizeof(scalar_t))};
  }

  MEMCHECK_INLINE bool has_contiguous_rows() const { return row_stride == 1 && lane_stride != 1; }
};

}  // namespace memcheck
