#pragma once

#include "common/mma_tile.cuh"
#include "compressed_attention/compressed_attention_work_cuda.cuh"

// Tiles of 32 or 64 rows and columns in shared memory, their products, and sums over tiles, for kernels in the
// accumulation type. Products are formed by multiply-adds or, of float32, on tensor cores.

namespace memcheck {
namespace compressed_cuda {

constexpr int kThreads = 128;
constexpr int kChunkTiles = 8;  // tiles to a chunk of sums

template <typename Tiles>
using acc_of = typename Tiles::acc;

// A thread's part of a tile: rows row_of(i), and columns column_of(j) of a product with rows, or result_column(j) of a
// product with columns, of which Tiles::kJoint are neighbours.
template <typename Tiles>
struct ThreadTile {
  acc_of<Tiles> x[Tiles::kThreadRows][Tiles::kThreadColumns] = {};

  __device__ __forceinline__ auto& operator[](int i) { return x[i]; }
  __device__ __forceinline__ const auto& operator[](int i) const { return x[i]; }
};

// Calls run(i, j) for all numbers of a thread's part.
template <typename Tiles, typename Run>
__device__ __forceinline__ void for_each(const Run& run) {
  unroll<Tiles::kThreadRows, Tiles::kThreadColumns>(run);
}

// Products by multiply-adds. The part of a thread is every kRowLanes-th row, and of these every kColumnLanes-th column
// or neighbouring ones.
template <typename acc_t>
struct FmaTiles {
  using acc = acc_t;
  static constexpr bool kOnTensorCores = false;
  static constexpr int kSize = sizeof(acc_t) == 8 ? 32 : 64;
  static constexpr int kRowLanes = 8;      // threads down a tile,
  static constexpr int kColumnLanes = 16;  // and across
  static constexpr int kThreadRows = kSize / kRowLanes;
  static constexpr int kThreadColumns = kSize / kColumnLanes;
  static constexpr int kJoint = kThreadColumns;
  static constexpr int kPack = kPackSize<acc_t>;
  static_assert(kThreadColumns == kPack);

  // Rows are 16 bytes longer than the tile, so that neighbouring rows begin in different banks.
  struct alignas(16) Tile {
    acc_t at[kSize][kSize + kPack];

    __device__ __forceinline__ void store(int row, int column, const Pack<acc_t>& pack) {
      store_pack(pack, &at[row][column]);
    }
  };
  using Kept = Tile;

  __device__ __forceinline__ static int row_of(int i) {
    return static_cast<int>(threadIdx.x) / kColumnLanes + kRowLanes * i;
  }
  __device__ __forceinline__ static int column_of(int j) {
    return static_cast<int>(threadIdx.x) % kColumnLanes + kColumnLanes * j;
  }
  __device__ __forceinline__ static int result_column(int j) {
    return static_cast<int>(threadIdx.x) % kColumnLanes * kThreadColumns + j;
  }

  // c += a b^T. Every element is one chain of products in the order of the columns, whichever thread forms it.
  __device__ __forceinline__ static void add_product_with_rows(const Tile& a, const Tile& b, ThreadTile<FmaTiles>& c) {
#pragma unroll 2
    for (int d = 0; d < kSize; d += kPack) {
      Pack<acc_t> of_b[kThreadColumns];
      unroll<kThreadColumns>([&](int j) { of_b[j] = load_pack(&b.at[column_of(j)][d]); });
      unroll<kThreadRows>([&](int i) {
        const Pack<acc_t> of_a = load_pack(&a.at[row_of(i)][d]);
        unroll<kPack, kThreadColumns>([&](int x, int j) { c[i][j] += of_a.values[x] * of_b[j].values[x]; });
      });
    }
  }
  // Stores a thread's part of a product with rows, the left factor of the next product.
  __device__ __forceinline__ static void keep(const ThreadTile<FmaTiles>& c, Kept& to) {
    for_each<FmaTiles>([&](int i, int j) { to.at[row_of(i)][column_of(j)] = c[i][j]; });
  }
  // c += a b, after `keep` of a and a barrier.
  __device__ __forceinline__ static void add_product(const ThreadTile<FmaTiles>&, const Kept& a, const Tile& b,
                                                     ThreadTile<FmaTiles>& c) {
#pragma unroll 2
    for (int k = 0; k < kSize; k += kPack) {
      Pack<acc_t> of_b[kPack];
      unroll<kPack>([&](int x) { of_b[x] = load_pack(&b.at[k + x][result_column(0)]); });
      unroll<kThreadRows>([&](int i) {
        const Pack<acc_t> of_a = load_pack(&a.at[row_of(i)][k]);
        unroll<kPack, kThreadColumns>([&](int x, int j) { c[i][j] += of_a.values[x] * of_b[x].values[j]; });
      });
    }
  }
};

// Products of float32 on tensor cores, of sums of three bfloat16. A warp has 16 rows, and its part of a product is the
// left factor of the next one as it lies in registers.
struct PartTiles {
  using acc = float;
  static constexpr bool kOnTensorCores = true;
  static constexpr int kSize = 64;
  static constexpr int kColumnLanes = 4;
  static constexpr int kThreadRows = 2;
  static constexpr int kThreadColumns = kSize / kColumnLanes;
  static constexpr int kJoint = 2;
  static constexpr int kParts = 3;

  struct Tile : memcheck::Tile<kSize, kSize, kParts> {
    __device__ __forceinline__ void store(int row, int column, const Pack<float>& pack) {
      uint32_t left[kParts], right[kParts];
      split(pack.values[0], pack.values[1], left);
      split(pack.values[2], pack.values[3], right);
      const uint32_t at = place(row, column / 8) + column % 8 * 2;
      unroll<kParts>([&](int part) {
        *reinterpret_cast<uint2*>(bytes + part * kPartBytes + at) = make_uint2(left[part], right[part]);
      });
    }
  };
  struct Kept {};

  __device__ __forceinline__ static int row_of(int i) { return 16 * warp() + fragment_row(0, i); }
  __device__ __forceinline__ static int column_of(int j) { return fragment_column(j / 2) + j % 2; }
  __device__ __forceinline__ static int result_column(int j) { return column_of(j); }

  __device__ __forceinline__ static void add_product_with_rows(const Tile& a, const Tile& b, ThreadTile<PartTiles>& c) {
    const Wide<Tile> of_a(a, 16 * warp());
    const Tall<Tile> of_b(b);
#pragma unroll 1
    for (int step = 0; step < kSize / 16; ++step) {
      uint32_t x[kParts][4];
      of_a.template load<false>(0, step, x);
      add_square<false>(x, of_b, step, c);
    }
  }
  template <typename Any>
  __device__ __forceinline__ static void keep(const ThreadTile<PartTiles>&, Any&) {}
  template <typename Any>
  __device__ __forceinline__ static void add_product(const ThreadTile<PartTiles>& a, const Any&, const Tile& b,
                                                     ThreadTile<PartTiles>& c) {
    const Wide<Tile> of_b(b);
    unroll<kSize / 16>([&](int step) {
      uint32_t x[kParts][4];
      unroll<4>([&](int i) {
        const int j = 4 * step + i / 2 * 2;
        uint32_t parts[kParts];
        split(a[i % 2][j], a[i % 2][j + 1], parts);
        unroll<kParts>([&](int part) { x[part][i] = parts[part]; });
      });
      add_square<true>(x, of_b, step, c);
    });
  }

 private:
  // c += 16 columns of the left factor times those rows of the right one, or, not transposed, those columns.
  template <bool kTransposed, typename Squares>
  __device__ __forceinline__ static void add_square(const uint32_t (&x)[kParts][4], const Squares& of_b, int step,
                                                    ThreadTile<PartTiles>& c) {
    unroll<kSize / 16>([&](int square) {
      uint32_t y[kParts][4];
      of_b.template load<kTransposed>(kTransposed ? step : square, kTransposed ? square : step, y);
      float sums[2][4] = {};
      multiply_square(x, y, sums);
      unroll<2, 2, 2>(
          [&](int right, int low, int i) { c[low][4 * square + 2 * right + i] += sums[right][2 * low + i]; });
    });
  }
};

// Calls run(tiles) with the type of tiles for scalar_t.
template <typename scalar_t, typename Run>
void with_tiles(const Run& run) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    const bool asked = float32_runs_on_tensor_cores();
    if constexpr (kFloat32OnTensorCores)
      if (asked) return run(PartTiles());
  }
  run(FmaTiles<acc_type<scalar_t>>());
}

// Joins the numbers of a row, which neighbouring lanes have.
template <typename Tiles, typename number_t, typename Join>
__device__ __forceinline__ number_t of_row(number_t x, const Join& join) {
#pragma unroll
  for (int bits = Tiles::kColumnLanes / 2; bits > 0; bits /= 2) x = join(x, __shfl_xor_sync(~0u, x, bits));
  return x;
}
template <typename Tiles>
__device__ __forceinline__ bool is_first_of_row() {
  return threadIdx.x % Tiles::kColumnLanes == 0;
}

// Loads rows from `row` and columns from `column` on; zeros where none exist. A thread starts four loads before it
// waits for the first.
template <typename Tiles, typename scalar_t, bool kGrouped>
__device__ __forceinline__ void load_tile(const HeadMatrix<scalar_t, kGrouped>& all, int64_t row, int64_t column,
                                          typename Tiles::Tile& to) {
  using acc_t = acc_type<scalar_t>;
  const auto from = all.from(row);
  using Packs = TilePacks<scalar_t, Tiles::kSize, Tiles::kSize, kThreads>;
  constexpr int kLoads = 4;
  static_assert(Packs::kCount % kLoads == 0);
  const Packs mine;
#pragma unroll 1
  for (int first = mine.row; first < Tiles::kSize; first += kLoads * Packs::kStep) {
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
        to.store(first + n * Packs::kStep, mine.column + i, pack);
      }
    });
  }
}

// How many rows or columns of a tile that begins at `first` are before `end`.
template <typename Tiles>
__device__ __forceinline__ int of_tile_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, Tiles::kSize)));
}

// Columns of a tile from begin to end.
struct TileColumns {
  int begin, end;

  MEMCHECK_INLINE bool have(int column) const { return begin <= column && column < end; }
};

template <typename Tiles, typename Parameters>
__device__ __forceinline__ TileColumns columns_seen(const RowLimits<Tiles::kSize, Parameters>& limits,
                                                    const ColumnTile& tile, int row) {
  const int end = of_tile_before<Tiles>(limits.end(tile, row), tile.first);
  if constexpr (!kHasWindow<Parameters>) return {0, end};
  return {of_tile_before<Tiles>(limits.begin(tile, row), tile.first), end};
}

// Whether a slab of columns stays in shared memory from one tile to the next: if there is only one.
template <typename Tiles>
MEMCHECK_INLINE bool stays(int64_t columns) {
  return columns <= Tiles::kSize;
}

// A tile of rows of a times a tile of rows of b, over all columns, one slab of columns at a time.
template <typename Tiles, typename scalar_t, bool kGroupedA, bool kGroupedB>
__device__ __forceinline__ ThreadTile<Tiles> multiply_rows(const HeadMatrix<scalar_t, kGroupedA>& a, int64_t row_of_a,
                                                           bool a_is_loaded, const HeadMatrix<scalar_t, kGroupedB>& b,
                                                           int64_t row_of_b, typename Tiles::Tile& tile_of_a,
                                                           typename Tiles::Tile& tile_of_b) {
  ThreadTile<Tiles> c;
  for (int64_t column = 0; column < a.columns; column += Tiles::kSize) {
    __syncthreads();
    if (!a_is_loaded) load_tile<Tiles>(a, row_of_a, column, tile_of_a);
    load_tile<Tiles>(b, row_of_b, column, tile_of_b);
    __syncthreads();
    Tiles::add_product_with_rows(tile_of_a, tile_of_b, c);
  }
  return c;
}

// The score in forward and backward. The product and the scaled product are rounded separately. Otherwise the compiler
// could fuse the scale with a subtraction, and a score would be rounded differently than in its lse.
template <typename acc_t>
__device__ __forceinline__ acc_t scaled(acc_t product, acc_t scale) {
  return fma(product, scale, acc_t(0));
}

// Sums over tiles have three levels, each from zero: within a tile, the tiles of a chunk, the chunks. Rounding errors
// of equal terms all have one sign, so they grow with the longest level instead of the sequence.
//
// Adds a chunk to the total and clears it.
template <typename Tiles>
__device__ __forceinline__ void add_chunk(ThreadTile<Tiles>& chunk, ThreadTile<Tiles>& total) {
  for_each<Tiles>([&](int i, int j) {
    total[i][j] += chunk[i][j];
    chunk[i][j] = 0;
  });
}

// chunk += a b, after Tiles::keep(a, kept) and a barrier.
template <typename Tiles, typename Kept>
__device__ __forceinline__ void add_product_of_tile(const ThreadTile<Tiles>& a, const Kept& kept,
                                                    const typename Tiles::Tile& b, ThreadTile<Tiles>& chunk) {
  ThreadTile<Tiles> product;
  Tiles::add_product(a, kept, b, product);
  for_each<Tiles>([&](int i, int j) { chunk[i][j] += product[i][j]; });
}

// Calls store(column, x) for all neighbouring columns of row i of a result, x[i][j] times `factor`.
template <typename Tiles, typename Store>
__device__ __forceinline__ void store_row(const ThreadTile<Tiles>& x, int i, acc_of<Tiles> factor, const Store& store) {
  unroll<Tiles::kThreadColumns / Tiles::kJoint>([&](int n) {
    acc_of<Tiles> joint[Tiles::kJoint];
    unroll<Tiles::kJoint>([&](int j) { joint[j] = x[i][n * Tiles::kJoint + j] * factor; });
    store(Tiles::result_column(n * Tiles::kJoint), joint);
  });
}

}  // namespace compressed_cuda
}  // namespace memcheck
