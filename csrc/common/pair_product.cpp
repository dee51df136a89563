#include "common/pair_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if MEMCHECK_CPU_HAS_LEVELS
#include <immintrin.h>
#endif

namespace memcheck {
namespace {

const uint16_t* row_of(const MatrixPlace& x, int64_t row) {
  return static_cast<const uint16_t*>(x.data) + row * x.row_stride;
}

MEMCHECK_INLINE uint32_t pair_of(uint32_t first, uint32_t second) {
  return first | second << 16;
}

// Lines of pairs of the rows of x. A template for MEMCHECK_PER_CPU_LEVEL.
template <typename pair_t>
MEMCHECK_INLINE void pair_full_rows_body(const MatrixPlace& x, int64_t pairs, int64_t columns, int64_t stride,
                                         pair_t* __restrict to) {
  for (int64_t i = 0; i < pairs; ++i) {
    const uint16_t* first = row_of(x, 2 * i);
    const uint16_t* second = row_of(x, 2 * i + 1);
    if (x.column_stride == 1) {
      for (int64_t c = 0; c < columns; ++c) to[i * stride + c] = pair_of(first[c], second[c]);
    } else {
      for (int64_t c = 0; c < columns; ++c)
        to[i * stride + c] = pair_of(first[c * x.column_stride], second[c * x.column_stride]);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(pair_t, pair_full_rows,
                       (const MatrixPlace& x, int64_t pairs, int64_t columns, int64_t stride, pair_t* to),
                       (x, pairs, columns, stride, to))

}  // namespace

void copy_pairs(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* to, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* source = row_of(from, row);
    uint32_t* line = to + row * stride;
    if (from.column_stride == 1) {
      std::memcpy(line, source, columns * sizeof(uint16_t));
    } else {
      char* numbers = reinterpret_cast<char*>(line);
      for (int64_t column = 0; column < columns; ++column)
        std::memcpy(numbers + 2 * column, source + column * from.column_stride, sizeof(uint16_t));
    }
    std::memset(reinterpret_cast<char*>(line) + 2 * columns, 0, 4 * stride - 2 * columns);
  }
}

PairView view_pairs(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* scratch) {
  const int64_t pairs = padded_pairs(columns);
  if (from.column_stride == 1 && columns == 2 * pairs && rows == padded_rows(rows))
    return {from.data, from.row_stride * static_cast<int64_t>(sizeof(uint16_t))};
  copy_pairs(from, rows, columns, scratch, pairs);
  std::fill_n(scratch + rows * pairs, (padded_rows(rows) - rows) * pairs, 0U);
  return {scratch, pairs * static_cast<int64_t>(sizeof(uint32_t))};
}

PairView view_pairs_of_few(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* scratch) {
  const int64_t pairs = ceil_div(columns, int64_t{32}) * 16;
  if (from.column_stride == 1 && columns == 2 * pairs)
    return {from.data, from.row_stride * static_cast<int64_t>(sizeof(uint16_t))};
  copy_pairs(from, rows, columns, scratch, pairs);
  return {scratch, pairs * static_cast<int64_t>(sizeof(uint32_t))};
}

void pair_rows(const MatrixPlace& from, int64_t rows, int64_t columns, uint32_t* to) {
  const int64_t stride = padded_columns(columns);
  const int64_t full = rows / 2, pairs = padded_pairs(rows);
  if (columns < stride || 2 * pairs > rows) std::fill_n(to, pairs * stride, 0U);
  pair_full_rows<uint32_t>(from, full, columns, stride, to);
  if (rows % 2 == 0) return;
  const uint16_t* last = row_of(from, rows - 1);
  for (int64_t c = 0; c < columns; ++c) to[full * stride + c] = last[c * from.column_stride];
}

void zero_not_finite(int64_t pairs, uint32_t* x) {
  for (int64_t i = 0; i < pairs; ++i)
    for (const uint32_t number : {0xffffU, 0xffff0000U})
      if ((x[i] & number & 0x7f807f80U) == (number & 0x7f807f80U)) x[i] &= ~number;
}

void zero_rest_of_infinite(int64_t rows, float* x) {
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t lane = 0; lane < kTileLanes; ++lane)
      for (int64_t number = 0; number < 2; ++number) {
        const float* first = x + row * kTileLanes + lane;
        if (!std::isinf(number_of_pair(first, number))) continue;
        std::memset(reinterpret_cast<char*>(x + (row + 1) * kTileLanes + lane) + 2 * number, 0, sizeof(uint16_t));
      }
}

#if MEMCHECK_CPU_HAS_PAIRS

namespace {

constexpr int64_t kVectorLanes = 16;
constexpr int64_t kLineBytes = kTileLanes * sizeof(float);
static_assert(kTileLanes == 2 * kVectorLanes);

// The pairs (x[i], y[i]), rounded to bfloat16.
MEMCHECK_TARGET_AVX512_BF16 MEMCHECK_INLINE __m512i rounded_pairs(__m512 x, __m512 y) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh halves = _mm512_cvtne2ps_pbh(y, x);
  __m512i numbers;
  std::memcpy(&numbers, &halves, sizeof(numbers));
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), numbers);
}

MEMCHECK_TARGET_AVX512_BF16 MEMCHECK_INLINE __m512bh load_pairs(const void* from) {
  __m512bh pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}

MEMCHECK_TARGET_AVX512_BF16 MEMCHECK_INLINE __m512bh repeat_pair(const void* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  const __m512i repeated = _mm512_set1_epi32(pair);
  __m512bh pairs;
  std::memcpy(&pairs, &repeated, sizeof(pairs));
  return pairs;
}

// Where the pairs of a left factor lie, in bytes: a pair is a sum of `parts`.
struct PairFactor {
  const char* data;
  int64_t row, pair, part;
};

// sums += rows of a times kVectors vectors of columns of b, over `pairs` pairs.
template <int kParts, int kRows, int kVectors>
MEMCHECK_TARGET_AVX512_BF16 MEMCHECK_INLINE void add_pairs(const PairFactor& a, const uint32_t* b, int64_t b_stride,
                                                           int64_t pairs, __m512 (&sums)[kRows][kVectors]) {
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh line[kVectors];
    MEMCHECK_UNROLL
    for (int j = 0; j < kVectors; ++j) line[j] = load_pairs(b + k * b_stride + j * kVectorLanes);
    MEMCHECK_UNROLL
    for (int part = 0; part < kParts; ++part) {
      MEMCHECK_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const __m512bh x = repeat_pair(a.data + i * a.row + k * a.pair + part * a.part);
        MEMCHECK_UNROLL
        for (int j = 0; j < kVectors; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], x, line[j]);
      }
    }
  }
}

// to (rows,columns) = a b, for multiples of kRows rows and of kVectors vectors of columns. In chains as long as those
// of tile_product.h, each from zero.
template <int kParts, int kRows, int kVectors = 2>
MEMCHECK_TARGET_AVX512_BF16 void multiply_by_vectors(int64_t rows, int64_t columns, int64_t pairs, const PairFactor& a,
                                                     const uint32_t* b, float* to) {
  constexpr int64_t kChain = kProductChain / 2;
  for (int64_t n = 0; n < columns; n += kVectors * kVectorLanes)
    for (int64_t m = 0; m < rows; m += kRows)
      for (int64_t k = 0; k < pairs; k += kChain) {
        __m512 sums[kRows][kVectors] = {};
        const PairFactor part{a.data + m * a.row + k * a.pair, a.row, a.pair, a.part};
        add_pairs<kParts>(part, b + k * columns + n, columns, std::min(kChain, pairs - k), sums);
        MEMCHECK_UNROLL
        for (int i = 0; i < kRows; ++i) {
          MEMCHECK_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            float* result = to + (m + i) * columns + n + j * kVectorLanes;
            if (k > 0) sums[i][j] = _mm512_add_ps(sums[i][j], _mm512_loadu_ps(result));
            _mm512_storeu_ps(result, sums[i][j]);
          }
        }
      }
}

// to (kM,kGroups vectors) = kM rows of a times rows of b, which lie along the lanes for it. In the same chains.
template <int kM, int kGroups>
MEMCHECK_TARGET_AVX512_BF16 void multiply_rows_of_pairs(int64_t pairs, const float* a, int64_t a_stride,
                                                        const char* const* b, float* to) {
  __m512 sums[kM][kGroups];
  for (int64_t chain = 0; chain < pairs; chain += kProductChain / 2) {
    __m512 part[kM][kGroups] = {};
    const int64_t end = std::min(pairs, chain + kProductChain / 2);
    for (int64_t k = chain; k < end; k += kVectorLanes) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        __m512 x[kVectorLanes];
        MEMCHECK_UNROLL
        for (int i = 0; i < kVectorLanes; ++i)
          x[i] = _mm512_loadu_ps(b[g * kVectorLanes + i] + k * static_cast<int64_t>(sizeof(uint32_t)));
        transpose_registers(x);
        MEMCHECK_UNROLL
        for (int m = 0; m < kM; ++m) {
          MEMCHECK_UNROLL
          for (int i = 0; i < kVectorLanes; ++i)
            part[m][g] = _mm512_dpbf16_ps(part[m][g], repeat_pair(a + m * a_stride + k + i), load_pairs(&x[i]));
        }
      }
    }
    MEMCHECK_UNROLL
    for (int m = 0; m < kM; ++m) {
      MEMCHECK_UNROLL
      for (int g = 0; g < kGroups; ++g) sums[m][g] = chain == 0 ? part[m][g] : _mm512_add_ps(part[m][g], sums[m][g]);
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_ps(to + m * kProductChain + g * kVectorLanes, sums[m][g]);
}

// AMX: registers 0 to 3 hold sums (2 x 2 tiles), 4 and 5 rows of a, 6 and 7 columns of b. A tile has 16 lines of 16
// pairs, or of 16 sums.
constexpr int64_t kTileSide = 16;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {};
  uint8_t lines[16] = {};
};

// Compilers do not know that a tile is read from memory.
MEMCHECK_INLINE void finish_stores() {
  asm volatile("" ::: "memory");
}

MEMCHECK_TARGET_AMX void set_tile_shapes() {
  TileShapes shapes;
  std::fill_n(shapes.line_bytes, 8, static_cast<uint16_t>(kTileSide * sizeof(uint32_t)));
  std::fill_n(shapes.lines, 8, static_cast<uint8_t>(kTileSide));
  finish_stores();
  _tile_loadconfig(&shapes);
}

MEMCHECK_TARGET_AMX void release_tiles() {
  _tile_release();
}

// to (kTileRows,columns) = the sum over parts of a (kTileRows,pairs) b (pairs,columns).
template <int kParts>
MEMCHECK_TARGET_AMX MEMCHECK_INLINE void multiply_tiles(int64_t columns, int64_t pairs, const PairFactor& a,
                                                        const uint32_t* b, float* to) {
  const int64_t line = columns * sizeof(float);
  for (int64_t n = 0; n < columns; n += kTileLanes) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < pairs; k += kTileSide) {
      const uint32_t* of_b = b + k * columns + n;
      _tile_loadd(6, of_b, line);
      _tile_loadd(7, of_b + kVectorLanes, line);
      for (int part = 0; part < kParts; ++part) {
        const char* of_a = a.data + k * a.pair + part * a.part;
        _tile_loadd(4, of_a, a.row);
        _tile_loadd(5, of_a + kTileSide * a.row, a.row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to + n, line);
    _tile_stored(1, to + n + kVectorLanes, line);
    _tile_stored(2, to + kTileSide * columns + n, line);
    _tile_stored(3, to + kTileSide * columns + n + kVectorLanes, line);
  }
}

MEMCHECK_TARGET_AMX void multiply_rows_by_tiles(int64_t rows, int64_t pairs, const PairView& a, const uint32_t* b,
                                                float* to) {
  finish_stores();
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const PairFactor factor{static_cast<const char*>(a.data) + row * a.stride, a.stride, sizeof(uint32_t), 0};
    multiply_tiles<1>(kTileLanes, pairs, factor, b, to + row * kTileLanes);
  }
}

// Rows of a tile lie side by side: some pairs at a time are transposed.
MEMCHECK_TARGET_AMX void multiply_split_by_tiles(int64_t pairs, int64_t columns, const float* a, const uint32_t* b,
                                                 float* to) {
  constexpr int64_t kMost = kProductChain / 2;
  alignas(64) float transposed[2 * kMost * kTileRows];
  for (int64_t part = 0; part < 2; ++part)
    transpose_rows(a + part * kTileLanes, 2 * kTileLanes, pairs, kTileLanes, transposed + part * kMost * kTileRows,
                   kTileRows);
  static_assert(kMost == kTileRows, "a line of transposed pairs");
  finish_stores();
  const PairFactor factor{reinterpret_cast<const char*>(transposed), kLineBytes, sizeof(uint32_t),
                          kMost * kTileRows * sizeof(float)};
  multiply_tiles<2>(columns, pairs, factor, b, to);
}

MEMCHECK_TARGET_AVX512_BF16 void split_lines(int64_t rows, float* x) {
  typedef uint32_t Pairs __attribute__((vector_size(64)));
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t lane = 0; lane < kTileLanes; lane += kVectorLanes) {
      float* line = x + row * kTileLanes + lane;
      const __m512 first = _mm512_loadu_ps(line), second = _mm512_loadu_ps(line + kTileLanes);
      const Pairs rounded = reinterpret_cast<Pairs>(rounded_pairs(first, second));
      const Pairs rest = reinterpret_cast<Pairs>(rounded_pairs(
          first - reinterpret_cast<__m512>(rounded << 16), second - reinterpret_cast<__m512>(rounded & 0xffff0000U)));
      std::memcpy(line, &rounded, sizeof(rounded));
      std::memcpy(line + kTileLanes, &rest, sizeof(rest));
    }
}

// The rounding of split_lines, for numbers side by side.
MEMCHECK_TARGET_AVX512_BF16 void split_line(int64_t count, float* x) {
  constexpr int64_t kVectors = kProductChain / kVectorLanes;
  __m512 wide[kVectors];
  std::fill_n(x + count, kProductChain - count, 0.0F);
  for (int64_t i = 0; i < kVectors; ++i) wide[i] = _mm512_loadu_ps(x + i * kVectorLanes);
  for (int64_t i = 0; i < kVectors; i += 2) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(wide[i + 1], wide[i]);
    std::memcpy(x + i / 2 * kVectorLanes, &rounded, sizeof(rounded));
    __m256i half[2];
    std::memcpy(half, &rounded, sizeof(half));
    for (int64_t j = 0; j < 2; ++j)
      wide[i + j] -= _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half[j]), 16));
    const __m512bh rest = _mm512_cvtne2ps_pbh(wide[i + 1], wide[i]);
    std::memcpy(x + (kVectors + i) / 2 * kVectorLanes, &rest, sizeof(rest));
  }
}

constexpr int kRows = 8;  // of a product, in registers

}  // namespace

void split_into_pairs(int64_t rows, float* x) {
  std::fill_n(x + rows * kTileLanes, (padded_rows(rows) - rows) * kTileLanes, 0.0F);
  split_lines(padded_rows(rows), x);
}

void multiply_pairs(int64_t rows, int64_t pairs, const PairView& a, const uint32_t* b, float* to) {
  if (cpu_level() == CpuLevel::Amx) return multiply_rows_by_tiles(rows, pairs, a, b, to);
  multiply_by_vectors<1, kRows>(rows, kTileLanes, pairs,
                                {static_cast<const char*>(a.data), a.stride, sizeof(uint32_t), 0}, b, to);
}

void multiply_split(int64_t pairs, int64_t columns, const float* a, const uint32_t* b, float* to) {
  if (cpu_level() == CpuLevel::Amx) return multiply_split_by_tiles(pairs, columns, a, b, to);
  multiply_by_vectors<2, kRows>(kTileLanes, columns, pairs,
                                {reinterpret_cast<const char*>(a), sizeof(float), 2 * kLineBytes, kLineBytes}, b, to);
}

void multiply_few_pairs(int64_t M, int64_t N, int64_t columns, const float* a, int64_t a_stride, const PairView& b,
                        float* to) {
  const int64_t pairs = ceil_div(columns, 2 * kVectorLanes) * kVectorLanes;
  const int64_t step = M == 1 ? 2 * kVectorLanes : kVectorLanes;
  for (int64_t n = 0; n < N; n += step) {
    const char* rows[2 * kVectorLanes];
    for (int64_t i = 0; i < step; ++i) rows[i] = static_cast<const char*>(b.data) + std::min(n + i, N - 1) * b.stride;
    if (M == 1 && N - n > kVectorLanes) multiply_rows_of_pairs<1, 2>(pairs, a, a_stride, rows, to + n);
    if (M == 1 && N - n <= kVectorLanes) multiply_rows_of_pairs<1, 1>(pairs, a, a_stride, rows, to + n);
    if (M == 2) multiply_rows_of_pairs<2, 1>(pairs, a, a_stride, rows, to + n);
    if (M == 3) multiply_rows_of_pairs<3, 1>(pairs, a, a_stride, rows, to + n);
    if (M == 4) multiply_rows_of_pairs<4, 1>(pairs, a, a_stride, rows, to + n);
  }
}

void split_few_into_pairs(int64_t M, int64_t count, float* x) {
  for (int64_t row = 0; row < M; ++row) split_line(count, x + row * kProductChain);
}

void multiply_few_split(int64_t M, int64_t pairs, int64_t columns, const float* a, const uint32_t* b, float* to) {
  constexpr int64_t kRowBytes = kProductChain * sizeof(float);
  const PairFactor factor{reinterpret_cast<const char*>(a), kRowBytes, sizeof(uint32_t), kRowBytes / 2};
  if (M == 1 && columns % (4 * kVectorLanes) == 0)
    return multiply_by_vectors<2, 1, 4>(1, columns, pairs, factor, b, to);
  multiply_by_vectors<2, kFewRowsOfProduct>(kFewRowsOfProduct, columns, pairs, factor, b, to);
}

PairRegisters::PairRegisters(Dtype dtype) : held_(cpu_multiplies_pairs(dtype) && cpu_level() == CpuLevel::Amx) {
  if (held_) set_tile_shapes();
}

PairRegisters::~PairRegisters() {
  if (held_) release_tiles();
}

#else

void split_into_pairs(int64_t, float*) {}
void multiply_pairs(int64_t, int64_t, const PairView&, const uint32_t*, float*) {}
void multiply_split(int64_t, int64_t, const float*, const uint32_t*, float*) {}
void multiply_few_pairs(int64_t, int64_t, int64_t, const float*, int64_t, const PairView&, float*) {}
void split_few_into_pairs(int64_t, int64_t, float*) {}
void multiply_few_split(int64_t, int64_t, int64_t, const float*, const uint32_t*, float*) {}
PairRegisters::PairRegisters(Dtype) : held_(false) {}
PairRegisters::~PairRegisters() {}

#endif

}  // namespace memcheck
