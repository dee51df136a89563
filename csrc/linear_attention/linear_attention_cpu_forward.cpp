#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/parallel.h"
#include "linear_attention/linear_attention_cpu.h"

// Forward, and one step of decoding.

namespace memcheck::linear_cpu {
namespace {

// The matrices of a chunk, a row for each position.
template <typename acc_t>
struct ForwardScratch {
  State<acc_t> state;          // M, z
  Matrix<acc_t> q, k;          // phi(q), phi(k) (kChunk,D); k of a long chunk goes on over k_transposed
  Matrix<acc_t> k_transposed;  // (D,kChunk)
  Matrix<acc_t> v, y;          // (kChunk,Dv), where they cannot be used in memory; v of a long chunk goes on over y
  Matrix<acc_t> values;        // v, here or in memory (kChunk,Dv)
  Matrix<acc_t> scores;        // phi(q) phi(k)^T (kChunk,kChunk)
  NextPair next;               // the rows of k and v that come after
  Matrix<acc_t> partial;       // sums along rows before their lanes are added (kChunk,kTileLanes)

  ForwardScratch(Arena& arena, const LinearAttentionShape& n)
      : state(forward_state(n), arena),
        q(arena, kChunk, n.D),
        k(arena, kChunk, n.D),
        k_transposed(arena, padded_columns(n.D), kChunk),
        v(arena, kChunk, n.Dv),
        y(arena, kChunk, n.Dv),
        values(v),
        scores(arena, kChunk, kChunk),
        partial(arena, kChunk, kTileLanes) {}
};

// ---- keys

// phi(k) and v of a chunk of keys, or of a long one.
template <typename acc_t>
MEMCHECK_INLINE void load_keys(const LinearAttentionForward& p, Dtype dtype, const Task& task, int64_t t, int64_t count,
                               ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const MatrixPlace keys = rows_at(dtype, p.k, task.b, task.key_head, t);
  const MatrixPlace values = rows_at(dtype, p.v, task.b, task.key_head, t);
  const bool direct = lies_as_scratch<acc_t>(dtype, values, n.Dv);
  x.values = direct ? in_memory<acc_t>(values) : x.v;
  if (!direct) load_rows(dtype, values, count, n.Dv, x.v.data, x.v.stride);
  load_features(n, dtype, keys, count, {}, {}, x.k);
  x.next = {rows_after(dtype, keys, count, n.D), rows_after(dtype, values, count, n.Dv), count};
}

// M += phi(k)^T v and z += phi(k).
template <typename acc_t>
MEMCHECK_INLINE void add_keys(int64_t count, ForwardScratch<acc_t>& x) {
  x.state.add_chunk(count, x.k.factor(0), x.values, nullptr, x.k.data, &x.next);
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

// ---- queries

// inverse = 1 / den of each row: phi(q).z of the keys before, in the state, and the scores of the keys at hand.
template <typename acc_t>
MEMCHECK_INLINE void inverse_denominators(const ForwardScratch<acc_t>& x, Range rows, bool keys_at_hand, double eps,
                                          acc_t* inverse) {
  const acc_t* z = x.state.vector_of(x.state.total);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    alignas(64) acc_t sums[kTileLanes] = {};
    if (keys_at_hand)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] = x.scores.row(row)[lane];
    for (int64_t i = 0; i < x.q.stride; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += x.q.row(row)[i + lane] * z[i + lane];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) x.partial.row(row)[lane] = sums[lane];
  }
  sum_lanes(x.partial, inverse);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    inverse[row] = acc_t(1) / (inverse[row] + static_cast<acc_t>(eps));
}

// y of rows of a chunk, from the state and from the `keys` keys at hand.
template <typename acc_t>
MEMCHECK_INLINE void attend(const LinearAttentionForward& p, Dtype dtype, const ChunkQueries& queries, int64_t keys,
                            ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range rows = queries.rows;
  const int64_t first = rows.begin;
  const MatrixPlace q_place = queries.place(dtype, p.q);
  const MatrixPlace y_place = queries.place(dtype, p.y);
  const bool direct = lies_as_scratch<acc_t>(dtype, y_place, n.Dv);
  const Matrix<acc_t> y = direct ? in_memory<acc_t>(y_place) : x.y;
  load_features(n, dtype, q_place, rows.count(), {}, {}, x.q.rows_from(first));
  NextPair next{rows_after(dtype, q_place, kChunk, n.D), {}, rows.count()};
  TileTerm<acc_t> seen{};
  if (keys > 0) {
    multiply_visible(x.q, rows, n.D, x.k_transposed, x.scores);
    mask_later_keys(x.scores, rows);
    seen = term(first, x.scores.factor(first), x.values);
  }
  alignas(64) acc_t inverse[kChunk];
  inverse_denominators(x, rows, keys > 0, p.eps, inverse);
  tile_rows(rows.count(), x.y.stride, term(n.D, x.q.factor(first), x.state.total), seen, inverse + first, y.result(0),
            &next);
  if (!direct) store_rows(dtype, y_place, rows.count(), n.Dv, y.data, y.stride);
}

// Causal: queries and keys of the same positions.
template <typename acc_t>
MEMCHECK_INLINE void attend_along(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range keys,
                                  ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range heads = query_heads(n, task);
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    load_keys(p, dtype, task, t, count, x);
    if (s + count > 0) {
      transpose_rows(x.k.data, x.k.stride, count, x.k.stride, x.k_transposed.data, kChunk);
      for (int64_t head = heads.begin; head < heads.end; ++head)
        attend(p, dtype, {task.b, head, s, {std::max<int64_t>(-s, 0), count}}, count, x);
    }
    if (t + kChunk < n.T) add_keys(count, x);
  }
}

// Queries that all see what the state holds.
template <typename acc_t>
MEMCHECK_INLINE void attend_to_all(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range queries,
                                   ForwardScratch<acc_t>& x) {
  const Range heads = query_heads(p.shape, task);
  for (int64_t head = heads.begin; head < heads.end; ++head)
    for (int64_t s = queries.begin; s < queries.end; s += kChunk)
      attend(p, dtype, {task.b, head, s, {0, std::min(kChunk, queries.end - s)}}, 0, x);
}

// ---- tasks of the forward

template <typename acc_t>
MEMCHECK_INLINE void forward_task(const Pass<LinearAttentionForward>& pass, const Task& task,
                                  ForwardScratch<acc_t>& x) {
  const LinearAttentionForward& p = pass.p;
  const LinearAttentionShape& n = p.shape;
  const int64_t key_slots = segments(n, n.T);
  acc_t* slots = slots_of<acc_t>(p.states, n, x.state.shape, task, 0, key_slots);
  const bool whole = pass.phase == Phase::Whole;
  const Range keys = whole ? Range{0, n.T} : segment_range(n, n.T, task.segment);
  x.state.clear();
  if (pass.phase == Phase::KeySums) {
    sum_keys(p, pass.dtype, task, keys, x);
    x.state.store(slots + task.segment * x.state.shape.size());
  } else if (n.causal) {
    if (!whole) x.state.start_from(slots, {0, task.segment});
    attend_along(p, pass.dtype, task, keys, x);
  } else {
    whole ? sum_keys(p, pass.dtype, task, keys, x) : x.state.start_from(slots, {0, key_slots});
    attend_to_all(p, pass.dtype, task, whole ? Range{0, n.S} : segment_range(n, n.S, task.segment), x);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const Pass<LinearAttentionForward>& pass, int64_t begin, int64_t end,
                                        int worker) {
  Arena arena = arena_of(pass.p.scratch, pass.scratch_bytes, worker);
  ForwardScratch<acc_t> x(arena, pass.p.shape);
  for (int64_t index = begin; index < end; ++index) forward_task(pass, task_of(pass.p.shape, index, pass.pieces), x);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, forward_tasks,
                       (const Pass<LinearAttentionForward>& pass, int64_t begin, int64_t end, int worker),
                       (pass, begin, end, worker))

template <typename acc_t>
void run_forward(const LinearAttentionForward& p, Dtype dtype, Phase phase, int64_t pieces) {
  const Pass<LinearAttentionForward> pass{p, dtype, phase, pieces, scratch_bytes<ForwardScratch<acc_t>>(p.shape)};
  parallel_tasks(p.shape.B * p.shape.Hkv * pieces,
                 [&](int64_t begin, int64_t end, int worker) { forward_tasks<acc_t>(pass, begin, end, worker); });
}

// ---- one step

// A head's state comes from memory, the new keys are added, the queries of the group read it, and it goes back.
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
MEMCHECK_INLINE void step_tasks_body(const Pass<LinearAttentionStep>& pass, int64_t begin, int64_t end, int worker) {
  Arena arena = arena_of(pass.p.scratch, pass.scratch_bytes, worker);
  ForwardScratch<acc_t> x(arena, pass.p.shape);
  for (int64_t index = begin; index < end; ++index)
    step_task(pass.p, pass.dtype, task_of(pass.p.shape, index, pass.pieces), x);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, step_tasks,
                       (const Pass<LinearAttentionStep>& pass, int64_t begin, int64_t end, int worker),
                       (pass, begin, end, worker))

}  // namespace

int64_t forward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<ForwardScratch<decltype(acc)>>(n); });
}

void forward(const LinearAttentionForward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    if (!splits(p.shape)) return run_forward<acc_t>(p, dtype, Phase::Whole, 1);
    run_forward<acc_t>(p, dtype, Phase::KeySums, segments(p.shape, p.shape.T));
    run_forward<acc_t>(p, dtype, Phase::Queries, query_segments(p.shape));
  });
}

void step(const LinearAttentionStep& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    const Pass<LinearAttentionStep> pass{p, dtype, Phase::Whole, 1, scratch_bytes<ForwardScratch<acc_t>>(p.shape)};
    parallel_tasks(p.shape.B * p.shape.Hkv,
                   [&](int64_t begin, int64_t end, int worker) { step_tasks<acc_t>(pass, begin, end, worker); });
  });
}

}  // namespace memcheck::linear_cpu
