#pragma once

#include <algorithm>
#include <cstdint>

#include "common/arena.h"
#include "common/formulas.h"
#include "common/half.h"
#include "common/matrix_tile.h"
#include "common/parallel.h"
#include "common/row_product.h"
#include "common/tile_product.h"
#include "common/types.h"
#include "compressed_attention/compressed_attention.h"

// What pooling, forward and backward share on the CPU: matrices, sums and products in scratch, and tasks.
//
// Query-stationary (forward, grad_q): a task is one tile of queries, and goes through the blocks that they see. Scores
// have 32 queries along the lanes, so that maxima and sums over blocks are vertical. Very few queries, as of decoding,
// would not fill the lanes: blocks lie along them instead. Key-stationary (grad_k, grad_v): a task is one tile of
// blocks, and goes through the queries that see them. Blocks lie along the lanes.
//
// A score is the same chain of products over D in every form, and a sum over blocks has the same order, so that the
// bits of a query do not depend on how many queries a call has.
//
// A query that does not see a block has a weight of 0 in the product of their tiles, and 0 times a NaN or an infinity
// is NaN: within a sequence these may reach every query of a tile.

namespace memcheck::compressed_cpu {

constexpr int64_t kQueries = 64;  // a tile of queries
constexpr int64_t kBlocks = 64;   // a tile of blocks that queries go through
constexpr int64_t kLanes = kTileColumns;
constexpr int64_t kChunkTiles = 8;  // tiles to a chunk of sums

// Tasks in the order first, last, second, last but one, ...: when causal, two neighbours together have equal cost.
MEMCHECK_INLINE int64_t front_and_back(int64_t index, int64_t count) {
  return index % 2 == 0 ? index / 2 : count - 1 - index / 2;
}

// Of the threads there are, those worth waking.
inline int64_t useful_threads(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                              int64_t threads) {
  const int64_t seen = window.size > 0 ? std::min(window.size + shape.factor, shape.T - window.first) : 0;
  const int64_t scores = shape.B * shape.H * shape.S * (shape.C * (shape.causal ? 1 : 2) + 2 * seen);
  return memcheck::useful_threads((scores + shape.B * shape.Hkv * shape.T) * shape.D, threads);
}

inline CompressedAttentionWindow window_of(const CompressedAttentionPooling&) {
  return {};
}
inline CompressedAttentionWindow window_of(const CompressedAttentionExtension&) {
  return {};
}
template <typename Parameters>
const CompressedAttentionWindow& window_of(const Parameters& p) {
  return p.window;
}

// Calls run(begin, end, scratch) on every worker, each with its own part of the memory.
template <typename Scratch, typename Parameters, typename Run>
void run_with_scratch(int64_t tasks, const Parameters& p, const Run& run) {
  const int64_t bytes = scratch_bytes<Scratch>(p.shape);
  parallel_tasks(tasks, useful_threads(p.shape, window_of(p), p.threads), [&](int64_t begin, int64_t end, int worker) {
    Arena arena = arena_of(p.scratch, bytes, worker);
    run(begin, end, Scratch(arena, p.shape));
  });
}

inline Dtype acc_dtype(Dtype dtype) {
  return dtype == Dtype::Float64 ? dtype : Dtype::Float32;
}

// ---- sums

template <typename acc_t>
MEMCHECK_INLINE void fill_zero(acc_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) to[i + lane] = acc_t(0);
}

// to += from
template <typename acc_t>
MEMCHECK_INLINE void add(int64_t count, const acc_t* __restrict from, acc_t* __restrict to) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) to[i + lane] += from[i + lane];
}

template <typename acc_t>
MEMCHECK_INLINE void scale_all(int64_t count, acc_t factor, acc_t* x) {
  for (int64_t i = 0; i < count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) x[i + lane] *= factor;
}

// A sum over tiles in three levels, each from zero: within a tile, the tiles of a chunk, the chunks before. Rounding
// errors of equal terms all have one sign, so they grow with the longest level instead of the sequence.
template <typename acc_t>
struct SumOfTiles {
  acc_t* chunk;  // (rows,columns), as the next
  acc_t* total;

  SumOfTiles(Arena& arena, int64_t elements) : chunk(arena.take<acc_t>(elements)), total(arena.take<acc_t>(elements)) {}

  MEMCHECK_INLINE void start(int64_t count) const {
    fill_zero(chunk, count);
    fill_zero(total, count);
  }
  MEMCHECK_INLINE void end_chunk(int64_t count) const {
    add(count, chunk, total);
    fill_zero(chunk, count);
  }
};

// ---- matrices and products

// Rows that a product reads: in scratch, or in memory.
template <typename acc_t>
struct MatrixView {
  const acc_t* data;
  int64_t stride;

  MEMCHECK_INLINE const acc_t* row(int64_t i) const { return data + i * stride; }
};

// Rows in memory that lie as a product needs them are read there. Others are loaded to scratch.
template <typename acc_t>
MEMCHECK_INLINE MatrixView<acc_t> view_rows(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t columns,
                                            acc_t* scratch) {
  if (lies_as_scratch<acc_t>(dtype, place, columns)) return {static_cast<const acc_t*>(place.data), place.row_stride};
  load_rows(dtype, place, rows, columns, scratch, padded_columns(columns));
  return {scratch, padded_columns(columns)};
}

// Rows of a matrix in memory as a factor of products, in the accumulation type.
template <typename acc_t>
struct Rows {
  int64_t count, D;
  MatrixView<acc_t> view;

  MEMCHECK_INLINE Rows(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t width, acc_t* scratch)
      : count(rows), D(width), view(view_rows(dtype, place, rows, width, scratch)) {}

  // to (count,kLanes) = rows b, for b (D,kLanes) of other rows along the lanes.
  MEMCHECK_INLINE void multiply(const acc_t* b, acc_t* to) const {
    tile_product<acc_t>(TileProduct::Set, count, kLanes, {D, {view.data, view.stride}, b, kLanes}, {to, kLanes});
  }

  // to (M,kBlocks) = a b^T, for other rows a (M,padded_columns(D)) and these rows b, which are put along the lanes of a
  // scratch (padded_columns(D),kLanes). Every element is the same chain as in `multiply`.
  MEMCHECK_INLINE void multiply_few(int64_t M, const acc_t* a, acc_t* lanes, acc_t* to) const {
    row_product<acc_t>(M, count, D, {a, padded_columns(D)}, {view.data, view.stride}, lanes, to, kBlocks);
  }

  // to (M,padded_columns(D)) = a rows for weights a (M,count).
  MEMCHECK_INLINE void weigh(int64_t M, const TileFactor<acc_t>& a, acc_t* to) const {
    const int64_t columns = padded_columns(D);
    tile_product<acc_t>(TileProduct::Set, M, columns, {count, a, view.data, view.stride}, {to, columns});
  }
};

// Weights (count,kLanes) of queries along the lanes, as the left factor.
template <typename acc_t>
MEMCHECK_INLINE TileFactor<acc_t> along_lanes(const acc_t* weights) {
  return {weights, 1, kLanes};
}

// ---- columns of scores

// What queries attend to: blocks, or the positions of a window.
struct Columns {
  const CompressedAttentionShape& shape;
  const CompressedAttentionWindow& window;
  bool of_window;
  int64_t first;  // the place of column 0 among all blocks, or all positions
  int64_t count;
  Strided<4> k;  // (B,Hkv,count,D), as the next
  Strided<4> v;

  template <typename Parameters>
  MEMCHECK_INLINE Columns(const Parameters& p, bool of_positions)
      : shape(p.shape),
        window(p.window),
        of_window(of_positions),
        first(of_positions ? p.window.first : 0),
        count(of_positions ? p.shape.T - p.window.first : p.shape.C),
        k(of_positions ? p.window.k : p.kc),
        v(of_positions ? p.window.v : p.vc) {}

  // Those that query s sees, which may be none.
  MEMCHECK_INLINE Span seen_by(int64_t s) const {
    return of_window ? window.positions(shape, s) : Span{0, shape.visible(s)};
  }
  // The queries from the first one that sees column j, and before the first one that sees none up to j any more.
  MEMCHECK_INLINE Span queries(int64_t j) const {
    return of_window ? window.queries(shape, j) : Span{shape.first_query(j), shape.S};
  }
};

// ---- passes: their tasks, the bytes of scratch of one worker, and what they run

int64_t pool_tasks(const CompressedAttentionShape& shape);
int64_t pool_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype);
void pool(const CompressedAttentionPooling& p, Dtype dtype);

void extend(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t);
void extend_backward(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t);

int64_t query_tasks(const CompressedAttentionShape& shape);
int64_t forward_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype);
void forward(const CompressedAttentionWindowForward& p, Dtype dtype);

int64_t query_gradient_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype);
void query_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype);  // and delta

int64_t key_tasks(const CompressedAttentionShape& shape, int64_t columns);
int64_t key_gradient_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype);
void key_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype);  // of keys and values
void sink_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype);

}  // namespace memcheck::compressed_cpu
