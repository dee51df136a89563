#pragma once

#include <cstdint>

#include "common/compensated_sum.h"
#include "common/macros.h"

namespace memcheck {

// Products of matrices that lie in scratch, in the accumulation type (float or double): the arithmetic of attention.

// Scratch matrices have a multiple of this many columns; what pads them is 0 wherever it is read as a number.
constexpr int64_t kTileColumns = 32;

// Products have a multiple of this many.
constexpr int64_t kProductColumns = 16;

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

// The cache lines of rows that will be read next. Asked for row by row between arithmetic they do not wait for each
// other. Any address may be asked for.
struct NextRows {
  const char* first = nullptr;
  int64_t stride = 0;
  int64_t bytes = 0;

  MEMCHECK_INLINE void expect(int64_t row) const {
    const char* line = first + row * stride;
    for (int64_t byte = 0; byte < bytes; byte += 128) {
      __builtin_prefetch(line + byte);
      __builtin_prefetch(line + byte + 64);
    }
  }
};

// The rows of two matrices that will be read next. A product asks for them evenly, at every block: all at once are more
// than a core can wait for.
struct NextPair {
  NextRows one, other;
  int64_t rows = 0;
  int64_t row = 0;  // asked for so far

  MEMCHECK_INLINE void expect(int64_t count) {
    for (const int64_t end = count < rows - row ? row + count : rows; row < end; ++row) {
      one.expect(row);
      other.expect(row);
    }
  }
};

enum class TileProduct { Set, Add };

// to (M,N) = a (M,K) b (K,N), or to += that. b and to have contiguous rows so many elements apart, and N is a multiple
// of kProductColumns. Every element is one chain of multiplications and additions over K, whatever M and N are, which
// joins what is there when it is complete: adding products up is a level of summation of its own. Where a rest is
// given, of the shape and stride of `to`, it is kept. Meanwhile the next rows are asked for.
template <typename acc_t>
void tile_product(TileProduct how, int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const acc_t* b,
                  int64_t b_stride, acc_t* to, int64_t to_stride, acc_t* rest = nullptr, NextPair* next = nullptr);

// The factors of a product (M,K) (K,N), as above.
template <typename acc_t>
struct TileTerm {
  int64_t K;
  TileFactor<acc_t> a;
  const acc_t* b = nullptr;
  int64_t b_stride = 0;
};

// to (M,N) = the product of one term, plus that of another, which may be absent and grows along a diagonal: row i has
// the first K + i + 1 columns of a (those right of them, as far as K + M, must be 0). All of row i times factors[i], if
// there are factors.
template <typename acc_t>
void tile_rows(int64_t M, int64_t N, const TileTerm<acc_t>& full, const TileTerm<acc_t>& growing, const acc_t* factors,
               acc_t* to, int64_t to_stride, NextPair* next = nullptr);

extern template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<float>&, const float*,
                                  int64_t, float*, int64_t, float*, NextPair*);
extern template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<double>&, const double*,
                                  int64_t, double*, int64_t, double*, NextPair*);
extern template void tile_rows(int64_t, int64_t, const TileTerm<float>&, const TileTerm<float>&, const float*, float*,
                               int64_t, NextPair*);
extern template void tile_rows(int64_t, int64_t, const TileTerm<double>&, const TileTerm<double>&, const double*,
                               double*, int64_t, NextPair*);

}  // namespace memcheck
