#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/integer.h"
#include "common/matrix_tile.h"
#include "common/parallel.h"
#include "common/softplus.h"
#include "common/tile_product.h"
#include "compressed_attention/compressed_attention.h"

// Query-stationary (forward, grad_q): a task is one tile of queries, and goes through the blocks that they see. Scores
// lie there with queries along the lanes, 32 at a time, so that maxima and sums over blocks are vertical.
// Key-stationary (grad_k, grad_v): a task is one tile of blocks, and goes through the queries that see them; blocks lie
// along the lanes. A score is one chain of products over D either way, but of the very few queries of decoding.
//
// A query that does not see a block has a weight of 0 in the product of their tiles, and 0 times a NaN or an infinity
// is NaN. So a tile whose result is not finite is formed a second time, with care: a weight of 0 then adds nothing, and
// a block whose keys are -inf throughout has a score of -inf.

namespace memcheck {
namespace {

constexpr int64_t kQueries = 64;  // a tile of queries
constexpr int64_t kBlocks = 64;   // a tile of blocks that queries go through
constexpr int64_t kLanes = kTileColumns;
constexpr int64_t kChunkTiles = 8;  // tiles to a chunk of sums
constexpr int64_t kFewQueries = 4;  // for so few a product with 32 lanes costs more than dot products

// Scratch of a worker, piece by piece; of no memory, only its size.
struct Room {
  char* begin;
  int64_t bytes = 0;

  template <typename acc_t>
  void take(acc_t*& piece, int64_t elements) {
    if (begin != nullptr) piece = reinterpret_cast<acc_t*>(begin + bytes);
    bytes += ceil_div(elements * static_cast<int64_t>(sizeof(acc_t)), 64) * 64;
  }
};

// Sums over tiles in three levels, each from zero: within a tile, the tiles of a chunk, the chunks before. Rounding
// errors of equal terms all have one sign, and so grow with the longest level instead of the sequence.
template <typename acc_t>
struct SumOfTiles {
  acc_t* chunk = nullptr;  // rows x columns
  acc_t* total = nullptr;

  void take(Room& room, int64_t elements) {
    room.take(chunk, elements);
    room.take(total, elements);
  }
};

template <typename acc_t>
struct QueryScratch {
  acc_t* q = nullptr;        // kQueries x D
  acc_t* q_lanes = nullptr;  // D x kLanes for every kLanes queries, as the next
  acc_t* grad_lanes = nullptr;
  acc_t* kc = nullptr;  // kBlocks x D, as the next
  acc_t* vc = nullptr;
  acc_t* scores = nullptr;  // kBlocks x kLanes, as the next
  acc_t* grad_weights = nullptr;
  acc_t* product = nullptr;  // kQueries x D
  SumOfTiles<acc_t> sum;     // kQueries x D

  QueryScratch(Room& room, const CompressedAttentionShape& shape, bool backward) {
    const int64_t columns = padded_columns(shape.D);
    for (acc_t** piece : {&kc, &vc}) room.take(*piece, kBlocks * columns);
    for (acc_t** piece : {backward ? &grad_lanes : &q, &q_lanes, &product}) room.take(*piece, kQueries * columns);
    sum.take(room, kQueries * columns);
    room.take(scores, kBlocks * kLanes);
    if (backward) room.take(grad_weights, kBlocks * kLanes);
  }
};

template <typename acc_t>
struct KeyScratch {
  acc_t* kc_lanes = nullptr;  // D x kLanes, as the next
  acc_t* vc_lanes = nullptr;
  acc_t* q = nullptr;  // kQueries x D, as the next
  acc_t* grad_y = nullptr;
  acc_t* weights = nullptr;  // kQueries x kLanes, as the next
  acc_t* grad_weights = nullptr;
  acc_t* product = nullptr;  // kLanes x D
  SumOfTiles<acc_t> grad_k;  // kLanes x D, as the next
  SumOfTiles<acc_t> grad_v;

  KeyScratch(Room& room, const CompressedAttentionShape& shape) {
    const int64_t columns = padded_columns(shape.D);
    for (acc_t** piece : {&kc_lanes, &vc_lanes, &product}) room.take(*piece, kLanes * columns);
    for (acc_t** piece : {&q, &grad_y}) room.take(*piece, kQueries * columns);
    for (acc_t** piece : {&weights, &grad_weights}) room.take(*piece, kQueries * kLanes);
    grad_k.take(room, kLanes * columns);
    grad_v.take(room, kLanes * columns);
  }
};

template <typename acc_t>
struct PoolScratch {
  acc_t* rows = nullptr;  // kTileRows x D
  acc_t* tile = nullptr;  // D, as the next
  SumOfTiles<acc_t> sum;

  PoolScratch(Room& room, const CompressedAttentionShape& shape) {
    const int64_t columns = padded_columns(shape.D);
    room.take(rows, kTileRows * columns);
    room.take(tile, columns);
    sum.take(room, columns);
  }
};

template <typename Scratch, typename... Options>
int64_t scratch_bytes(const CompressedAttentionShape& shape, Options... options) {
  Room room{nullptr};
  Scratch(room, shape, options...);
  return room.bytes;
}

// The first task, the last, the second, the last but one: neighbours together are of equal cost when causal.
MEMCHECK_INLINE int64_t front_and_back(int64_t index, int64_t count) {
  return index % 2 == 0 ? index / 2 : count - 1 - index / 2;
}

// ---- matrices

template <typename acc_t>
struct Rows {
  const acc_t* data;
  int64_t stride;
};

// Where rows lie as a product takes them, that is where they are read; else they are brought to scratch.
template <typename acc_t>
MEMCHECK_INLINE Rows<acc_t> rows_of(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t columns,
                                    acc_t* scratch) {
  const bool in_place = dtype == (sizeof(acc_t) == 8 ? Dtype::Float64 : Dtype::Float32);
  if (in_place && place.column_stride == 1 && columns % kTileColumns == 0)
    return {static_cast<const acc_t*>(place.data), place.row_stride};
  load_rows(dtype, place, rows, columns, scratch, padded_columns(columns));
  return {scratch, padded_columns(columns)};
}

template <typename acc_t>
MEMCHECK_INLINE void fill_zero(acc_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) to[i + lane] = acc_t(0);
}

// to = to factor[row] + from
template <typename acc_t>
MEMCHECK_INLINE void rescale_and_add(int64_t rows, int64_t columns, const acc_t* factor, const acc_t* __restrict from,
                                     acc_t* __restrict to) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = row * columns; i < (row + 1) * columns; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) to[i + lane] = to[i + lane] * factor[row] + from[i + lane];
}

// to += from
template <typename acc_t>
MEMCHECK_INLINE void add(int64_t count, const acc_t* __restrict from, acc_t* __restrict to) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) to[i + lane] += from[i + lane];
}

// Ends a chunk.
template <typename acc_t>
MEMCHECK_INLINE void add_chunk(int64_t count, const SumOfTiles<acc_t>& sum) {
  add(count, sum.chunk, sum.total);
  fill_zero(sum.chunk, count);
}

template <typename acc_t>
MEMCHECK_INLINE void start_sum(int64_t count, const SumOfTiles<acc_t>& sum) {
  fill_zero(sum.chunk, count);
  fill_zero(sum.total, count);
}

template <typename acc_t>
MEMCHECK_INLINE void scale_all(int64_t count, acc_t factor, acc_t* x) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) x[i + lane] *= factor;
}

// a . b over columns, a multiple of kLanes: lanes first, then a tree over the lanes.
template <typename acc_t>
MEMCHECK_INLINE acc_t dot(const acc_t* a, const acc_t* b, int64_t columns) {
  alignas(64) acc_t lanes[kLanes] = {};
  for (int64_t i = 0; i < columns; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += lanes[lane + 16];
  for (int64_t lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// to (rows, kLanes) = a (rows, D) b (D, kLanes)
template <typename acc_t>
MEMCHECK_INLINE void multiply_rows(int64_t rows, const Rows<acc_t>& a, const acc_t* b, int64_t D, acc_t* to) {
  const TileFactor<acc_t> factor{a.data, a.stride};
  tile_product(TileProduct::Set, rows, kLanes, D, factor, b, kLanes, to, kLanes);
}

// ---- what a weight of 0 is multiplied with

// The columns that pad x are 0.
template <typename acc_t>
MEMCHECK_INLINE bool all_finite(int64_t count, const acc_t* x) {
  alignas(64) acc_t zeros[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) zeros[lane] += x[i + lane] * acc_t(0);
  acc_t zero = acc_t(0);
  for (int64_t lane = 0; lane < kLanes; ++lane) zero += zeros[lane];
  return zero == acc_t(0);
}

// Elements of a key, so far apart. Where all are -inf nobody sees its block.
template <typename acc_t>
MEMCHECK_INLINE bool is_absent(const acc_t* key, int64_t stride, int64_t D) {
  int64_t i = 0;
  while (i < D && key[i * stride] == -std::numeric_limits<acc_t>::infinity()) ++i;
  return i == D && D > 0;
}

// to (M, columns) = weights (M,K) b (K, columns), with care or without. Every element is the same chain either way.
template <typename acc_t>
MEMCHECK_INLINE void multiply_weights(bool careful, int64_t M, int64_t columns, int64_t K,
                                      const TileFactor<acc_t>& weights, const Rows<acc_t>& b, acc_t* __restrict to) {
  if (!careful) return tile_product(TileProduct::Set, M, columns, K, weights, b.data, b.stride, to, columns);
  fill_zero(to, M * columns);
  for (int64_t row = 0; row < M; ++row)
    for (int64_t k = 0; k < K; ++k) {
      const acc_t weight = weights.data[row * weights.row_stride + k * weights.column_stride];
      if (weight == acc_t(0)) continue;
      for (int64_t i = 0; i < columns; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
          to[row * columns + i + lane] += weight * b.data[k * b.stride + i + lane];
    }
}

// ---- pooling

int64_t pool_tasks_of(const CompressedAttentionShape& shape) {
  return 2 * shape.B * shape.Hkv * shape.C;
}

struct PooledBlock {
  Strided<4> from, to;
  int64_t b, head, j;
};

// A task is one block of one head, of keys or of values.
MEMCHECK_INLINE PooledBlock pooled_block(const CompressedAttentionPooling& p, int64_t index) {
  const int64_t rows = p.shape.Hkv * p.shape.C;
  const bool of_keys = index < p.shape.B * rows;
  const int64_t of_one = of_keys ? index : index - p.shape.B * rows;
  return {of_keys ? p.k : p.v, of_keys ? p.kc : p.vc, of_one / rows, of_one % rows / p.shape.C, of_one % p.shape.C};
}

template <typename acc_t>
MEMCHECK_INLINE void pool_block(const CompressedAttentionPooling& p, Dtype dtype, const PooledBlock& block,
                                const PoolScratch<acc_t>& scratch) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t begin = block.j * p.shape.factor;
  const int64_t end = std::min(p.shape.T, begin + p.shape.factor);
  start_sum(columns, scratch.sum);
  int64_t tiles = 0;
  for (int64_t t = begin; t < end; t += kTileRows) {
    const int64_t rows = end - t < kTileRows ? end - t : kTileRows;
    const auto seen = rows_of(dtype, rows_at(dtype, block.from, block.b, block.head, t), rows, D, scratch.rows);
    fill_zero(scratch.tile, columns);
    for (int64_t row = 0; row < rows; ++row) add(columns, seen.data + row * seen.stride, scratch.tile);
    add(columns, scratch.tile, scratch.sum.chunk);
    if (++tiles % kTileRows == 0) add_chunk(columns, scratch.sum);
  }
  add_chunk(columns, scratch.sum);
  for (int64_t i = 0; i < columns; ++i) scratch.sum.total[i] /= static_cast<acc_t>(end - begin);
  store_rows(dtype, rows_at(dtype, block.to, block.b, block.head, block.j), 1, D, scratch.sum.total, columns);
}

template <typename scalar_t>
MEMCHECK_INLINE void pool_tasks_body(const CompressedAttentionPooling& p, Dtype dtype, int64_t begin, int64_t end,
                                     const PoolScratch<scalar_t>& scratch) {
  for (int64_t index = begin; index < end; ++index) pool_block(p, dtype, pooled_block(p, index), scratch);
}

MEMCHECK_PER_CPU_LEVEL(pool_tasks,
                       (const CompressedAttentionPooling& p, Dtype dtype, int64_t begin, int64_t end,
                        const PoolScratch<scalar_t>& scratch),
                       (p, dtype, begin, end, scratch))

// ---- tiles of queries

// Positions from s on of so many heads, one after the other: more than one head only of short sequences.
struct QueryTile {
  int64_t b, key_head, head, heads, s, positions;

  MEMCHECK_INLINE int64_t rows() const { return heads * positions; }
  MEMCHECK_INLINE int64_t position(int64_t row) const { return s + row % positions; }
};

int64_t heads_per_tile(const CompressedAttentionShape& shape) {
  return std::max<int64_t>(1, std::min(shape.group(), kQueries / std::max<int64_t>(1, shape.S)));
}

int64_t query_tasks(const CompressedAttentionShape& shape) {
  if (shape.B == 0 || shape.H == 0) return 0;
  return shape.B * shape.Hkv * ceil_div(shape.group(), heads_per_tile(shape)) * ceil_div(shape.S, kQueries);
}

QueryTile query_tile(const CompressedAttentionShape& shape, int64_t index) {
  const int64_t heads = heads_per_tile(shape);
  const int64_t head_tiles = ceil_div(shape.group(), heads);
  const int64_t position_tiles = ceil_div(shape.S, kQueries);
  const int64_t s = front_and_back(index % position_tiles, position_tiles) * kQueries;
  const int64_t row = index / position_tiles;
  const int64_t in_group = row % head_tiles * heads;
  const int64_t key_head = row / head_tiles % shape.Hkv;
  return {row / head_tiles / shape.Hkv,
          key_head,
          key_head * shape.group() + in_group,
          std::min(heads, shape.group() - in_group),
          s,
          std::min(kQueries, shape.S - s)};
}

template <typename acc_t>
MEMCHECK_INLINE void load_tile(Dtype dtype, const Strided<4>& x, const QueryTile& tile, int64_t D, acc_t* to) {
  const int64_t columns = padded_columns(D);
  for (int64_t head = 0; head < tile.heads; ++head)
    load_rows(dtype, rows_at(dtype, x, tile.b, tile.head + head, tile.s), tile.positions, D,
              to + head * tile.positions * columns, columns);
}

template <typename acc_t>
MEMCHECK_INLINE void store_tile(Dtype dtype, const Strided<4>& x, const QueryTile& tile, int64_t D, const acc_t* from) {
  const int64_t columns = padded_columns(D);
  for (int64_t head = 0; head < tile.heads; ++head)
    store_rows(dtype, rows_at(dtype, x, tile.b, tile.head + head, tile.s), tile.positions, D,
               from + head * tile.positions * columns, columns);
}

// Element `row` of a tile in a (B,H,S) tensor.
MEMCHECK_INLINE int64_t query_index(const CompressedAttentionShape& shape, const QueryTile& tile, int64_t row) {
  return (tile.b * shape.H + tile.head + row / tile.positions) * shape.S + tile.position(row);
}

// to (lane tiles, D, kLanes): queries along the lanes, and 0 where there are none.
template <typename acc_t>
MEMCHECK_INLINE void turn_to_lanes(const acc_t* from, int64_t rows, int64_t columns, acc_t* to) {
  for (int64_t first = 0; first < rows; first += kLanes)
    transpose_rows(from + first * columns, columns, rows - first < kLanes ? rows - first : kLanes, columns,
                   to + first * columns, kLanes);
}

// to (blocks, kLanes) = keys (blocks, D) times rows of queries (rows, D), which also lie along lanes.
template <typename acc_t>
MEMCHECK_INLINE void multiply_lanes(int64_t blocks, const Rows<acc_t>& keys, const acc_t* queries, const acc_t* lanes,
                                    int64_t rows, int64_t D, acc_t* to) {
  if (rows > kFewQueries) return multiply_rows(blocks, keys, lanes, D, to);
  const int64_t columns = padded_columns(D);
  fill_zero(to, blocks * kLanes);
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t row = 0; row < rows; ++row)
      to[j * kLanes + row] = dot(keys.data + j * keys.stride, queries + row * columns, columns);
}

// What a tile of queries sees of a tile of blocks.
template <typename acc_t>
struct Sight {
  int64_t blocks;              // in the tile
  int64_t by_all;              // the first so many are seen by all queries
  acc_t limit[kQueries] = {};  // a query sees the first so many

  MEMCHECK_INLINE Sight(const CompressedAttentionShape& shape, const QueryTile& tile, int64_t j, int64_t count)
      : blocks(count), by_all(count) {
    const int64_t fewest = shape.visible(tile.s) - j;
    if (fewest >= blocks) return;
    by_all = fewest > 0 ? fewest : 0;
    for (int64_t row = 0; row < tile.rows(); ++row) {
      const int64_t seen = shape.visible(tile.position(row)) - j;
      limit[row] = static_cast<acc_t>(seen < 0 ? 0 : seen < blocks ? seen : blocks);
    }
  }
};

// scores *= scale, and -inf where a query does not see the block.
template <typename acc_t>
MEMCHECK_INLINE void scale_and_hide(const Sight<acc_t>& sight, const acc_t* limit, acc_t scale, acc_t* scores) {
  scale_all(sight.by_all * kLanes, scale, scores);
  for (int64_t j = sight.by_all; j < sight.blocks; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      acc_t& score = scores[j * kLanes + lane];
      score = static_cast<acc_t>(j) < limit[lane] ? score * scale : -std::numeric_limits<acc_t>::infinity();
    }
}

// Scores of absent blocks become -inf.
template <typename acc_t>
MEMCHECK_INLINE void hide_absent(int64_t blocks, const Rows<acc_t>& kc, int64_t D, acc_t* scores) {
  for (int64_t j = 0; j < blocks; ++j) {
    if (!is_absent(kc.data + j * kc.stride, 1, D)) continue;
    for (int64_t lane = 0; lane < kLanes; ++lane) scores[j * kLanes + lane] = -std::numeric_limits<acc_t>::infinity();
  }
}

// What is subtracted before the exponential: nothing where that would be -inf, as exp(-inf - -inf) is no number.
template <typename acc_t>
MEMCHECK_INLINE acc_t shift_of(acc_t max) {
  return max == -std::numeric_limits<acc_t>::infinity() ? acc_t(0) : max;
}

// ---- forward

// The running maximum of scores, and the sums of exponentials that are relative to it.
template <typename acc_t>
struct Softmax {
  alignas(64) acc_t max[kQueries];
  alignas(64) acc_t sum[kQueries] = {};      // of this chunk
  alignas(64) acc_t before[kQueries] = {};   // of the chunks before,
  alignas(64) acc_t before_max[kQueries];    // relative to the maximum as it was
  alignas(64) acc_t rescale[kQueries] = {};  // sums that were relative to the last maximum, to this one

  MEMCHECK_INLINE Softmax() {
    for (int64_t i = 0; i < kQueries; ++i) max[i] = before_max[i] = -std::numeric_limits<acc_t>::infinity();
  }

  // scores (blocks, kLanes) of the lanes from `first` on become exponentials.
  MEMCHECK_INLINE void add(int64_t first, int64_t blocks, acc_t* __restrict scores) {
    alignas(64) acc_t highest[kLanes];
    alignas(64) acc_t shift[kLanes];
    alignas(64) acc_t tile_sum[kLanes] = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) highest[lane] = max[first + lane];
    for (int64_t j = 0; j < blocks; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const acc_t score = scores[j * kLanes + lane];
        highest[lane] = score > highest[lane] ? score : highest[lane];
      }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      shift[lane] = shift_of(highest[lane]);
      rescale[first + lane] = exp_minus_abs(max[first + lane] - shift[lane]);
      max[first + lane] = highest[lane];
    }
    for (int64_t j = 0; j < blocks; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const acc_t weight = exp_minus_abs(scores[j * kLanes + lane] - shift[lane]);
        scores[j * kLanes + lane] = weight;
        tile_sum[lane] += weight;
      }
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum[first + lane] = sum[first + lane] * rescale[first + lane] + tile_sum[lane];
  }

  MEMCHECK_INLINE void end_chunk() {
    for (int64_t i = 0; i < kQueries; ++i) {
      rescale[i] = exp_minus_abs(before_max[i] - shift_of(max[i]));
      before[i] = before[i] * rescale[i] + sum[i];
      before_max[i] = max[i];
      sum[i] = acc_t(0);
    }
  }
};

template <typename acc_t>
MEMCHECK_INLINE void end_chunk(int64_t rows, int64_t columns, Softmax<acc_t>& softmax, const SumOfTiles<acc_t>& sum) {
  softmax.end_chunk();
  rescale_and_add(rows, columns, softmax.rescale, sum.chunk, sum.total);
  fill_zero(sum.chunk, rows * columns);
}

// y = sum of weighted values / sum of weights, and 0 where nothing was seen, or only scores of -inf.
template <typename acc_t>
MEMCHECK_INLINE void finish_queries(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                                    const Softmax<acc_t>& softmax, acc_t* y) {
  const int64_t columns = padded_columns(p.shape.D);
  for (int64_t row = 0; row < tile.rows(); ++row) {
    const bool sees = softmax.before[row] != acc_t(0);
    const acc_t divisor = sees ? softmax.before[row] : acc_t(1);
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) y[i] /= divisor;
    if (p.lse == nullptr) continue;
    static_cast<acc_t*>(p.lse)[query_index(p.shape, tile, row)] =
        sees ? softmax.max[row] + std::log(divisor) : -std::numeric_limits<acc_t>::infinity();
  }
  store_tile(dtype, p.y, tile, p.shape.D, y);
}

// The sum of weighted values of a tile of queries, which lie in scratch.
template <typename acc_t>
MEMCHECK_INLINE void attend(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                            const QueryScratch<acc_t>& scratch, bool careful, Softmax<acc_t>& softmax) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t rows = tile.rows();
  const int64_t end = p.shape.visible(tile.s + tile.positions - 1);
  start_sum(rows * columns, scratch.sum);
  int64_t tiles = 0;
  for (int64_t j = 0; j < end; j += kBlocks) {
    const Sight<acc_t> sight(p.shape, tile, j, end - j < kBlocks ? end - j : kBlocks);
    const auto kc = rows_of(dtype, rows_at(dtype, p.kc, tile.b, tile.key_head, j), sight.blocks, D, scratch.kc);
    const auto vc = rows_of(dtype, rows_at(dtype, p.vc, tile.b, tile.key_head, j), sight.blocks, D, scratch.vc);
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      multiply_lanes(sight.blocks, kc, scratch.q + first * columns, scratch.q_lanes + first * columns, count, D,
                     scratch.scores);
      scale_and_hide(sight, sight.limit + first, static_cast<acc_t>(p.scale), scratch.scores);
      if (careful) hide_absent(sight.blocks, kc, D, scratch.scores);
      softmax.add(first, sight.blocks, scratch.scores);
      const TileFactor<acc_t> weights{scratch.scores, 1, kLanes};
      multiply_weights(careful, count, columns, sight.blocks, weights, vc, scratch.product + first * columns);
    }
    rescale_and_add(rows, columns, softmax.rescale, scratch.product, scratch.sum.chunk);
    if (++tiles % kChunkTiles == 0) end_chunk(rows, columns, softmax, scratch.sum);
  }
  end_chunk(rows, columns, softmax, scratch.sum);
}

template <typename acc_t>
MEMCHECK_INLINE void forward_task(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                                  const QueryScratch<acc_t>& scratch) {
  const int64_t columns = padded_columns(p.shape.D);
  load_tile(dtype, p.q, tile, p.shape.D, scratch.q);
  turn_to_lanes(scratch.q, tile.rows(), columns, scratch.q_lanes);
  for (const bool careful : {false, true}) {
    Softmax<acc_t> softmax;
    attend(p, dtype, tile, scratch, careful, softmax);
    if (!careful && !all_finite(tile.rows() * columns, scratch.sum.total)) continue;
    return finish_queries(p, dtype, tile, softmax, scratch.sum.total);
  }
}

template <typename scalar_t>
MEMCHECK_INLINE void forward_tasks_body(const CompressedAttentionForward& p, Dtype dtype, int64_t begin, int64_t end,
                                        const QueryScratch<scalar_t>& scratch) {
  for (int64_t index = begin; index < end; ++index) forward_task(p, dtype, query_tile(p.shape, index), scratch);
}

MEMCHECK_PER_CPU_LEVEL(forward_tasks,
                       (const CompressedAttentionForward& p, Dtype dtype, int64_t begin, int64_t end,
                        const QueryScratch<scalar_t>& scratch),
                       (p, dtype, begin, end, scratch))

// ---- backward, query-stationary

// y = sum_j p_j vc_j with p = softmax(scale q . kc), so with dp_j = grad_y . vc_j and delta = grad_y . y = sum_j p_j
// dp_j the gradient of score j is ds_j = p_j (dp_j - delta), and grad_q = scale sum_j ds_j kc_j.

// Brings q and grad_y to their lanes.
template <typename acc_t>
MEMCHECK_INLINE void load_queries(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                  const QueryScratch<acc_t>& scratch) {
  const int64_t columns = padded_columns(p.shape.D);
  load_tile(dtype, p.q, tile, p.shape.D, scratch.product);
  turn_to_lanes(scratch.product, tile.rows(), columns, scratch.q_lanes);
  load_tile(dtype, p.grad_y, tile, p.shape.D, scratch.product);
  turn_to_lanes(scratch.product, tile.rows(), columns, scratch.grad_lanes);
}

// A tile of blocks from j on, as a tile of queries sees it.
template <typename acc_t>
struct SeenBlocks {
  Sight<acc_t> sight;
  Rows<acc_t> kc, vc;

  MEMCHECK_INLINE SeenBlocks(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile, int64_t j,
                             int64_t end, const QueryScratch<acc_t>& scratch)
      : sight(p.shape, tile, j, end - j < kBlocks ? end - j : kBlocks),
        kc(rows_of(dtype, rows_at(dtype, p.kc, tile.b, tile.key_head, j), sight.blocks, p.shape.D, scratch.kc)),
        vc(rows_of(dtype, rows_at(dtype, p.vc, tile.b, tile.key_head, j), sight.blocks, p.shape.D, scratch.vc)) {}

  // Scores of the lanes from `first` on, and the gradients of their weights.
  MEMCHECK_INLINE void score(const CompressedAttentionBackward& p, int64_t first, const QueryScratch<acc_t>& scratch,
                             bool careful) const {
    const int64_t skipped = first * padded_columns(p.shape.D);
    multiply_rows(sight.blocks, kc, scratch.q_lanes + skipped, p.shape.D, scratch.scores);
    multiply_rows(sight.blocks, vc, scratch.grad_lanes + skipped, p.shape.D, scratch.grad_weights);
    scale_and_hide(sight, sight.limit + first, static_cast<acc_t>(p.scale), scratch.scores);
    if (careful) hide_absent(sight.blocks, kc, p.shape.D, scratch.scores);
  }
};

// weight x, and 0 of a weight of 0: of a block that is not seen x may be any number, or none.
template <typename acc_t>
MEMCHECK_INLINE acc_t weighted(acc_t weight, acc_t x) {
  return weight == acc_t(0) ? acc_t(0) : weight * x;
}

// delta = grad_y . y, one chain of products over D, as the gradient of a weight is: where a query sees one block these
// are the same numbers, and the gradient of the score is 0 as it should.
template <typename acc_t>
MEMCHECK_INLINE void delta_from_y(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                  const QueryScratch<acc_t>& scratch, acc_t* delta) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  acc_t* y_lanes = scratch.sum.total;
  load_tile(dtype, p.y, tile, D, scratch.product);
  turn_to_lanes(scratch.product, tile.rows(), columns, y_lanes);
  for (int64_t first = 0; first < tile.rows(); first += kLanes)
    for (int64_t i = first * columns; i < first * columns + D * kLanes; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        delta[first + lane] += y_lanes[i + lane] * scratch.grad_lanes[i + lane];
}

template <typename acc_t>
MEMCHECK_INLINE void add_weighted(int64_t blocks, const acc_t* shift, const acc_t* scores, const acc_t* grad_weights,
                                  acc_t* delta) {
  alignas(64) acc_t sum[kLanes] = {};
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum[lane] += weighted(exp_minus_abs(scores[j * kLanes + lane] - shift[lane]), grad_weights[j * kLanes + lane]);
  for (int64_t lane = 0; lane < kLanes; ++lane) delta[lane] += sum[lane];
}

// delta = sum_j p_j dp_j, where y was rounded to 16 bits: its error would be that of every score's gradient at once.
template <typename acc_t>
MEMCHECK_INLINE void delta_from_weights(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                        const QueryScratch<acc_t>& scratch, bool careful, const acc_t* shift,
                                        acc_t* delta) {
  const int64_t end = p.shape.visible(tile.s + tile.positions - 1);
  for (int64_t j = 0; j < end; j += kBlocks) {
    const SeenBlocks<acc_t> seen(p, dtype, tile, j, end, scratch);
    for (int64_t first = 0; first < tile.rows(); first += kLanes) {
      seen.score(p, first, scratch, careful);
      add_weighted(seen.sight.blocks, shift + first, scratch.scores, scratch.grad_weights, delta + first);
    }
  }
}

template <typename acc_t>
struct QueryGradients {
  alignas(64) acc_t shift[kQueries] = {};  // lse, as it is subtracted
  alignas(64) acc_t delta[kQueries] = {};

  MEMCHECK_INLINE QueryGradients(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                 const QueryScratch<acc_t>& scratch, bool careful) {
    for (int64_t row = 0; row < tile.rows(); ++row)
      shift[row] = shift_of(static_cast<const acc_t*>(p.lse)[query_index(p.shape, tile, row)]);
    if (p.y) {
      delta_from_y(p, dtype, tile, scratch, delta);
    } else {
      delta_from_weights(p, dtype, tile, scratch, careful, shift, delta);
    }
    if (p.delta == nullptr) return;
    for (int64_t row = 0; row < tile.rows(); ++row)
      static_cast<acc_t*>(p.delta)[query_index(p.shape, tile, row)] = delta[row];
  }

  MEMCHECK_INLINE bool finite(int64_t rows) const {
    acc_t zero = acc_t(0);
    for (int64_t row = 0; row < rows; ++row) zero += delta[row] * acc_t(0);
    return zero == acc_t(0);
  }
};

// Scores (blocks, kLanes) become their gradients.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_scores(int64_t blocks, const acc_t* shift, const acc_t* delta,
                                          const acc_t* __restrict grad_weights, acc_t* __restrict scores) {
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = j * kLanes + lane;
      scores[i] = weighted(exp_minus_abs(scores[i] - shift[lane]), grad_weights[i] - delta[lane]);
    }
}

// Left in scratch, up to the scale.
template <typename acc_t>
MEMCHECK_INLINE void query_gradient(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                    const QueryScratch<acc_t>& scratch, const QueryGradients<acc_t>& of, bool careful) {
  const int64_t columns = padded_columns(p.shape.D);
  const int64_t rows = tile.rows();
  const int64_t end = p.shape.visible(tile.s + tile.positions - 1);
  start_sum(rows * columns, scratch.sum);
  int64_t tiles = 0;
  for (int64_t j = 0; j < end; j += kBlocks) {
    const SeenBlocks<acc_t> seen(p, dtype, tile, j, end, scratch);
    const int64_t blocks = seen.sight.blocks;
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      seen.score(p, first, scratch, careful);
      differentiate_scores(blocks, of.shift + first, of.delta + first, scratch.grad_weights, scratch.scores);
      const TileFactor<acc_t> grad_scores{scratch.scores, 1, kLanes};
      multiply_weights(careful, count, columns, blocks, grad_scores, seen.kc, scratch.product + first * columns);
    }
    add(rows * columns, scratch.product, scratch.sum.chunk);
    if (++tiles % kChunkTiles == 0) add_chunk(rows * columns, scratch.sum);
  }
  add_chunk(rows * columns, scratch.sum);
}

template <typename acc_t>
MEMCHECK_INLINE void query_gradient_task(const CompressedAttentionBackward& p, Dtype dtype, const QueryTile& tile,
                                         const QueryScratch<acc_t>& scratch) {
  const int64_t size = tile.rows() * padded_columns(p.shape.D);
  load_queries(p, dtype, tile, scratch);
  for (const bool careful : {false, true}) {
    const QueryGradients<acc_t> of(p, dtype, tile, scratch, careful);
    if (!careful && !of.finite(tile.rows())) continue;
    if (!p.grad_q) return;
    query_gradient(p, dtype, tile, scratch, of, careful);
    if (!careful && !all_finite(size, scratch.sum.total)) continue;
    scale_all(size, static_cast<acc_t>(p.scale), scratch.sum.total);
    return store_tile(dtype, p.grad_q, tile, p.shape.D, scratch.sum.total);
  }
}

template <typename scalar_t>
MEMCHECK_INLINE void query_gradient_tasks_body(const CompressedAttentionBackward& p, Dtype dtype, int64_t begin,
                                               int64_t end, const QueryScratch<scalar_t>& scratch) {
  for (int64_t index = begin; index < end; ++index) query_gradient_task(p, dtype, query_tile(p.shape, index), scratch);
}

MEMCHECK_PER_CPU_LEVEL(query_gradient_tasks,
                       (const CompressedAttentionBackward& p, Dtype dtype, int64_t begin, int64_t end,
                        const QueryScratch<scalar_t>& scratch),
                       (p, dtype, begin, end, scratch))

// ---- backward, key-stationary: grad_vc_j = sum_i p_ij grad_y_i and grad_kc_j = scale sum_i ds_ij q_i, over the group

struct KeyTile {
  int64_t b, key_head, j, blocks;
};

int64_t key_tasks(const CompressedAttentionShape& shape) {
  return shape.B * shape.Hkv * ceil_div(shape.C, kLanes);
}

KeyTile key_tile(const CompressedAttentionShape& shape, int64_t index) {
  const int64_t tiles = ceil_div(shape.C, kLanes);
  const int64_t j = front_and_back(index % tiles, tiles) * kLanes;
  return {index / tiles / shape.Hkv, index / tiles % shape.Hkv, j, std::min(kLanes, shape.C - j)};
}

// D x kLanes
template <typename acc_t>
MEMCHECK_INLINE void load_lanes(Dtype dtype, const Strided<4>& x, const KeyTile& tile, int64_t D, acc_t* rows,
                                acc_t* to) {
  const int64_t columns = padded_columns(D);
  load_rows(dtype, rows_at(dtype, x, tile.b, tile.key_head, tile.j), tile.blocks, D, rows, columns);
  transpose_rows(rows, columns, tile.blocks, columns, to, kLanes);
}

// Queries from s on of one head.
struct QueryRows {
  int64_t head, s, count;
};

// Scores (count, kLanes) become the weights of softmax; a query sees the first so many lanes.
template <typename acc_t>
MEMCHECK_INLINE void weights_of_scores(const CompressedAttentionBackward& p, const KeyTile& tile,
                                       const QueryRows& queries, const acc_t* lse, acc_t* __restrict scores) {
  // Apart from the subtraction: fused with it, a score would be rounded otherwise than in its lse.
  scale_all(queries.count * kLanes, static_cast<acc_t>(p.scale), scores);
  const bool all_seen = p.shape.visible(queries.s) >= tile.j + tile.blocks;
  for (int64_t row = 0; row < queries.count; ++row) {
    acc_t* line = scores + row * kLanes;
    const acc_t shift = shift_of(lse[row]);
    for (int64_t lane = 0; lane < kLanes; ++lane) line[lane] = exp_minus_abs(line[lane] - shift);
    if (all_seen) continue;
    const int64_t seen = p.shape.visible(queries.s + row) - tile.j;
    for (int64_t lane = seen < 0 ? 0 : seen; lane < kLanes; ++lane) line[lane] = acc_t(0);
  }
}

// Weights (count, kLanes) of absent blocks become 0.
template <typename acc_t>
MEMCHECK_INLINE void drop_absent(int64_t count, const KeyTile& tile, int64_t D, const acc_t* kc_lanes, acc_t* weights) {
  for (int64_t lane = 0; lane < tile.blocks; ++lane) {
    if (!is_absent(kc_lanes + lane, kLanes, D)) continue;
    for (int64_t row = 0; row < count; ++row) weights[row * kLanes + lane] = acc_t(0);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void differentiate_weights(int64_t rows, const acc_t* delta, const acc_t* __restrict weights,
                                           acc_t* __restrict grad_weights) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = row * kLanes; i < (row + 1) * kLanes; ++i)
      grad_weights[i] = weighted(weights[i], grad_weights[i] - delta[row]);
}

// sum += a^T b: a (rows, kLanes) with blocks along the lanes, b (rows, D).
template <typename acc_t>
MEMCHECK_INLINE void add_product(bool careful, int64_t rows, const KeyTile& tile, int64_t columns, const acc_t* a,
                                 const Rows<acc_t>& b, acc_t* product, const SumOfTiles<acc_t>& sum) {
  const TileFactor<acc_t> turned{a, 1, kLanes};
  multiply_weights(careful, tile.blocks, columns, rows, turned, b, product);
  add(tile.blocks * columns, product, sum.chunk);
}

// What some queries add to the gradients of a tile of blocks.
template <typename acc_t>
MEMCHECK_INLINE void add_queries(const CompressedAttentionBackward& p, Dtype dtype, const KeyTile& tile,
                                 const QueryRows& queries, const KeyScratch<acc_t>& scratch, bool careful) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t rows = queries.count;
  const int64_t index = (tile.b * p.shape.H + queries.head) * p.shape.S + queries.s;
  const auto q = rows_of(dtype, rows_at(dtype, p.q, tile.b, queries.head, queries.s), rows, D, scratch.q);
  const auto grad_y =
      rows_of(dtype, rows_at(dtype, p.grad_y, tile.b, queries.head, queries.s), rows, D, scratch.grad_y);
  multiply_rows(rows, q, scratch.kc_lanes, D, scratch.weights);
  weights_of_scores(p, tile, queries, static_cast<const acc_t*>(p.lse) + index, scratch.weights);
  if (careful) drop_absent(rows, tile, D, scratch.kc_lanes, scratch.weights);
  if (p.grad_v) add_product(careful, rows, tile, columns, scratch.weights, grad_y, scratch.product, scratch.grad_v);
  if (!p.grad_k) return;
  multiply_rows(rows, grad_y, scratch.vc_lanes, D, scratch.grad_weights);
  differentiate_weights(rows, static_cast<const acc_t*>(p.delta) + index, scratch.weights, scratch.grad_weights);
  add_product(careful, rows, tile, columns, scratch.grad_weights, q, scratch.product, scratch.grad_k);
}

// Every position of a block gets its share of the block's gradient.
template <typename acc_t>
MEMCHECK_INLINE void spread(const CompressedAttentionBackward& p, Dtype dtype, const KeyTile& tile,
                            const Strided<4>& to, acc_t* gradients) {
  const int64_t columns = padded_columns(p.shape.D);
  for (int64_t i = 0; i < tile.blocks; ++i) {
    const int64_t t = (tile.j + i) * p.block_length;
    const int64_t left = p.gradient_length - t;
    const int64_t length = left < p.block_length ? left : p.block_length;
    acc_t* row = gradients + i * columns;
    for (int64_t column = 0; column < columns; ++column) row[column] /= static_cast<acc_t>(length);
    store_rows(dtype, rows_at(dtype, to, tile.b, tile.key_head, t), length, p.shape.D, row, 0);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void end_key_chunk(int64_t size, const KeyScratch<acc_t>& scratch) {
  add_chunk(size, scratch.grad_k);
  add_chunk(size, scratch.grad_v);
}

// Left in scratch, up to the scale.
template <typename acc_t>
MEMCHECK_INLINE void key_gradients(const CompressedAttentionBackward& p, Dtype dtype, const KeyTile& tile,
                                   const KeyScratch<acc_t>& scratch, bool careful) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  start_sum(size, scratch.grad_k);
  start_sum(size, scratch.grad_v);
  const int64_t begin = p.shape.first_query(tile.j);
  int64_t tiles = 0;
  for (int64_t i = 0; i < p.shape.group(); ++i) {
    for (int64_t s = begin; s < p.shape.S; s += kQueries) {
      const int64_t count = p.shape.S - s < kQueries ? p.shape.S - s : kQueries;
      add_queries(p, dtype, tile, {tile.key_head * p.shape.group() + i, s, count}, scratch, careful);
      if (++tiles % kChunkTiles == 0) end_key_chunk(size, scratch);
    }
  }
  end_key_chunk(size, scratch);
}

template <typename acc_t>
MEMCHECK_INLINE void key_gradient_task(const CompressedAttentionBackward& p, Dtype dtype, const KeyTile& tile,
                                       const KeyScratch<acc_t>& scratch) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  load_lanes(dtype, p.kc, tile, p.shape.D, scratch.product, scratch.kc_lanes);
  if (p.grad_k) load_lanes(dtype, p.vc, tile, p.shape.D, scratch.product, scratch.vc_lanes);
  for (const bool careful : {false, true}) {
    key_gradients(p, dtype, tile, scratch, careful);
    if (all_finite(size, scratch.grad_k.total) && all_finite(size, scratch.grad_v.total)) break;
  }
  if (p.grad_k) {
    scale_all(size, static_cast<acc_t>(p.scale), scratch.grad_k.total);
    spread(p, dtype, tile, p.grad_k, scratch.grad_k.total);
  }
  if (p.grad_v) spread(p, dtype, tile, p.grad_v, scratch.grad_v.total);
}

template <typename scalar_t>
MEMCHECK_INLINE void key_gradient_tasks_body(const CompressedAttentionBackward& p, Dtype dtype, int64_t begin,
                                             int64_t end, const KeyScratch<scalar_t>& scratch) {
  for (int64_t index = begin; index < end; ++index) key_gradient_task(p, dtype, key_tile(p.shape, index), scratch);
}

MEMCHECK_PER_CPU_LEVEL(key_gradient_tasks,
                       (const CompressedAttentionBackward& p, Dtype dtype, int64_t begin, int64_t end,
                        const KeyScratch<scalar_t>& scratch),
                       (p, dtype, begin, end, scratch))

template <typename acc_t>
CompressedAttentionPlan plan_in(const CompressedAttentionShape& shape, int64_t threads) {
  const int64_t query_workers = parallel_workers(query_tasks(shape), threads);
  const int64_t key_workers = parallel_workers(key_tasks(shape), threads);
  const int64_t pool_workers = parallel_workers(pool_tasks_of(shape), threads);
  const int64_t forward_bytes = query_workers * scratch_bytes<QueryScratch<acc_t>>(shape, false);
  return {std::max(forward_bytes, pool_workers * scratch_bytes<PoolScratch<acc_t>>(shape)), forward_bytes,
          shape.B * shape.H * shape.S * static_cast<int64_t>(sizeof(acc_t)),
          std::max(query_workers * scratch_bytes<QueryScratch<acc_t>>(shape, true),
                   key_workers * scratch_bytes<KeyScratch<acc_t>>(shape))};
}

// run(begin, end, scratch) on every worker.
template <typename Scratch, typename Run, typename... Options>
void run_with_scratch(int64_t tasks, void* memory, const CompressedAttentionShape& shape, const Run& run,
                      Options... options) {
  const int64_t bytes = scratch_bytes<Scratch>(shape, options...);
  parallel_tasks(tasks, [&](int64_t begin, int64_t end, int worker) {
    Room room{static_cast<char*>(memory) + worker * bytes};
    run(begin, end, Scratch(room, shape, options...));
  });
}

}  // namespace

CompressedAttentionPlan compressed_attention_plan_cpu(const CompressedAttentionShape& shape, Dtype dtype,
                                                      int64_t threads) {
  return with_acc_type(dtype, [&](auto acc) { return plan_in<decltype(acc)>(shape, threads); });
}

void compressed_attention_pool_cpu(const CompressedAttentionPooling& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<PoolScratch<acc_t>>(
        pool_tasks_of(p.shape), p.scratch, p.shape,
        [&](int64_t begin, int64_t end, const auto& scratch) { pool_tasks<acc_t>(p, dtype, begin, end, scratch); });
  });
}

void compressed_attention_forward_cpu(const CompressedAttentionForward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<QueryScratch<acc_t>>(
        query_tasks(p.shape), p.scratch, p.shape,
        [&](int64_t begin, int64_t end, const auto& scratch) { forward_tasks<acc_t>(p, dtype, begin, end, scratch); },
        false);
  });
}

void compressed_attention_backward_cpu(const CompressedAttentionBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    if (p.grad_q || p.grad_k)
      run_with_scratch<QueryScratch<acc_t>>(
          query_tasks(p.shape), p.scratch, p.shape,
          [&](int64_t begin, int64_t end, const auto& scratch) {
            query_gradient_tasks<acc_t>(p, dtype, begin, end, scratch);
          },
          true);
    if (p.grad_k || p.grad_v)
      run_with_scratch<KeyScratch<acc_t>>(key_tasks(p.shape), p.scratch, p.shape,
                                          [&](int64_t begin, int64_t end, const auto& scratch) {
                                            key_gradient_tasks<acc_t>(p, dtype, begin, end, scratch);
                                          });
  });
}

}  // namespace memcheck
