#pragma once

#include <cstdint>

#include "common/kernel.cuh"
#include "common/ptx.cuh"
#include "compressed_attention/compressed_attention_tiles.cuh"

// Tiles of 16-bit values and their products on tensor cores, summed in float32. Each of a block's warps has some rows
// of a product, 16 to a tile; of such a tile thread 4 g + c has columns 2 c and 2 c + 1 of rows g and g + 8.

namespace memcheck {
namespace compressed {

constexpr int kWarps = kThreads / 32;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x) % 32;
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x) / 32;
}

// Rows of a multiple of 64 columns. The chunks of a row, of 8 values, lie in an order of its own, so that the same
// chunk of 8 rows is in all banks: chunk i at i ^ (row % 8).
template <typename scalar_t, int kTileRows, int kTileColumns>
struct alignas(128) HalfTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  scalar_t x[kTileRows * kTileColumns];

  __device__ __forceinline__ scalar_t* chunk(int row, int index) {
    return &x[row * kTileColumns + (index ^ (row & 7)) * 8];
  }
  __device__ __forceinline__ const scalar_t* chunk(int row, int index) const {
    return &x[row * kTileColumns + (index ^ (row & 7)) * 8];
  }
};

// Rows from `row` on, with zeros where there are none. They have arrived after cp_async_wait and a barrier.
template <typename scalar_t, bool kGrouped, int kRows, int kColumns>
__device__ __forceinline__ void load_later(const Rows<scalar_t, kGrouped>& all, int64_t row,
                                           HalfTile<scalar_t, kRows, kColumns>& to) {
  constexpr int kPerRow = kColumns / 8;
  constexpr int kStep = kThreads / kPerRow;
  static_assert(kRows % kStep == 0);
  const auto from = all.from(row);
  const int first = static_cast<int>(threadIdx.x) / kPerRow;
  const int index = static_cast<int>(threadIdx.x) % kPerRow;
  const bool column_there = index * 8 < from.columns;
  const int count = static_cast<int>(smaller<int64_t>(from.count, kRows));
  if (from.chunks && (!kGrouped || from.group == 1)) {
    const scalar_t* source = from.data + first * from.position_stride + index * 8;
    const int64_t step = kStep * from.position_stride;
#pragma unroll
    for (int n = 0; n < kRows; n += kStep) {
      cp_async_16(to.chunk(first + n, index), source, column_there && first + n < count);
      source += step;
    }
    return;
  }
#pragma unroll 1  // addresses that are kept from tile to tile take registers that sums need
  for (int of_tile = first; of_tile < kRows; of_tile += kStep) {
    scalar_t* const place = to.chunk(of_tile, index);
    const scalar_t* const source = from.near(of_tile);
    if (from.chunks) {
      cp_async_16(place, source + index * 8, column_there && of_tile < count);
    } else {
      const Chunk<scalar_t> chunk = chunk_at(from, source, of_tile < count, index * 8);
      uint4 bits;
      __builtin_memcpy(&bits, chunk.x, sizeof(bits));
      *reinterpret_cast<uint4*>(place) = bits;
    }
  }
}

// ---- operands

// Where a lane finds its row of the first chunks of an operand. Those of the chunks that follow, 2 step further, are
// one exclusive or away: so many addresses need not be kept.
template <typename Tile>
struct Operand {
  const Tile& tile;
  int place;

  // Rows from `row` on: of lanes 0 to 15 the first chunk, of lanes 16 to 31 the second.
  __device__ __forceinline__ static Operand down(const Tile& tile, int row) {
    return at(tile, row + lane() % 16, lane() / 16);
  }
  // Of lanes 0 to 7 the first chunk of 8 rows, of lanes 8 to 15 the second, of the others those of the next rows.
  __device__ __forceinline__ static Operand across(const Tile& tile, int row) {
    return at(tile, row + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
  }
  __device__ __forceinline__ static Operand at(const Tile& tile, int row, int index) {
    return {tile, row * Tile::kColumns + (index ^ (row & 7)) * 8};
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

// Of a warp: kTall tiles of 16 rows, kWide of 8 columns.
template <int kTall, int kWide>
using WarpTile = float[kTall][kWide][4];

// The same as the first factor of a product over its columns, rounded.
template <int kTall, int kWide>
using WarpFactor = uint32_t[kTall][kWide / 2][4];

template <int kTall, int kWide>
__device__ __forceinline__ void set_zero(WarpTile<kTall, kWide>& c) {
#pragma unroll
  for (int m = 0; m < kTall; ++m)
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = 0;
}

template <typename scalar_t, int kTall, int kWide>
__device__ __forceinline__ void round_factor(const WarpTile<kTall, kWide>& c, WarpFactor<kTall, kWide>& a) {
#pragma unroll
  for (int m = 0; m < kTall; ++m)
#pragma unroll
    for (int n = 0; n < kWide; ++n) {
      a[m][n / 2][n % 2 * 2] = rounded_pair(scalar_t(), c[m][n][0], c[m][n][1]);
      a[m][n / 2][n % 2 * 2 + 1] = rounded_pair(scalar_t(), c[m][n][2], c[m][n][3]);
    }
}

// Two tiles of 8 columns of c += a b.
template <typename scalar_t, int kTall, int kWide>
__device__ __forceinline__ void multiply_pair(const uint32_t (&a)[kTall][4], const uint32_t (&b)[4], int pair,
                                              WarpTile<kTall, kWide>& c) {
  const uint32_t left[2] = {b[0], b[1]};
  const uint32_t right[2] = {b[2], b[3]};
#pragma unroll
  for (int m = 0; m < kTall; ++m) {
    mma_m16n8k16<scalar_t>(c[m][2 * pair], a[m], left);
    mma_m16n8k16<scalar_t>(c[m][2 * pair + 1], a[m], right);
  }
}

// c = a b^T of rows of a from row_of_a on, and the first rows of b.
template <typename scalar_t, int kTall, int kWide, typename TileA, typename TileB>
__device__ __forceinline__ void multiply_rows(const TileA& a, int row_of_a, const TileB& b, WarpTile<kTall, kWide>& c) {
  static_assert(TileA::kColumns == TileB::kColumns);
  const auto first = Operand<TileA>::down(a, row_of_a);
  const auto second = Operand<TileB>::across(b, 0);
  set_zero<kTall, kWide>(c);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step) {
    uint32_t of_a[kTall][4];
#pragma unroll
    for (int m = 0; m < kTall; ++m) ldmatrix_x4(of_a[m], first.row(16 * m, step));
#pragma unroll
    for (int pair = 0; pair < kWide / 2; ++pair) {
      uint32_t of_b[4];
      ldmatrix_x4(of_b, second.row(16 * pair, step));
      multiply_pair<scalar_t, kTall, kWide>(of_a, of_b, pair, c);
    }
  }
}

// c += a b
template <typename scalar_t, int kTall, int kDeep, int kWide, typename Tile>
__device__ __forceinline__ void add_product(const WarpFactor<kTall, kDeep>& a, const Tile& b,
                                            WarpTile<kTall, kWide>& c) {
  static_assert(8 * kWide == Tile::kColumns && 8 * kDeep == Tile::kRows);
  const auto second = Operand<Tile>::down(b, 0);
#pragma unroll
  for (int step = 0; step < kDeep / 2; ++step) {
    uint32_t of_a[kTall][4];
#pragma unroll
    for (int m = 0; m < kTall; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) of_a[m][i] = a[m][step][i];
#pragma unroll
    for (int pair = 0; pair < kWide / 2; ++pair) {
      uint32_t of_b[4];
      ldmatrix_x4_transposed(of_b, second.row(16 * step, pair));
      multiply_pair<scalar_t, kTall, kWide>(of_a, of_b, pair, c);
    }
  }
}

// Of this thread: the row of c[m][n][2 half + i] from the warp's first on, and its column.
__device__ __forceinline__ int fragment_row(int m, int half) {
  return 16 * m + 8 * half + lane() / 4;
}
__device__ __forceinline__ int fragment_column(int n) {
  return 8 * n + lane() % 4 * 2;
}

// run(row) of the warp's rows, from its first on, that a thread marks: bit 2 m + half for fragment_row(m, half).
template <int kTall, typename Run>
__device__ __forceinline__ void each_row_of_fragments(unsigned marked, const Run& run) {
  __syncwarp();
  for (int i = 0; i < 2 * kTall; ++i) {
    const unsigned yes = __ballot_sync(~0u, marked >> i & 1);
    for (int row = 0; row < 8; ++row)
      if ((yes >> (4 * row) & 0xfu) != 0) run(8 * i + row);
  }
}

// c, rounded, to rows of a tile that only this warp touches.
template <typename scalar_t, int kTall, int kWide, typename Tile>
__device__ __forceinline__ void keep_rows(const WarpTile<kTall, kWide>& c, int row, Tile& to) {
#pragma unroll
  for (int m = 0; m < kTall; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kWide; ++n)
        *reinterpret_cast<uint32_t*>(to.chunk(row + fragment_row(m, half), n) + lane() % 4 * 2) =
            rounded_pair(scalar_t(), c[m][n][2 * half], c[m][n][2 * half + 1]);
  __syncwarp();
}

// A chunk of a tile to a row in memory.
template <typename scalar_t, bool kGrouped, typename Tile>
__device__ __forceinline__ void store_chunk(const Tile& from, int row_of_tile, int index,
                                            const Rows<scalar_t, kGrouped>& to, int64_t row) {
  const int column = index * 8;
  if (column >= to.columns) return;
  const uint4 bits = *reinterpret_cast<const uint4*>(from.chunk(row_of_tile, index));
  scalar_t* at = to.at(row) + column * to.column_stride;
  if (to.chunks) {
    *reinterpret_cast<uint4*>(at) = bits;
  } else {
    scalar_t x[8];
    __builtin_memcpy(static_cast<void*>(x), &bits, sizeof(bits));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < to.columns) at[i * to.column_stride] = x[i];
  }
}

// to *= factor
template <int kTall, int kWide>
__device__ __forceinline__ void scale_all(float factor, WarpTile<kTall, kWide>& to) {
#pragma unroll
  for (int m = 0; m < kTall; ++m)
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[m][n][i] *= factor;
}

__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace compressed
}  // namespace memcheck
