#pragma once

#include "compressed_attention/compressed_attention_matrices_cuda.cuh"

// Which tiles a block of threads computes, and where split results lie in the plan's scratch.

namespace memcheck {

// In the files compressed_attention_{pool,backward}_cuda.cu.
void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_extend_cuda(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_extend_backward_cuda(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_backward_cuda(const CompressedAttentionWindowBackward& p, Dtype dtype, cudaStream_t stream);

namespace compressed_cuda {

// A tile of queries, and the tiles of blocks that it reads: all that any of its queries sees, or its part of them.
struct QueryWork {
  KeyHead of;
  int64_t row;     // the first; none of the tile exists if this does not
  int64_t column;  // the first of y or grad_q
  int64_t part;
  int64_t begin, end;  // tiles of blocks
  int64_t seen;        // by the last query

  MEMCHECK_INLINE bool exists() const { return row < of.rows(); }
};

MEMCHECK_INLINE int64_t part_of(int64_t tiles, int64_t part, int64_t parts) {
  return tiles * part / parts;
}

// Where a block of threads is: a tile of one key head of a sequence. It may lie behind the sequence's end.
struct TilePlace {
  int64_t sequence, head, tile;
};

// The tiles of all key heads, where rows of a batch have `length` rows in tiles of `size`.
MEMCHECK_INLINE int64_t tile_count(const CompressedAttentionShape& shape, int64_t length, int64_t size) {
  return tile_places(shape, length, size) * shape.Hkv;
}

// Tiles of as late rows as there are first, or last. first_of(sequence): its first row.
template <typename FirstOf>
MEMCHECK_INLINE TilePlace tile_place(const CompressedAttentionShape& shape, int64_t index, int64_t length, int64_t size,
                                     bool late_first, const FirstOf& first_of) {
  const int64_t heads = shape.sequences.packed ? shape.Hkv : sequence_count(shape) * shape.Hkv;
  const int64_t places = shape.sequences.packed ? tile_places(shape, length, size) : ceil_div(length, size);
  const int64_t place = late_first ? places - 1 - index / heads : index / heads;
  const int64_t head = index % heads;
  if (!shape.sequences.packed) return {head / shape.Hkv, head % shape.Hkv, place};
  const SequenceTile at = tile_at(shape, place, length, size, first_of);
  return {at.sequence, head, at.tile};
}

// Rows of queries in a row of the batch.
MEMCHECK_INLINE int64_t query_rows(const CompressedAttentionShape& shape) {
  return shape.group() * shape.S;
}

// What a row of the batch has for tiles of blocks, and the size of one: packed, blocks lie where their positions do.
MEMCHECK_INLINE int64_t block_rows(const CompressedAttentionShape& shape) {
  return shape.sequences.packed ? shape.T : shape.C;
}
MEMCHECK_INLINE int64_t block_tile(const CompressedAttentionShape& shape, int64_t blocks) {
  return shape.sequences.packed ? blocks * shape.factor : blocks;
}

// Late queries see most blocks. Their tiles go first, so that short tiles fill the end of the launch.
MEMCHECK_INLINE QueryWork query_work(const CompressedAttentionShape& shape, int64_t index, int64_t tile_rows,
                                     int64_t tile_keys, int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t group = shape.group();
  const TilePlace at = tile_place(shape, index, query_rows(shape), tile_rows, true,
                                  [group](const Sequence& x) { return group * x.first_query; });
  const KeyHead of = key_head(shape, at.sequence, at.head);
  const int64_t row = at.tile * tile_rows;
  const int64_t seen = row < of.rows() ? of.visible(shape, smaller(row + tile_rows, of.rows()) - 1) : 0;
  const int64_t tiles = ceil_div(seen, tile_keys);
  return {of, row, column, part, part_of(tiles, part, parts), part_of(tiles, part + 1, parts), seen};
}

// ---- with a window
//
// A call without a window has the parameters CompressedAttentionForward or CompressedAttentionBackward. So its kernels
// are compiled without what a window needs.

template <typename Parameters>
constexpr bool kHasWindow = std::is_same_v<Parameters, CompressedAttentionWindowForward> ||
                            std::is_same_v<Parameters, CompressedAttentionWindowBackward>;

// The tiles of positions follow those of blocks, and parts divide both.
struct WindowQueryWork : QueryWork {
  int64_t block_tiles;
  int64_t first_position;  // of the first tile of positions
  int64_t end_position;    // behind those that the last query sees
};

template <typename Parameters>
using QueryWorkOf = std::conditional_t<kHasWindow<Parameters>, WindowQueryWork, QueryWork>;

// A tile of columns of scores: of blocks, or of positions of a window.
struct ColumnTile {
  bool of_window;
  int64_t first;  // column
};

MEMCHECK_INLINE ColumnTile column_tile(const QueryWork&, int64_t tile, int64_t tile_keys) {
  return {false, tile * tile_keys};
}
MEMCHECK_INLINE ColumnTile column_tile(const WindowQueryWork& work, int64_t tile, int64_t tile_keys) {
  if (tile < work.block_tiles) return {false, tile * tile_keys};
  return {true, work.first_position + (tile - work.block_tiles) * tile_keys};
}

// The end of the columns that the last query sees.
MEMCHECK_INLINE int64_t end_of_columns(const QueryWork& work, const ColumnTile&) {
  return work.seen;
}
MEMCHECK_INLINE int64_t end_of_columns(const WindowQueryWork& work, const ColumnTile& tile) {
  return tile.of_window ? work.end_position : work.seen;
}

// The tile after `tile`.
MEMCHECK_INLINE ColumnTile next_tile(const QueryWork&, const ColumnTile& tile, int64_t tile_keys) {
  return {false, tile.first + tile_keys};
}
MEMCHECK_INLINE ColumnTile next_tile(const WindowQueryWork& work, const ColumnTile& tile, int64_t tile_keys) {
  const int64_t next = tile.first + tile_keys;
  if (tile.of_window || next < work.block_tiles * tile_keys) return {tile.of_window, next};
  return {true, work.first_position};
}

template <typename Parameters>
MEMCHECK_INLINE auto query_work(const Parameters& p, int64_t index, int64_t tile_rows, int64_t tile_keys,
                                int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const QueryWork work = query_work(p.shape, index, tile_rows, tile_keys, column_tiles, tile_columns, parts);
  if constexpr (kHasWindow<Parameters>) {
    WindowQueryWork both{work, ceil_div(work.seen, tile_keys), 0, 0};
    if (!work.exists()) return both;
    const int64_t last = smaller(work.row + tile_rows, work.of.rows()) - 1;
    both.first_position = work.of.positions(p.shape, p.window, work.row).begin;
    both.end_position = work.of.positions(p.shape, p.window, last).end;
    const int64_t tiles = both.block_tiles + ceil_div(both.end_position - both.first_position, tile_keys);
    both.begin = part_of(tiles, work.part, parts);
    both.end = part_of(tiles, work.part + 1, parts);
    return both;
  } else {
    return work;
  }
}

// The columns that each row of a tile of queries sees.
template <int kRows, typename Parameters>
struct RowLimits {
  int64_t numbers[kHasWindow<Parameters> ? 3 : 1][kRows];  // the end of blocks; the begin and the end of positions

  // Called by each of the first kRows threads.
  __device__ __forceinline__ void fill(const Parameters& p, const QueryWork& work) {
    const int64_t row = work.row + threadIdx.x;
    const bool exists = row < work.of.rows();
    numbers[0][threadIdx.x] = exists ? work.of.visible(p.shape, row) : 0;
    if constexpr (kHasWindow<Parameters>) {
      const Span seen = exists ? work.of.positions(p.shape, p.window, row) : Span{0, 0};
      numbers[1][threadIdx.x] = seen.begin;
      numbers[2][threadIdx.x] = seen.end;
    }
  }
  __device__ __forceinline__ int64_t begin(const ColumnTile& tile, int row) const {
    if constexpr (kHasWindow<Parameters>) return tile.of_window ? numbers[1][row] : 0;
    return 0;
  }
  __device__ __forceinline__ int64_t end(const ColumnTile& tile, int row) const {
    if constexpr (kHasWindow<Parameters>) return numbers[tile.of_window ? 2 : 0][row];
    return numbers[0][row];
  }
};

// Keys or values up to the last that a query of the tile sees.
template <typename scalar_t, typename Parameters, typename Work>
MEMCHECK_INLINE KeyMatrix<scalar_t> columns_of(const Parameters& p, const Work& work, const ColumnTile& tile,
                                               bool of_values) {
  const int64_t end = end_of_columns(work, tile);
  if constexpr (kHasWindow<Parameters>)
    if (tile.of_window)
      return rows_of<scalar_t>(p.shape, of_values ? p.window.v : p.window.k, work.of, work.of.first_key, end);
  return rows_of<scalar_t>(p.shape, of_values ? p.vc : p.kc, work.of, work.of.first_block, end);
}

// The same parameters, with the positions of the window in the place of blocks. Kernels with a tile of keys take these.
inline CompressedAttentionWindowBackward of_positions(CompressedAttentionWindowBackward p) {
  p.shape.C = p.shape.T - p.window.first;
  p.kc = p.window.k;
  p.vc = p.window.v;
  p.grad_k = p.window.grad_k;
  p.grad_v = p.window.grad_v;
  return p;
}

// The tiles of blocks, or of positions in their place.
template <typename Parameters>
MEMCHECK_INLINE int64_t key_tile_count(const Parameters& p, int64_t size) {
  const int64_t rows = kHasWindow<Parameters> ? size : block_tile(p.shape, size);
  return tile_count(p.shape, block_rows(p.shape), rows);
}

// Which rows see each key of a tile.
template <int kKeys, typename Parameters>
struct KeyLimits {
  int64_t first_row[kKeys];
  int64_t end[kHasWindow<Parameters> ? kKeys : 1];  // of the rows that see a position

  // Called by each of the first kKeys threads.
  __device__ __forceinline__ void fill(const Parameters& p, const KeyHead& of, int64_t key) {
    const int64_t j = key + threadIdx.x;
    if constexpr (kHasWindow<Parameters>) {
      const Span none{of.rows(), of.rows()};
      const Span rows = j < of.blocks ? of.rows_seeing(p.shape, p.window, j) : none;
      first_row[threadIdx.x] = rows.begin;
      end[threadIdx.x] = rows.end;
    } else {
      first_row[threadIdx.x] = of.first_row(p.shape, j);
    }
  }
  // rows: how many there are.
  __device__ __forceinline__ Span rows_seeing(int key, int64_t rows) const {
    if constexpr (kHasWindow<Parameters>) return {first_row[key], smaller(end[key], rows)};
    return {first_row[key], rows};
  }
};

// A tile of blocks, and the tiles of queries that it reads, from the first query that sees any of it.
struct KeyWork {
  KeyHead of;
  int64_t key;     // the first; none of the tile exists if this does not
  int64_t column;  // the first of the gradients
  int64_t part;
  int64_t first_row;   // of the queries
  int64_t begin, end;  // tiles of queries from there on

  MEMCHECK_INLINE bool exists() const { return key < of.blocks; }
};

// Most queries see early keys. Their tiles go first. p: those of of_positions, or without a window.
template <typename Parameters>
MEMCHECK_INLINE KeyWork key_work(const Parameters& p, int64_t index, int64_t tile_keys, int64_t tile_rows,
                                 int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const CompressedAttentionShape& shape = p.shape;
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t tile_size = kHasWindow<Parameters> ? tile_keys : block_tile(shape, tile_keys);
  const TilePlace at = tile_place(shape, index, block_rows(shape), tile_size, false, FirstKey());
  KeyHead of = key_head(shape, at.sequence, at.head);
  const int64_t key = at.tile * tile_keys;
  Span rows;
  if constexpr (kHasWindow<Parameters>) {
    of.first_block = of.first_key;
    of.blocks = of.keys - p.window.first;
    rows = {of.rows_seeing(shape, p.window, key).begin,
            of.rows_seeing(shape, p.window, smaller(key + tile_keys, of.blocks) - 1).end};
  } else {
    rows = {of.first_row(shape, key), of.rows()};
  }
  const int64_t tiles = ceil_div(rows.end - rows.begin, tile_rows);
  return {of, key, column, part, rows.begin, part_of(tiles, part, parts), part_of(tiles, part + 1, parts)};
}

// The positions of a block. Its gradient is divided by their number.
struct BlockPositions {
  int64_t begin, length;
};

MEMCHECK_INLINE BlockPositions positions_of(const CompressedAttentionBackward& p, const KeyHead& of, int64_t j) {
  const int64_t begin = j * p.block_length();
  return {begin, smaller((p.pooled ? of.blocks : of.keys) - begin, p.block_length())};
}

// A gradient of keys or of values.
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> gradient_of(const CompressedAttentionBackward& p, const Strided<4>& x,
                                                const KeyHead& of) {
  return p.pooled ? blocks_of<scalar_t>(p.shape, x, of) : keys_of<scalar_t>(p.shape, x, of);
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

// Adds the sink of a query's head, if there is one, to the query's lse. Returns what y is to be multiplied by.
template <typename acc_t>
__device__ __forceinline__ acc_t add_sink(const CompressedAttentionForward& p, int64_t head, acc_t& lse) {
  if (p.sink == nullptr) return acc_t(1);
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  const acc_t shift = softmax_shift(larger(lse, sink));
  const acc_t weight = softmax_weight<CudaMaths<acc_t>>(lse, shift);
  const acc_t sum = weight + sink_weight<CudaMaths<acc_t>>(sink, shift);
  if (sum == acc_t(0)) return acc_t(1);
  lse = shift + log(sum);
  return weight / sum;
}

// Where the parts of the gradients of kc and vc of a dense batch lie in the plan's scratch: (2,parts,B,Hkv,C,D).
template <typename acc_t>
struct KeyParts {
  acc_t* numbers;
  int64_t count;

  // One part of the gradient of a key head.
  MEMCHECK_INLINE KeyMatrix<acc_t> matrix(const CompressedAttentionShape& shape, const KeyHead& of, bool of_values,
                                          int64_t part) const {
    const int64_t of_head = shape.C * shape.D, of_row = shape.Hkv * of_head;
    acc_t* const first = numbers + ((of_values ? count : 0) + part) * shape.B * of_row;
    return rows_of<acc_t>(shape, {first, {of_row, of_head, shape.D, 1}}, of, 0, shape.C);
  }
};

// For 16-bit types. They return false, and do nothing, if the head is too wide for tensor cores.
template <typename scalar_t, typename Parameters>
bool forward_on_tensor_cores(const Parameters& p, const ForwardParts<float>& parts, cudaStream_t stream);
template <typename scalar_t, typename Parameters>
bool query_gradients_on_tensor_cores(const Parameters& p, cudaStream_t stream);
template <typename scalar_t, typename Parameters>
bool key_gradients_on_tensor_cores(const Parameters& p, const KeyParts<float>& parts, cudaStream_t stream);

}  // namespace compressed_cuda
}  // namespace memcheck
