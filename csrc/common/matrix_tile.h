#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype_cpu.h"
#include "common/macros.h"
#include "common/tile.h"
#include "common/tile_product.h"

// Rows of a matrix in memory, of any strides and dtype, as rows of a scratch matrix in the accumulation type, and back.

namespace memcheck {

static_assert(kTileColumns == kTileLanes);

struct MatrixPlace {
  void* data;
  int64_t row_stride;
  int64_t column_stride;
};

// rows x columns, and 0 up to padded_columns(columns).
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_rows_of(const MatrixPlace& place, int64_t rows, int64_t columns, acc_t* to,
                                  int64_t to_stride) {
  const int64_t padded = padded_columns(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const scalar_t* from = static_cast<const scalar_t*>(place.data) + row * place.row_stride;
    acc_t* line = to + row * to_stride;
    for (int64_t column = 0; column < padded; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      if (place.column_stride == 1) {
        convert_line(from + column, count, line + column);
      } else {
        for (int64_t i = 0; i < count; ++i)
          line[column + i] = static_cast<acc_t>(from[(column + i) * place.column_stride]);
      }
      for (int64_t i = count; i < kTileLanes; ++i) line[column + i] = acc_t(0);
    }
  }
}

// Rounds to the dtype.
template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_rows_of(const MatrixPlace& place, int64_t rows, int64_t columns, const acc_t* from,
                                   int64_t from_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    scalar_t* to = static_cast<scalar_t*>(place.data) + row * place.row_stride;
    const acc_t* line = from + row * from_stride;
    for (int64_t column = 0; column < columns; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      if (place.column_stride == 1) {
        convert_line(line + column, count, to + column);
      } else {
        for (int64_t i = 0; i < count; ++i)
          to[(column + i) * place.column_stride] = static_cast<scalar_t>(line[column + i]);
      }
    }
  }
}

// The dtype is looked at once a tile, so that kernels are compiled for each accumulation type only.
template <typename acc_t>
MEMCHECK_INLINE void load_rows(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t columns, acc_t* to,
                               int64_t to_stride) {
  if constexpr (std::is_same_v<acc_t, double>) {
    load_rows_of<double>(place, rows, columns, to, to_stride);
  } else if (dtype == Dtype::Float32) {
    load_rows_of<float>(place, rows, columns, to, to_stride);
  } else if (dtype == Dtype::BFloat16) {
    load_rows_of<c10::BFloat16>(place, rows, columns, to, to_stride);
  } else {
    load_rows_of<c10::Half>(place, rows, columns, to, to_stride);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void store_rows(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t columns, const acc_t* from,
                                int64_t from_stride) {
  if constexpr (std::is_same_v<acc_t, double>) {
    store_rows_of<double>(place, rows, columns, from, from_stride);
  } else if (dtype == Dtype::Float32) {
    store_rows_of<float>(place, rows, columns, from, from_stride);
  } else if (dtype == Dtype::BFloat16) {
    store_rows_of<c10::BFloat16>(place, rows, columns, from, from_stride);
  } else {
    store_rows_of<c10::Half>(place, rows, columns, from, from_stride);
  }
}

// to (columns,kTileRows) = from (rows,columns) transposed, for at most kTileRows rows and a multiple of kTileColumns
// columns. Where rows are missing it is 0.
template <typename acc_t>
MEMCHECK_INLINE void transpose_rows(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns, acc_t* to) {
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    alignas(64) acc_t lines[kTile];
    for (int64_t row = 0; row < rows; ++row)
      convert_line(from + row * from_stride + column, kTileLanes, lines + row * kTileLanes);
    for (int64_t i = rows * kTileLanes; i < kTile; ++i) lines[i] = acc_t(0);
    transpose_tile(lines, to + column * kTileRows);
  }
}

}  // namespace memcheck
