#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/arena.h"
#include "common/formulas.h"
#include "common/half.h"
#include "common/matrix_tile.h"
#include "common/parallel.h"
#include "common/sequences.h"
#include "common/tile_product.h"
#include "common/types.h"
#include "linear_attention/linear_attention.h"

// What forward and backward share on the CPU: heads and tasks, matrices in scratch, the state, and rows of operands.
//
// Kernels work on one key head of one sequence, as a dense batch of one row. They go along the sequence in chunks of 32
// positions: within a chunk queries and keys meet in a 32 x 32 matrix, and the state holds the sums over everything
// before. A state is a sum in levels, each from zero: the positions of a chunk, the chunks of a segment, the segments
// before. So segments can be tasks of their own, with the same bits: each first sums its own state, then starts from
// the sum of those before.
//
// Decays are multiplied up in float64, within a chunk and over the chunks of a segment. They become weights of at most
// 1 and are never divided by.

namespace memcheck::linear_cpu {

constexpr int64_t kChunk = kTileRows;
constexpr int64_t kLongChunk = 2 * kChunk;  // where positions are only summed

// ---- segments

constexpr int64_t kShortestSegment = 512;
constexpr int64_t kMostSegments = 512;  // of a head
// Where segments are tasks, each has a state in memory: it has at least so many queries for every element of a value,
// so that the states are small beside the queries.
constexpr int64_t kQueriesPerValueElement = 16;

// Positions of one segment of a sequence. This depends on neither B nor Hkv nor threads, and so do results.
inline int64_t segment_length(const LinearAttentionShape& shape, int64_t length) {
  const int64_t queries = std::max(kShortestSegment, kQueriesPerValueElement * shape.Dv);
  const int64_t shortest = ceil_div(queries, std::max<int64_t>(1, shape.group()));
  return ceil_div(std::max(shortest, ceil_div(length, kMostSegments)), kLongChunk) * kLongChunk;
}

inline int64_t segments(const LinearAttentionShape& shape, int64_t length) {
  return std::max<int64_t>(1, ceil_div(length, segment_length(shape, length)));
}

// 0 where there is one segment, and no state that it could go on from.
inline int64_t segment_step(const LinearAttentionShape& shape, int64_t length) {
  return shape.continued || segments(shape, length) > 1 ? segment_length(shape, length) : 0;
}

// Causal, queries go along with keys, and so do their segments.
inline int64_t query_segments(const LinearAttentionShape& n) {
  return segments(n, n.causal ? n.T : n.S);
}

// The states that a head has in memory. Causal, nothing starts from the sum of all segments.
inline int64_t key_slots(const LinearAttentionShape& n) {
  return segments(n, n.T) - (n.causal ? 1 : 0);
}
inline int64_t query_slots(const LinearAttentionShape& n) {
  return query_segments(n) - (n.causal ? 1 : 0);
}

inline Span segment_span(const LinearAttentionShape& shape, int64_t length, int64_t segment) {
  const int64_t step = segment_length(shape, length);
  return {segment * step, std::min(length, (segment + 1) * step)};
}

// ---- heads and passes

// A key head of a sequence with the query heads that read it, or a sequence with all of its heads.
struct Head {
  Sequence place;
  int64_t sequence, key_head;
  LinearAttentionShape shape;  // of a dense batch of one row
};

// Heads in their order in memory.
Head head_at(const LinearAttentionShape& n, int64_t index);

// The parameters of a head, but for its scratch.
LinearAttentionForward parameters_of(const LinearAttentionForward& batch, const Head& head, Dtype dtype);
LinearAttentionBackward parameters_of(const LinearAttentionBackward& batch, const Head& head, Dtype dtype);

// What the tasks of one pass do. Each head is a task, or all heads are cut and have tasks in every other pass.
enum class Phase {
  Whole,      // a task goes along the whole sequence
  KeySums,    // a task sums one segment of keys into its slot
  KeyScan,    // a task adds up a part of all these sums
  Queries,    // a task attends for one segment, from the sum of the segments it sees
  QuerySums,  // backward: a task sums one segment of queries into its slot
  QueryScan,  // backward: a task adds up a part of all these sums
  Keys,       // backward: a task writes the gradients of one segment of keys
};

template <typename Params>
struct Task {
  Params p;  // of one head
  Dtype dtype;
  Phase phase;
  int64_t piece;  // the segment, or the part of a scan

  // Positions of its keys. Causal, those of its queries too.
  MEMCHECK_INLINE Span keys() const {
    return phase == Phase::Whole ? Span{0, p.shape.T} : segment_span(p.shape, p.shape.T, piece);
  }
};

// How the heads of a dense batch, which are all alike, are dealt out to threads, and the scratch: that of each worker,
// the states of segments, and backward 1 / den and delta of each query.
struct Deal {
  LinearAttentionShape n, head;
  Dtype dtype;
  bool backward;
  int64_t heads, threads;  // threads: those worth waking
  bool cut;
  int64_t workers, worker_bytes, state_bytes, row_bytes;  // states and rows: of a head

  Deal(const LinearAttentionShape& shape, Dtype dtype, int64_t available_threads, bool backward);
  int64_t pieces(Phase phase) const;  // tasks of a head
  int64_t scratch_bytes() const { return workers * worker_bytes + heads * (state_bytes + row_bytes); }
};

// Calls run(task, arena) for every task of a pass.
template <typename Params, typename Run>
void run_pass(const Params& batch, const Deal& deal, Phase phase, const Run& run) {
  const int64_t pieces = deal.pieces(phase);
  char* const states = static_cast<char*>(batch.scratch) + deal.workers * deal.worker_bytes;
  parallel_in_turn(deal.heads * pieces, deal.threads, [&](int64_t index, int worker) {
    const int64_t head = index / pieces;
    // No key needs the sum of the first segment's queries: there is none before them.
    Task<Params> task{parameters_of(batch, head_at(deal.n, head), deal.dtype), deal.dtype, phase,
                      index % pieces + (phase == Phase::QuerySums ? 1 : 0)};
    task.p.states = states + head * deal.state_bytes;
    if constexpr (std::is_same_v<Params, LinearAttentionBackward>)
      task.p.rows = states + deal.heads * deal.state_bytes + head * deal.row_bytes;
    run(task, arena_of(batch.scratch, deal.worker_bytes, worker));
  });
}

// Rows of a chunk of queries of one head. Row 0 of the chunk is at `position`, which is negative where the first keys
// have no query; `rows` are those that have one.
struct ChunkQueries {
  int64_t head, position;
  Span rows;

  MEMCHECK_INLINE MatrixPlace place(Dtype dtype, const Strided<4>& x) const {
    return rows_at(dtype, x, 0, head, position + rows.begin);
  }
};

// Causal: the queries of the positions of `count` keys from t on, of the first head.
MEMCHECK_INLINE ChunkQueries queries_along(const LinearAttentionShape& n, int64_t t, int64_t count) {
  const int64_t position = t - (n.T - n.S);
  return {0, position, {std::min(std::max<int64_t>(-position, 0), count), count}};
}

// ---- matrices in scratch

template <typename acc_t>
struct Matrix {
  acc_t* data;
  int64_t stride;

  MEMCHECK_INLINE Matrix(acc_t* first, int64_t row_stride) : data(first), stride(row_stride) {}
  MEMCHECK_INLINE Matrix(Arena& arena, int64_t rows, int64_t columns)
      : data(arena.take<acc_t>(rows * padded_columns(columns))), stride(padded_columns(columns)) {}

  MEMCHECK_INLINE acc_t* row(int64_t i) const { return data + i * stride; }
  MEMCHECK_INLINE Matrix rows_from(int64_t i) const { return {row(i), stride}; }
  MEMCHECK_INLINE TileFactor<acc_t> factor(int64_t first_row) const { return {row(first_row), stride}; }
  MEMCHECK_INLINE TileResult<acc_t> result(int64_t first_row) const { return {row(first_row), stride}; }
};

// The product of `count` rows or columns of a, with rows of b.
template <typename acc_t>
MEMCHECK_INLINE TileTerm<acc_t> term(int64_t count, const TileFactor<acc_t>& a, const Matrix<acc_t>& b) {
  return {count, a, b.data, b.stride};
}

// Rows of a matrix in memory that lie as they would in scratch.
template <typename acc_t>
MEMCHECK_INLINE Matrix<acc_t> in_memory(const MatrixPlace& x) {
  return {static_cast<acc_t*>(x.data), x.row_stride};
}

// ---- the state

// The sum over positions of an outer product, (rows,columns), and behind it that of a vector, (keys).
struct StateShape {
  int64_t rows, columns, keys;
  bool decayed;
  bool transposed;  // as it would lie in a result
  int64_t matrix_size() const { return rows * padded_columns(columns); }
  int64_t size() const { return matrix_size() + padded_columns(keys); }
  // In memory, the product of the decays of its segment is behind it.
  int64_t slot_size() const { return size() + (decayed ? kTileColumns : 0); }
};

// Forward M (D,Dv) and z (D); backward M^T (Dv,D) and z (D), or N^T (Dv,D) and n (D).
inline StateShape state_shape(const LinearAttentionShape& n, bool backward) {
  return {backward ? n.Dv : n.D, backward ? n.D : n.Dv, n.D, n.decayed, backward};
}

// How much of a state is read while its sums grow.
enum class Reading {
  Chunks,  // after every chunk
  Ends,    // when all segments have been added
};

template <typename acc_t>
MEMCHECK_INLINE constexpr Dtype acc_dtype() {
  return sizeof(acc_t) == sizeof(double) ? Dtype::Float64 : Dtype::Float32;
}

template <typename acc_t>
struct State {
  StateShape shape;
  int64_t segment_length;  // 0 where there is one segment; then all parts are the same
  Matrix<acc_t> segment;   // the sum over the chunks of a segment
  Matrix<acc_t> before;    // the sum over the segments before
  Matrix<acc_t> seen;      // what is read: the sum of both, or if it is read when all is added, `before`
  double kept = 1;         // what decays have left of `before` since the segment began

  // One part, in memory.
  State(const StateShape& of, acc_t* data)
      : shape(of), segment_length(0), segment(data, padded_columns(of.columns)), before(segment), seen(segment) {}

  State(const StateShape& of, int64_t length, Reading reading, Arena& arena)
      : shape(of),
        segment_length(length),
        segment(part(arena)),
        before(length > 0 ? part(arena) : segment),
        seen(length > 0 && reading == Reading::Chunks ? part(arena) : before) {}

  Matrix<acc_t> part(Arena& arena) const { return {arena.take<acc_t>(shape.size()), padded_columns(shape.columns)}; }

  MEMCHECK_INLINE acc_t* vector_of(const Matrix<acc_t>& part) const { return part.data + shape.matrix_size(); }

  // Begins a segment, after the sum over segments that a slot holds, or after none.
  MEMCHECK_INLINE void start_from(const acc_t* slot) {
    set(segment, segment_length == 0 ? slot : nullptr);
    if (segment_length > 0) set(before, slot);
    if (seen.data != before.data) set(seen, slot);
    kept = 1;
  }

  MEMCHECK_INLINE void clear() { start_from(nullptr); }

  // A state in memory comes before. Its vector is multiplied by a sign.
  MEMCHECK_INLINE void load(const LinearAttentionState& from, acc_t sign) {
    load_rows(acc_dtype<acc_t>(), matrix_of(from.m), shape.rows, shape.columns, before.data, before.stride);
    if (from.z)
      load_rows(acc_dtype<acc_t>(), rows_at(acc_dtype<acc_t>(), from.z, 0, 0, 0), 1, shape.keys, vector_of(before),
                padded_columns(shape.keys));
    for (int64_t i = 0; i < shape.keys; ++i) vector_of(before)[i] *= sign;
    if (seen.data != before.data) set(seen, before.data);
  }

  // Ends the sequence, and writes its state as `load` reads it.
  MEMCHECK_INLINE void store(const LinearAttentionState& to, acc_t sign) {
    end_segment();
    if (to.m) store_rows(acc_dtype<acc_t>(), matrix_of(to.m), shape.rows, shape.columns, before.data, before.stride);
    for (int64_t i = 0; i < shape.keys; ++i) vector_of(before)[i] *= sign;
    if (to.z)
      store_rows(acc_dtype<acc_t>(), rows_at(acc_dtype<acc_t>(), to.z, 0, 0, 0), 1, shape.keys, vector_of(before),
                 padded_columns(shape.keys));
  }

  // What is held decays. Then chunks are added, and `refresh` makes them seen.
  MEMCHECK_INLINE void fade(double decay) {
    if (!shape.decayed) return;
    scale(segment, decay);
    kept *= decay;
  }

  MEMCHECK_INLINE void refresh() {
    if (!shape.decayed || seen.data == before.data) return;
    const acc_t factor = static_cast<acc_t>(kept);
    acc_t* __restrict to = seen.data;
    const acc_t* __restrict old = before.data;
    const acc_t* __restrict added = segment.data;
    for (int64_t i = 0; i < shape.size(); ++i) to[i] = factor * old[i] + added[i];
  }

  // The chunks that come next are of another segment.
  MEMCHECK_INLINE void end_segment() {
    if (segment_length == 0) return;
    // Scaled first, so that the sum is rounded as that of scan_slots, not as a fused product.
    if (shape.decayed) scale(before, kept);
    kept = 1;
    acc_t* __restrict to = before.data;
    const acc_t* __restrict from = segment.data;
    for (int64_t i = 0; i < shape.size(); ++i) to[i] += from[i];
    set(segment, nullptr);
    if (seen.data != before.data) set(seen, before.data);
  }

  // Whether a segment begins at a position.
  MEMCHECK_INLINE bool begins_at(int64_t position) const {
    return segment_length > 0 && position % segment_length == 0;
  }

  // Adds the sum over the rows of a chunk of a b^T, and of weights (null: 1) times x. sums_only: nothing reads the
  // state before the segment is stored. What decays is seen after `refresh`.
  MEMCHECK_INLINE void add_chunk(int64_t rows, const TileFactor<acc_t>& a, const Matrix<acc_t>& b, const acc_t* weights,
                                 const acc_t* x, bool sums_only, NextPair* next = nullptr) {
    const bool reads = seen.data != before.data && !sums_only && !shape.decayed;
    tile_product<acc_t>(TileProduct::Add, shape.rows, segment.stride, term(rows, a.transposed(), b),
                        {segment.data, segment.stride, before.data, reads ? seen.data : nullptr}, next);
    const int64_t stride = padded_columns(shape.keys);
    for (int64_t i = 0; i < stride; i += kTileLanes) {
      alignas(64) acc_t sum[kTileLanes] = {};
      for (int64_t row = 0; row < rows; ++row) {
        const acc_t weight = weights == nullptr ? acc_t(1) : weights[row];
        for (int64_t lane = 0; lane < kTileLanes; ++lane) sum[lane] += weight * x[row * stride + i + lane];
      }
      for (int64_t lane = 0; lane < kTileLanes; ++lane) vector_of(segment)[i + lane] += sum[lane];
      for (int64_t lane = 0; reads && lane < kTileLanes; ++lane)
        vector_of(seen)[i + lane] = vector_of(before)[i + lane] + vector_of(segment)[i + lane];
    }
  }

  // Stores the sum of a segment; with_before: and of what came before it.
  MEMCHECK_INLINE void store_segment(acc_t* slot, bool with_before) {
    if (shape.decayed) slot[shape.size()] = static_cast<acc_t>(kept);
    if (with_before) end_segment();
    const acc_t* sum = with_before ? before.data : segment.data;
    for (int64_t i = 0; i < shape.size(); ++i) slot[i] = sum[i];
  }

 private:
  MatrixPlace matrix_of(const Strided<4>& x) const {
    MatrixPlace place = rows_at(acc_dtype<acc_t>(), x, 0, 0, 0);
    if (shape.transposed) std::swap(place.row_stride, place.column_stride);
    return place;
  }

  MEMCHECK_INLINE void scale(const Matrix<acc_t>& part, double decay) const {
    const acc_t factor = static_cast<acc_t>(decay);
    for (int64_t i = 0; i < shape.size(); ++i) part.data[i] *= factor;
  }

  // A part becomes a copy, or zero.
  MEMCHECK_INLINE void set(const Matrix<acc_t>& part, const acc_t* __restrict from) const {
    acc_t* __restrict to = part.data;
    if (from == nullptr) {
      for (int64_t i = 0; i < shape.size(); ++i) to[i] = acc_t(0);
    } else {
      for (int64_t i = 0; i < shape.size(); ++i) to[i] = from[i];
    }
  }
};

// States of a head in memory, of segments or their sums.
template <typename acc_t>
struct Slots {
  acc_t* data;
  int64_t count;
  StateShape state;

  // Null where there is no such slot: nothing comes before the first segment, or after the last.
  MEMCHECK_INLINE acc_t* at(int64_t slot) const {
    return slot < 0 || slot >= count ? nullptr : data + slot * state.slot_size();
  }
};

constexpr int64_t kScanPart = 512;  // elements of a state

inline int64_t scan_parts(const StateShape& state) {
  return ceil_div(state.size(), kScanPart);
}

// A part of each slot becomes the sum of itself and of all slots before it (reversed: after it), decayed, and added one
// by one, as a task over all segments adds them.
template <typename acc_t>
void scan_slots(const Slots<acc_t>& slots, bool reversed, int64_t part);

// Whether the sums of queries take the place of the sums of keys. Causal, those of keys have been read when those of
// queries are written, but the gradient of decays needs both.
inline bool sums_share_slots(const LinearAttentionShape& n) {
  return n.causal && !n.decays_learn;
}

// Slots of keys, or backward of queries, which are behind those of keys or in their place.
template <typename acc_t, typename Params>
MEMCHECK_INLINE Slots<acc_t> slots_of(const Params& p, bool of_queries) {
  const LinearAttentionShape& n = p.shape;
  const StateShape state = state_shape(n, std::is_same_v<Params, LinearAttentionBackward>);
  const int64_t first = of_queries && !sums_share_slots(n) ? key_slots(n) : 0;
  return {static_cast<acc_t*>(p.states) + first * state.slot_size(), of_queries ? query_slots(n) : key_slots(n), state};
}

// ---- decays

// Of a chunk. A sum over positions of the chunk and before it reads position j at position i with weight between[i][j],
// and the state before the chunk with weight into[i]. The state behind the chunk has position j with weight out[j].
template <typename acc_t>
struct ChunkDecays {
  Matrix<acc_t> between;  // (kChunk,kChunk): the product of the decays from j + 1 to i, 0 for j > i
  acc_t* at;              // (kChunk): the decays
  acc_t* into;            // (kChunk): their products up to i
  const acc_t* out;       // the last row of `between`
  double all;             // the product of all

  ChunkDecays(Arena& arena, const LinearAttentionShape& n)
      : between(arena, n.decayed ? kChunk : 0, kChunk),
        at(arena.take<acc_t>(n.decayed ? kChunk : 0)),
        into(arena.take<acc_t>(n.decayed ? kChunk : 0)),
        out(nullptr),
        all(1) {}

  // Of `count` keys from t on. Nothing if decay is null.
  MEMCHECK_INLINE void load(const LinearAttentionDecay& decay, int64_t t, int64_t count) {
    if (!decay) return;
    alignas(64) double line[kChunk] = {};
    all = 1;
    for (int64_t row = 0; row < count; ++row) {
      const double a = decay.at<acc_t>(0, 0, t + row);
      at[row] = static_cast<acc_t>(a);
      for (int64_t i = 0; i < kChunk; ++i) line[i] *= a;
      line[row] = 1;
      for (int64_t i = 0; i < kChunk; ++i) between.row(row)[i] = static_cast<acc_t>(line[i]);
      all *= a;
      into[row] = static_cast<acc_t>(all);
    }
    out = between.row(std::max<int64_t>(0, count - 1));
  }
};

// Row i of x is multiplied by factors[i].
template <typename acc_t>
MEMCHECK_INLINE void scale_rows(const Matrix<acc_t>& x, Span rows, const acc_t* factors) {
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < x.stride; ++i) x.row(row)[i] *= factors[row];
}

// Scores of the queries and keys of a chunk, which are 0 for later keys, are multiplied by weights.
template <typename acc_t>
MEMCHECK_INLINE void scale_scores(const Matrix<acc_t>& scores, Span rows, const Matrix<acc_t>& weights) {
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < kChunk; ++i) scores.row(row)[i] *= weights.row(row)[i];
}

// ---- features

template <typename from_t, typename acc_t>
MEMCHECK_INLINE void map_lanes(const from_t* __restrict from, acc_t* __restrict to) {
  for (int64_t lane = 0; lane < kTileLanes; ++lane) {
    const acc_t x = from[lane];
    to[lane] = elu_plus_one(x, exp_minus_abs(x));
  }
}

// phi of a line in place, with zeros in the columns that pad it.
template <typename acc_t>
MEMCHECK_INLINE void map_in_place(int64_t columns, int64_t padded, acc_t* line) {
  for (int64_t column = 0; column < padded; column += kTileLanes) {
    alignas(64) acc_t x[kTileLanes];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) x[lane] = line[column + lane];
    map_lanes(x, line + column);
  }
  for (int64_t i = columns; i < padded; ++i) line[i] = acc_t(0);
}

// phi(x) of some rows (rows,D). Prefetches the rows of two matrices meanwhile. Full lines are read where they lie.
template <typename acc_t>
MEMCHECK_INLINE void load_features(const LinearAttentionShape& n, Dtype dtype, const MatrixPlace& x, int64_t rows,
                                   const NextRows& next, const NextRows& other_next, const Matrix<acc_t>& to) {
  const bool identity = n.feature_map == FeatureMap::Identity;
  const bool full = !identity && x.column_stride == 1 && n.D == to.stride;
  const bool direct = full && dtype == acc_dtype<acc_t>(), direct_half = full && dtype == Dtype::BFloat16;
  const auto map_row = [&](const auto* from, acc_t* line) MEMCHECK_INLINE_LAMBDA {
    for (int64_t column = 0; column < n.D; column += kTileLanes) map_lanes(from + column, line + column);
  };
  if (!direct && !direct_half) load_rows(dtype, x, rows, n.D, to.data, to.stride);
  for (int64_t row = 0; row < rows; ++row) {
    next.prefetch(row);
    other_next.prefetch(row);
    const int64_t first = row * x.row_stride;
    if (direct) {
      map_row(static_cast<const acc_t*>(x.data) + first, to.row(row));
    } else if (direct_half) {
      map_row(static_cast<const BFloat16*>(x.data) + first, to.row(row));
    } else if (!identity) {
      map_in_place(n.D, to.stride, to.row(row));
    }
  }
}

// phi'(x) from phi(x).
template <typename acc_t>
MEMCHECK_INLINE acc_t feature_derivative(FeatureMap map, acc_t phi) {
  return map == FeatureMap::Identity ? acc_t(1) : elu_plus_one_derivative_of_value(phi);
}

// ---- rows of a chunk

// Causal: a query sees the keys of its chunk up to its own row.
template <typename acc_t>
MEMCHECK_INLINE void mask_later_keys(const Matrix<acc_t>& scores, Span rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    acc_t* line = scores.row(row);
    for (int64_t i = 0; i < kChunk; ++i) line[i] = i <= row ? line[i] : acc_t(0);
  }
}

// to = a b in the columns of keys that some row of a block sees. The other columns of the block are undefined.
template <typename acc_t>
MEMCHECK_INLINE void multiply_visible(const Matrix<acc_t>& a, Span rows, int64_t depth, const Matrix<acc_t>& b,
                                      const Matrix<acc_t>& to) {
  for (int64_t row = rows.begin, end; row < rows.end; row = end) {
    const int64_t columns = (row / kProductColumns + 1) * kProductColumns;
    end = std::min(rows.end, columns);
    tile_product(TileProduct::Set, end - row, columns, term(depth, a.factor(row), b), to.result(row));
  }
}

template <typename acc_t>
MEMCHECK_INLINE void clear_rows(const Matrix<acc_t>& x, Span rows) {
  for (int64_t i = rows.begin * x.stride; i < rows.end * x.stride; ++i) x.data[i] = acc_t(0);
}

template <typename acc_t>
MEMCHECK_INLINE void sum_pairs(int64_t count, const acc_t* __restrict from, acc_t* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
}

// to (rows) = the sum over the lanes of each row, (rows,kTileLanes), of at most kChunk rows.
template <typename acc_t>
MEMCHECK_INLINE void sum_lanes(int64_t rows, const Matrix<acc_t>& partial, acc_t* __restrict to) {
  static_assert(kTileLanes == 32);
  alignas(64) acc_t half[16 * kChunk], quarter[8 * kChunk], eighth[4 * kChunk], sixteenth[2 * kChunk];
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t lane = 0; lane < 16; ++lane)
      half[row * 16 + lane] = partial.row(row)[lane] + partial.row(row)[lane + 16];
  sum_pairs(8 * rows, half, quarter);
  sum_pairs(4 * rows, quarter, eighth);
  sum_pairs(2 * rows, eighth, sixteenth);
  sum_pairs(rows, sixteenth, to);
}

// ---- one head

// Adds keys to a state, chunk by chunk of so many, and leaves the last segment open.
template <typename acc_t, typename OfHead>
MEMCHECK_INLINE void sum_keys(OfHead& x, State<acc_t>& state, Span keys, int64_t chunk) {
  for (int64_t t = keys.begin; t < keys.end; t += chunk) {
    const int64_t count = std::min(chunk, keys.end - t);
    if (t > keys.begin && state.begins_at(t)) state.end_segment();
    x.load_keys(t, count);
    x.add_keys(count, true);
  }
}

// Of one worker, for a head.
int64_t forward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype);
int64_t backward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype, bool cut);
void forward(const LinearAttentionForward& p, Dtype dtype);
void backward(const LinearAttentionBackward& p, Dtype dtype);

}  // namespace memcheck::linear_cpu
