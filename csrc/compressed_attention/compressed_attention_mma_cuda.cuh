#pragma once

#include "common/mma.cuh"
#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// What the kernels on tensor cores share: tiles of queries and keys of a head.

namespace memcheck {
namespace compressed_cuda {

// Beside those of tiles in the accumulation type.
using memcheck::add_product;
using memcheck::any_not_finite;
using memcheck::multiply_rows;
using memcheck::set_zero;

constexpr int kWarps = kThreads / 32;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// Calls run(columns) with the columns of a tile, a constant, for heads of D. Returns false if they are too wide.
template <typename Run>
bool with_tile_columns(int64_t D, const Run& run) {
  if (D > 256) return false;
  if (D <= 64)
    run(std::integral_constant<int, 64>());
  else if (D <= 128)
    run(std::integral_constant<int, 128>());
  else
    run(std::integral_constant<int, 256>());
  return true;
}

// Begins to load rows from `row` on; zeros where none exist. They have arrived after cp_async_wait and a barrier.
template <typename scalar_t, bool kGrouped, int kRows, int kColumns>
__device__ __forceinline__ void request_rows(const HeadMatrix<scalar_t, kGrouped>& all, int64_t row,
                                             HalfTile<scalar_t, kRows, kColumns>& to) {
  using Packs = TilePacks<scalar_t, kRows, kColumns, kThreads>;
  const Packs mine;
  const auto from = all.from(row);
  const int count = static_cast<int>(smaller<int64_t>(from.count, kRows));
  const auto place = [&](int tile_row) { return to.pack(tile_row, mine.column / Packs::kSize); };
  const auto exists = [&](int tile_row) { return tile_row < count; };
  if (from.packed && (!kGrouped || from.group == 1)) {
    // The loop of request_tile, written out with a moving pointer: in any other form the gradient of q spills more.
    const bool column_exists = mine.column < from.columns;
    const scalar_t* source = from.data + mine.row * from.position_stride + mine.column;
    const int64_t step = Packs::kStep * from.position_stride;
    unroll<Packs::kCount>([&](int i) {
      const int tile_row = mine.row + i * Packs::kStep;
      cp_async_16(place(tile_row), source, column_exists && exists(tile_row));
      source += step;
    });
    return;
  }
  // Not unrolled: addresses that the compiler keeps from tile to tile take registers that sums need.
  request_tile<1>(
      mine, from.layout(), [&](int tile_row) { return from.near(tile_row) + mine.column * from.column_stride; }, place,
      exists);
}

// Copies a pack of a tile to a row in memory.
template <typename scalar_t, bool kGrouped, typename Tile>
__device__ __forceinline__ void store_row_pack(const Tile& from, int row_of_tile, int index,
                                               const HeadMatrix<scalar_t, kGrouped>& to, int64_t row) {
  const int column = index * kPackSize<scalar_t>;
  if (column >= to.columns) return;
  write_pack(load_pack(from.pack(row_of_tile, index)), to.at(row) + column * to.column_stride, to.layout(), column);
}

}  // namespace compressed_cuda
}  // namespace memcheck
