#pragma once

#include <cstdint>

#include "common/cpu_level.h"
#include "common/tile_product.h"

#if MEMCHECK_CPU_HAS_LEVELS
#include <immintrin.h>
#endif

// Products of very few rows with rows of another matrix, which lie along the lanes for it.

namespace memcheck {

constexpr int64_t kFewRowsOfProduct = 4;

// to (M,N) = a b^T for at most kFewRowsOfProduct rows of a and at most 64 of b, which both have padded_columns(K)
// columns, 0 from K on. Rows of `to` are to_stride elements apart, and are written up to the next multiple of
// kTileColumns. Every element is the chains of tile_product. `lanes` is scratch, (padded_columns(K),kTileColumns).
template <typename acc_t>
void row_product(int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const TileFactor<acc_t>& b, acc_t* lanes,
                 acc_t* to, int64_t to_stride);

#if MEMCHECK_CPU_HAS_LEVELS

// Rows of 16 numbers of 32 bits in registers become columns. Squares of four are transposed first, and then squares of
// four such squares.
MEMCHECK_TARGET_AVX512 MEMCHECK_INLINE void transpose_registers(__m512 (&x)[16]) {
  __m512 y[16];
  MEMCHECK_UNROLL
  for (int i = 0; i < 16; i += 4) {
    const __m512 low01 = _mm512_unpacklo_ps(x[i], x[i + 1]), high01 = _mm512_unpackhi_ps(x[i], x[i + 1]);
    const __m512 low23 = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), high23 = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
    y[i] = _mm512_shuffle_ps(low01, low23, 0x44);
    y[i + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
    y[i + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
    y[i + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
  }
  MEMCHECK_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512 even01 = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88);
    const __m512 odd01 = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    x[i + 4] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    x[i + 12] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}

#endif

}  // namespace memcheck
