#include "common/matrix_tile.h"

#include <type_traits>

#include "common/cpu_level.h"
#include "common/half.h"

namespace memcheck {
namespace {

// run(scalar_t{}) for the C++ type of a dtype whose accumulation type is acc_t. Inlined as `run` must be, so that both
// are compiled for the instructions of the function around them.
template <typename acc_t, typename Run>
MEMCHECK_INLINE void with_element_type(Dtype dtype, const Run& run) {
  if constexpr (std::is_same_v<acc_t, double>) {
    run(double{});
  } else if (dtype == Dtype::Float32) {
    run(float{});
  } else if (dtype == Dtype::BFloat16) {
    run(BFloat16{});
  } else {
    run(Half{});
  }
}

// Elements `stride` apart become a line, and the way back.
template <typename from_t, typename to_t>
MEMCHECK_INLINE void gather_line(const from_t* from, int64_t stride, int64_t count, to_t* to) {
  if (stride == 1) return convert_line(from, count, to);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<to_t>(from[i * stride]);
}

template <typename from_t, typename to_t>
MEMCHECK_INLINE void scatter_line(const from_t* from, int64_t count, to_t* to, int64_t stride) {
  if (stride == 1) return convert_line(from, count, to);
  for (int64_t i = 0; i < count; ++i) to[i * stride] = static_cast<to_t>(from[i]);
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_rows_of(const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to,
                                  int64_t to_stride) {
  const int64_t padded = padded_columns(columns);
  const scalar_t* first = static_cast<const scalar_t*>(from.data);
  if (from.column_stride == 1 && columns == padded) {
    for (int64_t column = 0; column < columns; column += kTileLanes)
      convert_lines(first + column, from.row_stride, rows, kTileLanes, to + column, to_stride);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const scalar_t* source = first + row * from.row_stride;
    acc_t* line = to + row * to_stride;
    for (int64_t column = 0; column < padded; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      gather_line(source + column * from.column_stride, from.column_stride, count, line + column);
      for (int64_t i = count; i < kTileLanes; ++i) line[column + i] = acc_t(0);
    }
  }
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_rows_of(const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* from,
                                   int64_t from_stride) {
  scalar_t* first = static_cast<scalar_t*>(to.data);
  if (to.column_stride == 1 && columns % kTileLanes == 0) {
    for (int64_t column = 0; column < columns; column += kTileLanes)
      convert_lines(from + column, from_stride, rows, kTileLanes, first + column, to.row_stride);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    scalar_t* target = first + row * to.row_stride;
    const acc_t* line = from + row * from_stride;
    for (int64_t column = 0; column < columns; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      scatter_line(line + column, count, target + column * to.column_stride, to.column_stride);
    }
  }
}

// Full lines have a loop of their own, without a branch in it: it is as fast as the memory.
MEMCHECK_INLINE bool has_full_lines(const MatrixPlace& x, int64_t columns) {
  return x.column_stride == 1 && columns == kTileLanes;
}

MEMCHECK_INLINE bool is_full_tile(int64_t rows, int64_t columns) {
  return rows == kTileRows && columns == kTileLanes;
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_tile_of(const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* __restrict tile) {
  const scalar_t* first = static_cast<const scalar_t*>(from.data);
  if (rows_lie_side_by_side(from)) {
    if constexpr (std::is_same_v<scalar_t, acc_t>)
      if (is_full_tile(rows, columns)) return transpose_tile(first, tile, from.column_stride);
    alignas(64) acc_t lines[kTileElements];
    convert_lines(first, from.column_stride, columns, rows, lines, kTileRows);
    for (int64_t i = columns * kTileRows; i < kTileElements; ++i) lines[i] = acc_t(0);
    transpose_tile(lines, tile);
  } else if (has_full_lines(from, columns)) {
    convert_lines(first, from.row_stride, rows, kTileLanes, tile, kTileLanes);
  } else {
    load_rows_of<scalar_t>(from, rows, columns, tile, kTileLanes);
  }
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_tile_of(const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* __restrict tile) {
  scalar_t* first = static_cast<scalar_t*>(to.data);
  if (rows_lie_side_by_side(to)) {
    alignas(64) acc_t lines[kTileElements];
    transpose_tile(tile, lines);
    convert_lines(lines, kTileRows, columns, rows, first, to.column_stride);
  } else if (has_full_lines(to, columns)) {
    convert_lines(tile, kTileLanes, rows, kTileLanes, first, to.row_stride);
  } else {
    store_rows_of<scalar_t>(to, rows, columns, tile, kTileLanes);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void load_rows_body(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to,
                                    int64_t to_stride) {
  with_element_type<acc_t>(dtype, [&](auto element) MEMCHECK_INLINE_LAMBDA {
    load_rows_of<decltype(element)>(from, rows, columns, to, to_stride);
  });
}

template <typename acc_t>
MEMCHECK_INLINE void store_rows_body(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns,
                                     const acc_t* from, int64_t from_stride) {
  with_element_type<acc_t>(dtype, [&](auto element) MEMCHECK_INLINE_LAMBDA {
    store_rows_of<decltype(element)>(to, rows, columns, from, from_stride);
  });
}

template <typename acc_t>
MEMCHECK_INLINE void load_tile_body(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* tile) {
  with_element_type<acc_t>(
      dtype, [&](auto element) MEMCHECK_INLINE_LAMBDA { load_tile_of<decltype(element)>(from, rows, columns, tile); });
}

template <typename acc_t>
MEMCHECK_INLINE void store_tile_body(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns,
                                     const acc_t* tile) {
  with_element_type<acc_t>(
      dtype, [&](auto element) MEMCHECK_INLINE_LAMBDA { store_tile_of<decltype(element)>(to, rows, columns, tile); });
}

// Transposing a tile costs the same however few rows it has. These are placed one by one.
constexpr int64_t kFewRows = 4;

template <typename acc_t>
MEMCHECK_INLINE void place_few_rows(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns,
                                    acc_t* __restrict to, int64_t to_stride) {
  for (int64_t column = 0; column < columns; ++column) {
    acc_t* line = to + column * to_stride;
    for (int64_t i = 0; i < kTileRows; ++i) line[i] = acc_t(0);
    for (int64_t row = 0; row < rows; ++row) line[row] = from[row * from_stride + column];
  }
}

template <typename acc_t>
MEMCHECK_INLINE void transpose_rows_body(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns,
                                         acc_t* to, int64_t to_stride) {
  if (rows <= kFewRows) return place_few_rows(from, from_stride, rows, columns, to, to_stride);
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    if (rows == kTileRows && to_stride == kTileRows) {
      transpose_tile(from + column, to + column * to_stride, from_stride);
      continue;
    }
    alignas(64) acc_t lines[kTileElements];
    for (int64_t row = 0; row < rows; ++row)
      convert_line(from + row * from_stride + column, kTileLanes, lines + row * kTileLanes);
    for (int64_t i = rows * kTileLanes; i < kTileElements; ++i) lines[i] = acc_t(0);
    if (to_stride == kTileRows) {
      transpose_tile(lines, to + column * to_stride);
      continue;
    }
    alignas(64) acc_t transposed[kTileElements];
    transpose_tile(lines, transposed);
    for (int64_t row = 0; row < kTileRows; ++row)
      convert_line(transposed + row * kTileLanes, kTileLanes, to + (column + row) * to_stride);
  }
}

}  // namespace

MEMCHECK_PER_CPU_LEVEL(acc_t, load_rows,
                       (Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to,
                        int64_t to_stride),
                       (dtype, from, rows, columns, to, to_stride))
MEMCHECK_PER_CPU_LEVEL(acc_t, store_rows,
                       (Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* from,
                        int64_t from_stride),
                       (dtype, to, rows, columns, from, from_stride))
MEMCHECK_PER_CPU_LEVEL(acc_t, load_tile,
                       (Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* tile),
                       (dtype, from, rows, columns, tile))
MEMCHECK_PER_CPU_LEVEL(acc_t, store_tile,
                       (Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* tile),
                       (dtype, to, rows, columns, tile))
MEMCHECK_PER_CPU_LEVEL(acc_t, transpose_rows,
                       (const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns, acc_t* to,
                        int64_t to_stride),
                       (from, from_stride, rows, columns, to, to_stride))

template void load_rows(Dtype, const MatrixPlace&, int64_t, int64_t, float*, int64_t);
template void load_rows(Dtype, const MatrixPlace&, int64_t, int64_t, double*, int64_t);
template void store_rows(Dtype, const MatrixPlace&, int64_t, int64_t, const float*, int64_t);
template void store_rows(Dtype, const MatrixPlace&, int64_t, int64_t, const double*, int64_t);
template void load_tile(Dtype, const MatrixPlace&, int64_t, int64_t, float*);
template void load_tile(Dtype, const MatrixPlace&, int64_t, int64_t, double*);
template void store_tile(Dtype, const MatrixPlace&, int64_t, int64_t, const float*);
template void store_tile(Dtype, const MatrixPlace&, int64_t, int64_t, const double*);
template void transpose_rows(const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void transpose_rows(const double*, int64_t, int64_t, int64_t, double*, int64_t);

}  // namespace memcheck
