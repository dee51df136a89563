#pragma once

#include <cstdint>

namespace memcheck {

// Products of matrices that lie in scratch, in the accumulation type (float or double): the arithmetic of attention.

// Scratch matrices have a multiple of this many columns; what pads them is 0 wherever it is read as a number.
constexpr int64_t kTileColumns = 32;

inline int64_t padded_columns(int64_t columns) {
  return (columns + kTileColumns - 1) / kTileColumns * kTileColumns;
}

// The left factor may be transposed: element (row, column) at data[row * row_stride + column * column_stride].
template <typename acc_t>
struct TileFactor {
  const acc_t* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  TileFactor transposed() const { return {data, column_stride, row_stride}; }
};

enum class TileProduct { Set, Add };

// to (M,N) = a (M,K) b (K,N), or to += that. b and to have contiguous rows so many elements apart, and N is a multiple
// of kTileColumns. Every element is one chain of multiplications and additions over K, whatever M and N are, which
// joins what is there when it is complete: adding products up is a level of summation of its own.
template <typename acc_t>
void tile_product(TileProduct how, int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const acc_t* b,
                  int64_t b_stride, acc_t* to, int64_t to_stride);

extern template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<float>&, const float*,
                                  int64_t, float*, int64_t);
extern template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<double>&, const double*,
                                  int64_t, double*, int64_t);

}  // namespace memcheck
