#pragma once

#include <cstdint>

#include "common/tile.h"
#include "common/tile_product.h"
#include "common/types.h"

// Matrices in memory, of any strides and dtype, as matrices in scratch in the accumulation type, and back.

namespace memcheck {

static_assert(kTileColumns == kTileLanes);

// Element (row, column) is row * row_stride + column * column_stride elements behind data.
struct MatrixPlace {
  void* data;
  int64_t row_stride;
  int64_t column_stride;
};

MEMCHECK_INLINE void* element_at(Dtype dtype, void* data, int64_t index) {
  return static_cast<char*>(data) + index * element_bytes(dtype);
}

// The matrix x[i][j], from a row on.
MEMCHECK_INLINE MatrixPlace rows_at(Dtype dtype, const Strided<4>& x, int64_t i, int64_t j, int64_t row) {
  const int64_t first = i * x.stride[0] + j * x.stride[1] + row * x.stride[2];
  return {element_at(dtype, x.data, first), x.stride[2], x.stride[3]};
}

// Whether rows in memory lie as they would in scratch, so that products can read them there: in the accumulation type,
// columns side by side, in full tiles.
template <typename acc_t>
MEMCHECK_INLINE bool lies_as_scratch(Dtype dtype, const MatrixPlace& x, int64_t columns) {
  const Dtype acc = sizeof(acc_t) == sizeof(double) ? Dtype::Float64 : Dtype::Float32;
  return dtype == acc && x.column_stride == 1 && columns % kTileColumns == 0;
}

// The rows that come `further` rows behind those of a place.
MEMCHECK_INLINE NextRows rows_after(Dtype dtype, const MatrixPlace& place, int64_t further, int64_t columns) {
  if (place.column_stride != 1 || columns == 0) return {};
  const int64_t stride = place.row_stride * element_bytes(dtype);
  return {static_cast<const char*>(place.data) + further * stride, stride, columns * element_bytes(dtype)};
}

// to (rows,padded_columns(columns)) = rows of a matrix in memory, with zeros in the columns that pad them.
template <typename acc_t>
void load_rows(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to, int64_t to_stride);

// Rows of a matrix in memory = from (rows,columns), rounded to the dtype.
template <typename acc_t>
void store_rows(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* from,
                int64_t from_stride);

// to (columns,kTileRows) = from (rows,columns) transposed, for at most kTileRows rows and a multiple of kTileColumns
// columns, with zeros where rows are missing.
template <typename acc_t>
void transpose_rows(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns, acc_t* to,
                    int64_t to_stride);

// load_rows and store_rows for one tile, of at most kTileRows rows and kTileLanes columns. Where not the columns but
// the rows lie side by side in memory, it is read and written that way, and transposed.
template <typename acc_t>
void load_tile(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* tile);

template <typename acc_t>
void store_tile(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* tile);

MEMCHECK_INLINE bool rows_lie_side_by_side(const MatrixPlace& x) {
  return x.row_stride == 1 && x.column_stride != 1;
}

// The cache lines of a tile that will be read or written next. A tile is a few cache lines each of many rows, too many
// streams for the hardware to foresee. Prefetched row by row between arithmetic, they do not wait for each other. Any
// address may be prefetched.
template <typename acc_t>
struct NextTile {
  const char* first;
  int64_t stride;       // of rows, or of columns where rows lie side by side
  int64_t line_stride;  // of the prefetches for a row

  // The tile that comes `further` rows behind that of a place.
  MEMCHECK_INLINE NextTile(Dtype dtype, const MatrixPlace& place, int64_t further)
      : first(static_cast<const char*>(element_at(dtype, place.data, further * place.row_stride))),
        stride((rows_lie_side_by_side(place) ? place.column_stride : place.row_stride) * element_bytes(dtype)),
        line_stride(kTileLanes * element_bytes(dtype) / kLines) {}

  MEMCHECK_INLINE void prefetch(int64_t row) const {
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(first + row * stride + line * line_stride, 0, 2);
  }

 private:
  // Of a row in the accumulation type: more than a row of 16-bit elements has, whose second prefetch is within 64
  // bytes.
  static constexpr int64_t kLines = kTileLanes * sizeof(acc_t) / 64;
};

}  // namespace memcheck
