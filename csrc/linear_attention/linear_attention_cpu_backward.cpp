#include <limits>

#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/parallel.h"
#include "linear_attention/linear_attention_cpu.h"

// Backward. With h = g / den, delta = (g.y) / den, N_j = sum over the queries i that see j of phi(q_i) h_i^T and n_j =
// the same sum of delta_i phi(q_i):
//
//     grad phi(q_i) = M_i h_i - delta_i z_i     grad phi(k_j) = N_j v_j - n_j     grad v_j = N_j^T phi(k_j)
//
// g.y = phi(q).(M h), so y is not needed. Queries come first, along the sequence with M and z. They leave 1 / den and
// delta for the way back with N and n. Not normalized: h = g and delta = 0.
//
// With decays, N_j = a_(j+1) N_(j+1) + phi(q_j) h_j^T. A score of query i and key j has the weight a_(j+1) ... a_i, so
// the gradient of log(a_i) is the sum over t >= i of
//
//     phi(q_t).(grad phi(q_t)) - phi(k_t).(grad phi(k_t))
//
// and of <grad M, M> + <grad z, z> of the last state. The first of these is delta_t eps where y is normalized.

namespace memcheck::linear_cpu {
namespace {

// The matrices of a chunk, a row for each position.
template <typename acc_t>
struct BackwardScratch {
  State<acc_t> keys;                         // M^T, z
  State<acc_t> queries;                      // N^T, n; causal: in the place of `keys`, which is not needed any more
  Matrix<acc_t> n;                           // N (D,Dv)
  Matrix<acc_t> q, k, grad_q, grad_k, z;     // (kChunk,D): phi(q), phi(k), the gradients of these, and running z
  Matrix<acc_t> k_transposed, v_transposed;  // (D,kChunk), (Dv,kChunk)
  Matrix<acc_t> g, v, grad_v;                // (kChunk,Dv)
  Matrix<acc_t> scores, products;            // phi(q) phi(k)^T, g v^T (kChunk,kChunk)
  Matrix<acc_t> partial;                     // sums along rows before their lanes are added (kChunk,kTileLanes)
  ChunkDecays<acc_t> decays;

  BackwardScratch(Arena& arena, const LinearAttentionShape& shape)
      : keys(backward_state(shape), segment_step(shape, shape.T), shape.causal ? Reading::Chunks : Reading::Ends,
             arena),
        queries(shape.causal ? keys
                             : State<acc_t>(backward_state(shape), segment_step(shape, shape.S), Reading::Ends, arena)),
        n(arena, padded_columns(shape.D), shape.Dv),
        q(arena, kChunk, shape.D),
        k(arena, kChunk, shape.D),
        grad_q(arena, kChunk, shape.D),
        grad_k(arena, kChunk, shape.D),
        z(arena, kChunk, shape.D),
        k_transposed(arena, padded_columns(shape.D), kChunk),
        v_transposed(arena, padded_columns(shape.Dv), kChunk),
        g(arena, kChunk, shape.Dv),
        v(arena, kChunk, shape.Dv),
        grad_v(arena, kChunk, shape.Dv),
        scores(arena, kChunk, kChunk),
        products(arena, kChunk, kChunk),
        partial(arena, kChunk, kTileLanes),
        decays(arena, shape) {}
};

// 1 / den and delta of each query of one head, in memory.
template <typename acc_t>
struct QueryNumbers {
  acc_t* inverse;
  acc_t* delta;

  MEMCHECK_INLINE QueryNumbers(const LinearAttentionBackward& p, const ChunkQueries& queries)
      : inverse(static_cast<acc_t*>(p.rows) + (queries.b * p.shape.H + queries.head) * p.shape.S + queries.position),
        delta(inverse + p.shape.B * p.shape.H * p.shape.S) {}
};

// ---- loads

// phi(x) of rows of a chunk, (rows,D), and values, (rows,Dv). The next chunk begins `ahead` positions further.
template <typename acc_t>
MEMCHECK_INLINE void load_pair(const LinearAttentionShape& n, Dtype dtype, const MatrixPlace& x,
                               const MatrixPlace& values, int64_t rows, int64_t ahead, const Matrix<acc_t>& to,
                               const Matrix<acc_t>& to_values) {
  NextRows next_values{};
  if (values.data != nullptr) {
    load_rows(dtype, values, rows, n.Dv, to_values.data, to_values.stride);
    next_values = rows_after(dtype, values, ahead, n.Dv);
  }
  load_features(n, dtype, x, rows, rows_after(dtype, x, ahead, n.D), next_values, to);
}

// phi(k), v and decays of a chunk of keys.
template <typename acc_t>
MEMCHECK_INLINE void load_keys(const LinearAttentionBackward& p, Dtype dtype, const Task& task, int64_t t,
                               int64_t count, int64_t ahead, BackwardScratch<acc_t>& x) {
  const MatrixPlace values = p.v ? rows_at(dtype, p.v, task.b, task.key_head, t) : MatrixPlace{};
  load_pair(p.shape, dtype, rows_at(dtype, p.k, task.b, task.key_head, t), values, count, ahead, x.k, x.v);
  if (!p.v) clear_rows(x.v, {0, count});
  x.decays.load(p.decay, task, t, count);
}

// phi(q) and g of rows of a chunk of queries.
template <typename acc_t>
MEMCHECK_INLINE void load_queries(const LinearAttentionBackward& p, Dtype dtype, const ChunkQueries& queries,
                                  int64_t ahead, BackwardScratch<acc_t>& x) {
  const Range rows = queries.rows;
  load_pair(p.shape, dtype, queries.place(dtype, p.q), queries.place(dtype, p.grad_y), rows.count(), ahead,
            x.q.rows_from(rows.begin), x.g.rows_from(rows.begin));
}

// h = g / den
template <typename acc_t>
MEMCHECK_INLINE void divide_by_denominators(const acc_t* inverse, Range rows, BackwardScratch<acc_t>& x) {
  for (int64_t row = rows.begin; row < rows.end; ++row)
    for (int64_t i = 0; i < x.g.stride; ++i) x.g.row(row)[i] *= inverse[row];
}

// ---- states

// M^T += v^T phi(k) and z += phi(k), after what decays leave of both. Leaves phi(k) scaled.
template <typename acc_t>
MEMCHECK_INLINE void add_keys(int64_t count, bool sums_only, BackwardScratch<acc_t>& x) {
  if (x.keys.shape.decayed) scale_rows(x.k, {0, count}, x.decays.out);
  x.keys.fade(x.decays.all);
  x.keys.add_chunk(count, x.v.factor(0), x.k, nullptr, x.k.data, sums_only);
  if (!sums_only) x.keys.refresh();
}

// Leaves the last segment open.
template <typename acc_t>
MEMCHECK_INLINE void sum_keys(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                              BackwardScratch<acc_t>& x) {
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    if (t > keys.begin && x.keys.begins_at(t)) x.keys.end_segment();
    load_keys(p, dtype, task, t, count, kChunk, x);
    add_keys(count, true, x);
  }
}

// N^T += h^T phi(q) and n += delta phi(q). Leaves phi(q) scaled where there are decays.
template <typename acc_t>
MEMCHECK_INLINE void add_queries(const LinearAttentionBackward& p, const ChunkQueries& queries, bool sums_only,
                                 BackwardScratch<acc_t>& x) {
  const int64_t first = queries.rows.begin;
  if (p.shape.decayed) scale_rows(x.q, queries.rows, x.decays.into);
  x.queries.add_chunk(queries.rows.count(), x.g.factor(first), x.q.rows_from(first),
                      QueryNumbers<acc_t>(p, queries).delta + first, x.q.row(first), sums_only);
}

// N from N^T.
template <typename acc_t>
MEMCHECK_INLINE void transpose_query_state(const LinearAttentionShape& n, BackwardScratch<acc_t>& x) {
  const Matrix<acc_t>& seen = x.queries.seen;
  for (int64_t row = 0; row < n.Dv; row += kTileRows)
    transpose_rows(seen.row(row), seen.stride, std::min<int64_t>(kTileRows, n.Dv - row), seen.stride, x.n.data + row,
                   x.n.stride);
}

// ---- gradients of queries

// z of every row: that of the state, and of the first `keys` rows of phi(k) up to the row.
template <typename acc_t>
MEMCHECK_INLINE void running_key_sums(int64_t rows, int64_t keys, BackwardScratch<acc_t>& x) {
  const acc_t* before = x.keys.vector_of(x.keys.seen);
  for (int64_t i = 0; i < x.z.stride; i += kTileLanes) {
    alignas(64) acc_t sum[kTileLanes] = {};
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t lane = 0; lane < kTileLanes; ++lane) {
        if (row < keys) sum[lane] += x.k.row(row)[i + lane];
        x.z.row(row)[i + lane] = before[i + lane] + sum[lane];
      }
    }
  }
}

// to (kChunk) = a.b of each of the rows.
template <typename acc_t>
MEMCHECK_INLINE void dots(const Matrix<acc_t>& a, const Matrix<acc_t>& b, Range rows, const Matrix<acc_t>& partial,
                          acc_t* to) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const acc_t* x = a.row(row);
    const acc_t* y = b.row(row);
    alignas(64) acc_t sums[kTileLanes] = {};
    for (int64_t i = 0; i < a.stride; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) partial.row(row)[lane] = sums[lane];
  }
  sum_lanes(rows.end, partial, to);
}

// The same with decays, at all rows.
template <typename acc_t>
MEMCHECK_INLINE void running_decayed_key_sums(int64_t rows, BackwardScratch<acc_t>& x) {
  const acc_t* before = x.keys.vector_of(x.keys.seen);
  for (int64_t i = 0; i < x.z.stride; i += kTileLanes) {
    alignas(64) acc_t sum[kTileLanes] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const acc_t decay = x.decays.at[row], into = x.decays.into[row];
      for (int64_t lane = 0; lane < kTileLanes; ++lane) {
        sum[lane] = decay * sum[lane] + x.k.row(row)[i + lane];
        x.z.row(row)[i + lane] = into * before[i + lane] + sum[lane];
      }
    }
  }
}

// grad_q = M h, from the state and from the `keys` keys at hand. Leaves h scaled where there are decays.
template <typename acc_t>
MEMCHECK_INLINE void multiply_by_key_sums(const LinearAttentionShape& n, Range rows, int64_t keys,
                                          BackwardScratch<acc_t>& x) {
  const int64_t first = rows.begin;
  TileTerm<acc_t> seen{};
  if (keys > 0) {
    multiply_visible(x.g, rows, n.Dv, x.v_transposed, x.products);
    mask_later_keys(x.products, rows);
    seen = term(first, x.products.factor(first), x.k);
  }
  if (n.decayed) {
    scale_scores(x.products, rows, x.decays.between);
    scale_rows(x.g, rows, x.decays.into);
  }
  tile_rows<acc_t>(rows.count(), x.grad_q.stride, term(n.Dv, x.g.factor(first), x.keys.seen), seen, nullptr,
                   x.grad_q.result(first));
}

// phi(q) and h of rows of a chunk, grad_q if it is wanted, and what rows give to grad_decay. Leaves 1 / den and delta.
// Everything is formed with h instead of g, because phi(q).(M g) may overflow where phi(q).(M h) = g.y does not.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_queries(const LinearAttentionBackward& p, Dtype dtype, const ChunkQueries& queries,
                                           int64_t keys, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range rows = queries.rows;
  const QueryNumbers<acc_t> kept(p, queries);
  load_queries(p, dtype, queries, kChunk, x);
  alignas(64) acc_t inverse[kChunk];
  const acc_t eps = static_cast<acc_t>(p.eps);
  dots(x.q, x.z, rows, x.partial, inverse);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    inverse[row] = n.normalize ? acc_t(1) / (inverse[row] + eps) : acc_t(1);
  divide_by_denominators(inverse, rows, x);
  multiply_by_key_sums(n, rows, keys, x);
  alignas(64) acc_t g_dot_y[kChunk];
  dots(x.q, x.grad_q, rows, x.partial, g_dot_y);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const acc_t delta = n.normalize ? g_dot_y[row] * inverse[row] : acc_t(0);
    acc_t* grad_q = x.grad_q.row(row);
    for (int64_t i = 0; i < x.grad_q.stride; ++i)
      grad_q[i] = (grad_q[i] - delta * x.z.row(row)[i]) * feature_derivative(n.feature_map, x.q.row(row)[i]);
    kept.inverse[row] = inverse[row];
    kept.delta[row] = delta;
    if (p.grad_decay)
      *p.grad_decay.template at<acc_t>(queries.b, queries.head / n.group(), queries.position + row + n.T - n.S) +=
          n.normalize ? delta * eps : g_dot_y[row];
  }
  if (p.grad_q)
    store_rows(dtype, queries.place(dtype, p.grad_q), rows.count(), n.D, x.grad_q.row(rows.begin), x.grad_q.stride);
}

// Causal, along the sequence: grad_q, 1 / den and delta.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_along(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                         BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range heads = query_heads(n, task);
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    if (t > keys.begin && x.keys.begins_at(t)) x.keys.end_segment();
    load_keys(p, dtype, task, t, count, kChunk, x);
    for (int64_t row = 0; row < count && p.grad_decay; ++row)
      *p.grad_decay.template at<acc_t>(task.b, task.key_head, t + row) = acc_t(0);
    if (s + count > 0) {
      transpose_rows(x.v.data, x.v.stride, count, x.v.stride, x.v_transposed.data, kChunk);
      if (!n.normalize) {
        clear_rows(x.z, {0, count});
      } else if (n.decayed) {
        running_decayed_key_sums(count, x);
      } else {
        running_key_sums(count, count, x);
      }
      for (int64_t head = heads.begin; head < heads.end; ++head)
        differentiate_queries(p, dtype, {task.b, head, s, {std::max<int64_t>(-s, 0), count}}, count, x);
    }
    if (t + kChunk < keys.end) add_keys(count, false, x);
  }
}

// Not causal: every query sees what the state of keys holds. grad_q, and N and n of these queries.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_all_queries(const LinearAttentionBackward& p, Dtype dtype, const Task& task,
                                               Range range, BackwardScratch<acc_t>& x) {
  const Range heads = query_heads(p.shape, task);
  if (p.shape.normalize) {
    running_key_sums(kChunk, 0, x);
  } else {
    clear_rows(x.z, {0, kChunk});
  }
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    for (int64_t s = range.begin; s < range.end; s += kChunk) {
      const ChunkQueries queries{task.b, head, s, {0, std::min(kChunk, range.end - s)}};
      differentiate_queries(p, dtype, queries, 0, x);
      add_queries(p, queries, true, x);
    }
  }
}

// ---- gradients of keys

// grad phi(k) = N v - n and grad_v = N^T phi(k) of a chunk, from the later queries in the state.
template <typename acc_t>
MEMCHECK_INLINE void key_gradients_of_state(const LinearAttentionShape& n, int64_t count, BackwardScratch<acc_t>& x) {
  tile_product(TileProduct::Set, count, x.grad_k.stride, term(n.Dv, x.v.factor(0), x.queries.seen), x.grad_k.result(0));
  const acc_t* later = x.queries.vector_of(x.queries.seen);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < x.grad_k.stride; ++i) x.grad_k.row(row)[i] -= later[i];
  tile_product(TileProduct::Set, count, x.grad_v.stride, term(n.D, x.k.factor(0), x.n), x.grad_v.result(0));
  if (!n.decayed) return;
  scale_rows(x.grad_k, {0, count}, x.decays.out);
  scale_rows(x.grad_v, {0, count}, x.decays.out);
}

// Adds to these what the queries of the same chunk give.
template <typename acc_t>
MEMCHECK_INLINE void key_gradients_of_chunk(const LinearAttentionBackward& p, const ChunkQueries& queries, int64_t keys,
                                            BackwardScratch<acc_t>& x) {
  const Range rows = queries.rows;
  const int64_t first = rows.begin;
  const acc_t* delta = QueryNumbers<acc_t>(p, queries).delta;
  multiply_visible(x.g, rows, p.shape.Dv, x.v_transposed, x.products);
  for (int64_t row = first; row < rows.end; ++row)
    for (int64_t i = 0; i < kChunk; ++i) x.products.row(row)[i] -= delta[row];
  mask_later_keys(x.products, rows);
  if (p.shape.decayed) scale_scores(x.products, rows, x.decays.between);
  tile_product(TileProduct::Add, keys, x.grad_k.stride,
               term(rows.count(), x.products.factor(first).transposed(), x.q.rows_from(first)), x.grad_k.result(0));
  multiply_visible(x.q, rows, p.shape.D, x.k_transposed, x.scores);
  mask_later_keys(x.scores, rows);
  if (p.shape.decayed) scale_scores(x.scores, rows, x.decays.between);
  tile_product(TileProduct::Add, keys, x.grad_v.stride,
               term(rows.count(), x.scores.factor(first).transposed(), x.g.rows_from(first)), x.grad_v.result(0));
}

template <typename acc_t>
MEMCHECK_INLINE void store_key_gradients(const LinearAttentionBackward& p, Dtype dtype, const Task& task, int64_t t,
                                         int64_t count, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  if (p.grad_decay) {
    alignas(64) acc_t weights[kChunk];
    dots(x.k, x.grad_k, {0, count}, x.partial, weights);
    for (int64_t row = 0; row < count; ++row)
      *p.grad_decay.template at<acc_t>(task.b, task.key_head, t + row) -= weights[row];
  }
  for (int64_t i = 0; i < count * x.k.stride; ++i) x.grad_k.data[i] *= feature_derivative(n.feature_map, x.k.data[i]);
  if (p.grad_k)
    store_rows(dtype, rows_at(dtype, p.grad_k, task.b, task.key_head, t), count, n.D, x.grad_k.data, x.grad_k.stride);
  if (p.grad_v)
    store_rows(dtype, rows_at(dtype, p.grad_v, task.b, task.key_head, t), count, n.Dv, x.grad_v.data, x.grad_v.stride);
}

// Causal, back: grad_k and grad_v, or only N and n. The state then has all queries if they are the first and the
// gradient of the initial state is wanted.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_back(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                        bool sums_only, BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range heads = query_heads(n, task);
  const bool adds_first = sums_only || (p.grad_initial && keys.begin == 0);
  for (int64_t t = keys.begin + (keys.end - 1 - keys.begin) / kChunk * kChunk; t >= keys.begin; t -= kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    const Range rows{std::min(std::max<int64_t>(-s, 0), count), count};
    if (!sums_only) {
      load_keys(p, dtype, task, t, count, -kChunk, x);
      transpose_rows(x.k.data, x.k.stride, count, x.k.stride, x.k_transposed.data, kChunk);
      transpose_rows(x.v.data, x.v.stride, count, x.v.stride, x.v_transposed.data, kChunk);
      transpose_query_state(n, x);
      key_gradients_of_state(n, count, x);
    } else {
      x.decays.load(p.decay, task, t, count);
    }
    x.queries.fade(x.decays.all);
    for (int64_t head = heads.begin; head < heads.end && rows.count() > 0; ++head) {
      const ChunkQueries queries{task.b, head, s, rows};
      load_queries(p, dtype, queries, -kChunk, x);
      divide_by_denominators(QueryNumbers<acc_t>(p, queries).inverse, rows, x);
      if (!sums_only) key_gradients_of_chunk(p, queries, count, x);
      if (adds_first || t > keys.begin) add_queries(p, queries, sums_only, x);
    }
    if (!sums_only) x.queries.refresh();
    if (t > keys.begin && x.queries.begins_at(t)) x.queries.end_segment();
    if (!sums_only) store_key_gradients(p, dtype, task, t, count, x);
  }
}

// Not causal: what the state of queries holds sees every key.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_all_keys(const LinearAttentionBackward& p, Dtype dtype, const Task& task, Range keys,
                                            BackwardScratch<acc_t>& x) {
  transpose_query_state(p.shape, x);
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    load_keys(p, dtype, task, t, count, kChunk, x);
    key_gradients_of_state(p.shape, count, x);
    store_key_gradients(p, dtype, task, t, count, x);
  }
}

// ---- tasks

template <typename acc_t>
MEMCHECK_INLINE Slots<acc_t> slots_of_keys(const LinearAttentionBackward& p) {
  return {p.states, p.shape, 0, key_slots(p.shape), backward_state(p.shape)};
}

template <typename acc_t>
MEMCHECK_INLINE Slots<acc_t> slots_of_queries(const LinearAttentionBackward& p) {
  const LinearAttentionShape& n = p.shape;
  // Causal: the sums of keys have been read when those of queries are written in their place.
  return {p.states, n, n.causal ? 0 : n.B * n.Hkv * key_slots(n), query_slots(n), backward_state(n)};
}

// M and z of the keys that the task's queries see before they go along with their own; KeySums: of the task's keys.
template <typename acc_t>
MEMCHECK_INLINE void start_keys_body(const Pass<LinearAttentionBackward>& pass, const Task& task, Range keys,
                                     BackwardScratch<acc_t>& x) {
  const LinearAttentionBackward& p = pass.p;
  const LinearAttentionShape& n = p.shape;
  if (pass.phase == Phase::Queries) {
    const Slots<acc_t> slots = slots_of_keys<acc_t>(p);
    x.keys.start_from(slots.at(n, task, n.causal ? task.segment - 1 : slots.slots - 1));
  } else {
    x.keys.clear();
  }
  if (p.initial && keys.begin == 0) x.keys.load(p.initial, task, true, 1);
  if (pass.phase == Phase::Queries) return;
  if (pass.phase == Phase::KeySums || !n.causal) sum_keys(p, pass.dtype, task, keys, x);
  if (pass.phase == Phase::Whole && !n.causal) x.keys.end_segment();
}

// grad_q. Not causal: and N and n of the task's queries.
template <typename acc_t>
MEMCHECK_INLINE void query_part_body(const Pass<LinearAttentionBackward>& pass, const Task& task, Range keys,
                                     BackwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = pass.p.shape;
  if (n.causal) return differentiate_along(pass.p, pass.dtype, task, keys, x);
  const bool whole = pass.phase == Phase::Whole;
  const int64_t end = whole ? query_segments(n) : task.segment + 1;
  x.queries.clear();
  for (int64_t segment = whole ? 0 : task.segment; segment < end; ++segment) {
    differentiate_all_queries(pass.p, pass.dtype, task, segment_range(n, n.S, segment), x);
    if (whole) x.queries.end_segment();
  }
}

// grad_k and grad_v; QuerySums: N and n of the task's queries.
template <typename acc_t>
MEMCHECK_INLINE void key_part_body(const Pass<LinearAttentionBackward>& pass, const Task& task, Range keys,
                                   BackwardScratch<acc_t>& x) {
  const LinearAttentionBackward& p = pass.p;
  const LinearAttentionShape& n = p.shape;
  if (pass.phase == Phase::Keys) {
    x.queries.start_from(slots_of_queries<acc_t>(p).at(n, task, n.causal ? task.segment : query_slots(n) - 1));
  } else if (n.causal) {
    x.queries.clear();
  }
  if (!n.causal) return differentiate_all_keys(p, pass.dtype, task, keys, x);
  // y has -n in its gradient of z, so n begins and ends with a minus.
  if (p.grad_last && keys.end == n.T) x.queries.load(p.grad_last, task, true, -1);
  differentiate_back(p, pass.dtype, task, keys, pass.phase == Phase::QuerySums, x);
  if (p.grad_initial && keys.begin == 0 && pass.phase != Phase::QuerySums)
    x.queries.store(p.grad_initial, task, true, -1);
}

// Whether anything is wanted that needs N and n.
inline bool wants_keys(const LinearAttentionBackward& p) {
  return p.grad_k || p.grad_v || p.grad_decay || p.grad_initial;
}

// What the tasks of other segments read.
template <typename acc_t>
MEMCHECK_INLINE void store_sums_body(const Pass<LinearAttentionBackward>& pass, const Task& task, Range keys,
                                     BackwardScratch<acc_t>& x) {
  const LinearAttentionBackward& p = pass.p;
  if (pass.phase == Phase::KeySums)
    x.keys.store_segment(slots_of_keys<acc_t>(p).at(p.shape, task, task.segment), p.initial && keys.begin == 0);
  if (pass.phase == Phase::QuerySums || (pass.phase == Phase::Queries && !p.shape.causal))
    x.queries.store_segment(slots_of_queries<acc_t>(p).at(p.shape, task, task.segment - pass.first_segment),
                            p.grad_last && keys.end == p.shape.T);
}

// A function for each part: compilers take far longer for one function of all parts.
#define MEMCHECK_BACKWARD_PART(name)                                                                        \
  MEMCHECK_PER_CPU_LEVEL(                                                                                   \
      acc_t, name,                                                                                          \
      (const Pass<LinearAttentionBackward>& pass, const Task& task, Range keys, BackwardScratch<acc_t>& x), \
      (pass, task, keys, x))
MEMCHECK_BACKWARD_PART(start_keys)
MEMCHECK_BACKWARD_PART(query_part)
MEMCHECK_BACKWARD_PART(key_part)
MEMCHECK_BACKWARD_PART(store_sums)
#undef MEMCHECK_BACKWARD_PART

template <typename acc_t>
void backward_task(const Pass<LinearAttentionBackward>& pass, const Task& task, BackwardScratch<acc_t>& x) {
  const LinearAttentionBackward& p = pass.p;
  const bool whole = pass.phase == Phase::Whole;
  const bool has_queries = whole || pass.phase == Phase::Queries;
  const bool has_keys = whole ? wants_keys(p) : pass.phase == Phase::QuerySums || pass.phase == Phase::Keys;
  const Range keys = whole ? Range{0, p.shape.T} : segment_range(p.shape, p.shape.T, task.segment);
  if (has_queries || pass.phase == Phase::KeySums) start_keys(pass, task, keys, x);
  if (has_queries) query_part(pass, task, keys, x);
  if (has_keys) key_part(pass, task, keys, x);
  if (!whole) store_sums(pass, task, keys, x);
}

template <typename acc_t>
void backward_tasks(const Pass<LinearAttentionBackward>& pass, int64_t begin, int64_t end, int worker) {
  Arena arena = arena_of(pass.p.scratch, pass.scratch_bytes, worker);
  BackwardScratch<acc_t> x(arena, pass.p.shape);
  for (int64_t index = begin; index < end; ++index) backward_task(pass, pass.task(index), x);
}

template <typename acc_t>
void run_backward(const LinearAttentionBackward& p, Dtype dtype, Phase phase, int64_t pieces) {
  // No key needs the sum of the first segment's queries: there is none before them.
  const int64_t first = phase == Phase::QuerySums ? 1 : 0;
  const int64_t bytes = scratch_bytes<BackwardScratch<acc_t>>(p.shape);
  const Pass<LinearAttentionBackward> pass{p, dtype, phase, pieces, first, bytes};
  parallel_tasks(p.shape.B * p.shape.Hkv * pieces, useful_threads(p.shape, p.threads),
                 [&](int64_t begin, int64_t end, int worker) { backward_tasks<acc_t>(pass, begin, end, worker); });
}

template <typename acc_t>
void run_passes(const LinearAttentionBackward& p, Dtype dtype) {
  const LinearAttentionShape& n = p.shape;
  const int64_t threads = useful_threads(n, p.threads);
  if (!splits(n, p.threads)) return run_backward<acc_t>(p, dtype, Phase::Whole, 1);
  run_backward<acc_t>(p, dtype, Phase::KeySums, key_slots(n));
  scan_slots(slots_of_keys<acc_t>(p), false, threads);
  run_backward<acc_t>(p, dtype, Phase::Queries, query_segments(n));
  if (!wants_keys(p)) return;
  if (n.causal) run_backward<acc_t>(p, dtype, Phase::QuerySums, query_slots(n));
  scan_slots(slots_of_queries<acc_t>(p), n.causal, threads);
  run_backward<acc_t>(p, dtype, Phase::Keys, segments(n, n.T));
}

// ---- decays

// The sum of x y over one head, of matrices (rows,columns).
template <typename acc_t>
double product_sum(const Strided<4>& x, const Strided<4>& y, const Task& task, int64_t rows, int64_t columns) {
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < columns; ++i)
      sum += double{*x.template at<const acc_t>(task.b, task.key_head, row, i)} *
             *y.template at<const acc_t>(task.b, task.key_head, row, i);
  return sum;
}

// grad_decay from what each position gives to it. The sum of a decay below the precision of acc_t is smaller than its
// rounding errors, and divided by the decay it would be anything: its gradient is 0.
template <typename acc_t>
void finish_grad_decay(const LinearAttentionBackward& p, const Task& task) {
  const LinearAttentionShape& n = p.shape;
  double sum = 0;
  if (p.grad_last.m) sum += product_sum<acc_t>(p.grad_last.m, p.last.m, task, n.D, n.Dv);
  if (p.grad_last.z) sum += product_sum<acc_t>(p.grad_last.z, p.last.z, task, 1, n.D);
  for (int64_t t = n.T - 1; t >= 0; --t) {
    acc_t* const grad = p.grad_decay.template at<acc_t>(task.b, task.key_head, t);
    const double decay = *p.decay.template at<const acc_t>(task.b, task.key_head, t);
    sum += *grad;
    *grad = decay < std::numeric_limits<acc_t>::epsilon() ? acc_t(0) : static_cast<acc_t>(sum / decay);
  }
}

}  // namespace

int64_t backward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<BackwardScratch<decltype(acc)>>(n); });
}

void backward(const LinearAttentionBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_passes<acc_t>(p, dtype);
    if (!p.grad_decay) return;
    const LinearAttentionShape& n = p.shape;
    parallel_tasks(n.B * n.Hkv, useful_threads(n, p.threads), [&](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head) finish_grad_decay<acc_t>(p, {head / n.Hkv, head % n.Hkv, 0});
    });
  });
}

void sum_decays(const LinearAttentionDecaySum& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    parallel_tasks(p.Hkv, memcheck::useful_threads(p.B * p.Hkv * p.T, p.Hkv), [&](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head) {
        double sum = 0;
        for (int64_t b = 0; b < p.B; ++b)
          for (int64_t t = 0; t < p.T; ++t) sum += *p.from.template at<const acc_t>(b, head, t);
        *p.to.template at<acc_t>(head) = static_cast<acc_t>(sum);
      }
    });
  });
}

}  // namespace memcheck::linear_cpu
