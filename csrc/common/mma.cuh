#pragma once

#include <cmath>
#include <type_traits>

#include "common/formulas.h"
#include "common/ptx.cuh"

// Tiles of 16-bit values and their products on tensor cores, summed in float32. Each warp of a block has some rows of a
// product, in tiles of 16 rows and 8 columns. Of such a tile thread 4 g + c has columns 2 c and 2 c + 1 of rows g and
// g + 8.

namespace memcheck {

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x) % 32;
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x) / 32;
}

// Rows of a multiple of 64 columns. Pack i of a row, of 8 values, is at place i ^ (row % 8), so that the same
// pack of 8 rows is spread over all banks.
template <typename scalar_t, int kTileRows, int kTileColumns>
struct alignas(128) HalfTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  scalar_t x[kTileRows * kTileColumns];

  __device__ __forceinline__ scalar_t* pack(int row, int index) {
    return &x[row * kTileColumns + (index ^ (row & 7)) * 8];
  }
  __device__ __forceinline__ const scalar_t* pack(int row, int index) const {
    return &x[row * kTileColumns + (index ^ (row & 7)) * 8];
  }
};

// x, from which compilers form addresses where these are used, instead of keeping all of them over a loop.
__device__ __forceinline__ int not_kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- operands

// Where a lane finds its row of the first packs of an operand. The packs that are 2 step further differ by one
// exclusive or, so that their addresses need no registers.
template <typename Tile>
struct Operand {
  const Tile& tile;
  int place;

  // Rows from `row` on. Lanes 0 to 15 have the first pack, lanes 16 to 31 the second.
  __device__ __forceinline__ static Operand down(const Tile& tile, int row, int lane = memcheck::lane()) {
    return at(tile, row + lane % 16, lane / 16);
  }
  // Lanes 0 to 7 have the first pack of 8 rows, lanes 8 to 15 the second; the other lanes have those of the next 8
  // rows.
  __device__ __forceinline__ static Operand across(const Tile& tile, int row, int lane = memcheck::lane()) {
    return at(tile, row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  __device__ __forceinline__ static Operand at(const Tile& tile, int row, int index) {
    return {tile, not_kept(row * Tile::kColumns + (index ^ (row & 7)) * 8)};
  }
  __device__ __forceinline__ const void* row(int further, int step) const {
    return &tile.x[(place ^ (16 * step)) + further * Tile::kColumns];
  }
};

__device__ __forceinline__ uint32_t rounded_pair(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ __forceinline__ uint32_t rounded_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// A warp's part of a product: kTall tiles of 16 rows by kWide tiles of 8 columns.
template <int kTall, int kWide>
using WarpTile = float[kTall][kWide][4];

// The same, rounded, as the first factor of a product over its columns.
template <int kTall, int kWide>
using WarpFactor = uint32_t[kTall][kWide / 2][4];

template <int kTall, int kWide>
__device__ __forceinline__ void set_zero(WarpTile<kTall, kWide>& c) {
  unroll<kTall, kWide, 4>([&](int m, int n, int i) { c[m][n][i] = 0; });
}

template <typename scalar_t, int kTall, int kWide>
__device__ __forceinline__ void round_factor(const WarpTile<kTall, kWide>& c, WarpFactor<kTall, kWide>& a) {
  unroll<kTall, kWide>([&](int m, int n) {
    a[m][n / 2][n % 2 * 2] = rounded_pair(scalar_t(), c[m][n][0], c[m][n][1]);
    a[m][n / 2][n % 2 * 2 + 1] = rounded_pair(scalar_t(), c[m][n][2], c[m][n][3]);
  });
}

// c[0] and c[1] += a times the two operands in b.
template <typename scalar_t>
__device__ __forceinline__ void multiply_two(const uint32_t (&a)[4], const uint32_t (&b)[4], float (*c)[4]) {
  const uint32_t left[2] = {b[0], b[1]};
  const uint32_t right[2] = {b[2], b[3]};
  mma_m16n8k16<scalar_t>(c[0], a, left);
  mma_m16n8k16<scalar_t>(c[1], a, right);
}

// c += a b for tiles n and n + 1 of c.
template <typename scalar_t, int kTall, int kWide>
__device__ __forceinline__ void multiply_pair(const uint32_t (&a)[kTall][4], const uint32_t (&b)[4], int n,
                                              WarpTile<kTall, kWide>& c) {
  unroll<kTall>([&](int m) { multiply_two<scalar_t>(a[m], b, &c[m][n]); });
}

// kTall tiles of 16 rows, as the first factor of products over their columns: read from shared memory by every product,
template <int kTall, typename Tile>
struct RowsInTile {
  Operand<Tile> first;

  __device__ __forceinline__ RowsInTile(const Tile& tile, int row) : first(Operand<Tile>::down(tile, row)) {}
  // Of 16 columns.
  __device__ __forceinline__ void read(int step, uint32_t (&to)[kTall][4]) const {
    unroll<kTall>([&](int m) { ldmatrix_x4(to[m], first.row(16 * m, step)); });
  }
};

// or kept in registers.
template <int kTall, int kColumns>
struct RowsInRegisters {
  uint32_t x[kColumns / 16][kTall][4];

  RowsInRegisters() = default;
  template <typename Tile>
  __device__ __forceinline__ RowsInRegisters(const Tile& tile, int row) {
    unroll<kTall>([&](int m) { load(m, tile, row + 16 * m); });
  }
  // Reads tile m of 16 rows.
  template <typename Tile>
  __device__ __forceinline__ void load(int m, const Tile& tile, int row) {
    static_assert(Tile::kColumns == kColumns);
    const auto from = Operand<Tile>::down(tile, row);
    unroll<kColumns / 16>([&](int step) { ldmatrix_x4(x[step][m], from.row(0, step)); });
  }
  __device__ __forceinline__ void read(int step, uint32_t (&to)[kTall][4]) const {
    unroll<kTall, 4>([&](int m, int i) { to[m][i] = x[step][m][i]; });
  }
};

// c = a b^T for the rows of b from `row` on.
template <typename scalar_t, int kTall, int kWide, typename Rows, typename Tile>
__device__ __forceinline__ void multiply_rows(const Rows& a, const Tile& b, int row, WarpTile<kTall, kWide>& c) {
  const auto second = Operand<Tile>::across(b, row);
  set_zero<kTall, kWide>(c);
  unroll<Tile::kColumns / 16>([&](int step) {
    uint32_t of_a[kTall][4];
    a.read(step, of_a);
    unroll<kWide / 2>([&](int pair) {
      uint32_t of_b[4];
      ldmatrix_x4(of_b, second.row(16 * pair, step));
      multiply_pair<scalar_t, kTall, kWide>(of_a, of_b, 2 * pair, c);
    });
  });
}

// Calls add(m, n, i, x) for the numbers x of a b, for the rows of b from `row` on. Tensor cores cut a sum towards zero
// at every step, and the errors of equal terms add up. So the product is summed from zero, for `add` to round to
// nearest.
template <typename scalar_t, int kTall, int kDeep, int kWide, typename Tile, typename Add>
__device__ __forceinline__ void multiply(const WarpFactor<kTall, kDeep>& a, const Tile& b, int row, const Add& add) {
  static_assert(8 * kWide == Tile::kColumns && 8 * kDeep <= Tile::kRows);
  const auto second = Operand<Tile>::down(b, row);
  unroll<kWide / 2>([&](int pair) {
    float product[kTall][2][4];
    set_zero<kTall, 2>(product);
    unroll<kDeep / 2>([&](int step) {
      uint32_t of_a[kTall][4];
      unroll<kTall, 4>([&](int m, int i) { of_a[m][i] = a[m][step][i]; });
      uint32_t of_b[4];
      ldmatrix_x4_transposed(of_b, second.row(16 * step, pair));
      multiply_pair<scalar_t, kTall, 2>(of_a, of_b, 0, product);
    });
    unroll<kTall, 2, 4>([&](int m, int n, int i) { add(m, 2 * pair + n, i, product[m][n][i]); });
  });
}

// c += a b
template <typename scalar_t, int kTall, int kDeep, int kWide, typename Tile>
__device__ __forceinline__ void add_product(const WarpFactor<kTall, kDeep>& a, const Tile& b, int row,
                                            WarpTile<kTall, kWide>& c) {
  multiply<scalar_t, kTall, kDeep, kWide>(a, b, row, [&](int m, int n, int i, float x) { c[m][n][i] += x; });
}

// ---- places of results

// The row of this thread's c[m][n][2 half + i], counted from the warp's first row, and the column of c[m][n][2 half].
__device__ __forceinline__ int fragment_row(int m, int half, int lane = memcheck::lane()) {
  return 16 * m + 8 * half + lane / 4;
}
__device__ __forceinline__ int fragment_column(int n, int lane = memcheck::lane()) {
  return 8 * n + lane % 4 * 2;
}

// Stores pair(x, y), two 16-bit values, for neighbours x and y of c in rows of a tile that only this warp uses.
template <int kTall, int kWide, typename Tile, typename PairOf>
__device__ __forceinline__ void keep_pairs(const WarpTile<kTall, kWide>& c, int row, Tile& to, const PairOf& pair) {
  unroll<kTall, 2, kWide>([&](int m, int half, int n) {
    *reinterpret_cast<uint32_t*>(to.pack(row + fragment_row(m, half), n) + lane() % 4 * 2) =
        pair(c[m][n][2 * half], c[m][n][2 * half + 1]);
  });
  __syncwarp();
}

// The same for c, rounded.
template <typename scalar_t, int kTall, int kWide, typename Tile>
__device__ __forceinline__ void keep_rows(const WarpTile<kTall, kWide>& c, int row, Tile& to) {
  keep_pairs<kTall, kWide>(c, row, to, [](float x, float y) { return rounded_pair(scalar_t(), x, y); });
}

__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace memcheck
