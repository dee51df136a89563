#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/kernel.cuh"
#include "compressed_attention/compressed_attention.h"

// What the CUDA kernels of compressed attention share: how a block of threads finds its work, how matrices come to
// shared memory, and products of tiles in the accumulation type.
//
// The queries of all heads that read one key head are rows of one matrix, position by position: row r is position
// r / group of head r % group of the group. Neighbours see the same blocks, whatever the group, and a few positions of
// many heads fill a tile.

namespace memcheck {
namespace compressed {

template <typename number_t>
MEMCHECK_INLINE number_t smaller(number_t a, number_t b) {
  return b < a ? b : a;
}

template <typename number_t>
MEMCHECK_INLINE number_t larger(number_t a, number_t b) {
  return a < b ? b : a;
}

template <typename acc_t>
MEMCHECK_INLINE acc_t minus_infinity() {
  return -std::numeric_limits<acc_t>::infinity();
}

// What is subtracted before the exponential: nothing where that would be -inf, as exp(-inf - -inf) is no number.
template <typename acc_t>
MEMCHECK_INLINE acc_t shift_of(acc_t max) {
  return max == minus_infinity<acc_t>() ? acc_t(0) : max;
}

// ---- matrices in memory

// A row of the queries of a group: a position, and a head of the group.
struct QueryRow {
  int64_t position, head;
};

// Of two large numbers division takes a hundred instructions.
MEMCHECK_INLINE QueryRow query_row(int64_t row, int64_t group) {
  if (group == 1) return {row, 0};
  constexpr int64_t kSmall = std::numeric_limits<uint32_t>::max();
  if (row > kSmall || group > kSmall) return {row / group, row % group};
  const uint32_t position = static_cast<uint32_t>(row) / static_cast<uint32_t>(group);
  return {position, static_cast<uint32_t>(row) - position * static_cast<uint32_t>(group)};
}

// Rows of one key head: its keys, or, where grouped, the queries that read it.
template <typename scalar_t, bool kGrouped>
struct Rows {
  scalar_t* data;
  int64_t position_stride;
  int64_t head_stride;
  int64_t column_stride;
  int64_t group;       // heads
  int64_t first_head;  // of row 0
  int64_t count;
  int64_t columns;
  bool chunks;  // may be read and written 16 bytes at a time

  MEMCHECK_INLINE scalar_t* at(int64_t row) const {
    if (!kGrouped) return data + row * position_stride;
    const QueryRow of = query_row(row + first_head, group);
    return data + of.position * position_stride + of.head * head_stride;
  }
  // The same rows without those before `row`.
  MEMCHECK_INLINE Rows from(int64_t row) const {
    Rows rows = *this;
    rows.count = count - row;
    if (kGrouped) {
      const QueryRow of = query_row(row + first_head, group);
      rows.data = data + of.position * position_stride;
      rows.first_head = of.head;
    } else {
      rows.data = data + row * position_stride;
    }
    return rows;
  }
  // One of the first 256 rows, when the first head is one of the group.
  MEMCHECK_INLINE scalar_t* near(int row) const {
    if (!kGrouped || group == 1) return data + row * position_stride;
    const int64_t head = first_head + row;
    if (group >= 256) {
      const bool next = head >= group;
      return data + (next ? position_stride : 0) + (next ? head - group : head) * head_stride;
    }
    const uint32_t position = static_cast<uint32_t>(head) / static_cast<uint32_t>(group);
    return data + position * position_stride + (head - position * group) * head_stride;
  }
};

template <typename scalar_t>
using QueryMatrix = Rows<scalar_t, true>;
template <typename scalar_t>
using KeyMatrix = Rows<scalar_t, false>;

template <typename scalar_t>
MEMCHECK_INLINE bool in_chunks(const Strided<4>& x, int64_t columns) {
  constexpr int64_t kChunk = 16 / sizeof(scalar_t);
  const bool strides = (x.stride[0] | x.stride[1] | x.stride[2]) % kChunk == 0;
  return strides && x.stride[3] == 1 && columns % kChunk == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// Which key head of which batch entry a block of threads works for.
struct KeyHead {
  int64_t b, head, group;
};

MEMCHECK_INLINE KeyHead key_head_at(const CompressedAttentionShape& shape, int64_t index) {
  return {index / shape.Hkv, index % shape.Hkv, shape.group()};
}

// x (B,H,S,D)
template <typename scalar_t>
MEMCHECK_INLINE QueryMatrix<scalar_t> queries_of(const CompressedAttentionShape& shape, const Strided<4>& x,
                                                 const KeyHead& of) {
  return {x.at<scalar_t>(of.b, of.head * of.group, 0, 0),
          x.stride[2],
          x.stride[1],
          x.stride[3],
          of.group,
          0,
          of.group * shape.S,
          shape.D,
          in_chunks<scalar_t>(x, shape.D)};
}

// x (B,Hkv,count,D)
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> keys_of(const CompressedAttentionShape& shape, const Strided<4>& x, int64_t count,
                                            const KeyHead& of) {
  return {x.at<scalar_t>(of.b, of.head, 0, 0), x.stride[2], 0, x.stride[3], 1, 0, count, shape.D,
          in_chunks<scalar_t>(x, shape.D)};
}

// Element of a (B,H,S) tensor.
MEMCHECK_INLINE int64_t query_index(const CompressedAttentionShape& shape, const KeyHead& of, int64_t row) {
  const QueryRow of_group = query_row(row, of.group);
  return (of.b * shape.H + of.head * of.group + of_group.head) * shape.S + of_group.position;
}

// ---- work of a block of threads

// A tile of queries, and the tiles of blocks it goes through: all that any of its queries sees, or its part of them.
struct QueryWork {
  KeyHead of;
  int64_t row;     // the first
  int64_t column;  // the first of y or grad_q
  int64_t part;
  int64_t begin, end;  // tiles of blocks
  int64_t seen;        // by the last query
};

MEMCHECK_INLINE int64_t part_of(int64_t tiles, int64_t part, int64_t parts) {
  return tiles * part / parts;
}

// Tiles of late queries, which see most, go first, so that short ones fill the end of the launch.
MEMCHECK_INLINE QueryWork query_work(const CompressedAttentionShape& shape, int64_t index, int64_t tile_rows,
                                     int64_t tile_keys, int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t key_heads = shape.B * shape.Hkv;
  const KeyHead of = key_head_at(shape, index % key_heads);
  const int64_t rows = of.group * shape.S;
  const int64_t row = (ceil_div(rows, tile_rows) - 1 - index / key_heads) * tile_rows;
  const int64_t seen = shape.visible((smaller(row + tile_rows, rows) - 1) / of.group);
  const int64_t tiles = ceil_div(seen, tile_keys);
  return {of, row, column, part, part_of(tiles, part, parts), part_of(tiles, part + 1, parts), seen};
}

// A tile of blocks, and the tiles of queries it goes through, from the first query that sees any of it.
struct KeyWork {
  KeyHead of;
  int64_t key;     // the first
  int64_t column;  // the first of the gradients
  int64_t part;
  int64_t first_row;   // of the queries
  int64_t begin, end;  // tiles of queries from there on
};

// Tiles of early keys, which most queries see, go first.
MEMCHECK_INLINE KeyWork key_work(const CompressedAttentionShape& shape, int64_t index, int64_t tile_keys,
                                 int64_t tile_rows, int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t key_heads = shape.B * shape.Hkv;
  const KeyHead of = key_head_at(shape, index % key_heads);
  const int64_t key = index / key_heads * tile_keys;
  const int64_t first_row = smaller(shape.first_query(key), shape.S) * of.group;
  const int64_t tiles = ceil_div(of.group * shape.S - first_row, tile_rows);
  return {of, key, column, part, first_row, part_of(tiles, part, parts), part_of(tiles, part + 1, parts)};
}

// The positions of a block, and what its gradient is divided by.
struct BlockPositions {
  int64_t begin, length;
};

MEMCHECK_INLINE BlockPositions positions_of(const CompressedAttentionBackward& p, int64_t j) {
  const int64_t begin = j * p.block_length;
  return {begin, smaller(p.gradient_length - begin, p.block_length)};
}

// Where the parts of a split forward lie in the plan's scratch: y (parts,B,H,S,D), then lse (parts,B,H,S).
template <typename acc_t>
struct ForwardParts {
  acc_t* y;
  acc_t* lse;
  int64_t count;

  ForwardParts(const CompressedAttentionForward& p, int64_t parts)
      : y(static_cast<acc_t*>(p.scratch)),
        lse(y == nullptr ? nullptr : y + parts * p.shape.B * p.shape.H * p.shape.S * p.shape.D),
        count(parts) {}
};

// Parts of the gradients of kc and vc in the plan's scratch, (parts,2,B,Hkv,C,D).
template <typename acc_t>
struct KeyParts {
  acc_t* gradients;
  int64_t count;

  __device__ __forceinline__ acc_t* at(const CompressedAttentionShape& shape, int64_t part, bool of_values,
                                       const KeyHead& of, int64_t j) const {
    const int64_t head = (part * 2 + of_values) * shape.B * shape.Hkv + of.b * shape.Hkv + of.head;
    return gradients + (head * shape.C + j) * shape.D;
  }
};

// Of 16-bit types and heads that fit. False where they do not.
template <typename scalar_t>
bool forward_on_tensor_cores(const CompressedAttentionForward& p, const ForwardParts<float>& parts,
                             cudaStream_t stream);
template <typename scalar_t>
bool query_gradients_on_tensor_cores(const CompressedAttentionBackward& p, cudaStream_t stream);
template <typename scalar_t>
bool key_gradients_on_tensor_cores(const CompressedAttentionBackward& p, const KeyParts<float>& parts,
                                   cudaStream_t stream);

// ---- tiles in the accumulation type

constexpr int kThreads = 128;
constexpr int kRowLanes = 8;      // threads down a tile,
constexpr int kColumnLanes = 16;  // and across
constexpr int kChunkTiles = 8;    // tiles to a chunk of sums

// A square tile; each thread has so many of its rows and columns.
template <typename acc_t>
struct TileSize {
  static constexpr int kSize = sizeof(acc_t) == 8 ? 32 : 64;
  static constexpr int kRows = kSize / kRowLanes;
  static constexpr int kColumns = kSize / kColumnLanes;
  static constexpr int kVector = 16 / sizeof(acc_t);
  static_assert(kColumns == kVector);
};

// Rows are 16 bytes apart in banks.
template <typename acc_t>
struct alignas(16) SharedTile {
  acc_t at[TileSize<acc_t>::kSize][TileSize<acc_t>::kSize + TileSize<acc_t>::kVector];
};

// A thread's part of a tile: rows row_of(i), and columns spread_column(j) of a product with rows, or joint_column(j)
// of a product with columns.
template <typename acc_t>
using ThreadTile = acc_t[TileSize<acc_t>::kRows][TileSize<acc_t>::kColumns];

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
  return TileSize<acc_t>::kColumns * column_lane() + j;
}

template <typename acc_t>
struct alignas(16) Vector {
  acc_t x[TileSize<acc_t>::kVector];
};

template <typename acc_t>
__device__ __forceinline__ const Vector<acc_t>& vector_at(const acc_t* x) {
  return *reinterpret_cast<const Vector<acc_t>*>(x);
}

template <typename acc_t>
__device__ __forceinline__ void set_zero(ThreadTile<acc_t>& c) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) c[i][j] = acc_t(0);
}

// c += a b^T, every element one chain of products in the order of the columns, whoever forms it.
template <typename acc_t>
__device__ __forceinline__ void add_product_with_rows(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                                      ThreadTile<acc_t>& c) {
  using Size = TileSize<acc_t>;
#pragma unroll 2
  for (int d = 0; d < Size::kSize; d += Size::kVector) {
    Vector<acc_t> of_b[Size::kColumns];
#pragma unroll
    for (int j = 0; j < Size::kColumns; ++j) of_b[j] = vector_at(&b.at[spread_column(j)][d]);
#pragma unroll
    for (int i = 0; i < Size::kRows; ++i) {
      const Vector<acc_t> of_a = vector_at(&a.at[row_of(i)][d]);
#pragma unroll
      for (int x = 0; x < Size::kVector; ++x)
#pragma unroll
        for (int j = 0; j < Size::kColumns; ++j) c[i][j] += of_a.x[x] * of_b[j].x[x];
    }
  }
}

// c += a b
template <typename acc_t>
__device__ __forceinline__ void add_product(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                            ThreadTile<acc_t>& c) {
  using Size = TileSize<acc_t>;
#pragma unroll 2
  for (int k = 0; k < Size::kSize; k += Size::kVector) {
    Vector<acc_t> of_b[Size::kVector];
#pragma unroll
    for (int x = 0; x < Size::kVector; ++x) of_b[x] = vector_at(&b.at[k + x][joint_column<acc_t>(0)]);
#pragma unroll
    for (int i = 0; i < Size::kRows; ++i) {
      const Vector<acc_t> of_a = vector_at(&a.at[row_of(i)][k]);
#pragma unroll
      for (int x = 0; x < Size::kVector; ++x)
#pragma unroll
        for (int j = 0; j < Size::kColumns; ++j) c[i][j] += of_a.x[x] * of_b[x].x[j];
    }
  }
}

template <typename scalar_t>
struct alignas(16) Chunk {
  static constexpr int kCount = 16 / sizeof(scalar_t);
  scalar_t x[kCount];
};

// Columns [column, column + kCount) of a row; zeros where there are none.
template <typename scalar_t, bool kGrouped>
__device__ __forceinline__ Chunk<scalar_t> chunk_at(const Rows<scalar_t, kGrouped>& from, const scalar_t* row,
                                                    bool there, int64_t column) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  Chunk<scalar_t> chunk;
  if (there && column < from.columns) {
    const scalar_t* x = row + column * from.column_stride;
    if (from.chunks) {
      bits = *reinterpret_cast<const uint4*>(x);
    } else {
      // The gradient of a sum is one number, with strides of 0.
      const bool all_equal = from.column_stride == 0;
      const scalar_t first = x[0];
#pragma unroll
      for (int i = 0; i < Chunk<scalar_t>::kCount; ++i) {
        chunk.x[i] = from_acc<scalar_t>(0);
        if (column + i < from.columns) chunk.x[i] = all_equal || i == 0 ? first : x[i * from.column_stride];
      }
      __builtin_memcpy(&bits, chunk.x, sizeof(bits));
    }
  }
  __builtin_memcpy(static_cast<void*>(chunk.x), &bits, sizeof(bits));
  return chunk;
}

// Rows from `row` and columns from `column` on to a tile, with zeros where there are none. Four loads are under way
// before the first is waited for.
template <typename scalar_t, bool kGrouped, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void load_tile(const Rows<scalar_t, kGrouped>& all, int64_t row, int64_t column,
                                          SharedTile<acc_t>& to) {
  const auto from = all.from(row);
  constexpr int kCount = Chunk<scalar_t>::kCount;
  constexpr int kPerRow = TileSize<acc_t>::kSize / kCount;
  constexpr int kLoads = 4;
  static_assert(TileSize<acc_t>::kSize * kPerRow % (kLoads * kThreads) == 0);
#pragma unroll 1
  for (int first = threadIdx.x; first < TileSize<acc_t>::kSize * kPerRow; first += kLoads * kThreads) {
    Chunk<scalar_t> chunks[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int index = first + n * kThreads;
      const int of_tile = index / kPerRow;
      chunks[n] = chunk_at(from, from.near(of_tile), of_tile < from.count, column + index % kPerRow * kCount);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int index = first + n * kThreads;
#pragma unroll
      for (int i = 0; i < kCount; ++i) to.at[index / kPerRow][index % kPerRow * kCount + i] = to_acc(chunks[n].x[i]);
    }
  }
}

// How many of a tile that begins at `first` lie before `end`.
template <typename acc_t>
__device__ __forceinline__ int of_tile_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, TileSize<acc_t>::kSize)));
}

// A thread's part of a product with rows, for the next product to read.
template <typename acc_t>
__device__ __forceinline__ void keep_tile(const ThreadTile<acc_t>& c, SharedTile<acc_t>& to) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) to.at[row_of(i)][spread_column(j)] = c[i][j];
}

// Whether slabs of all columns stay in shared memory from one tile to the next: one slab does.
template <typename acc_t>
MEMCHECK_INLINE bool stays(int64_t columns) {
  return columns <= TileSize<acc_t>::kSize;
}

// c = a tile of rows of a times a tile of rows of b, over all columns, a slab of them at a time.
template <typename scalar_t, bool kGroupedA, bool kGroupedB, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void multiply_rows(const Rows<scalar_t, kGroupedA>& a, int64_t row_of_a, bool a_is_there,
                                              const Rows<scalar_t, kGroupedB>& b, int64_t row_of_b,
                                              SharedTile<acc_t>& tile_of_a, SharedTile<acc_t>& tile_of_b,
                                              ThreadTile<acc_t>& c) {
  set_zero<acc_t>(c);
  for (int64_t column = 0; column < a.columns; column += TileSize<acc_t>::kSize) {
    __syncthreads();
    if (!a_is_there) load_tile(a, row_of_a, column, tile_of_a);
    load_tile(b, row_of_b, column, tile_of_b);
    __syncthreads();
    add_product_with_rows(tile_of_a, tile_of_b, c);
  }
}

// The scores of both passes: the product, then the scale, each rounded, apart from what is subtracted of them. Fused,
// a score would be rounded otherwise than in its lse.
template <typename acc_t>
__device__ __forceinline__ acc_t scaled(acc_t product, acc_t scale) {
  return fma(product, scale, acc_t(0));
}

// Sums over tiles in three levels, each from zero: within a tile, the tiles of a chunk, the chunks before. Rounding
// errors of equal terms all have one sign, and so grow with the longest level instead of the sequence. A chunk is in
// registers; the total, seldom used, in shared memory, where every thread has its own elements.
template <typename acc_t>
struct Totals {
  acc_t at[TileSize<acc_t>::kSize / kRowLanes * TileSize<acc_t>::kColumns][kThreads];

  __device__ __forceinline__ acc_t& of(int i, int j) { return at[i * TileSize<acc_t>::kColumns + j][threadIdx.x]; }
};

template <typename acc_t>
__device__ __forceinline__ void start(Totals<acc_t>& total) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) total.of(i, j) = acc_t(0);
}

// Ends a chunk.
template <typename acc_t>
__device__ __forceinline__ void add_chunk(ThreadTile<acc_t>& chunk, Totals<acc_t>& total) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) {
      total.of(i, j) += chunk[i][j];
      chunk[i][j] = acc_t(0);
    }
}

// chunk += a b
template <typename acc_t>
__device__ __forceinline__ void add_product_of_tile(const SharedTile<acc_t>& a, const SharedTile<acc_t>& b,
                                                    ThreadTile<acc_t>& chunk) {
  ThreadTile<acc_t> product;
  set_zero<acc_t>(product);
  add_product(a, b, product);
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) chunk[i][j] += product[i][j];
}

// kCount columns of a row, as far as there are so many.
template <typename scalar_t, int kCount, bool kGrouped>
__device__ __forceinline__ void store_columns(const Rows<scalar_t, kGrouped>& to, int64_t row, int64_t column,
                                              const acc_type<scalar_t> (&x)[kCount]) {
  constexpr int kBytes = kCount * sizeof(scalar_t);
  using Bits = std::conditional_t<kBytes == 16, uint4, uint2>;
  static_assert(sizeof(Bits) == kBytes);
  scalar_t* at = to.at(row) + column * to.column_stride;
  if (to.chunks) {
    scalar_t stored[kCount];
    Bits bits;
#pragma unroll
    for (int i = 0; i < kCount; ++i) stored[i] = from_acc<scalar_t>(x[i]);
    __builtin_memcpy(&bits, stored, kBytes);
    if (column < to.columns) *reinterpret_cast<Bits*>(at) = bits;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (column + i < to.columns) at[i * to.column_stride] = from_acc<scalar_t>(x[i]);
  }
}

}  // namespace compressed
}  // namespace memcheck
