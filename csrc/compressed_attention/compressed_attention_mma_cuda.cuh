#pragma once

#include "common/mma.cuh"
#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// What the kernels on tensor cores share: tiles of queries and keys of a head.

namespace memcheck {
namespace compressed_cuda {

// Beside those of tiles in the accumulation type.
using memcheck::multiply_rows;

constexpr int kWarps = kThreads / 32;
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

// Loads rows whose packs are not aligned, or queries of several heads. A call, so that its addresses take no registers
// of the loops around it.
template <typename scalar_t, bool kGrouped, int kRows, int kColumns>
__device__ __attribute__((noinline)) void gather_rows(const HeadMatrix<scalar_t, kGrouped>& all, int64_t row,
                                                      HalfTile<scalar_t, kRows, kColumns>& to) {
  const TilePacks<scalar_t, kRows, kColumns, kThreads> mine;
  const auto from = all.from(row);
  request_tile<1>(
      mine, from.layout(), [&](int tile_row) { return from.near(tile_row) + mine.column * from.column_stride; },
      [&](int tile_row) { return to.pack(tile_row, mine.column / kPackSize<scalar_t>); },
      [&](int tile_row) { return tile_row < from.count; });
}

// Begins to load rows from `row` on; zeros where none exist. They have arrived after cp_async_wait and a barrier.
template <typename scalar_t, bool kGrouped, int kRows, int kColumns>
__device__ __forceinline__ void request_rows(const HeadMatrix<scalar_t, kGrouped>& all, int64_t row,
                                             HalfTile<scalar_t, kRows, kColumns>& to) {
  using Packs = TilePacks<scalar_t, kRows, kColumns, kThreads>;
  if (!all.packed || (kGrouped && all.group > 1)) return gather_rows(all, row, to);
  const int thread = not_kept(threadIdx.x);
  const Packs mine{thread / Packs::kPerRow, thread % Packs::kPerRow * Packs::kSize};
  const int count = mine.column < all.columns ? static_cast<int>(smaller<int64_t>(all.count - row, kRows)) : 0;
  const scalar_t* source = all.data + (row + mine.row) * all.position_stride + mine.column;
  const int64_t step = Packs::kStep * all.position_stride;
  unroll<Packs::kCount>([&](int i) {
    const int tile_row = mine.row + i * Packs::kStep;
    cp_async_16(to.pack(tile_row, mine.column / Packs::kSize), source, tile_row < count);
    source += step;
  });
}

// Copies a pack of a tile to a row in memory.
template <typename scalar_t, bool kGrouped, typename Tile>
__device__ __forceinline__ void store_row_pack(const Tile& from, int row_of_tile, int index,
                                               const HeadMatrix<scalar_t, kGrouped>& to, int64_t row) {
  const int column = index * kPackSize<scalar_t>;
  if (column >= to.columns) return;
  write_pack(load_pack(from.pack(row_of_tile, index)), to.at(row) + column * to.column_stride, to.layout(), column);
}

// Stores a warp's rows of a result from row `first` of a tile on, whose row 0 is row `row` of `to`, as far as they
// exist.
template <int kTall, int kColumns, typename scalar_t, bool kGrouped, typename Tile>
__device__ __forceinline__ void store_rows(const WarpTile<kTall, kColumns>& c, int first, Tile& tile,
                                           const HeadMatrix<scalar_t, kGrouped>& to, int64_t row) {
  keep_rows<scalar_t, kTall, kColumns>(c, first, tile);
  for (int index = lane(); index < 16 * kTall * kColumns; index += 32) {
    const int of_tile = first + index / kColumns;
    if (row + of_tile < to.count) store_row_pack(tile, of_tile, index % kColumns, to, row + of_tile);
  }
}

// ---- what queries see

// How many of kCount rows or columns from `first` on are before `end`.
template <int kCount>
MEMCHECK_INLINE int columns_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, kCount)));
}

// What each row of a tile of kRows queries sees: the blocks before an end, and with a window the positions from a begin
// to another end. Those of a row are counted from the first row's, and fit into 32 bits.
template <int kRows, bool kWindow>
struct SeenByRows {
  int64_t first_begin, first_end[kWindow ? 2 : 1];  // of the first row; end: of blocks, of positions
  int begin[kWindow ? kRows : 1], end[kWindow ? 2 : 1][kRows];

  template <typename Parameters>
  __device__ __forceinline__ void find(const Parameters& p, const QueryWork& work) {
    const int mine = threadIdx.x;
    if (mine >= kRows) return;
    const bool exists = work.row + mine < work.of.rows();
    const int64_t first_blocks = work.of.visible(p.shape, work.row);
    if (mine == 0) first_end[0] = first_blocks;
    end[0][mine] = exists ? near(work.of.visible(p.shape, work.row + mine) - first_blocks) : -kMost;
    if constexpr (kWindow) {
      const Span first = work.of.positions(p.shape, p.window, work.row);
      const Span of_row = work.of.positions(p.shape, p.window, work.row + mine);
      if (mine == 0) {
        first_begin = first.begin;
        first_end[1] = first.end;
      }
      begin[mine] = exists ? near(of_row.begin - first.begin) : kMost;
      end[1][mine] = exists ? near(of_row.end - first.end) : -kMost;
    }
  }
  // Sets scores of kWide tiles of 8 columns to -inf where a query does not see the column. row_of(m, half): its row.
  template <int kTall, int kWide, typename RowOf>
  __device__ __forceinline__ void hide(const ColumnTile& tile, const RowOf& row_of,
                                       WarpTile<kTall, kWide>& scores) const {
    const int source = kWindow && tile.of_window ? 1 : 0;
    const int before = near(first_end[source] - tile.first);
    const int after = kWindow && source == 1 ? near(first_begin - tile.first) : -kMost;
    // The first row sees fewest blocks, and the last one none of the positions before its begin.
    if (before >= 8 * kWide && (after == -kMost || after + begin[kWindow ? kRows - 1 : 0] <= 0)) return;
    unroll<kTall, 2>([&](int m, int half) {
      const int row = row_of(m, half);
      const int to = before + end[source][row];
      const int from = after == -kMost ? after : after + begin[kWindow ? row : 0];
      unroll<kWide, 2>([&](int n, int i) {
        const int column = fragment_column(n) + i;
        if (column < from || column >= to) scores[m][n][2 * half + i] = minus_infinity<float>();
      });
    });
  }

 private:
  static constexpr int kMost = 1 << 30;
  __device__ __forceinline__ static int near(int64_t x) {
    return static_cast<int>(larger<int64_t>(-kMost, smaller<int64_t>(x, kMost)));
  }
};

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
  // Begin to load a tile.
  template <typename Tile>
  __device__ __forceinline__ void request_keys(const ColumnTile& tile, Tile& to) const {
    request_rows(keys[kWindow && tile.of_window ? 1 : 0], tile.first, to);
    cp_async_commit();
  }
  template <typename Tile>
  __device__ __forceinline__ void request_values(const ColumnTile& tile, Tile& to) const {
    request_rows(values[kWindow && tile.of_window ? 1 : 0], tile.first, to);
    cp_async_commit();
  }
};

}  // namespace compressed_cuda
}  // namespace memcheck
