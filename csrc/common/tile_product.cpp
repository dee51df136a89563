#include "common/tile_product.h"

#include <algorithm>
#include <cstring>

#include "common/cpu_level.h"
#include "common/integer.h"
#include "common/macros.h"

// Loops over registers must be gone before the compiler decides what lives in memory.
#if defined(__clang__)
#define MEMCHECK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MEMCHECK_UNROLL _Pragma("GCC unroll 16")
#endif

namespace memcheck {
namespace {

template <typename acc_t>
struct Product {
  int64_t M, N;
  TileTerm<acc_t> term;
  acc_t* to;
  int64_t to_stride;
  // What becomes of it: it is added, with a rest or without; or it has a second term, and a factor for each row.
  bool add;
  acc_t* rest;
  TileTerm<acc_t> growing;
  const acc_t* factors;
  NextPair* next;
};

template <typename acc_t, int kBytes>
struct VectorOf {
  typedef acc_t type __attribute__((vector_size(kBytes)));
};

// sums += rows of a from m on times columns of b from n on; every step of k is a row of b times a column of a.
template <int kRows, int kVectors, typename acc_t, typename Vector>
MEMCHECK_INLINE void multiply_block(const TileTerm<acc_t>& term, int64_t begin, int64_t end, int64_t m, int64_t n,
                                    Vector (&sums)[kRows][kVectors]) {
  constexpr int kLanes = sizeof(Vector) / sizeof(acc_t);
  const int64_t a_row = term.a.row_stride, a_column = term.a.column_stride, b_row = term.b_stride;
  const acc_t* a = term.a.data + m * a_row;
  const acc_t* b = term.b + n;
  for (int64_t k = begin; k < end; ++k) {
    Vector row[kVectors];
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) std::memcpy(&row[j], b + k * b_row + j * kLanes, sizeof(Vector));
    MEMCHECK_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const acc_t x = a[i * a_row + k * a_column];
      MEMCHECK_UNROLL
      for (int j = 0; j < kVectors; ++j) sums[i][j] += x * row[j];
    }
  }
}

enum class Ending { Set, Scale, Add, AddWithRest };

// What becomes of sums that are complete, decided once a block and not for each of its vectors.
template <Ending kEnding, int kRows, int kVectors, typename acc_t, typename Vector>
MEMCHECK_INLINE void end_block(const Product<acc_t>& p, int64_t m, int64_t n, const Vector (&sums)[kRows][kVectors]) {
  constexpr int kLanes = sizeof(Vector) / sizeof(acc_t);
  const int64_t stride = p.to_stride;
  MEMCHECK_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const int64_t place = (m + i) * stride + n + j * kLanes;
      Vector result = sums[i][j];
      if constexpr (kEnding == Ending::Scale) result *= p.factors[m + i];
      if constexpr (kEnding == Ending::Add) {
        std::memcpy(&result, p.to + place, sizeof(Vector));
        result += sums[i][j];
      }
      if constexpr (kEnding == Ending::AddWithRest) {
        Vector rest;
        std::memcpy(&result, p.to + place, sizeof(Vector));
        std::memcpy(&rest, p.rest + place, sizeof(Vector));
        add_to_sum(sums[i][j], result, rest);
        std::memcpy(p.rest + place, &rest, sizeof(Vector));
      }
      std::memcpy(p.to + place, &result, sizeof(Vector));
    }
  }
}

// kRows x kVectors registers of sums.
template <int kBytes, int kRows, int kVectors, typename acc_t>
MEMCHECK_INLINE void product_block(const Product<acc_t>& p, int64_t m, int64_t n, int64_t next_rows) {
  using Vector = typename VectorOf<acc_t, kBytes>::type;
  Vector sums[kRows][kVectors];
  MEMCHECK_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vector{};
  }
  const int64_t half = p.term.K / 2;
  multiply_block(p.term, 0, half, m, n, sums);
  if (p.next != nullptr) p.next->expect(next_rows);
  multiply_block(p.term, half, p.term.K, m, n, sums);
  if (p.growing.b != nullptr) multiply_block(p.growing, 0, p.growing.K + m + kRows, m, n, sums);
  if (p.rest != nullptr) {
    end_block<Ending::AddWithRest>(p, m, n, sums);
  } else if (p.add) {
    end_block<Ending::Add>(p, m, n, sums);
  } else if (p.factors != nullptr) {
    end_block<Ending::Scale>(p, m, n, sums);
  } else {
    end_block<Ending::Set>(p, m, n, sums);
  }
}

// Columns from n on in steps of kVectors vectors, as far as they go; returns where they end.
template <int kBytes, int kRows, int kVectors, typename acc_t>
MEMCHECK_INLINE int64_t product_columns(const Product<acc_t>& p, int64_t n) {
  constexpr int64_t kStep = kVectors * kBytes / sizeof(acc_t);
  const int64_t halves = std::max<int64_t>(1, 2 * ceil_div(p.M, kRows) * ceil_div(p.N, kStep));
  const int64_t next_rows = p.next == nullptr ? 0 : ceil_div(p.next->rows, halves);
  for (; n + kStep <= p.N; n += kStep) {
    int64_t m = 0;
    for (; m + kRows <= p.M; m += kRows) {
      product_block<kBytes, kRows, kVectors>(p, m, n, next_rows);
      if (p.next != nullptr) p.next->expect(next_rows);
    }
    for (; m < p.M; ++m) product_block<kBytes, 1, kVectors>(p, m, n, next_rows);
  }
  return n;
}

// AVX-512 has 32 registers. Of 16 sums, 8 are in flight at a time; what is left holds a row of b.
#if MEMCHECK_CPU_HAS_LEVELS
template <typename acc_t>
MEMCHECK_TARGET_AVX512 void product_avx512(const Product<acc_t>& p) {
  product_columns<64, 8, 1>(p, product_columns<64, 8, 2>(p, product_columns<64, 4, 4>(p, 0)));
}

template <typename acc_t>
MEMCHECK_TARGET_AVX2 void product_avx2(const Product<acc_t>& p) {
  product_columns<32, 4, 2>(p, 0);
}
#endif

template <typename acc_t>
void product_default(const Product<acc_t>& p) {
  product_columns<16, 4, 2>(p, 0);
}

template <typename acc_t>
void multiply_at_level(const Product<acc_t>& p) {
#if MEMCHECK_CPU_HAS_LEVELS
  if (cpu_level() == CpuLevel::Avx512) return product_avx512(p);
  if (cpu_level() == CpuLevel::Avx2) return product_avx2(p);
#endif
  product_default(p);
}

template <typename acc_t>
void multiply(const Product<acc_t>& p) {
  multiply_at_level(p);
  if (p.next != nullptr) p.next->expect(p.next->rows);
}

}  // namespace

template <typename acc_t>
void tile_product(TileProduct how, int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const acc_t* b,
                  int64_t b_stride, acc_t* to, int64_t to_stride, acc_t* rest, NextPair* next) {
  multiply<acc_t>({M, N, {K, a, b, b_stride}, to, to_stride, how == TileProduct::Add, rest, {}, nullptr, next});
}

template <typename acc_t>
void tile_rows(int64_t M, int64_t N, const TileTerm<acc_t>& full, const TileTerm<acc_t>& growing, const acc_t* factors,
               acc_t* to, int64_t to_stride, NextPair* next) {
  multiply<acc_t>({M, N, full, to, to_stride, false, nullptr, growing, factors, next});
}

template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<float>&, const float*, int64_t,
                           float*, int64_t, float*, NextPair*);
template void tile_product(TileProduct, int64_t, int64_t, int64_t, const TileFactor<double>&, const double*, int64_t,
                           double*, int64_t, double*, NextPair*);
template void tile_rows(int64_t, int64_t, const TileTerm<float>&, const TileTerm<float>&, const float*, float*, int64_t,
                        NextPair*);
template void tile_rows(int64_t, int64_t, const TileTerm<double>&, const TileTerm<double>&, const double*, double*,
                        int64_t, NextPair*);

}  // namespace memcheck
