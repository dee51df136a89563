#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/macros.h"
#include "common/strided.h"
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

// The matrix of x at [i][j], from a row on.
MEMCHECK_INLINE MatrixPlace rows_at(Dtype dtype, const Strided<4>& x, int64_t i, int64_t j, int64_t row) {
  const int64_t first = i * x.stride[0] + j * x.stride[1] + row * x.stride[2];
  return {static_cast<char*>(x.data) + first * element_bytes(dtype), x.stride[2], x.stride[3]};
}

// The rows that come so many after those of a place.
MEMCHECK_INLINE NextRows rows_after(Dtype dtype, const MatrixPlace& place, int64_t further, int64_t columns) {
  if (place.column_stride != 1 || columns == 0) return {};
  const int64_t stride = place.row_stride * element_bytes(dtype);
  return {static_cast<const char*>(place.data) + further * stride, stride, columns * element_bytes(dtype)};
}

// to (rows,padded_columns(columns)) = the rows of a matrix in memory, and 0 where it has no columns.
template <typename acc_t>
void load_rows(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to, int64_t to_stride);

// The way back rounds to the dtype.
template <typename acc_t>
void store_rows(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* from,
                int64_t from_stride);

// to (columns,kTileRows) = from (rows,columns) transposed, for at most kTileRows rows and a multiple of kTileColumns
// columns. Where rows are missing it is 0.
template <typename acc_t>
void transpose_rows(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns, acc_t* to,
                    int64_t to_stride);

}  // namespace memcheck
