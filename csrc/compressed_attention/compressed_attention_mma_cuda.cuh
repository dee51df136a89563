#pragma once

#include "common/mma.cuh"
#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// What the kernels on tensor cores share: tiles of queries and keys of a head.

namespace memcheck {
namespace compressed_cuda {

// Beside those of tiles in the accumulation type.
using memcheck::add_product;
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

// ---- what queries see

// How many of kCount rows or columns from `first` on are before `end`.
template <int kCount>
MEMCHECK_INLINE int columns_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, kCount)));
}

// The columns of a tile that a query sees: the first ones,
struct ColumnsBefore {
  int to;

  __device__ __forceinline__ bool operator()(int column) const { return column < to; }
};

// or with a window.
struct ColumnsBetween {
  int from, to;

  __device__ __forceinline__ bool operator()(int column) const { return column >= from && column < to; }
};

// What each row of a tile of kRows queries sees, of a batch without a window: the blocks before a limit.
template <int kRows>
struct BlocksOfRows {
  int64_t limit[kRows];

  template <typename Parameters>
  __device__ __forceinline__ void find(const Parameters& p, const QueryWork& work) {
    const int64_t row = work.row + threadIdx.x;
    if (threadIdx.x < kRows) limit[threadIdx.x] = row < work.of.rows() ? work.of.visible(p.shape, row) : 0;
  }
  // Whether all rows see kCount columns. The first row sees fewest.
  template <int kCount>
  __device__ __forceinline__ bool all_see(const ColumnTile& tile) const {
    return tile.first + kCount <= limit[0];
  }
  template <int kCount>
  __device__ __forceinline__ ColumnsBefore seen_by(int row, const ColumnTile& tile) const {
    return {columns_before<kCount>(limit[row], tile.first)};
  }
};

// With a window: the blocks before an end, and the positions from a begin to another end. Those of a row are counted
// from the first row's, and fit into 32 bits.
template <int kRows>
struct WindowOfRows {
  int64_t begin, end[2];  // end: of blocks, of positions
  int row_begin[kRows], row_end[2][kRows];

  template <typename Parameters>
  __device__ __forceinline__ void find(const Parameters& p, const QueryWork& work) {
    const int mine = threadIdx.x;
    const int64_t first_blocks = work.of.visible(p.shape, work.row);
    const PositionRange first = work.of.positions(p.shape, p.window, work.row);
    if (mine == 0) {
      begin = first.begin;
      end[0] = first_blocks;
      end[1] = first.end;
    }
    if (mine >= kRows) return;
    const bool exists = work.row + mine < work.of.rows();
    const PositionRange of_row = work.of.positions(p.shape, p.window, work.row + mine);
    row_begin[mine] = exists ? short_of(of_row.begin - first.begin) : kMost;
    row_end[0][mine] = exists ? short_of(work.of.visible(p.shape, work.row + mine) - first_blocks) : -kMost;
    row_end[1][mine] = exists ? short_of(of_row.end - first.end) : -kMost;
  }
  template <int kCount>
  __device__ __forceinline__ bool all_see(const ColumnTile& tile) const {
    return tile.first + kCount <= end[tile.of_window] &&
           (!tile.of_window || tile.first >= begin + row_begin[kRows - 1]);
  }
  template <int kCount>
  __device__ __forceinline__ ColumnsBetween seen_by(int row, const ColumnTile& tile) const {
    if (all_see<kCount>(tile)) return {0, kCount};
    return {tile.of_window ? columns_before<kCount>(begin + row_begin[row], tile.first) : 0,
            columns_before<kCount>(end[tile.of_window] + row_end[tile.of_window][row], tile.first)};
  }

 private:
  static constexpr int kMost = std::numeric_limits<int>::max();
  __device__ __forceinline__ static int short_of(int64_t x) { return static_cast<int>(smaller<int64_t>(x, kMost)); }
};

template <typename Parameters, int kRows>
using SeenByRows = std::conditional_t<kHasWindow<Parameters>, WindowOfRows<kRows>, BlocksOfRows<kRows>>;

// The keys and values of blocks, and of the window.
template <typename scalar_t, bool kWindow>
struct KeyMatrices {
  KeyMatrix<scalar_t> keys[kWindow ? 2 : 1], values[kWindow ? 2 : 1];

  template <typename Parameters, typename Work>
  __device__ __forceinline__ void find(const Parameters& p, const Work& work) {
    unroll<kWindow ? 2 : 1>([&](int source) {
      keys[source] = columns_of<scalar_t>(p, work, {source == 1, 0}, false);
      values[source] = columns_of<scalar_t>(p, work, {source == 1, 0}, true);
    });
  }
  // Begins to load a tile.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void request(const ColumnTile& tile, HalfTile<scalar_t, kRows, kColumns>& k,
                                          HalfTile<scalar_t, kRows, kColumns>& v) const {
    const int source = kWindow && tile.of_window ? 1 : 0;
    request_rows(keys[source], tile.first, k);
    request_rows(values[source], tile.first, v);
    cp_async_commit();
  }
};

}  // namespace compressed_cuda
}  // namespace memcheck
