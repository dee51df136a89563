#pragma once

#include <cmath>
#include <type_traits>

#include "common/mma_tile.cuh"

// Products of 16-bit tiles on tensor cores, of which each warp of a block has some rows.

namespace memcheck {

// x, from which compilers form addresses where these are used, instead of keeping all of them over a loop.
__device__ __forceinline__ int not_kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
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
  Wide<Tile> squares;

  __device__ __forceinline__ RowsInTile(const Tile& tile, int row) : squares(tile, row) {}
  // Of 16 columns.
  __device__ __forceinline__ void read(int step, uint32_t (&to)[kTall][4]) const {
    unroll<kTall>([&](int m) { squares.template load<false>(m, step, to[m]); });
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
    const Wide<Tile> squares(tile, row);
    unroll<kColumns / 16>([&](int step) { squares.template load<false>(0, step, x[step][m]); });
  }
  __device__ __forceinline__ void read(int step, uint32_t (&to)[kTall][4]) const {
    unroll<kTall, 4>([&](int m, int i) { to[m][i] = x[step][m][i]; });
  }
};

// c = a b^T for the rows of b from `row` on.
template <typename scalar_t, int kTall, int kWide, typename Rows, typename Tile>
__device__ __forceinline__ void multiply_rows(const Rows& a, const Tile& b, int row, WarpTile<kTall, kWide>& c) {
  const Tall<Tile> second(b, row);
  set_zero<kTall, kWide>(c);
  unroll<Tile::kColumns / 16>([&](int step) {
    uint32_t of_a[kTall][4];
    a.read(step, of_a);
    unroll<kWide / 2>([&](int pair) {
      uint32_t of_b[4];
      second.template load<false>(pair, step, of_b);
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
  const Wide<Tile> second(b, row);
  unroll<kWide / 2>([&](int pair) {
    float product[kTall][2][4];
    set_zero<kTall, 2>(product);
    unroll<kDeep / 2>([&](int step) {
      uint32_t of_a[kTall][4];
      unroll<kTall, 4>([&](int m, int i) { of_a[m][i] = a[m][step][i]; });
      uint32_t of_b[4];
      second.template load<true>(step, pair, of_b);
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

// ---- results

// Stores c, rounded to 16 bits, in rows of a tile that only this warp uses.
template <typename scalar_t, int kTall, int kWide, typename Tile>
__device__ __forceinline__ void keep_rows(const WarpTile<kTall, kWide>& c, int row, Tile& to) {
  unroll<kTall, 2, kWide>([&](int m, int half, int n) {
    *reinterpret_cast<uint32_t*>(to.pack(row + fragment_row(m, half), n) + lane() % 4 * 2) =
        rounded_pair(scalar_t(), c[m][n][2 * half], c[m][n][2 * half + 1]);
  });
  __syncwarp();
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
