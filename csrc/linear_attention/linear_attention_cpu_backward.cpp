#include "common/cpu_level.h"
#include "common/half.h"
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
// the gradient of log(a_t) is a sum over the pairs i >= t > j: of the score times its gradient,
//
//     a_(j+1) ... a_i phi(q_i).phi(k_j) (h_i.v_j - delta_i)
//
// Every term has a_t as a factor, so the gradient is as accurate for strong decays as for weak ones. (It is also the
// sum over i >= t of phi(q_i).(grad phi(q_i)) - phi(k_i).(grad phi(k_i)), which cancels where a_t is small.) Over a
// chunk, the pairs are those of the chunk's queries and keys, of its queries and M before it, of N behind it and its
// keys, and of N and M: <M, N> - z.n. M and z before each chunk are formed again on the way back, a block of chunks at
// a time.

namespace memcheck::linear_cpu {
namespace {

using BackwardTask = Task<LinearAttentionBackward>;

// Positions of a segment whose states are formed again at the same time.
constexpr int64_t kBlock = 8 * kChunk;

// A task, and the matrices of a chunk, with a row for each position.
template <typename acc_t>
struct BackwardHead {
  const LinearAttentionBackward& p;
  const LinearAttentionShape& n;
  const Dtype dtype;
  State<acc_t> keys;                         // M^T, z
  State<acc_t> queries;                      // N^T, n; causal: in the place of `keys`, which is not needed any more
  Matrix<acc_t> later;                       // N (D,Dv)
  Matrix<acc_t> q, k, grad_q, grad_k, z;     // (kChunk,D): phi(q), phi(k), the gradients of these, and running z
  Matrix<acc_t> k_transposed, v_transposed;  // (D,kChunk), (Dv,kChunk)
  Matrix<acc_t> g, v, grad_v;                // (kChunk,Dv)
  Matrix<acc_t> scores, products;            // phi(q) phi(k)^T, g v^T (kChunk,kChunk)
  Matrix<acc_t> partial;                     // sums along rows before their lanes are added (kChunk,kTileLanes)
  ChunkDecays<acc_t> decays;
  // M^T and z before each segment but the first, which lie in slots if the head is cut. For the gradient of decays, as
  // the next three.
  Slots<acc_t> of_segments;
  acc_t *of_blocks, *of_chunks;  // M^T and z before each block of a segment, and before each chunk of a block
  acc_t* crossing;               // (kChunk): the gradients of logarithms of decays, but for queries and M

  BackwardHead(Arena& arena, const BackwardTask& task)
      : p(task.p),
        n(p.shape),
        dtype(task.dtype),
        keys(state_shape(n, true), segment_step(n, n.T), n.causal ? Reading::Chunks : Reading::Ends, arena),
        queries(n.causal ? keys : State<acc_t>(state_shape(n, true), segment_step(n, n.S), Reading::Ends, arena)),
        later(arena, padded_columns(n.D), n.Dv),
        q(arena, kChunk, n.D),
        k(arena, kChunk, n.D),
        grad_q(arena, kChunk, n.D),
        grad_k(arena, kChunk, n.D),
        z(arena, kChunk, n.D),
        k_transposed(arena, padded_columns(n.D), kChunk),
        v_transposed(arena, padded_columns(n.Dv), kChunk),
        g(arena, kChunk, n.Dv),
        v(arena, kChunk, n.Dv),
        grad_v(arena, kChunk, n.Dv),
        scores(arena, kChunk, kChunk),
        products(arena, kChunk, kChunk),
        partial(arena, kChunk, kTileLanes),
        decays(arena, n),
        of_segments(slots_of<acc_t>(p, false)),
        of_blocks(states(n.decays_learn ? ceil_div(std::max<int64_t>(1, segment_end(0)), kBlock) : 0, arena)),
        of_chunks(states(n.decays_learn ? kBlock / kChunk : 0, arena)),
        crossing(arena.take<acc_t>(n.decays_learn ? kChunk : 0)) {
    if (n.decays_learn && task.phase == Phase::Whole)
      of_segments.data = arena.take<acc_t>(of_segments.count * of_segments.state.slot_size());
  }

  acc_t* states(int64_t count, Arena& arena) const { return arena.take<acc_t>(count * keys.shape.size()); }

  // ---- loads

  // phi(x) of rows of a chunk, (rows,D), and values, (rows,Dv). The next chunk begins `ahead` positions further.
  MEMCHECK_INLINE void load_pair(const MatrixPlace& x, const MatrixPlace& values, int64_t rows, int64_t ahead,
                                 const Matrix<acc_t>& to, const Matrix<acc_t>& to_values) const {
    NextRows next_values{};
    if (values.data != nullptr) {
      load_rows(dtype, values, rows, n.Dv, to_values.data, to_values.stride);
      next_values = rows_after(dtype, values, ahead, n.Dv);
    }
    load_features(n, dtype, x, rows, rows_after(dtype, x, ahead, n.D), next_values, to);
  }

  // phi(k), v and decays of a chunk of keys.
  MEMCHECK_INLINE void load_keys(int64_t t, int64_t count, int64_t ahead = kChunk) {
    load_pair(rows_at(dtype, p.k, 0, 0, t), p.v ? rows_at(dtype, p.v, 0, 0, t) : MatrixPlace{}, count, ahead, k, v);
    if (!p.v) clear_rows(v, {0, count});
    decays.load(p.decay, t, count);
  }

  // phi(q) and g of rows of a chunk of queries.
  MEMCHECK_INLINE void load_queries(const ChunkQueries& at, int64_t ahead) const {
    load_pair(at.place(dtype, p.q), at.place(dtype, p.grad_y), at.rows.size(), ahead, q.rows_from(at.rows.begin),
              g.rows_from(at.rows.begin));
  }

  // ---- numbers of each query, in memory

  MEMCHECK_INLINE acc_t* inverses(const ChunkQueries& at) const {
    return static_cast<acc_t*>(p.rows) + at.head * n.S + at.position;
  }
  MEMCHECK_INLINE acc_t* deltas(const ChunkQueries& at) const { return inverses(at) + n.H * n.S; }

  // ---- states

  // M^T += v^T phi(k) and z += phi(k), after what decays leave of both. Leaves phi(k) scaled.
  MEMCHECK_INLINE void add_keys_to(State<acc_t>& state, int64_t count, bool sums_only) const {
    if (n.decayed) scale_rows(k, {0, count}, decays.out);
    state.fade(decays.all);
    state.add_chunk(count, v.factor(0), k, nullptr, k.data, sums_only);
    if (!sums_only) state.refresh();
  }
  MEMCHECK_INLINE void add_keys(int64_t count, bool sums_only) { add_keys_to(keys, count, sums_only); }

  // N^T += h^T phi(q) and n += delta phi(q). Leaves phi(q) scaled where there are decays.
  MEMCHECK_INLINE void add_queries(const ChunkQueries& at, bool sums_only) {
    const int64_t first = at.rows.begin;
    if (n.decayed) scale_rows(q, at.rows, decays.into);
    queries.add_chunk(at.rows.size(), g.factor(first), q.rows_from(first), deltas(at) + first, q.row(first), sums_only);
  }

  // N from N^T.
  MEMCHECK_INLINE void transpose_query_state() const {
    const Matrix<acc_t>& seen = queries.seen;
    for (int64_t row = 0; row < n.Dv; row += kTileRows)
      transpose_rows(seen.row(row), seen.stride, std::min<int64_t>(kTileRows, n.Dv - row), seen.stride,
                     later.data + row, later.stride);
  }

  // ---- states of keys on the way back

  // The end of the segment that begins at a position.
  MEMCHECK_INLINE int64_t segment_end(int64_t begin) const {
    return keys.segment_length == 0 ? n.T : std::min(n.T, begin + keys.segment_length);
  }

  // The states before every `step` positions of a span, from that before its first one. Null: as the sequence begins.
  MEMCHECK_INLINE void form_states(const acc_t* first, Span span, int64_t step, acc_t* to) {
    State<acc_t> state(keys.shape, to);
    state.start_from(first);
    if (first == nullptr && p.initial) state.load(p.initial, 1);
    for (int64_t t = span.begin; t + kChunk < span.end; t += kChunk) {
      if ((t - span.begin) % step == 0) {
        const acc_t* before = to;
        state = State<acc_t>(keys.shape, to += keys.shape.size());
        state.start_from(before);
      }
      load_keys(t, kChunk);
      add_keys_to(state, kChunk, true);
    }
  }

  // The state before the chunk at t. It is asked for chunk by chunk, from the last one of each segment to its first.
  MEMCHECK_INLINE const acc_t* keys_before(int64_t t, int64_t count) {
    const int64_t segment = keys.segment_length == 0 ? 0 : t / keys.segment_length;
    const int64_t begin = segment * keys.segment_length, block = (t - begin) / kBlock, first = begin + block * kBlock;
    const bool ends = t + count == segment_end(begin);
    if (ends) form_states(of_segments.at(segment - 1), {begin, first + kChunk}, kBlock, of_blocks);
    if (ends || t + count == first + kBlock)
      form_states(of_blocks + block * keys.shape.size(), {first, t + count}, kChunk, of_chunks);
    return of_chunks + (t - first) / kChunk * keys.shape.size();
  }

  // ---- the gradient of decays

  // Adds what queries give with the state before their chunk, of_state = phi(q).(M h) and of_z = phi(q).z: to every
  // position the sum over the queries from it on.
  MEMCHECK_INLINE void add_queries_of_state(const ChunkQueries& at, const acc_t* of_state, const acc_t* of_z) const {
    const acc_t* const delta = deltas(at);
    acc_t sum = 0;
    for (int64_t row = at.rows.end - 1; row >= 0; --row) {
      if (row >= at.rows.begin)
        sum += of_state[row] - (n.normalize ? delta[row] * decays.into[row] * of_z[row] : acc_t(0));
      *p.grad_decay.template at<acc_t>(0, 0, at.position + row + n.T - n.S) += sum;
    }
  }

  // What the state behind a chunk gives with that before it and with the chunk's keys, whose gradients are those of
  // the state: to every position the sum over the keys before it.
  MEMCHECK_INLINE void start_crossing(const acc_t* before, int64_t count) const {
    alignas(64) double lanes[kTileLanes] = {};
    const acc_t* const behind = queries.seen.data;
    const int64_t matrix = queries.shape.matrix_size(), size = decays.all == 0 ? 0 : queries.shape.size();
    for (int64_t i = 0; i < size; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) {
        const double product = double{before[i + lane]} * behind[i + lane];
        lanes[lane] += i < matrix ? product : -product;
      }
    double sum = 0;
    for (int64_t lane = 0; lane < kTileLanes; ++lane) sum += lanes[lane];
    sum *= decays.all;
    alignas(64) acc_t of_keys[kChunk];
    dots(k, grad_k, {0, count}, of_keys);
    for (int64_t row = 0; row < count; ++row) {
      crossing[row] = static_cast<acc_t>(sum);
      sum += of_keys[row];
    }
  }

  // Adds what queries and keys of the chunk give, from scores and their weighed gradients in `products`: to every
  // position the sum over the queries from it on and the keys before it.
  MEMCHECK_INLINE void add_pairs(Span rows) const {
    alignas(64) acc_t sums[kChunk] = {}, of_pairs[kChunk];  // of each key, over the queries from a row on
    for (int64_t row = rows.end - 1; row >= 0; --row) {
      for (int64_t i = 0; i < kChunk && row >= rows.begin; ++i)
        sums[i] += i < row ? products.row(row)[i] * scores.row(row)[i] : acc_t(0);
      for (int64_t i = 0; i < kChunk; ++i) partial.row(row)[i] = i < row ? sums[i] : acc_t(0);
    }
    sum_lanes(rows.end, partial, of_pairs);
    for (int64_t row = 0; row < rows.end; ++row) crossing[row] += of_pairs[row];
  }

  // The gradients of the chunk's decays, or of their logarithms, from all parts.
  MEMCHECK_INLINE void store_grad_decay(int64_t t, int64_t count) const {
    for (int64_t row = 0; row < count; ++row) {
      acc_t* const grad = p.grad_decay.template at<acc_t>(0, 0, t + row);
      const double sum = double{*grad} + crossing[row];
      *grad = static_cast<acc_t>(p.decay.logarithms ? sum : sum / p.decay.template at<acc_t>(0, 0, t + row));
    }
  }

  // ---- gradients of queries

  // z of every row, 0 if y is not normalized: that of the state, and of the first `count` rows of phi(k) up to the row.
  MEMCHECK_INLINE void running_key_sums(int64_t rows, int64_t count) const {
    if (!n.normalize) return clear_rows(z, {0, rows});
    const acc_t* before = keys.vector_of(keys.seen);
    for (int64_t i = 0; i < z.stride; i += kTileLanes) {
      alignas(64) acc_t sum[kTileLanes] = {};
      for (int64_t row = 0; row < rows; ++row) {
        const acc_t decay = n.decayed ? decays.at[row] : acc_t(1), into = n.decayed ? decays.into[row] : acc_t(1);
        for (int64_t lane = 0; lane < kTileLanes; ++lane) {
          if (row < count) sum[lane] = decay * sum[lane] + k.row(row)[i + lane];
          z.row(row)[i + lane] = into * before[i + lane] + sum[lane];
        }
      }
    }
  }

  // to (kChunk) = a.b of each of the rows.
  MEMCHECK_INLINE void dots(const Matrix<acc_t>& a, const Matrix<acc_t>& b, Span rows, acc_t* to) const {
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

  // Products of queries and keys of the same chunk become weights.
  MEMCHECK_INLINE void weigh(const Matrix<acc_t>& weights, Span rows) const {
    mask_later_keys(weights, rows);
    if (n.decayed) scale_scores(weights, rows, decays.between);
  }

  // grad_q = M h, from the state and, causal, from the keys of the chunk. Leaves h scaled where there are decays, and
  // of_state = phi(q).(M h) of the state alone if the gradient of decays is wanted.
  MEMCHECK_INLINE void multiply_by_key_sums(Span rows, acc_t* of_state) const {
    const int64_t first = rows.begin;
    TileTerm<acc_t> seen{};
    if (n.causal) {
      multiply_visible(g, rows, n.Dv, v_transposed, products);
      weigh(products, rows);
      seen = term(first, products.factor(first), k);
    }
    if (n.decayed) scale_rows(g, rows, decays.into);
    const auto before = term(n.Dv, g.factor(first), keys.seen);
    if (p.grad_decay) {
      tile_product(TileProduct::Set, rows.size(), grad_q.stride, before, grad_q.result(first));
      dots(q, grad_q, rows, of_state);
    }
    tile_rows<acc_t>(rows.size(), grad_q.stride, before, seen, nullptr, grad_q.result(first));
  }

  // phi(q) and h of rows of a chunk, grad_q if it is wanted, and what rows give to grad_decay. Leaves 1 / den and
  // delta. Everything is formed with h instead of g, because phi(q).(M g) may overflow where phi(q).(M h) = g.y does
  // not.
  MEMCHECK_INLINE void differentiate_queries(const ChunkQueries& at) const {
    const Span rows = at.rows;
    acc_t* const kept_inverse = inverses(at);
    acc_t* const kept_delta = deltas(at);
    load_queries(at, kChunk);
    alignas(64) acc_t den[kChunk], inverse[kChunk];
    const acc_t eps = static_cast<acc_t>(p.eps);
    dots(q, z, rows, den);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      inverse[row] = n.normalize ? acc_t(1) / (den[row] + eps) : acc_t(1);
    scale_rows(g, rows, inverse);
    alignas(64) acc_t g_dot_y[kChunk], of_state[kChunk], of_z[kChunk];
    multiply_by_key_sums(rows, of_state);
    dots(q, grad_q, rows, g_dot_y);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const acc_t delta = n.normalize ? g_dot_y[row] * inverse[row] : acc_t(0);
      acc_t* grad = grad_q.row(row);
      for (int64_t i = 0; i < grad_q.stride; ++i)
        grad[i] = (grad[i] - delta * z.row(row)[i]) * feature_derivative(n.feature_map, q.row(row)[i]);
      kept_inverse[row] = inverse[row];
      kept_delta[row] = delta;
    }
    if (p.grad_decay) {
      dots(q, {keys.vector_of(keys.seen), 0}, rows, of_z);
      add_queries_of_state(at, of_state, of_z);
    }
    if (p.grad_q) store_rows(dtype, at.place(dtype, p.grad_q), rows.size(), n.D, grad_q.row(rows.begin), grad_q.stride);
  }

  // Causal, along the sequence: grad_q, 1 / den and delta.
  MEMCHECK_INLINE void differentiate_along(Span span) {
    for (int64_t t = span.begin; t < span.end; t += kChunk) {
      const int64_t count = std::min(kChunk, span.end - t);
      if (t > span.begin && keys.begins_at(t)) {
        keys.end_segment();
        if (p.grad_decay)
          State<acc_t>(keys.shape, of_segments.at(t / keys.segment_length - 1)).start_from(keys.before.data);
      }
      load_keys(t, count);
      for (int64_t row = 0; row < count && p.grad_decay; ++row)
        *p.grad_decay.template at<acc_t>(0, 0, t + row) = acc_t(0);
      ChunkQueries at = queries_along(n, t, count);
      if (at.rows.size() > 0) {
        transpose_rows(v.data, v.stride, count, v.stride, v_transposed.data, kChunk);
        running_key_sums(count, count);
        for (; at.head < n.H; ++at.head) differentiate_queries(at);
      }
      if (t + kChunk < span.end) add_keys(count, false);
    }
  }

  // Not causal: every query sees what the state of keys holds. grad_q, and N and n of these queries.
  MEMCHECK_INLINE void differentiate_all_queries(Span span) {
    running_key_sums(kChunk, 0);
    for (int64_t head = 0; head < n.H; ++head) {
      for (int64_t s = span.begin; s < span.end; s += kChunk) {
        const ChunkQueries at{head, s, {0, std::min(kChunk, span.end - s)}};
        differentiate_queries(at);
        add_queries(at, true);
      }
    }
  }

  // ---- gradients of keys

  // grad phi(k) = N v - n and grad_v = N^T phi(k) of a chunk, from the later queries in the state.
  MEMCHECK_INLINE void key_gradients_of_state(int64_t count) const {
    tile_product(TileProduct::Set, count, grad_k.stride, term(n.Dv, v.factor(0), queries.seen), grad_k.result(0));
    const acc_t* sums = queries.vector_of(queries.seen);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < grad_k.stride; ++i) grad_k.row(row)[i] -= sums[i];
    tile_product(TileProduct::Set, count, grad_v.stride, term(n.D, k.factor(0), later), grad_v.result(0));
    if (!n.decayed) return;
    scale_rows(grad_k, {0, count}, decays.out);
    scale_rows(grad_v, {0, count}, decays.out);
  }

  // Adds to these what the queries of the same chunk give.
  MEMCHECK_INLINE void key_gradients_of_chunk(const ChunkQueries& at, int64_t count) const {
    const Span rows = at.rows;
    const int64_t first = rows.begin;
    const acc_t* delta = deltas(at);
    multiply_visible(g, rows, n.Dv, v_transposed, products);
    for (int64_t row = first; row < rows.end; ++row)
      for (int64_t i = 0; i < kChunk; ++i) products.row(row)[i] -= delta[row];
    weigh(products, rows);
    tile_product(TileProduct::Add, count, grad_k.stride,
                 term(rows.size(), products.factor(first).transposed(), q.rows_from(first)), grad_k.result(0));
    multiply_visible(q, rows, n.D, k_transposed, scores);
    if (p.grad_decay) add_pairs(rows);
    weigh(scores, rows);
    tile_product(TileProduct::Add, count, grad_v.stride,
                 term(rows.size(), scores.factor(first).transposed(), g.rows_from(first)), grad_v.result(0));
  }

  MEMCHECK_INLINE void store_key_gradients(int64_t t, int64_t count) const {
    if (p.grad_decay) store_grad_decay(t, count);
    for (int64_t i = 0; i < count * k.stride; ++i) grad_k.data[i] *= feature_derivative(n.feature_map, k.data[i]);
    if (p.grad_k) store_rows(dtype, rows_at(dtype, p.grad_k, 0, 0, t), count, n.D, grad_k.data, grad_k.stride);
    if (p.grad_v) store_rows(dtype, rows_at(dtype, p.grad_v, 0, 0, t), count, n.Dv, grad_v.data, grad_v.stride);
  }

  // Causal, back: grad_k and grad_v, or only N and n. The state then has all queries if they are the first and the
  // gradient of the initial state is wanted.
  MEMCHECK_INLINE void differentiate_back(Span span, bool sums_only) {
    const bool adds_first = sums_only || (p.grad_initial && span.begin == 0);
    for (int64_t t = span.begin + (span.end - 1 - span.begin) / kChunk * kChunk; t >= span.begin; t -= kChunk) {
      const int64_t count = std::min(kChunk, span.end - t);
      if (!sums_only) {
        const acc_t* const before = p.grad_decay ? keys_before(t, count) : nullptr;
        load_keys(t, count, -kChunk);
        transpose_rows(k.data, k.stride, count, k.stride, k_transposed.data, kChunk);
        transpose_rows(v.data, v.stride, count, v.stride, v_transposed.data, kChunk);
        transpose_query_state();
        key_gradients_of_state(count);
        if (p.grad_decay) start_crossing(before, count);
      } else {
        decays.load(p.decay, t, count);
      }
      queries.fade(decays.all);
      for (ChunkQueries at = queries_along(n, t, count); at.head < n.H && at.rows.size() > 0; ++at.head) {
        load_queries(at, -kChunk);
        scale_rows(g, at.rows, inverses(at));
        if (!sums_only) key_gradients_of_chunk(at, count);
        if (adds_first || t > span.begin) add_queries(at, sums_only);
      }
      if (!sums_only) queries.refresh();
      if (t > span.begin && queries.begins_at(t)) queries.end_segment();
      if (!sums_only) store_key_gradients(t, count);
    }
  }

  // Not causal: what the state of queries holds sees every key.
  MEMCHECK_INLINE void differentiate_all_keys(Span span) {
    transpose_query_state();
    for (int64_t t = span.begin; t < span.end; t += kChunk) {
      const int64_t count = std::min(kChunk, span.end - t);
      load_keys(t, count);
      key_gradients_of_state(count);
      store_key_gradients(t, count);
    }
  }
};

// ---- tasks

// M and z of the keys that the task's queries see before they go along with their own; KeySums: of the task's keys.
template <typename acc_t>
MEMCHECK_INLINE void start_keys_body(const BackwardTask& task, BackwardHead<acc_t>& x) {
  const Span keys = task.keys();
  const bool whole = task.phase == Phase::Whole, continues = task.p.initial && keys.begin == 0;
  const Slots<acc_t> slots = slots_of<acc_t>(task.p, false);
  x.keys.start_from(task.phase == Phase::Queries ? slots.at(x.n.causal ? task.piece - 1 : slots.count - 1) : nullptr);
  if (continues) x.keys.load(task.p.initial, 1);
  if (task.phase == Phase::KeySums || (whole && !x.n.causal)) sum_keys(x, x.keys, keys, kChunk);
  if (task.phase == Phase::KeySums) x.keys.store_segment(slots.at(task.piece), continues);
  if (whole && !x.n.causal) x.keys.end_segment();
}

// grad_q. Not causal: and N and n of the task's queries.
template <typename acc_t>
MEMCHECK_INLINE void query_gradients_body(const BackwardTask& task, BackwardHead<acc_t>& x) {
  if (x.n.causal) return x.differentiate_along(task.keys());
  const bool whole = task.phase == Phase::Whole;
  const int64_t end = whole ? query_segments(x.n) : task.piece + 1;
  x.queries.clear();
  for (int64_t segment = whole ? 0 : task.piece; segment < end; ++segment) {
    x.differentiate_all_queries(segment_span(x.n, x.n.S, segment));
    if (whole) x.queries.end_segment();
  }
  if (!whole) x.queries.store_segment(slots_of<acc_t>(task.p, true).at(task.piece), false);
}

// grad_k and grad_v; QuerySums: N and n of the task's queries.
template <typename acc_t>
MEMCHECK_INLINE void key_gradients_body(const BackwardTask& task, BackwardHead<acc_t>& x) {
  const LinearAttentionBackward& p = task.p;
  const Span keys = task.keys();
  const bool sums_only = task.phase == Phase::QuerySums, ends = p.grad_last && keys.end == p.shape.T;
  const Slots<acc_t> slots = slots_of<acc_t>(p, true);
  if (task.phase == Phase::Keys) {
    x.queries.start_from(slots.at(x.n.causal ? task.piece : slots.count - 1));
  } else if (x.n.causal) {
    x.queries.clear();
  }
  if (!x.n.causal) return x.differentiate_all_keys(keys);
  // y has -n in its gradient of z, so n begins and ends with a minus.
  if (ends) x.queries.load(p.grad_last, -1);
  x.differentiate_back(keys, sums_only);
  if (sums_only) return x.queries.store_segment(slots.at(task.piece - 1), ends);
  if (p.grad_initial && keys.begin == 0) x.queries.store(p.grad_initial, -1);
}

// A function for each part: compilers take far longer for one function of all parts.
#define MEMCHECK_BACKWARD_PART(name) \
  MEMCHECK_PER_CPU_LEVEL(acc_t, name, (const BackwardTask& task, BackwardHead<acc_t>& x), (task, x))
MEMCHECK_BACKWARD_PART(start_keys)
MEMCHECK_BACKWARD_PART(query_gradients)
MEMCHECK_BACKWARD_PART(key_gradients)
#undef MEMCHECK_BACKWARD_PART

// Whether anything is wanted that needs N and n.
bool wants_keys(const LinearAttentionBackward& p) {
  return p.grad_k || p.grad_v || p.grad_decay || p.grad_initial;
}

template <typename acc_t>
void run_backward(const BackwardTask& task, Arena arena) {
  const bool whole = task.phase == Phase::Whole;
  if (task.phase == Phase::KeyScan || task.phase == Phase::QueryScan) {
    const bool of_queries = task.phase == Phase::QueryScan;
    return scan_slots(slots_of<acc_t>(task.p, of_queries), of_queries && task.p.shape.causal, task.piece);
  }
  BackwardHead<acc_t> x(arena, task);
  if (whole || task.phase == Phase::KeySums || task.phase == Phase::Queries) start_keys(task, x);
  if (whole || task.phase == Phase::Queries) query_gradients(task, x);
  if (whole ? wants_keys(task.p) : task.phase == Phase::QuerySums || task.phase == Phase::Keys) key_gradients(task, x);
}

}  // namespace

int64_t backward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype, bool cut) {
  BackwardTask task{.p = {}, .dtype = dtype, .phase = cut ? Phase::Keys : Phase::Whole, .piece = 0};
  task.p.shape = n;
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<BackwardHead<decltype(acc)>>(task); });
}

void backward(const LinearAttentionBackward& p, Dtype dtype) {
  const Deal deal(p.shape, dtype, p.threads, true);
  const auto run = [&](Phase phase) {
    run_pass(p, deal, phase, [&](const BackwardTask& task, Arena arena) {
      with_acc_type(dtype, [&](auto acc) { run_backward<decltype(acc)>(task, arena); });
    });
  };
  for (const Phase phase : {Phase::Whole, Phase::KeySums, Phase::KeyScan, Phase::Queries}) run(phase);
  if (!wants_keys(p)) return;
  if (p.shape.causal) run(Phase::QuerySums);
  for (const Phase phase : {Phase::QueryScan, Phase::Keys}) run(phase);
}

}  // namespace memcheck::linear_cpu
