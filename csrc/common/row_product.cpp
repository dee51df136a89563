#include "common/row_product.h"

#include <algorithm>
#include <type_traits>

#include "common/cpu_level.h"
#include "common/matrix_tile.h"

#if MEMCHECK_CPU_HAS_LEVELS
#include <immintrin.h>
#endif

namespace memcheck {
namespace {

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

// A product of kM rows of a with kGroups vectors of rows of b.
struct RowBlock {
  const float* a;
  int64_t a_stride;
  const float* const* b;  // the rows
  int64_t next;           // from them to the rows that come after, which are prefetched
  int64_t K;              // padded
  float* to;
  int64_t to_stride;
};

template <int kM, int kGroups>
MEMCHECK_TARGET_AVX512 MEMCHECK_INLINE void multiply_avx512(const RowBlock& p) {
  constexpr int kLanes = 16;
  __m512 sums[kM][kGroups];
  for (int64_t chain = 0; chain < p.K; chain += kProductChain) {
    __m512 part[kM][kGroups] = {};
    const int64_t end = std::min(p.K, chain + kProductChain);
    for (int64_t k = chain; k < end; k += kLanes) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        __m512 x[kLanes];
        MEMCHECK_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          const float* row = p.b[g * kLanes + i] + k;
          x[i] = _mm512_loadu_ps(row);
          __builtin_prefetch(row + p.next);
        }
        transpose_registers(x);
        MEMCHECK_UNROLL
        for (int m = 0; m < kM; ++m) {
          MEMCHECK_UNROLL
          for (int i = 0; i < kLanes; ++i)
            part[m][g] = _mm512_fmadd_ps(_mm512_set1_ps(p.a[m * p.a_stride + k + i]), x[i], part[m][g]);
        }
      }
    }
    MEMCHECK_UNROLL
    for (int m = 0; m < kM; ++m) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) sums[m][g] = chain == 0 ? part[m][g] : _mm512_add_ps(sums[m][g], part[m][g]);
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_ps(p.to + m * p.to_stride + g * kLanes, sums[m][g]);
}

// Rows of 8 numbers become columns. The halves of rows i and i + 4 come in one register, so that squares of four are
// all that is left to transpose.
MEMCHECK_TARGET_AVX2 MEMCHECK_INLINE void load_transposed(const float* const* row, int64_t k, __m256 (&x)[8]) {
  MEMCHECK_UNROLL
  for (int half = 0; half < 2; ++half) {
    __m256 y[4];
    MEMCHECK_UNROLL
    for (int i = 0; i < 4; ++i)
      y[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[i] + k + 4 * half)),
                                  _mm_loadu_ps(row[i + 4] + k + 4 * half), 1);
    const __m256 low01 = _mm256_unpacklo_ps(y[0], y[1]), high01 = _mm256_unpackhi_ps(y[0], y[1]);
    const __m256 low23 = _mm256_unpacklo_ps(y[2], y[3]), high23 = _mm256_unpackhi_ps(y[2], y[3]);
    x[4 * half] = _mm256_shuffle_ps(low01, low23, 0x44);
    x[4 * half + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    x[4 * half + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    x[4 * half + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
}

template <int kM, int kGroups>
MEMCHECK_TARGET_AVX2 MEMCHECK_INLINE void multiply_avx2(const RowBlock& p) {
  constexpr int kLanes = 8;
  __m256 sums[kM][kGroups];
  for (int64_t chain = 0; chain < p.K; chain += kProductChain) {
    __m256 part[kM][kGroups] = {};
    const int64_t end = std::min(p.K, chain + kProductChain);
    for (int64_t k = chain; k < end; k += kLanes) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        __m256 x[kLanes];
        load_transposed(p.b + g * kLanes, k, x);
        MEMCHECK_UNROLL
        for (int m = 0; m < kM; ++m) {
          MEMCHECK_UNROLL
          for (int i = 0; i < kLanes; ++i)
            part[m][g] = _mm256_fmadd_ps(_mm256_set1_ps(p.a[m * p.a_stride + k + i]), x[i], part[m][g]);
        }
      }
    }
    MEMCHECK_UNROLL
    for (int m = 0; m < kM; ++m) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) sums[m][g] = chain == 0 ? part[m][g] : _mm256_add_ps(sums[m][g], part[m][g]);
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int g = 0; g < kGroups; ++g) _mm256_storeu_ps(p.to + m * p.to_stride + g * kLanes, sums[m][g]);
}

// A row of a has two vectors of sums at a time, so that one does not wait for the other. More rows have one each.
MEMCHECK_TARGET_AVX512 void rows_avx512(int64_t M, int64_t left, const RowBlock& p) {
  if (M == 1 && left > 16) return multiply_avx512<1, 2>(p);
  if (M == 1) return multiply_avx512<1, 1>(p);
  if (M == 2) return multiply_avx512<2, 1>(p);
  if (M == 3) return multiply_avx512<3, 1>(p);
  multiply_avx512<4, 1>(p);
}

MEMCHECK_TARGET_AVX2 void rows_avx2(int64_t M, int64_t left, const RowBlock& p) {
  if (M == 1 && left > 8) return multiply_avx2<1, 2>(p);
  if (M == 1) return multiply_avx2<1, 1>(p);
  if (M == 2) return multiply_avx2<2, 1>(p);
  if (M == 3) return multiply_avx2<3, 1>(p);
  multiply_avx2<4, 1>(p);
}

// Vectors of b that would go beyond its rows have the last one in their place.
void multiply_by_vectors(int64_t M, int64_t N, int64_t K, const TileFactor<float>& a, const TileFactor<float>& b,
                         float* to, int64_t to_stride) {
  constexpr int64_t kMost = 32;
  const bool wide = cpu_level() >= CpuLevel::Avx512;
  const int64_t step = (wide ? kMost : kMost / 2) / (M == 1 ? 1 : 2);
  for (int64_t n = 0; n < N; n += step) {
    const float* rows[kMost];
    const float* row = b.data + n * b.row_stride;
    for (int64_t i = 0; i < step; ++i, row += n + i < N ? b.row_stride : 0) rows[i] = row;
    const RowBlock p{a.data, a.row_stride, rows, step * b.row_stride, padded_columns(K), to + n, to_stride};
    wide ? rows_avx512(M, N - n, p) : rows_avx2(M, N - n, p);
  }
}

#endif

}  // namespace

template <typename acc_t>
void row_product(int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const TileFactor<acc_t>& b, acc_t* lanes,
                 acc_t* to, int64_t to_stride) {
#if MEMCHECK_CPU_HAS_LEVELS
  if constexpr (std::is_same_v<acc_t, float>)
    if (K > 0) return multiply_by_vectors(M, N, K, a, b, to, to_stride);
#endif
  for (int64_t n = 0; n < N; n += kTileColumns) {
    transpose_rows(b.data + n * b.row_stride, b.row_stride, std::min(kTileColumns, N - n), padded_columns(K), lanes,
                   kTileColumns);
    tile_product<acc_t>(TileProduct::Set, M, kTileColumns, {K, a, lanes, kTileColumns}, {to + n, to_stride});
  }
}

template void row_product(int64_t, int64_t, int64_t, const TileFactor<float>&, const TileFactor<float>&, float*, float*,
                          int64_t);
template void row_product(int64_t, int64_t, int64_t, const TileFactor<double>&, const TileFactor<double>&, double*,
                          double*, int64_t);

}  // namespace memcheck
