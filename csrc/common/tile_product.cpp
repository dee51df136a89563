#include "common/tile_product.h"

#include <algorithm>
#include <cstring>

#include "common/cpu_level.h"
#include "common/types.h"

namespace memcheck {
namespace {

// What is done with a product: it replaces the result, as it is or times a factor for each row, or it is added to the
// result, whose sum with a base may be wanted.
enum class Ending { Set, Scale, Add, AddToBase };

template <typename acc_t>
struct Product {
  int64_t M, N;
  TileTerm<acc_t> term;
  TileTerm<acc_t> growing;
  TileResult<acc_t> to;
  const acc_t* factors;
  NextPair* next;
};

template <typename acc_t, int kBytes>
struct VectorOf {
  typedef acc_t type __attribute__((vector_size(kBytes)));
};

// sums += (rows of a from m on) (columns of b from n on), for k from `begin` to `end`. A step of k multiplies a row of
// b by a column of a.
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

template <int kRows, int kVectors, typename Vector>
MEMCHECK_INLINE void clear(Vector (&sums)[kRows][kVectors]) {
  MEMCHECK_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vector{};
  }
}

template <Ending kEnding, int kRows, int kVectors, typename acc_t, typename Vector>
MEMCHECK_INLINE void end_block(const Product<acc_t>& p, int64_t m, int64_t n, const Vector (&sums)[kRows][kVectors]) {
  constexpr int kLanes = sizeof(Vector) / sizeof(acc_t);
  MEMCHECK_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int64_t first = (m + i) * p.to.stride + n;
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      Vector result = sums[i][j];
      acc_t* to = p.to.data + first + j * kLanes;
      if constexpr (kEnding == Ending::Scale) result *= p.factors[m + i];
      if constexpr (kEnding == Ending::Add || kEnding == Ending::AddToBase) {
        std::memcpy(&result, to, sizeof(Vector));
        result += sums[i][j];
      }
      std::memcpy(to, &result, sizeof(Vector));
      if constexpr (kEnding == Ending::AddToBase) {
        Vector base;
        std::memcpy(&base, p.to.base + first + j * kLanes, sizeof(Vector));
        base += result;
        std::memcpy(p.to.sum + first + j * kLanes, &base, sizeof(Vector));
      }
    }
  }
}

// A block of the product, with kRows x kVectors registers of sums.
template <Ending kEnding, int kBytes, int kRows, int kVectors, typename acc_t>
MEMCHECK_INLINE void product_block(const Product<acc_t>& p, int64_t m, int64_t n, int64_t next_rows) {
  using Vector = typename VectorOf<acc_t, kBytes>::type;
  Vector sums[kRows][kVectors];
  clear(sums);
  multiply_block(p.term, 0, std::min(p.term.K, kProductChain), m, n, sums);
  for (int64_t k = kProductChain; k < p.term.K; k += kProductChain) {
    Vector part[kRows][kVectors];
    clear(part);
    multiply_block(p.term, k, std::min(p.term.K, k + kProductChain), m, n, part);
    MEMCHECK_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MEMCHECK_UNROLL
      for (int j = 0; j < kVectors; ++j) sums[i][j] += part[i][j];
    }
  }
  if (p.next != nullptr) p.next->prefetch(next_rows);
  if (p.growing.b != nullptr) multiply_block(p.growing, 0, p.growing.K + m + kRows, m, n, sums);
  end_block<kEnding>(p, m, n, sums);
}

// The columns from n on, in steps of kVectors vectors. Returns the first column that is left.
template <Ending kEnding, int kBytes, int kRows, int kVectors, typename acc_t>
MEMCHECK_INLINE int64_t product_columns(const Product<acc_t>& p, int64_t n) {
  constexpr int64_t kStep = kVectors * kBytes / sizeof(acc_t);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(p.M, kRows) * ceil_div(p.N, kStep));
  const int64_t next_rows = p.next == nullptr ? 0 : ceil_div(p.next->rows, blocks);
  for (; n + kStep <= p.N; n += kStep) {
    int64_t m = 0;
    for (; m + kRows <= p.M; m += kRows) product_block<kEnding, kBytes, kRows, kVectors>(p, m, n, next_rows);
    for (; m < p.M; ++m) product_block<kEnding, kBytes, 1, kVectors>(p, m, n, next_rows);
  }
  return n;
}

// AVX-512 has 32 registers: 16 for sums, of which 8 are being added to at a time, and some for a row of b.
#if MEMCHECK_CPU_HAS_LEVELS
template <Ending kEnding, typename acc_t>
MEMCHECK_TARGET_AVX512 void product_avx512(const Product<acc_t>& p) {
  int64_t n = p.M > 1 ? 0 : product_columns<kEnding, 64, 1, 8>(p, 0);
  n = product_columns<kEnding, 64, 8, 2>(p, product_columns<kEnding, 64, 4, 4>(p, n));
  product_columns<kEnding, 64, 8, 1>(p, n);
}

template <Ending kEnding, typename acc_t>
MEMCHECK_TARGET_AVX2 void product_avx2(const Product<acc_t>& p) {
  const int64_t n = p.M > 1 ? 0 : product_columns<kEnding, 32, 1, 4>(p, product_columns<kEnding, 32, 1, 8>(p, 0));
  product_columns<kEnding, 32, 4, 2>(p, n);
}

template <Ending kEnding, typename acc_t>
void multiply_at_level(const Product<acc_t>& p) {
  cpu_level() == CpuLevel::Avx512 ? product_avx512<kEnding>(p) : product_avx2<kEnding>(p);
}

#else

// Arm has 32 registers of 128 bits, and 16 are for sums: its pipelines take so many before the first sum is complete.
template <Ending kEnding, typename acc_t>
void multiply_at_level(const Product<acc_t>& p) {
  product_columns<kEnding, 16, 4, 4>(p, p.M > 1 ? 0 : product_columns<kEnding, 16, 1, 8>(p, 0));
}

#endif

template <Ending kEnding, typename acc_t>
void multiply(const Product<acc_t>& p) {
  multiply_at_level<kEnding>(p);
  if (p.next != nullptr) p.next->prefetch(p.next->rows);
}

}  // namespace

template <typename acc_t>
void tile_product(TileProduct how, int64_t M, int64_t N, const TileTerm<acc_t>& term, const TileResult<acc_t>& to,
                  NextPair* next) {
  const Product<acc_t> p{M, N, term, {}, to, nullptr, next};
  if (how == TileProduct::Set) return multiply<Ending::Set>(p);
  if (to.sum == nullptr) return multiply<Ending::Add>(p);
  multiply<Ending::AddToBase>(p);
}

template <typename acc_t>
void tile_rows(int64_t M, int64_t N, const TileTerm<acc_t>& full, const TileTerm<acc_t>& growing, const acc_t* factors,
               const TileResult<acc_t>& to, NextPair* next) {
  const Product<acc_t> p{M, N, full, growing, to, factors, next};
  if (factors == nullptr) return multiply<Ending::Set>(p);
  multiply<Ending::Scale>(p);
}

template void tile_product(TileProduct, int64_t, int64_t, const TileTerm<float>&, const TileResult<float>&, NextPair*);
template void tile_product(TileProduct, int64_t, int64_t, const TileTerm<double>&, const TileResult<double>&,
                           NextPair*);
template void tile_rows(int64_t, int64_t, const TileTerm<float>&, const TileTerm<float>&, const float*,
                        const TileResult<float>&, NextPair*);
template void tile_rows(int64_t, int64_t, const TileTerm<double>&, const TileTerm<double>&, const double*,
                        const TileResult<double>&, NextPair*);

}  // namespace memcheck
