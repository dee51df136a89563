#pragma once

#include "compressed_attention/compressed_attention_work_cuda.cuh"

// Tiles in the accumulation type in shared memory, their products, and sums over tiles.

namespace memcheck {
namespace compressed_cuda {

constexpr int kThreads = 128;
constexpr int kRowLanes = 8;      // threads down a tile,
constexpr int kColumnLanes = 16;  // and across
constexpr int kChunkTiles = 8;    // tiles to a chunk of sums

// A square tile, of which each thread has kThreadRows rows and kThreadColumns columns.
template <typename acc_t>
struct TileSize {
  static constexpr int kSize = sizeof(acc_t) == 8 ? 32 : 64;
  static constexpr int kThreadRows = kSize / kRowLanes;
  static constexpr int kThreadColumns = kSize / kColumnLanes;
  static constexpr int kPack = 16 / sizeof(acc_t);
  static_assert(kThreadColumns == kPack);
};

// Rows are 16 bytes longer than the tile, so that neighbouring rows begin in different banks.
template <typename acc_t>
struct alignas(16) SharedTile {
  acc_t at[TileSize<acc_t>::kSize][TileSize<acc_t>::kSize + TileSize<acc_t>::kPack];
};

// A thread's part of a tile: rows row_of(i), and columns spread_column(j) of a product with rows, or joint_column(j) of
// a product with columns.
template <typename acc_t>
using ThreadTile = acc_t[TileSize<acc_t>::kThreadRows][TileSize<acc_t>::kThreadColumns];

__device__ __forceinline__ int row_lane() {
  return static_cast<int>(threadIdx.x) / kColumnLanes;
}
__device__ __forceinline__ int column_lane() {
  return static_cast<int>(threadIdx.x) % kColumnLanes;
}
__device__ __forceinline__ int row_of(int i) {
  return row_lane() + kRowLanes * i;
}
__device__ __forceinline__ int spread_column(int j) {
  return column_lane() + kColumnLanes * j;
}
template <typename acc_t>
__device__ __forceinline__ int joint_column(int j) {
  return TileSize<acc_t>::kThreadColumns * column_lane() + j;
}

template <typename acc_t>
__device__ __forceinline__ void set_zero(ThreadTile<acc_t>& c) {
  unroll<TileSize<acc_t>::kThreadRows, TileSize<acc_t>::kThreadColumns>([&](int i, int j) { c[i][j] = acc_t(0); });
}

// c += a b^T. Every element is one chain of products in the order of the columns, whichever thread forms it.
template <typename acc_t>
__device__ __forceinline__ void add_product_with_rows(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                                      ThreadTile<acc_t>& c) {
  using Size = TileSize<acc_t>;
#pragma unroll 2
  for (int d = 0; d < Size::kSize; d += Size::kPack) {
    Pack<acc_t> of_b[Size::kThreadColumns];
    unroll<Size::kThreadColumns>([&](int j) { of_b[j] = load_pack(&b.at[spread_column(j)][d]); });
    unroll<Size::kThreadRows>([&](int i) {
      const Pack<acc_t> of_a = load_pack(&a.at[row_of(i)][d]);
      unroll<Size::kPack, Size::kThreadColumns>([&](int x, int j) { c[i][j] += of_a.values[x] * of_b[j].values[x]; });
    });
  }
}

// c += a b
template <typename acc_t>
__device__ __forceinline__ void add_product(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                            ThreadTile<acc_t>& c) {
  using Size = TileSize<acc_t>;
#pragma unroll 2
  for (int k = 0; k < Size::kSize; k += Size::kPack) {
    Pack<acc_t> of_b[Size::kPack];
    unroll<Size::kPack>([&](int x) { of_b[x] = load_pack(&b.at[k + x][joint_column<acc_t>(0)]); });
    unroll<Size::kThreadRows>([&](int i) {
      const Pack<acc_t> of_a = load_pack(&a.at[row_of(i)][k]);
      unroll<Size::kPack, Size::kThreadColumns>([&](int x, int j) { c[i][j] += of_a.values[x] * of_b[x].values[j]; });
    });
  }
}

// Loads rows from `row` and columns from `column` on; zeros where none exist. A thread starts four loads before it
// waits for the first.
template <typename scalar_t, bool kGrouped, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void load_tile(const HeadMatrix<scalar_t, kGrouped>& all, int64_t row, int64_t column,
                                          SharedTile<acc_t>& to) {
  const auto from = all.from(row);
  using Packs = TilePacks<scalar_t, TileSize<acc_t>::kSize, TileSize<acc_t>::kSize, kThreads>;
  constexpr int kLoads = 4;
  static_assert(Packs::kCount % kLoads == 0);
  const Packs mine;
#pragma unroll 1
  for (int first = mine.row; first < TileSize<acc_t>::kSize; first += kLoads * Packs::kStep) {
    Pack<scalar_t> packs[kLoads];
    unroll<kLoads>([&](int n) {
      const int row_of_tile = first + n * Packs::kStep;
      packs[n] = from.read(from.near(row_of_tile), row_of_tile < from.count, column + mine.column);
    });
    unroll<kLoads>([&](int n) {
#pragma unroll
      for (int i = 0; i < Packs::kSize; i += kPackSize<acc_t>) {
        Pack<acc_t> pack;
        unroll<kPackSize<acc_t>>([&](int x) { pack.values[x] = to_acc(packs[n].values[i + x]); });
        store_pack(pack, &to.at[first + n * Packs::kStep][mine.column + i]);
      }
    });
  }
}

// How many rows or columns of a tile that begins at `first` are before `end`.
template <typename acc_t>
__device__ __forceinline__ int of_tile_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, TileSize<acc_t>::kSize)));
}

// Columns of a tile from begin to end.
struct TileColumns {
  int begin, end;

  MEMCHECK_INLINE bool have(int column) const { return begin <= column && column < end; }
};

template <typename acc_t, int kRows, typename Parameters>
__device__ __forceinline__ TileColumns columns_seen(const RowLimits<kRows, Parameters>& limits, const ColumnTile& tile,
                                                    int row) {
  const int end = of_tile_before<acc_t>(limits.end(tile, row), tile.first);
  if constexpr (!kHasWindow<Parameters>) return {0, end};
  return {of_tile_before<acc_t>(limits.begin(tile, row), tile.first), end};
}

// Stores a thread's part of a product with rows, for the next product to read.
template <typename acc_t>
__device__ __forceinline__ void keep_tile(const ThreadTile<acc_t>& c, SharedTile<acc_t>& to) {
  unroll<TileSize<acc_t>::kThreadRows, TileSize<acc_t>::kThreadColumns>(
      [&](int i, int j) { to.at[row_of(i)][spread_column(j)] = c[i][j]; });
}

// Whether a slab of columns stays in shared memory from one tile to the next: if there is only one.
template <typename acc_t>
MEMCHECK_INLINE bool stays(int64_t columns) {
  return columns <= TileSize<acc_t>::kSize;
}

// c = a tile of rows of a times a tile of rows of b, over all columns, one slab of columns at a time.
template <typename scalar_t, bool kGroupedA, bool kGroupedB, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void multiply_rows(const HeadMatrix<scalar_t, kGroupedA>& a, int64_t row_of_a,
                                              bool a_is_loaded, const HeadMatrix<scalar_t, kGroupedB>& b,
                                              int64_t row_of_b, SharedTile<acc_t>& tile_of_a,
                                              SharedTile<acc_t>& tile_of_b, ThreadTile<acc_t>& c) {
  set_zero<acc_t>(c);
  for (int64_t column = 0; column < a.columns; column += TileSize<acc_t>::kSize) {
    __syncthreads();
    if (!a_is_loaded) load_tile(a, row_of_a, column, tile_of_a);
    load_tile(b, row_of_b, column, tile_of_b);
    __syncthreads();
    add_product_with_rows(tile_of_a, tile_of_b, c);
  }
}

// The score in forward and backward. The product and the scaled product are rounded separately. Otherwise the compiler
// could fuse the scale with a subtraction, and a score would be rounded differently than in its lse.
template <typename acc_t>
__device__ __forceinline__ acc_t scaled(acc_t product, acc_t scale) {
  return fma(product, scale, acc_t(0));
}

// Sums over tiles have three levels, each from zero: within a tile, the tiles of a chunk, the chunks. Rounding errors
// of equal terms all have one sign, so they grow with the longest level instead of the sequence. The chunk is in
// registers. The total, used seldom, is in shared memory, where every thread has its own elements.
template <typename acc_t>
struct Totals {
  acc_t at[TileSize<acc_t>::kSize / kRowLanes * TileSize<acc_t>::kThreadColumns][kThreads];

  __device__ __forceinline__ acc_t& of(int i, int j) {
    return at[i * TileSize<acc_t>::kThreadColumns + j][threadIdx.x];
  }
};

template <typename acc_t>
__device__ __forceinline__ void start(Totals<acc_t>& total) {
  unroll<TileSize<acc_t>::kThreadRows, TileSize<acc_t>::kThreadColumns>(
      [&](int i, int j) { total.of(i, j) = acc_t(0); });
}

// Adds a chunk to the total and clears it.
template <typename acc_t>
__device__ __forceinline__ void add_chunk(ThreadTile<acc_t>& chunk, Totals<acc_t>& total) {
  unroll<TileSize<acc_t>::kThreadRows, TileSize<acc_t>::kThreadColumns>([&](int i, int j) {
    total.of(i, j) += chunk[i][j];
    chunk[i][j] = acc_t(0);
  });
}

// chunk += a b
template <typename acc_t>
__device__ __forceinline__ void add_product_of_tile(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                                    ThreadTile<acc_t>& chunk) {
  ThreadTile<acc_t> product;
  set_zero<acc_t>(product);
  add_product(a, b, product);
  unroll<TileSize<acc_t>::kThreadRows, TileSize<acc_t>::kThreadColumns>(
      [&](int i, int j) { chunk[i][j] += product[i][j]; });
}

}  // namespace compressed_cuda
}  // namespace memcheck
