#include "common/torch/packed_product.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdint>
#include <exception>

#include "common/cpu_products.h"
#include "common/integer.h"
#include "common/parallel.h"
#include "common/tile.h"

namespace memcheck {
namespace {

// The sum is formed in tiles of kM x kN, from kK rows at a time. All are of one size, padded with zeros, because oneDNN
// compiles a kernel for every size, in every thread, and keeps it.
constexpr int64_t kM = 32, kN = 64, kK = 64;
// So many rows are summed one after the other; then their sum is added to that of the rows before.
constexpr int64_t kMostRows = 1024;

// tile (kM,kN) = a b, or += if it `adds`. a: (kM,kK) in bfloat16. b: (kK/2,kN,2), pairs of rows.
void multiply_tile(float* tile, const uint32_t* a, const uint32_t* b, bool adds) {
  at::native::cpublas::brgemm(kM, kN, kK, kK, kN, kN, adds, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), tile, /*is_vnni=*/true);
}

// Every thread that has multiplied calls this when it is done: on some CPUs products hold registers of their own.
void release() {
  at::native::cpublas::brgemm_release(/*is_vnni=*/true);
}

// Whether a product of ones comes out right. It raises where the environment keeps oneDNN from the instructions.
bool multiplies_ones() {
  alignas(64) uint32_t a[kM * kK / 2], b[kN * kK / 2];
  alignas(64) float tile[kM * kN];
  std::fill_n(a, kM * kK / 2, 0x3f803f80U);
  std::fill_n(b, kN * kK / 2, 0x3f803f80U);
  try {
    multiply_tile(tile, a, b, /*adds=*/false);
    release();
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(tile, tile + kM * kN, [](float x) { return x == kK; });
}

bool has_products() {
  if (!at::globalContext().userEnabledMkldnn()) return false;
  static const bool works = cpu_has_instructions(Dtype::BFloat16) && multiplies_ones();
  return works;
}

// pairs (kK/2,width) = the columns [column, column + width) of kK rows of x from `row` on: each number is a pair of
// rows of a column. Where x has no more rows or columns they are 0.
template <int64_t width>
void pair_rows(const at::Tensor& x, int64_t row, int64_t column, uint32_t* pairs) {
  const int64_t rows = std::min(kK, x.size(0) - row), columns = std::min(width, x.size(1) - column);
  const int64_t down = x.stride(0), right = x.stride(1);
  const uint16_t* first = static_cast<const uint16_t*>(x.const_data_ptr()) + row * down + column * right;
  if (rows < kK || columns < width) std::fill_n(pairs, width * kK / 2, 0U);
  for (int64_t i = 0; i < rows / 2; ++i, first += 2 * down) {
    const uint16_t* second = first + down;
    uint32_t* const to = pairs + i * width;
    if (right == 1 && columns == width) {  // vectors
      for (int64_t c = 0; c < width; ++c) to[c] = first[c] | static_cast<uint32_t>(second[c]) << 16;
    } else {
      for (int64_t c = 0; c < columns; ++c) to[c] = first[c * right] | static_cast<uint32_t>(second[c * right]) << 16;
    }
  }
  if (rows % 2 == 0) return;
  for (int64_t c = 0; c < columns; ++c) pairs[rows / 2 * width + c] = first[c * right];
}

// The same as (width,kK/2): rows of columns.
template <int64_t width>
void pair_rows_transposed(const at::Tensor& x, int64_t row, int64_t column, uint32_t* to) {
  constexpr int64_t kPairs = kK / 2, kSide = 4;
  alignas(64) uint32_t pairs[width * kPairs];
  pair_rows<width>(x, row, column, pairs);
  for (int64_t c = 0; c < width; c += kSide)
    for (int64_t i = 0; i < kPairs; i += kSide)
      transpose_square(reinterpret_cast<const float*>(pairs + i * width + c), width,
                       reinterpret_cast<float*>(to + c * kPairs + i), kPairs);
}

// Columns of a and b, packed: panels of kM columns of a, then panels of kN columns of b, each with `slabs` tiles of kK
// rows one behind the other.
struct Packed {
  uint32_t* memory;
  int64_t a_panels, b_panels, slabs;

  uint32_t* a(int64_t panel) const { return memory + panel * slabs * (kM * kK / 2); }
  uint32_t* b(int64_t panel) const { return a(a_panels) + panel * slabs * (kN * kK / 2); }
};

// The rows of a and b from `row` on.
void pack(const Packed& packed, const at::Tensor& a, const at::Tensor& b, int64_t row) {
  const int64_t panels = packed.a_panels + packed.b_panels;
  const int64_t work = (a.size(1) + b.size(1)) * packed.slabs * kK;
  parallel_tasks(panels, useful_threads(work, panels), [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t of_b = panel - packed.a_panels;
      for (int64_t slab = 0; slab < packed.slabs; ++slab) {
        const int64_t first = row + slab * kK;
        if (of_b < 0)
          pair_rows_transposed<kM>(a, first, panel * kM, packed.a(panel) + slab * (kM * kK / 2));
        else
          pair_rows<kN>(b, first, of_b * kN, packed.b(of_b) + slab * (kN * kK / 2));
      }
    }
  });
}

// to = rows of a tile (kM,kN), or += if it `adds`. A full row has a length that the compiler knows.
void write_tile(const float* __restrict tile, int64_t rows, int64_t columns, bool adds, float* __restrict to,
                int64_t stride) {
  const auto write = [&](int64_t count) MEMCHECK_INLINE_LAMBDA {
    for (int64_t i = 0; i < rows; ++i, tile += kN, to += stride) {
      if (adds) {
        for (int64_t j = 0; j < count; ++j) to[j] += tile[j];
      } else {
        for (int64_t j = 0; j < count; ++j) to[j] = tile[j];
      }
    }
  };
  columns == kN ? write(kN) : write(columns);
}

// sum (M,N) = the product of what is packed, or += if it `adds`.
void multiply(float* sum, int64_t M, int64_t N, const Packed& packed, bool adds) {
  const int64_t tiles = packed.a_panels * packed.b_panels;
  parallel_tasks(tiles, useful_threads(M * N * packed.slabs * kK, tiles), [&](int64_t begin, int64_t end, int) {
    alignas(64) float tile[kM * kN];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t a_panel = i / packed.b_panels, b_panel = i % packed.b_panels;
      for (int64_t slab = 0; slab < packed.slabs; ++slab)
        multiply_tile(tile, packed.a(a_panel) + slab * (kM * kK / 2), packed.b(b_panel) + slab * (kN * kK / 2),
                      /*adds=*/slab > 0);
      const int64_t m = a_panel * kM, n = b_panel * kN;
      write_tile(tile, std::min(kM, M - m), std::min(kN, N - n), adds, sum + m * N + n, N);
    }
    release();
  });
}

// ---- float32

// Tiles of kFloatRows x kN are formed from kDepth columns of a at a time. A task has kN columns of kTaskRows rows, or
// of up to twice as many at the end, for which it packs b once.
constexpr int64_t kFloatRows = 32, kDepth = 256, kTaskRows = 512;
constexpr int64_t kFewRows = 128, kFewColumns = 64;  // fewer stay with the library

struct FloatMatrix {
  float* data;
  int64_t rows, columns, down, right;

  float* at(int64_t row, int64_t column) const { return data + row * down + column * right; }
};

FloatMatrix float_matrix(const at::Tensor& x, void* data) {
  return {static_cast<float*>(data), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

// tile (kFloatRows,kN) = a b, for a (kFloatRows,depth), rows a_stride apart, and b (depth,kN).
void multiply_float_tile(const float* a, int64_t a_stride, int64_t depth, const float* b, float* tile) {
  at::native::cpublas::brgemm(kFloatRows, kN, depth, a_stride, kN, kN, /*add_C=*/false, a, b, tile);
}

bool multiplies_float_ones() {
  alignas(64) float a[kFloatRows * kK], b[kK * kN], tile[kFloatRows * kN];
  std::fill_n(a, kFloatRows * kK, 1.0F);
  std::fill_n(b, kK * kN, 1.0F);
  try {
    multiply_float_tile(a, kK, kK, b, tile);
    at::native::cpublas::brgemm_release(/*is_vnni=*/false);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(tile, tile + kFloatRows * kN, [](float x) { return x == kK; });
}

bool has_float_products() {
  if (!cpu_prefers_onednn() || !at::globalContext().userEnabledMkldnn()) return false;
  static const bool works = multiplies_float_ones();
  return works;
}

// to (depth,kN) = rows of b from `row` on, in the columns from `column` on, with 0 where there are no more.
void pack_float_columns(const FloatMatrix& b, int64_t row, int64_t depth, int64_t column, float* to) {
  const int64_t columns = std::min(kN, b.columns - column);
  if (columns < kN) std::fill_n(to, depth * kN, 0.0F);
  if (b.right == 1) {
    for (int64_t k = 0; k < depth; ++k) std::copy_n(b.at(row + k, column), columns, to + k * kN);
  } else {
    constexpr int64_t kSide = 4;
    for (int64_t n = 0; n < columns; n += kSide)
      for (int64_t k = 0; k < depth; k += kSide) {
        if (n + kSide <= columns && k + kSide <= depth) {
          transpose_square(b.at(row + k, column + n), b.right, to + k * kN + n, kN);
          continue;
        }
        for (int64_t i = k; i < std::min(depth, k + kSide); ++i)
          for (int64_t j = n; j < std::min(columns, n + kSide); ++j) to[i * kN + j] = *b.at(row + i, column + j);
      }
  }
}

// The rows [begin, end) of kN columns of `to`. The last tile begins early enough to be whole: some of its rows are
// those of the tile before, and not written again.
void multiply_float_columns(const FloatMatrix& to, const FloatMatrix& a, const FloatMatrix& b, int64_t begin,
                            int64_t end, int64_t column) {
  alignas(64) float packed[kDepth * kN];
  alignas(64) float tile[kFloatRows * kN];
  const int64_t columns = std::min(kN, to.columns - column);
  for (int64_t k = 0; k < b.rows; k += kDepth) {
    const int64_t depth = std::min(kDepth, b.rows - k);
    pack_float_columns(b, k, depth, column, packed);
    for (int64_t row = begin; row < end; row += kFloatRows) {
      const int64_t first = std::min(row, end - kFloatRows);
      multiply_float_tile(a.at(first, k), a.down, depth, packed, tile);
      for (int64_t m = row; m < first + kFloatRows; ++m) {
        const float* products = tile + (m - first) * kN;
        float* sums = to.at(m, column);
        for (int64_t n = 0; n < columns; ++n) sums[n] = k > 0 ? sums[n] + products[n] : products[n];
      }
    }
  }
}

}  // namespace

bool multiply_packed_floats(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b) {
  if (to.scalar_type() != at::kFloat || !to.is_cpu() || !has_float_products()) return false;
  const FloatMatrix result = float_matrix(to, to.mutable_data_ptr());
  const FloatMatrix left = float_matrix(a, const_cast<void*>(a.const_data_ptr()));
  const FloatMatrix right = float_matrix(b, const_cast<void*>(b.const_data_ptr()));
  // oneDNN asks for a row stride of at least a row. Rows of a may be the same, or overlap.
  const bool reads_a = left.right == 1 && left.down >= left.columns;
  const bool fits = reads_a && result.right == 1 && (right.right == 1 || right.down == 1);
  if (!fits || left.rows < kFewRows || right.rows < kFewColumns || right.columns < kFewColumns) return false;
  const int64_t panels = ceil_div(right.columns, kN), blocks = std::max<int64_t>(1, left.rows / kTaskRows);
  const int64_t tasks = panels * blocks;
  parallel_tasks(tasks, useful_threads(left.rows * right.rows * right.columns, tasks),
                 [&](int64_t begin, int64_t end, int) {
                   for (int64_t i = begin; i < end; ++i) {
                     const int64_t block = i / panels;
                     const int64_t last = block + 1 < blocks ? (block + 1) * kTaskRows : left.rows;
                     multiply_float_columns(result, left, right, block * kTaskRows, last, i % panels * kN);
                   }
                   at::native::cpublas::brgemm_release(/*is_vnni=*/false);
                 });
  return true;
}

bool multiply_packed(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds,
                     const at::Tensor& memory) {
  const int64_t M = a.size(1), N = b.size(1), K = a.size(0);
  Packed packed{static_cast<uint32_t*>(memory.mutable_data_ptr()), ceil_div(M, kM), ceil_div(N, kN), 0};
  const int64_t slab_numbers = (packed.a_panels * kM + packed.b_panels * kN) * kK / 2;
  const int64_t most_slabs = std::min(memory.numel() / slab_numbers, kMostRows / kK);
  if (a.scalar_type() != at::kBFloat16 || K < kK || most_slabs == 0 || !has_products()) return false;
  for (int64_t row = 0; row < K; row += most_slabs * kK) {
    packed.slabs = std::min(most_slabs, ceil_div(K - row, kK));
    pack(packed, a, b, row);
    multiply(static_cast<float*>(sum.mutable_data_ptr()), M, N, packed, adds || row > 0);
  }
  return true;
}

}  // namespace memcheck
