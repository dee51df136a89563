#include "common/matrix_tile.h"

#include <type_traits>

#include "common/cpu_level.h"
#include "common/dtype_cpu.h"

namespace memcheck {

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_rows_of(const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to,
                                  int64_t to_stride) {
  const int64_t padded = padded_columns(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const scalar_t* source = static_cast<const scalar_t*>(from.data) + row * from.row_stride;
    acc_t* line = to + row * to_stride;
    for (int64_t column = 0; column < padded; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      if (from.column_stride == 1) {
        convert_line(source + column, count, line + column);
      } else {
        for (int64_t i = 0; i < count; ++i)
          line[column + i] = static_cast<acc_t>(source[(column + i) * from.column_stride]);
      }
      for (int64_t i = count; i < kTileLanes; ++i) line[column + i] = acc_t(0);
    }
  }
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_rows_of(const MatrixPlace& to, int64_t rows, int64_t columns, const acc_t* from,
                                   int64_t from_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    scalar_t* target = static_cast<scalar_t*>(to.data) + row * to.row_stride;
    const acc_t* line = from + row * from_stride;
    for (int64_t column = 0; column < columns; column += kTileLanes) {
      const int64_t count = columns - column < kTileLanes ? columns - column : kTileLanes;
      if (to.column_stride == 1) {
        convert_line(line + column, count, target + column);
      } else {
        for (int64_t i = 0; i < count; ++i)
          target[(column + i) * to.column_stride] = static_cast<scalar_t>(line[column + i]);
      }
    }
  }
}

template <typename acc_t>
MEMCHECK_INLINE void load_rows_body(Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, acc_t* to,
                                    int64_t to_stride) {
  if constexpr (std::is_same_v<acc_t, double>) {
    load_rows_of<double>(from, rows, columns, to, to_stride);
  } else if (dtype == Dtype::Float32) {
    load_rows_of<float>(from, rows, columns, to, to_stride);
  } else if (dtype == Dtype::BFloat16) {
    load_rows_of<c10::BFloat16>(from, rows, columns, to, to_stride);
  } else {
    load_rows_of<c10::Half>(from, rows, columns, to, to_stride);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void store_rows_body(Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns,
                                     const acc_t* from, int64_t from_stride) {
  if constexpr (std::is_same_v<acc_t, double>) {
    store_rows_of<double>(to, rows, columns, from, from_stride);
  } else if (dtype == Dtype::Float32) {
    store_rows_of<float>(to, rows, columns, from, from_stride);
  } else if (dtype == Dtype::BFloat16) {
    store_rows_of<c10::BFloat16>(to, rows, columns, from, from_stride);
  } else {
    store_rows_of<c10::Half>(to, rows, columns, from, from_stride);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void transpose_rows_body(const acc_t* from, int64_t from_stride, int64_t rows, int64_t columns,
                                         acc_t* to, int64_t to_stride) {
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    if (rows == kTileRows && to_stride == kTileRows) {
      transpose_tile(from + column, to + column * to_stride, from_stride);
      continue;
    }
    alignas(64) acc_t lines[kTile];
    for (int64_t row = 0; row < rows; ++row)
      convert_line(from + row * from_stride + column, kTileLanes, lines + row * kTileLanes);
    for (int64_t i = rows * kTileLanes; i < kTile; ++i) lines[i] = acc_t(0);
    if (to_stride == kTileRows) {
      transpose_tile(lines, to + column * to_stride);
      continue;
    }
    alignas(64) acc_t turned[kTile];
    transpose_tile(lines, turned);
    for (int64_t row = 0; row < kTileRows; ++row)
      convert_line(turned + row * kTileLanes, kTileLanes, to + (column + row) * to_stride);
  }
}

// scalar_t is the accumulation type here.
MEMCHECK_PER_CPU_LEVEL(load_rows,
                       (Dtype dtype, const MatrixPlace& from, int64_t rows, int64_t columns, scalar_t* to,
                        int64_t to_stride),
                       (dtype, from, rows, columns, to, to_stride))
MEMCHECK_PER_CPU_LEVEL(store_rows,
                       (Dtype dtype, const MatrixPlace& to, int64_t rows, int64_t columns, const scalar_t* from,
                        int64_t from_stride),
                       (dtype, to, rows, columns, from, from_stride))
MEMCHECK_PER_CPU_LEVEL(transpose_rows,
                       (const scalar_t* from, int64_t from_stride, int64_t rows, int64_t columns, scalar_t* to,
                        int64_t to_stride),
                       (from, from_stride, rows, columns, to, to_stride))

template void load_rows(Dtype, const MatrixPlace&, int64_t, int64_t, float*, int64_t);
template void load_rows(Dtype, const MatrixPlace&, int64_t, int64_t, double*, int64_t);
template void store_rows(Dtype, const MatrixPlace&, int64_t, int64_t, const float*, int64_t);
template void store_rows(Dtype, const MatrixPlace&, int64_t, int64_t, const double*, int64_t);
template void transpose_rows(const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void transpose_rows(const double*, int64_t, int64_t, int64_t, double*, int64_t);

}  // namespace memcheck
