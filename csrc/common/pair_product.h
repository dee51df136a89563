#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu_level.h"
#include "common/half.h"
#include "common/integer.h"
#include "common/matrix_tile.h"
#include "common/row_product.h"

// Products of matrices in bfloat16, with sums in float32, by instructions that multiply pairs of numbers: the levels
// avx512_bf16 and amx (cpu_level.h). Nothing here may be called at another level.
//
// A pair is 32 bits: two neighbours in a row of the left factor, or in a column of the right one, the first in the
// lower half. Subnormal numbers are taken as 0.

namespace memcheck {

inline bool cpu_multiplies_pairs(Dtype dtype) {
  return dtype == Dtype::BFloat16 && cpu_level() >= CpuLevel::Avx512Bf16;
}

// Factors are padded with zeros: AMX takes 16 pairs and 32 rows at a time, vectors take one pair and 8 rows.
MEMCHECK_INLINE int64_t padded_pairs(int64_t numbers) {
  const int64_t step = cpu_level() == CpuLevel::Amx ? 16 : 1;
  return ceil_div(numbers, 2 * step) * step;
}

MEMCHECK_INLINE int64_t padded_rows(int64_t rows) {
  const int64_t step = cpu_level() == CpuLevel::Amx ? 32 : 8;
  return ceil_div(rows, step) * step;
}

// Rows of pairs: in scratch, or in memory.
struct PairView {
  const void* data;
  int64_t stride;  // bytes
};

// to (rows,stride) = rows of a matrix in memory, and 0 right of them.
void copy_pairs(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* to, int64_t stride);

// The left factor (padded_rows(rows),padded_pairs(columns)): rows as they lie in memory, or if they lie otherwise as a
// copy, which takes that many numbers of scratch.
PairView view_pairs(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* scratch);

// The right factor (padded_pairs(rows),padded_columns(columns)), of pairs of rows.
void pair_rows(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* to);

// x (rows,kTileLanes) in place becomes sums of two numbers in bfloat16: lines 2i and 2i + 1 become the pairs of their
// first parts, then those of their second parts. With zeros for more rows, up to padded_rows(rows).
void split_into_pairs(int64_t rows, float* x);

// to (rows,kTileLanes) = a (rows,pairs) b (pairs,kTileLanes), for padded rows and pairs.
void multiply_pairs(int64_t rows, int64_t pairs, const PairView& a, const uint32_t* b, float* to);

// to (kTileLanes,columns) = a^T b, for a (2 pairs,kTileLanes) after split_into_pairs and b (pairs,columns), for padded
// pairs, of which there are at most kProductChain / 2, and a multiple of kTileLanes columns.
void multiply_split(int64_t pairs, int64_t columns, const float* a, const uint32_t* b, float* to);

// The same products of at most kFewRowsOfProduct rows. They are not written for AMX: at that level nothing here may be
// called. Every element is the same chain.
inline bool cpu_multiplies_few_pairs() {
  return cpu_level() == CpuLevel::Avx512Bf16;
}

// Rows of pairs for multiply_few_pairs, (rows,columns padded to 16 pairs): as they lie in memory, or as a copy.
PairView view_pairs_of_few(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* scratch);

// to (M,N) = a b^T for rows of so many columns, padded to 16 pairs. Rows of a are a_stride numbers of 32 bits apart,
// those of `to` kProductChain numbers, and up to 31 numbers behind a row are written too.
void multiply_few_pairs(int64_t M, int64_t N, int64_t columns, const float* a, int64_t a_stride, const PairView& b,
                        float* to);

// x (M,kProductChain) in place becomes sums of two numbers in bfloat16: a line becomes the pairs of its `count` first
// parts, then those of its second parts.
void split_few_into_pairs(int64_t M, int64_t count, float* x);

// to (M,columns) = a b, for a after split_few_into_pairs, and b and columns as in multiply_split. Rows up to
// kFewRowsOfProduct may be read and written too.
void multiply_few_split(int64_t M, int64_t pairs, int64_t columns, const float* a, const uint32_t* b, float* to);

// Number 0 or 1 of a pair.
MEMCHECK_INLINE float number_of_pair(const void* pair, int64_t number) {
  BFloat16 x;
  std::memcpy(&x, static_cast<const char*>(pair) + number * sizeof(x), sizeof(x));
  return x;
}

// Numbers that are not finite become 0.
void zero_not_finite(int64_t pairs, uint32_t* x);

// After split_into_pairs, the second part of an infinite number is NaN. It becomes 0.
void zero_rest_of_infinite(int64_t rows, float* x);

// A thread that multiplies holds one of these: the registers of AMX are set up before, and released after. At other
// levels, and for other dtypes, it does nothing.
class PairRegisters {
 public:
  explicit PairRegisters(Dtype dtype);
  ~PairRegisters();
  PairRegisters(const PairRegisters&) = delete;
  PairRegisters& operator=(const PairRegisters&) = delete;

 private:
  bool held_;
};

}  // namespace memcheck
