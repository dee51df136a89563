#pragma once

#include <cstdint>

#include "common/types.h"

// Products of matrices in scratch, in the accumulation type (float or double): the arithmetic of attention.

namespace memcheck {

// Matrices in scratch have a multiple of this many columns. The columns that pad them are 0 wherever they are read.
constexpr int64_t kTileColumns = 32;

// The columns of a product are a multiple of this.
constexpr int64_t kProductColumns = 16;

inline int64_t padded_columns(int64_t columns) {
  return (columns + kTileColumns - 1) / kTileColumns * kTileColumns;
}

// The left factor of a product. It may be transposed: element (row, column) is at
// data[row * row_stride + column * column_stride].
template <typename acc_t>
struct TileFactor {
  const acc_t* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  TileFactor transposed() const { return {data, column_stride, row_stride}; }
};

// The factors of a product (M,K) (K,N). The rows of b are b_stride elements apart, and its columns side by side.
template <typename acc_t>
struct TileTerm {
  int64_t K;
  TileFactor<acc_t> a;
  const acc_t* b = nullptr;
  int64_t b_stride = 0;
};

// Where a product (M,N) goes: rows `stride` elements apart, and columns side by side.
template <typename acc_t>
struct TileResult {
  acc_t* data;
  int64_t stride;
  // Where products are added up, the result plus `base` goes to `sum`, if it is not null: (M,N) with the same stride.
  const acc_t* base = nullptr;
  acc_t* sum = nullptr;
};

// The cache lines of rows that will be read next. Prefetched row by row between arithmetic, they do not wait for each
// other. Any address may be prefetched.
struct NextRows {
  const char* first = nullptr;
  int64_t stride = 0;
  int64_t bytes = 0;

  MEMCHECK_INLINE void prefetch(int64_t row) const {
    const char* line = first + row * stride;
    for (int64_t byte = 0; byte < bytes; byte += 128) {
      __builtin_prefetch(line + byte);
      __builtin_prefetch(line + byte + 64);
    }
  }
};

// The rows of two matrices that will be read next. A product prefetches them evenly, some at every block, because a
// core cannot wait for all of them at once.
struct NextPair {
  NextRows one, other;
  int64_t rows = 0;
  int64_t row = 0;  // prefetched so far

  MEMCHECK_INLINE void prefetch(int64_t count) {
    for (const int64_t end = count < rows - row ? row + count : rows; row < end; ++row) {
      one.prefetch(row);
      other.prefetch(row);
    }
  }
};

// The terms of a product are added up in chains of so many, so that equal terms do not drift.
constexpr int64_t kProductChain = 64;

enum class TileProduct { Set, Add };

// to (M,N) = the product of a term, or to += the product. N is a multiple of kProductColumns. Every element is
// summed over K in the same way, whatever M and N are: in chains of kProductChain terms, which are then added up. It is
// added to `to` when it is complete: adding products up is a level of summation of its own. Prefetches the next rows
// meanwhile.
template <typename acc_t>
void tile_product(TileProduct how, int64_t M, int64_t N, const TileTerm<acc_t>& term, const TileResult<acc_t>& to,
                  NextPair* next = nullptr);

// to (M,N) = the product of one term plus that of another, which may be absent and grows along a diagonal: of row i it
// has the first K + i + 1 columns of a (those right of them, up to column K + M, must be 0). Row i is multiplied by
// factors[i], if there are factors. Prefetches the next rows meanwhile.
template <typename acc_t>
void tile_rows(int64_t M, int64_t N, const TileTerm<acc_t>& full, const TileTerm<acc_t>& growing, const acc_t* factors,
               const TileResult<acc_t>& to, NextPair* next = nullptr);

}  // namespace memcheck
