#include <algorithm>

#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/integer.h"
#include "common/matrix_tile.h"
#include "common/parallel.h"
#include "common/softplus.h"
#include "common/tile_product.h"
#include "linear_attention/linear_attention.h"

// A task owns a key head of one batch entry, and goes along the sequence in chunks of 32 positions: within a chunk
// queries and keys meet in a 32 x 32 matrix, and all that lies before is in the state. Where there are few heads the
// sequence is cut into segments; each sums its own state first, then starts from the sum of those before it.

namespace memcheck {
namespace {

constexpr int64_t kChunk = kTileRows;
constexpr int64_t kLongChunk = 2 * kChunk;  // where positions are summed and nothing else
constexpr int64_t kFewTasks = 8;
constexpr int64_t kMostSegments = 16;  // of all heads together, about
// A segment is a multiple of so many positions. It has a state in memory: this many times as many positions as a value
// has elements, so that the states are small beside keys and values.
constexpr int64_t kSegmentStep = 16 * kChunk;
constexpr int64_t kPositionsPerValueElement = 32;

// Positions of one segment of a sequence; all of them where there are enough tasks without.
int64_t segment_length(const LinearAttentionShape& shape, int64_t length) {
  const int64_t heads = std::max<int64_t>(1, shape.B * shape.Hkv);
  if (heads >= kFewTasks) return std::max<int64_t>(length, 1);
  const int64_t even = ceil_div(length, ceil_div(kMostSegments, heads));
  return std::max<int64_t>(1, ceil_div(std::max(even, kPositionsPerValueElement * shape.Dv), kSegmentStep)) *
         kSegmentStep;
}

int64_t segments(const LinearAttentionShape& shape, int64_t length) {
  return std::max<int64_t>(1, ceil_div(length, segment_length(shape, length)));
}

bool splits(const LinearAttentionShape& shape) {
  return segments(shape, shape.T) > 1 || segments(shape, shape.S) > 1;
}

template <typename acc_t>
struct Matrix {
  acc_t* data;
  int64_t stride;

  MEMCHECK_INLINE acc_t* row(int64_t i) const { return data + i * stride; }
  MEMCHECK_INLINE Matrix rows_from(int64_t i) const { return {row(i), stride}; }
  MEMCHECK_INLINE TileFactor<acc_t> from_row(int64_t i) const { return {row(i), stride}; }
};

// Deals out scratch; from null it counts.
template <typename acc_t>
struct Arena {
  acc_t* data;
  int64_t used = 0;

  Matrix<acc_t> matrix(int64_t rows, int64_t columns) {
    const int64_t stride = padded_columns(columns);
    acc_t* first = data == nullptr ? nullptr : data + used;
    used += rows * stride;
    return {first, stride};
  }
};

// The sum over positions of an outer product, (rows,columns), and of a vector (keys) behind it.
struct StateShape {
  int64_t rows, columns, keys;
  int64_t matrix_size() const { return rows * padded_columns(columns); }
  int64_t size() const { return matrix_size() + padded_columns(keys); }
};

template <typename acc_t>
struct State {
  StateShape shape;
  Matrix<acc_t> total;
  Matrix<acc_t> rest;  // what rounding has left out of it, so that errors do not grow with the number of positions

  State(const StateShape& of, Arena<acc_t>& arena) : shape(of) {
    for (Matrix<acc_t>* part : {&total, &rest}) {
      *part = arena.matrix(shape.rows, shape.columns);
      arena.matrix(1, shape.keys);
    }
  }
  MEMCHECK_INLINE acc_t* vector_of(const Matrix<acc_t>& part) const { return part.data + shape.matrix_size(); }

  MEMCHECK_INLINE void clear() {
    for (int64_t i = 0; i < shape.size(); ++i) total.data[i] = rest.data[i] = acc_t(0);
  }
  // The sum of what other segments hold, of this shape one after another.
  MEMCHECK_INLINE void start_from(const acc_t* others, int64_t first, int64_t last) {
    clear();
    for (int64_t other = first; other < last; ++other) {
      const acc_t* from = others + other * shape.size();
      for (int64_t i = 0; i < shape.size(); ++i) add_to_sum(from[i], total.data[i], rest.data[i]);
    }
  }
  // The sum over the rows of a chunk of a b^T, and of weights (null: 1) times x.
  MEMCHECK_INLINE void add_chunk(int64_t rows, const TileFactor<acc_t>& a, const acc_t* b, int64_t b_stride,
                                 const acc_t* weights, const acc_t* x, NextPair* next = nullptr) {
    tile_product(TileProduct::Add, shape.rows, total.stride, rows, a.transposed(), b, b_stride, total.data,
                 total.stride, rest.data, next);
    const int64_t stride = padded_columns(shape.keys);
    for (int64_t i = 0; i < stride; i += kTileLanes) {
      alignas(64) acc_t sum[kTileLanes] = {};
      for (int64_t row = 0; row < rows; ++row) {
        const acc_t weight = weights == nullptr ? acc_t(1) : weights[row];
        for (int64_t lane = 0; lane < kTileLanes; ++lane) sum[lane] += weight * x[row * stride + i + lane];
      }
      for (int64_t lane = 0; lane < kTileLanes; ++lane)
        add_to_sum(sum[lane], vector_of(total)[i + lane], vector_of(rest)[i + lane]);
    }
  }
  MEMCHECK_INLINE void store(acc_t* to) {
    for (int64_t i = 0; i < shape.size(); ++i) to[i] = total.data[i];
  }
};

StateShape forward_state(const LinearAttentionShape& n) {
  return {n.D, n.Dv, n.D};  // M, z
}

StateShape backward_state(const LinearAttentionShape& n) {
  return {n.Dv, n.D, n.D};  // M^T, z; and N^T, n
}

// A chunk's matrices, one row a position.
template <typename acc_t>
struct ForwardScratch {
  State<acc_t> state;          // M, z
  Matrix<acc_t> q, k;          // phi(q), phi(k) (kChunk,D); a long chunk's k goes on over k_transposed
  Matrix<acc_t> k_transposed;  // (D,kChunk)
  Matrix<acc_t> v, y;          // (kChunk,Dv), unless memory serves; a long chunk's v goes on over y
  Matrix<acc_t> values;        // v, where it is (kChunk,Dv)
  Matrix<acc_t> scores;        // phi(q) phi(k)^T (kChunk,kChunk)
  NextPair next;               // the lines of k and v that come after
  Matrix<acc_t> partial;       // sums along rows before their lanes are added (kChunk,kTileLanes)

  ForwardScratch(const LinearAttentionShape& n, Arena<acc_t>& arena)
      : state(forward_state(n), arena),
        q(arena.matrix(kChunk, n.D)),
        k(arena.matrix(kChunk, n.D)),
        k_transposed(arena.matrix(padded_columns(n.D), kChunk)),
        v(arena.matrix(kChunk, n.Dv)),
        y(arena.matrix(kChunk, n.Dv)),
        values(v),
        scores(arena.matrix(kChunk, kChunk)),
        partial(arena.matrix(kChunk, kTileLanes)) {}
};

template <typename acc_t>
struct BackwardScratch {
  State<acc_t> keys;                         // M^T, z
  State<acc_t> queries;                      // N^T, n; causal: in the place of the other, of which no more is needed
  Matrix<acc_t> n;                           // N (D,Dv)
  Matrix<acc_t> q, k, grad_q, grad_k, z;     // (kChunk,D), in the space of phi
  Matrix<acc_t> k_transposed, v_transposed;  // (D,kChunk), (Dv,kChunk)
  Matrix<acc_t> g, v, grad_v;                // (kChunk,Dv)
  Matrix<acc_t> scores, products;            // phi(q) phi(k)^T, g v^T (kChunk,kChunk)
  Matrix<acc_t> partial;

  BackwardScratch(const LinearAttentionShape& shape, Arena<acc_t>& arena)
      : keys(backward_state(shape), arena),
        queries(shape.causal ? keys : State<acc_t>(backward_state(shape), arena)),
        n(arena.matrix(padded_columns(shape.D), shape.Dv)),
        q(arena.matrix(kChunk, shape.D)),
        k(arena.matrix(kChunk, shape.D)),
        grad_q(arena.matrix(kChunk, shape.D)),
        grad_k(arena.matrix(kChunk, shape.D)),
        z(arena.matrix(kChunk, shape.D)),
        k_transposed(arena.matrix(padded_columns(shape.D), kChunk)),
        v_transposed(arena.matrix(padded_columns(shape.Dv), kChunk)),
        g(arena.matrix(kChunk, shape.Dv)),
        v(arena.matrix(kChunk, shape.Dv)),
        grad_v(arena.matrix(kChunk, shape.Dv)),
        scores(arena.matrix(kChunk, kChunk)),
        products(arena.matrix(kChunk, kChunk)),
        partial(arena.matrix(kChunk, kTileLanes)) {}
};

struct Task {
  int64_t b;
  int64_t key_head;
  int64_t segment;
};

Task task_of(const LinearAttentionShape& shape, int64_t index, int64_t segments) {
  return {index / segments / shape.Hkv, index / segments % shape.Hkv, index % segments};
}

struct Range {
  int64_t begin, end;
};

Range segment_range(const LinearAttentionShape& shape, int64_t length, int64_t segment) {
  const int64_t step = segment_length(shape, length);
  return {segment * step, std::min(length, (segment + 1) * step)};
}

// Rows in memory that are as good as scratch: of the accumulation type, dense, in full tiles.
template <typename acc_t>
MEMCHECK_INLINE bool serves_as_scratch(Dtype dtype, const MatrixPlace& x, int64_t columns) {
  const Dtype acc = sizeof(acc_t) == sizeof(double) ? Dtype::Float64 : Dtype::Float32;
  return dtype == acc && x.column_stride == 1 && columns % kTileColumns == 0;
}

template <typename acc_t>
MEMCHECK_INLINE Matrix<acc_t> in_memory(const MatrixPlace& x) {
  return {static_cast<acc_t*>(x.data), x.row_stride};
}

template <typename acc_t>
MEMCHECK_INLINE void map_lanes(const acc_t* __restrict from, acc_t* __restrict to) {
  for (int64_t lane = 0; lane < kTileLanes; ++lane) {
    const acc_t x = from[lane];
    const acc_t e = exp_minus_abs(x);
    to[lane] = x > acc_t(0) ? x + acc_t(1) : e;
  }
}

// phi of a line, from where it lies or in place; where columns are missing to a full tile it is 0.
template <typename acc_t>
MEMCHECK_INLINE void map_line(const acc_t* from, int64_t columns, int64_t padded, acc_t* to) {
  for (int64_t column = 0; column < padded; column += kTileLanes) {
    if (from == to) {
      alignas(64) acc_t x[kTileLanes];
      for (int64_t lane = 0; lane < kTileLanes; ++lane) x[lane] = from[column + lane];
      map_lanes(x, to + column);
    } else {
      map_lanes(from + column, to + column);
    }
  }
  for (int64_t i = columns; i < padded; ++i) to[i] = acc_t(0);
}

// phi(x) of some rows (rows,D). Meanwhile the rows of two matrices that will be read next are asked for.
template <typename acc_t>
MEMCHECK_INLINE void load_features(const LinearAttentionShape& n, Dtype dtype, const MatrixPlace& x, int64_t rows,
                                   const NextRows& next, const NextRows& other_next, const Matrix<acc_t>& to) {
  const bool identity = n.feature_map == FeatureMap::Identity;
  const bool direct = !identity && serves_as_scratch<acc_t>(dtype, x, n.D);
  if (!direct) load_rows(dtype, x, rows, n.D, to.data, to.stride);
  const Matrix<acc_t> from = direct ? in_memory<acc_t>(x) : to;
  for (int64_t row = 0; row < rows; ++row) {
    next.expect(row);
    other_next.expect(row);
    if (!identity) map_line(from.row(row), n.D, to.stride, to.row(row));
  }
}

// phi' from phi: 1 where x > 0, else exp(x), and phi is above 1 just there.
template <typename acc_t>
MEMCHECK_INLINE acc_t feature_derivative(FeatureMap map, acc_t phi) {
  return map == FeatureMap::Identity || phi > acc_t(1) ? acc_t(1) : phi;
}

// Rows of a chunk: phi(x) (rows,D), and of another matrix values (rows,Dv) if it is there. `further` is where the next
// chunk lies.
template <typename acc_t>
MEMCHECK_INLINE void load_pair(const LinearAttentionShape& n, Dtype dtype, const MatrixPlace& x,
                               const MatrixPlace& values, Range rows, int64_t further, const Matrix<acc_t>& to,
                               const Matrix<acc_t>& to_values) {
  const int64_t count = rows.end - rows.begin;
  if (values.data != nullptr) load_rows(dtype, values, count, n.Dv, to_values.row(rows.begin), to_values.stride);
  const NextRows next = rows_after(dtype, x, further, n.D);
  const NextRows next_values = values.data != nullptr ? rows_after(dtype, values, further, n.Dv) : NextRows{};
  load_features(n, dtype, x, count, next, next_values, to.rows_from(rows.begin));
}

// A query sees the keys of its chunk up to its own row.
template <typename acc_t>
MEMCHECK_INLINE void mask_later_keys(const Matrix<acc_t>& scores, Range rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    acc_t* line = scores.row(row);
    for (int64_t i = 0; i < kChunk; ++i) line[i] = i <= row ? line[i] : acc_t(0);
  }
}

// to = a b in the columns of keys that a row of its block sees; where none does it is undefined.
template <typename acc_t>
MEMCHECK_INLINE void multiply_visible(const Matrix<acc_t>& a, Range rows, int64_t depth, const Matrix<acc_t>& b,
                                      const Matrix<acc_t>& to) {
  for (int64_t row = rows.begin, end; row < rows.end; row = end) {
    const int64_t columns = (row / kProductColumns + 1) * kProductColumns;
    end = std::min(rows.end, columns);
    tile_product(TileProduct::Set, end - row, columns, depth, a.from_row(row), b.data, b.stride, to.row(row),
                 to.stride);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void clear_rows(const Matrix<acc_t>& x, Range rows) {
  for (int64_t i = rows.begin * x.stride; i < rows.end * x.stride; ++i) x.data[i] = acc_t(0);
}

// partial[row][lane] += sum of a b over the row's elements of this lane; b has one row, or as many as a.
template <typename acc_t>
MEMCHECK_INLINE void add_partial_dots(const Matrix<acc_t>& a, const acc_t* b, int64_t b_stride, Range rows,
                                      const Matrix<acc_t>& partial) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const acc_t* x = a.row(row);
    const acc_t* y = b + row * b_stride;
    alignas(64) acc_t sums[kTileLanes];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] = partial.row(row)[lane];
    for (int64_t i = 0; i < a.stride; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) partial.row(row)[lane] = sums[lane];
  }
}

template <int64_t kCount, typename acc_t>
MEMCHECK_INLINE void sum_pairs(const acc_t* __restrict from, acc_t* __restrict to) {
  for (int64_t i = 0; i < kCount; ++i) to[i] = from[2 * i] + from[2 * i + 1];
}

// One number a row.
template <typename acc_t>
MEMCHECK_INLINE void sum_lanes(const Matrix<acc_t>& partial, acc_t* __restrict to) {
  static_assert(kTileLanes == 32);
  alignas(64) acc_t half[16 * kChunk], quarter[8 * kChunk], eighth[4 * kChunk], sixteenth[2 * kChunk];
  for (int64_t row = 0; row < kChunk; ++row)
    for (int64_t lane = 0; lane < 16; ++lane)
      half[row * 16 + lane] = partial.row(row)[lane] + partial.row(row)[lane + 16];
  sum_pairs<8 * kChunk>(half, quarter);
  sum_pairs<4 * kChunk>(quarter, eighth);
  sum_pairs<2 * kChunk>(eighth, sixteenth);
  sum_pairs<kChunk>(sixteenth, to);
}

// ---- forward

// What the rows give to all keys together: those before by the state, and those at hand.
template <typename acc_t>
MEMCHECK_INLINE void sum_weights(const ForwardScratch<acc_t>& x, Range rows, bool keys_at_hand, acc_t* to) {
  const acc_t* z = x.state.vector_of(x.state.total);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    alignas(64) acc_t sums[kTileLanes] = {};
    if (keys_at_hand)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] = x.scores.row(row)[lane];
    for (int64_t i = 0; i < x.q.stride; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += x.q.row(row)[i + lane] * z[i + lane];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) x.partial.row(row)[lane] = sums[lane];
  }
  sum_lanes(x.partial, to);
}

// y of rows [rows.begin, rows.end) of one chunk of one query head: of what the state holds, and of the keys at hand.
template <typename acc_t>
MEMCHECK_INLINE void attend(const LinearAttentionForward& p, Dtype dtype, int64_t b, int64_t head, int64_t position,
                            Range rows, int64_t keys, ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const int64_t first = rows.begin;
  const int64_t count = rows.end - first;
  const MatrixPlace queries = rows_at(dtype, p.q, b, head, position + first);
  const MatrixPlace result = rows_at(dtype, p.y, b, head, position + first);
  const bool direct = serves_as_scratch<acc_t>(dtype, result, n.Dv);
  const Matrix<acc_t> y = direct ? in_memory<acc_t>(result) : x.y;
  load_features(n, dtype, queries, count, {}, {}, x.q.rows_from(first));
  NextPair next{rows_after(dtype, queries, kChunk, n.D), {}, count};
  TileTerm<acc_t> seen{};
  if (keys > 0) {
    multiply_visible(x.q, rows, n.D, x.k_transposed, x.scores);
    mask_later_keys(x.scores, rows);
    seen = {first, x.scores.from_row(first), x.values.data, x.values.stride};
  }
  alignas(64) acc_t inverse[kChunk];
  sum_weights(x, rows, keys > 0, inverse);
  for (int64_t row = first; row < rows.end; ++row) inverse[row] = acc_t(1) / (inverse[row] + static_cast<acc_t>(p.eps));
  tile_rows<acc_t>(count, x.y.stride, {n.D, x.q.from_row(first), x.state.total.data, x.state.total.stride}, seen,
                   inverse + first, y.data, y.stride, &next);
  if (!direct) store_rows(dtype, result, count, n.Dv, y.data, y.stride);
}

template <typename acc_t, typename Params>
MEMCHECK_INLINE void load_keys(const Params& p, Dtype dtype, const Task& task, int64_t t, int64_t count,
                               int64_t further, const Matrix<acc_t>& k, const Matrix<acc_t>& v) {
  const MatrixPlace values = p.v ? rows_at(dtype, p.v, task.b, task.key_head, t) : MatrixPlace{};
  load_pair(p.shape, dtype, rows_at(dtype, p.k, task.b, task.key_head, t), values, {0, count}, further, k, v);
  if (!p.v) clear_rows(v, {0, count});
}

// phi(k) and v of a chunk of keys, or of a long one.
template <typename acc_t>
MEMCHECK_INLINE void load_keys(const LinearAttentionForward& p, Dtype dtype, const Task& task, int64_t t, int64_t count,
                               ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const MatrixPlace keys = rows_at(dtype, p.k, task.b, task.key_head, t);
  const MatrixPlace values = rows_at(dtype, p.v, task.b, task.key_head, t);
  const bool direct = serves_as_scratch<acc_t>(dtype, values, n.Dv);
  x.values = direct ? in_memory<acc_t>(values) : x.v;
  if (!direct) load_rows(dtype, values, count, n.Dv, x.v.data, x.v.stride);
  load_features(n, dtype, keys, count, {}, {}, x.k);
  x.next = {rows_after(dtype, keys, count, n.D), rows_after(dtype, values, count, n.Dv), count};
}

// M += phi(k)^T v and z += phi(k).
template <typename acc_t>
MEMCHECK_INLINE void add_keys(int64_t count, ForwardScratch<acc_t>& x) {
  x.state.add_chunk(count, x.k.from_row(0), x.values.data, x.values.stride, nullptr, x.k.data, &x.next);
}

template <typename acc_t>
MEMCHECK_INLINE void sum_keys(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range keys,
                              ForwardScratch<acc_t>& x) {
  for (int64_t t = keys.begin; t < keys.end; t += kLongChunk) {
    const int64_t count = std::min(kLongChunk, keys.end - t);
    load_keys(p, dtype, task, t, count, x);
    add_keys(count, x);
  }
}

// Queries and keys of the same positions, causal.
template <typename acc_t>
MEMCHECK_INLINE void attend_along(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range keys,
                                  ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    load_keys(p, dtype, task, t, count, x);
    if (s + count > 0) {
      transpose_rows(x.k.data, x.k.stride, count, x.k.stride, x.k_transposed.data, kChunk);
      for (int64_t head = task.key_head * n.group(); head < (task.key_head + 1) * n.group(); ++head)
        attend(p, dtype, task.b, head, s, {std::max<int64_t>(-s, 0), count}, count, x);
    }
    if (t + kChunk < n.T) add_keys(count, x);
  }
}

// Queries that all see what the state holds.
template <typename acc_t>
MEMCHECK_INLINE void attend_to_all(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range queries,
                                   ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  for (int64_t head = task.key_head * n.group(); head < (task.key_head + 1) * n.group(); ++head)
    for (int64_t s = queries.begin; s < queries.end; s += kChunk)
      attend(p, dtype, task.b, head, s, {0, std::min(kChunk, queries.end - s)}, 0, x);
}

enum class Phase {
  Whole,      // a task goes along the whole sequence
  KeySums,    // a task sums one segment of keys into its slot
  Queries,    // a task attends for one segment, from the sums of the segments it sees
  QuerySums,  // backward: a task sums one segment of queries into its slot
  Keys,       // backward: a task writes the gradients of one segment of keys
};

// The slots of one head's segments, behind so many of other heads.
template <typename acc_t>
MEMCHECK_INLINE acc_t* slots_of(void* states, const LinearAttentionShape& n, const StateShape& state, const Task& task,
                                int64_t slots_before, int64_t slots) {
  const int64_t head = task.b * n.Hkv + task.key_head;
  return static_cast<acc_t*>(states) + (slots_before + head * slots) * state.size();
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const LinearAttentionForward& p, Dtype dtype, Phase phase, int64_t pieces,
                                        int64_t scratch_size, int64_t begin, int64_t end, int worker) {
  const LinearAttentionShape& n = p.shape;
  Arena<acc_t> arena{static_cast<acc_t*>(p.scratch) + worker * scratch_size};
  ForwardScratch<acc_t> x(n, arena);
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(n, index, pieces);
    acc_t* slots = slots_of<acc_t>(p.states, n, x.state.shape, task, 0, segments(n, n.T));
    const bool whole = phase == Phase::Whole;
    const Range keys = whole ? Range{0, n.T} : segment_range(n, n.T, task.segment);
    x.state.clear();
    if (phase == Phase::KeySums) {
      sum_keys(p, dtype, task, keys, x);
      x.state.store(slots + task.segment * x.state.shape.size());
    } else if (n.causal) {
      if (!whole) x.state.start_from(slots, 0, task.segment);
      attend_along(p, dtype, task, keys, x);
    } else {
      whole ? sum_keys(p, dtype, task, keys, x) : x.state.start_from(slots, 0, segments(n, n.T));
      attend_to_all(p, dtype, task, whole ? Range{0, n.S} : segment_range(n, n.S, task.segment), x);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(forward_tasks,
                       (const LinearAttentionForward& p, Dtype dtype, Phase phase, int64_t pieces, int64_t scratch_size,
                        int64_t begin, int64_t end, int worker),
                       (p, dtype, phase, pieces, scratch_size, begin, end, worker))

template <typename acc_t>
int64_t forward_scratch_size(const LinearAttentionShape& n) {
  Arena<acc_t> arena{nullptr};
  const ForwardScratch<acc_t> counted(n, arena);
  return arena.used;
}

template <typename acc_t>
void run_forward(const LinearAttentionForward& p, Dtype dtype, Phase phase, int64_t pieces) {
  const int64_t size = forward_scratch_size<acc_t>(p.shape);
  parallel_tasks(p.shape.B * p.shape.Hkv * pieces, [&](int64_t begin, int64_t end, int worker) {
    forward_tasks<acc_t>(p, dtype, phase, pieces, size, begin, end, worker);
  });
}

template <typename acc_t>
void forward(const LinearAttentionForward& p, Dtype dtype) {
  const LinearAttentionShape& n = p.shape;
  if (!splits(n)) return run_forward<acc_t>(p, dtype, Phase::Whole, 1);
  run_forward<acc_t>(p, dtype, Phase::KeySums, segments(n, n.T));
  run_forward<acc_t>(p, dtype, Phase::Queries, segments(n, n.causal ? n.T : n.S));
}

// ---- backward
//
// With h = g / den, delta = (g.y) / den, N_j = sum over the queries i that see j of phi(q_i) h_i^T and n_j = the same
// sum of delta_i phi(q_i):
//
//     grad phi(q_i) = M_i h_i - delta_i z_i     grad phi(k_j) = N_j v_j - n_j     grad v_j = N_j^T phi(k_j)
//
// g.y = phi(q).(M h), so y is not needed. Queries come first, along the sequence with M and z; they leave 1 / den
// and delta for the way back with N and n.

template <typename acc_t>
struct Rows {
  acc_t* inverse;  // 1 / den of each query of one head
  acc_t* delta;
};

template <typename acc_t>
MEMCHECK_INLINE Rows<acc_t> rows_of(const LinearAttentionBackward& p, int64_t b, int64_t head) {
  const LinearAttentionShape& n = p.shape;
  acc_t* inverse = static_cast<acc_t*>(p.rows) + (b * n.H + head) * n.S;
  return {inverse, inverse + n.B * n.H * n.S};
}

// z of every row: that of the state, and of the keys at hand up to the row.
template <typename acc_t>
MEMCHECK_INLINE void running_key_sums(const acc_t* before, int64_t count, int64_t keys, BackwardScratch<acc_t>& x) {
  for (int64_t i = 0; i < x.z.stride; i += kTileLanes) {
    alignas(64) acc_t sum[kTileLanes] = {};
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t lane = 0; lane < kTileLanes; ++lane) {
        if (row < keys) sum[lane] += x.k.row(row)[i + lane];
        x.z.row(row)[i + lane] = before[i + lane] + sum[lane];
      }
    }
  }
}

// phi(q) and h = g / den of rows of a chunk, and grad_q if it is wanted; leaves 1 / den and delta. Everything is formed
// of h, not of g, because phi(q).(M g) may overflow where phi(q).(M h) = g.y does not.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_queries(const LinearAttentionBackward& p, Dtype dtype, int64_t b, int64_t head,
                                           int64_t position, Range rows, int64_t keys, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const int64_t first = rows.begin;
  const int64_t count = rows.end - first;
  const Rows<acc_t> out = rows_of<acc_t>(p, b, head);
  load_pair(n, dtype, rows_at(dtype, p.q, b, head, position + first),
            rows_at(dtype, p.grad_y, b, head, position + first), rows, kChunk, x.q, x.g);
  alignas(64) acc_t inverse[kChunk];
  clear_rows(x.partial, rows);
  add_partial_dots(x.q, x.z.data, x.z.stride, rows, x.partial);
  sum_lanes(x.partial, inverse);
  for (int64_t row = first; row < rows.end; ++row) {
    inverse[row] = acc_t(1) / (inverse[row] + static_cast<acc_t>(p.eps));
    for (int64_t i = 0; i < x.g.stride; ++i) x.g.row(row)[i] *= inverse[row];
  }
  TileTerm<acc_t> seen{};
  if (keys > 0) {
    multiply_visible(x.g, rows, n.Dv, x.v_transposed, x.products);
    mask_later_keys(x.products, rows);
    seen = {first, x.products.from_row(first), x.k.data, x.k.stride};
  }
  tile_rows<acc_t>(count, x.grad_q.stride, {n.Dv, x.g.from_row(first), x.keys.total.data, x.keys.total.stride}, seen,
                   nullptr, x.grad_q.row(first), x.grad_q.stride);
  // grad_q holds M h so far.
  alignas(64) acc_t dots[kChunk];
  clear_rows(x.partial, rows);
  add_partial_dots(x.q, x.grad_q.data, x.grad_q.stride, rows, x.partial);
  sum_lanes(x.partial, dots);
  for (int64_t row = first; row < rows.end; ++row) {
    const acc_t delta = dots[row] * inverse[row];
    acc_t* grad_q = x.grad_q.row(row);
    for (int64_t i = 0; i < x.grad_q.stride; ++i)
      grad_q[i] = (grad_q[i] - delta * x.z.row(row)[i]) * feature_derivative(n.feature_map, x.q.row(row)[i]);
    out.inverse[position + row] = inverse[row];
    out.delta[position + row] = delta;
  }
  if (p.grad_q)
    store_rows(dtype, rows_at(dtype, p.grad_q, b, head, position + first), count, n.D, x.grad_q.row(first),
               x.grad_q.stride);
}

// M^T += v^T phi(k) and z += phi(k).
template <typename acc_t>
MEMCHECK_INLINE void add_keys(int64_t count, BackwardScratch<acc_t>& x) {
  x.keys.add_chunk(count, x.v.from_row(0), x.k.data, x.k.stride, nullptr, x.k.data);
}

template <typename acc_t>
MEMCHECK_INLINE void sum_keys(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                              BackwardScratch<acc_t>& x) {
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    load_keys(p, dtype, task, t, count, kChunk, x.k, x.v);
    add_keys(count, x);
  }
}

// phi(q), and h in the place of g, of rows of a chunk; their outer product joins N^T, and n.
template <typename acc_t>
MEMCHECK_INLINE void load_queries(const LinearAttentionBackward& p, Dtype dtype, int64_t b, int64_t head,
                                  int64_t position, Range rows, BackwardScratch<acc_t>& x) {
  load_pair(p.shape, dtype, rows_at(dtype, p.q, b, head, position + rows.begin),
            rows_at(dtype, p.grad_y, b, head, position + rows.begin), rows, -kChunk, x.q, x.g);
  const acc_t* inverse = rows_of<acc_t>(p, b, head).inverse + position;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < x.g.stride; ++i) x.g.row(row)[i] *= inverse[row];
}

// N^T += h^T phi(q) and n += delta phi(q).
template <typename acc_t>
MEMCHECK_INLINE void add_queries(const LinearAttentionBackward& p, int64_t b, int64_t head, int64_t position,
                                 Range rows, BackwardScratch<acc_t>& x) {
  const int64_t first = rows.begin;
  x.queries.add_chunk(rows.end - first, x.g.from_row(first), x.q.row(first), x.q.stride,
                      rows_of<acc_t>(p, b, head).delta + position + first, x.q.row(first));
}

// N from N^T.
template <typename acc_t>
MEMCHECK_INLINE void turn_query_state(const LinearAttentionShape& n, BackwardScratch<acc_t>& x) {
  const Matrix<acc_t>& total = x.queries.total;
  for (int64_t row = 0; row < n.Dv; row += kTileRows)
    transpose_rows(total.row(row), total.stride, std::min<int64_t>(kTileRows, n.Dv - row), total.stride, x.n.data + row,
                   x.n.stride);
}

// The gradients of a chunk of keys: of all later queries by the state, to which add those at hand.
template <typename acc_t>
MEMCHECK_INLINE void key_gradients_of_state(const LinearAttentionShape& n, int64_t count, BackwardScratch<acc_t>& x) {
  const Matrix<acc_t>& total = x.queries.total;
  tile_product(TileProduct::Set, count, x.grad_k.stride, n.Dv, x.v.from_row(0), total.data, total.stride, x.grad_k.data,
               x.grad_k.stride);
  const acc_t* later = x.queries.vector_of(x.queries.total);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < x.grad_k.stride; ++i) x.grad_k.row(row)[i] -= later[i];
  tile_product(TileProduct::Set, count, x.grad_v.stride, n.D, x.k.from_row(0), x.n.data, x.n.stride, x.grad_v.data,
               x.grad_v.stride);
}

template <typename acc_t>
MEMCHECK_INLINE void key_gradients_of_chunk(const LinearAttentionBackward& p, const acc_t* delta, Range rows,
                                            int64_t keys, BackwardScratch<acc_t>& x) {
  const int64_t first = rows.begin;
  const int64_t count = rows.end - first;
  multiply_visible(x.g, rows, p.shape.Dv, x.v_transposed, x.products);
  for (int64_t row = first; row < rows.end; ++row)
    for (int64_t i = 0; i < kChunk; ++i) x.products.row(row)[i] -= delta[row];
  mask_later_keys(x.products, rows);
  tile_product(TileProduct::Add, keys, x.grad_k.stride, count, x.products.from_row(first).transposed(), x.q.row(first),
               x.q.stride, x.grad_k.data, x.grad_k.stride);
  multiply_visible(x.q, rows, p.shape.D, x.k_transposed, x.scores);
  mask_later_keys(x.scores, rows);
  tile_product(TileProduct::Add, keys, x.grad_v.stride, count, x.scores.from_row(first).transposed(), x.g.row(first),
               x.g.stride, x.grad_v.data, x.grad_v.stride);
}

template <typename acc_t>
MEMCHECK_INLINE void store_key_gradients(const LinearAttentionBackward& p, Dtype dtype, const Task& task, int64_t t,
                                         int64_t count, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  for (int64_t i = 0; i < count * x.k.stride; ++i) x.grad_k.data[i] *= feature_derivative(n.feature_map, x.k.data[i]);
  if (p.grad_k)
    store_rows(dtype, rows_at(dtype, p.grad_k, task.b, task.key_head, t), count, n.D, x.grad_k.data, x.grad_k.stride);
  if (p.grad_v)
    store_rows(dtype, rows_at(dtype, p.grad_v, task.b, task.key_head, t), count, n.Dv, x.grad_v.data, x.grad_v.stride);
}

// Causal, along the sequence: grad_q, 1 / den and delta.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_along(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                         BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    load_keys(p, dtype, task, t, count, kChunk, x.k, x.v);
    if (s + count > 0) {
      transpose_rows(x.v.data, x.v.stride, count, x.v.stride, x.v_transposed.data, kChunk);
      running_key_sums(x.keys.vector_of(x.keys.total), count, count, x);
      for (int64_t head = task.key_head * n.group(); head < (task.key_head + 1) * n.group(); ++head)
        differentiate_queries(p, dtype, task.b, head, s, {std::max<int64_t>(-s, 0), count}, count, x);
    }
    if (t + kChunk < n.T) add_keys(count, x);
  }
}

// Causal, and back: grad_k and grad_v; or the sums alone.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_back(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                        bool sums_only, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  for (int64_t t = keys.begin + (keys.end - 1 - keys.begin) / kChunk * kChunk; t >= keys.begin; t -= kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    const Range rows{std::min(std::max<int64_t>(-s, 0), count), count};
    if (!sums_only) {
      load_keys(p, dtype, task, t, count, -kChunk, x.k, x.v);
      transpose_rows(x.k.data, x.k.stride, count, x.k.stride, x.k_transposed.data, kChunk);
      transpose_rows(x.v.data, x.v.stride, count, x.v.stride, x.v_transposed.data, kChunk);
      turn_query_state(n, x);
      key_gradients_of_state(n, count, x);
    }
    for (int64_t head = task.key_head * n.group(); head < (task.key_head + 1) * n.group(); ++head) {
      if (rows.begin == rows.end) break;
      load_queries(p, dtype, task.b, head, s, rows, x);
      if (!sums_only) key_gradients_of_chunk(p, rows_of<acc_t>(p, task.b, head).delta + s, rows, count, x);
      add_queries(p, task.b, head, s, rows, x);
    }
    if (!sums_only) store_key_gradients(p, dtype, task, t, count, x);
  }
}

// Not causal: every query sees what the state of keys holds; grad_q, and N and n of these queries.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_all_queries(const LinearAttentionBackward& p, Dtype dtype, const Task& task,
                                               Range queries, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  running_key_sums(x.keys.vector_of(x.keys.total), kChunk, 0, x);
  for (int64_t head = task.key_head * n.group(); head < (task.key_head + 1) * n.group(); ++head) {
    for (int64_t s = queries.begin; s < queries.end; s += kChunk) {
      const Range rows{0, std::min(kChunk, queries.end - s)};
      differentiate_queries(p, dtype, task.b, head, s, rows, 0, x);
      add_queries(p, task.b, head, s, rows, x);
    }
  }
}

// Not causal: every key is seen by what the state of queries holds.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_all_keys(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                            BackwardScratch<acc_t>& x) {
  turn_query_state(p.shape, x);
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    load_keys(p, dtype, task, t, count, kChunk, x.k, x.v);
    key_gradients_of_state(p.shape, count, x);
    store_key_gradients(p, dtype, task, t, count, x);
  }
}

// Where the sequence is split, and queries go along with keys if causal, so do their segments.
int64_t query_segments(const LinearAttentionShape& n) {
  return segments(n, n.causal ? n.T : n.S);
}

template <typename acc_t>
MEMCHECK_INLINE void backward_whole(const LinearAttentionBackward& p, Dtype dtype, const Task& task,
                                    BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  x.keys.clear();
  if (n.causal) {
    differentiate_along(p, dtype, task, {0, n.T}, x);
  } else {
    sum_keys(p, dtype, task, {0, n.T}, x);
    x.queries.clear();
    differentiate_all_queries(p, dtype, task, {0, n.S}, x);
  }
  if (!p.grad_k && !p.grad_v) return;
  if (n.causal) {
    x.queries.clear();
    differentiate_back(p, dtype, task, {0, n.T}, false, x);
  } else {
    differentiate_all_keys(p, dtype, task, {0, n.T}, x);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void backward_segment(const LinearAttentionBackward& p, Dtype dtype, Phase phase, const Task& task,
                                      BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const int64_t key_slots = segments(n, n.T);
  const int64_t query_slots = query_segments(n);
  acc_t* of_keys = slots_of<acc_t>(p.states, n, x.keys.shape, task, 0, key_slots);
  // Causal: the sums of keys have been read when those of queries are written.
  const int64_t slots_before = n.causal ? 0 : n.B * n.Hkv * key_slots;
  acc_t* of_queries = slots_of<acc_t>(p.states, n, x.queries.shape, task, slots_before, query_slots);
  acc_t* own_slot = (phase == Phase::KeySums ? of_keys : of_queries) + task.segment * x.keys.shape.size();
  const Range keys = segment_range(n, n.T, task.segment);
  if (phase == Phase::KeySums) {
    x.keys.clear();
    sum_keys(p, dtype, task, keys, x);
    x.keys.store(own_slot);
  } else if (phase == Phase::Queries && n.causal) {
    x.keys.start_from(of_keys, 0, task.segment);
    differentiate_along(p, dtype, task, keys, x);
  } else if (phase == Phase::Queries) {
    x.keys.start_from(of_keys, 0, key_slots);
    x.queries.clear();
    differentiate_all_queries(p, dtype, task, segment_range(n, n.S, task.segment), x);
    x.queries.store(own_slot);
  } else if (phase == Phase::QuerySums) {
    x.queries.clear();
    differentiate_back(p, dtype, task, keys, true, x);
    x.queries.store(own_slot);
  } else if (n.causal) {
    x.queries.start_from(of_queries, task.segment + 1, query_slots);
    differentiate_back(p, dtype, task, keys, false, x);
  } else {
    x.queries.start_from(of_queries, 0, query_slots);
    differentiate_all_keys(p, dtype, task, keys, x);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void backward_tasks_body(const LinearAttentionBackward& p, Dtype dtype, Phase phase, int64_t pieces,
                                         int64_t scratch_size, int64_t begin, int64_t end, int worker) {
  Arena<acc_t> arena{static_cast<acc_t*>(p.scratch) + worker * scratch_size};
  BackwardScratch<acc_t> x(p.shape, arena);
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(p.shape, index, pieces);
    phase == Phase::Whole ? backward_whole(p, dtype, task, x) : backward_segment(p, dtype, phase, task, x);
  }
}

MEMCHECK_PER_CPU_LEVEL(backward_tasks,
                       (const LinearAttentionBackward& p, Dtype dtype, Phase phase, int64_t pieces,
                        int64_t scratch_size, int64_t begin, int64_t end, int worker),
                       (p, dtype, phase, pieces, scratch_size, begin, end, worker))

template <typename acc_t>
int64_t backward_scratch_size(const LinearAttentionShape& n) {
  Arena<acc_t> arena{nullptr};
  const BackwardScratch<acc_t> counted(n, arena);
  return arena.used;
}

template <typename acc_t>
void run_backward(const LinearAttentionBackward& p, Dtype dtype, Phase phase, int64_t pieces) {
  const int64_t size = backward_scratch_size<acc_t>(p.shape);
  parallel_tasks(p.shape.B * p.shape.Hkv * pieces, [&](int64_t begin, int64_t end, int worker) {
    backward_tasks<acc_t>(p, dtype, phase, pieces, size, begin, end, worker);
  });
}

template <typename acc_t>
void backward(const LinearAttentionBackward& p, Dtype dtype) {
  const LinearAttentionShape& n = p.shape;
  if (!splits(n)) return run_backward<acc_t>(p, dtype, Phase::Whole, 1);
  run_backward<acc_t>(p, dtype, Phase::KeySums, segments(n, n.T));
  run_backward<acc_t>(p, dtype, Phase::Queries, query_segments(n));
  if (!p.grad_k && !p.grad_v) return;
  if (n.causal) run_backward<acc_t>(p, dtype, Phase::QuerySums, query_segments(n));
  run_backward<acc_t>(p, dtype, Phase::Keys, segments(n, n.T));
}

// ---- one step

// A head's state comes from memory, takes the new keys, is read by the group's queries, and goes back.
template <typename acc_t>
MEMCHECK_INLINE void step_task(const LinearAttentionStep& p, Dtype dtype, const Task& task, ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Dtype acc = dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32;
  const LinearAttentionForward forward{n, p.eps, p.q, p.k, p.v, p.y, nullptr, nullptr};
  State<acc_t>& state = x.state;
  const auto place = [&](const Strided<4>& whole) { return rows_at(acc, whole, task.b, task.key_head, 0); };
  state.clear();
  load_rows(acc, place(p.m), n.D, n.Dv, state.total.data, state.total.stride);
  load_rows(acc, place(p.z), 1, n.D, state.vector_of(state.total), padded_columns(n.D));
  sum_keys(forward, dtype, task, {0, n.T}, x);
  attend_to_all(forward, dtype, task, {0, 1}, x);
  store_rows(acc, place(p.new_m), n.D, n.Dv, state.total.data, state.total.stride);
  store_rows(acc, place(p.new_z), 1, n.D, state.vector_of(state.total), padded_columns(n.D));
}

template <typename acc_t>
MEMCHECK_INLINE void step_tasks_body(const LinearAttentionStep& p, Dtype dtype, int64_t scratch_size, int64_t begin,
                                     int64_t end, int worker) {
  Arena<acc_t> arena{static_cast<acc_t*>(p.scratch) + worker * scratch_size};
  ForwardScratch<acc_t> x(p.shape, arena);
  for (int64_t index = begin; index < end; ++index) step_task(p, dtype, task_of(p.shape, index, 1), x);
}

MEMCHECK_PER_CPU_LEVEL(step_tasks,
                       (const LinearAttentionStep& p, Dtype dtype, int64_t scratch_size, int64_t begin, int64_t end,
                        int worker),
                       (p, dtype, scratch_size, begin, end, worker))

template <typename acc_t>
void step(const LinearAttentionStep& p, Dtype dtype) {
  const int64_t size = forward_scratch_size<acc_t>(p.shape);
  parallel_tasks(p.shape.B * p.shape.Hkv, [&](int64_t begin, int64_t end, int worker) {
    step_tasks<acc_t>(p, dtype, size, begin, end, worker);
  });
}

template <typename acc_t>
LinearAttentionPlan plan(const LinearAttentionShape& n, int64_t threads) {
  const int64_t heads = n.B * n.Hkv;
  const bool split = splits(n);
  const int64_t key_slots = split ? segments(n, n.T) : 0;
  const int64_t query_slots = split ? query_segments(n) : 0;
  const int64_t workers = parallel_workers(heads * std::max<int64_t>({1, key_slots, query_slots}), threads);
  const int64_t item = sizeof(acc_t);
  return {heads * key_slots * forward_state(n).size() * item, forward_scratch_size<acc_t>(n) * workers * item,
          2 * n.B * n.H * n.S * item,
          heads * (n.causal ? key_slots : key_slots + query_slots) * backward_state(n).size() * item,
          backward_scratch_size<acc_t>(n) * workers * item};
}

}  // namespace

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads) {
  return dtype == Dtype::Float64 ? plan<double>(shape, threads) : plan<float>(shape, threads);
}

void linear_attention_forward_cpu(const LinearAttentionForward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) { forward<decltype(acc)>(p, dtype); });
}

void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) { backward<decltype(acc)>(p, dtype); });
}

void linear_attention_step_cpu(const LinearAttentionStep& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) { step<decltype(acc)>(p, dtype); });
}

}  // namespace memcheck
