#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/parallel.h"
#include "linear_attention/linear_attention_cpu.h"

// Forward, and one step of decoding.

namespace memcheck::linear_cpu {

template <typename acc_t>
void scan_slots(const Slots<acc_t>& x, bool reversed, int64_t threads) {
  constexpr int64_t kPart = 512;  // elements of a state
  const int64_t parts = ceil_div(x.sum_size, kPart);
  parallel_tasks(x.heads * parts, threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t part = index % parts * kPart;
      acc_t* head = x.data + index / parts * x.slots * x.size + part;
      const int64_t count = std::min(kPart, x.sum_size - part);
      const bool decayed = x.size > x.sum_size;
      for (int64_t step = 1; step < x.slots; ++step) {
        acc_t* __restrict slot = head + (reversed ? x.slots - 1 - step : step) * x.size;
        const acc_t* __restrict last = reversed ? slot + x.size : slot - x.size;
        if (!decayed) {
          for (int64_t i = 0; i < count; ++i) slot[i] += last[i];
          continue;
        }
        const acc_t kept = slot[x.sum_size - part];
        alignas(64) acc_t faded[kPart];
        for (int64_t i = 0; i < count; ++i) faded[i] = kept * last[i];
        for (int64_t i = 0; i < count; ++i) slot[i] += faded[i];
      }
    }
  });
}

template void scan_slots(const Slots<float>&, bool, int64_t);
template void scan_slots(const Slots<double>&, bool, int64_t);

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
  ChunkDecays<acc_t> decays;

  ForwardScratch(Arena& arena, const LinearAttentionShape& n)
      : state(forward_state(n), segment_step(n, n.T), n.causal ? Reading::Chunks : Reading::Ends, arena),
        q(arena, kChunk, n.D),
        k(arena, kChunk, n.D),
        k_transposed(arena, padded_columns(n.D), kChunk),
        v(arena, kChunk, n.Dv),
        y(arena, kChunk, n.Dv),
        values(v),
        scores(arena, kChunk, kChunk),
        partial(arena, kChunk, kTileLanes),
        decays(arena, n) {}
};

// ---- keys

// phi(k), v and decays of a chunk of keys, or phi(k) and v of a long one.
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
  x.decays.load(p.decay, task, t, count);
}

// M += phi(k)^T v and z += phi(k), after what decays leave of both. Leaves phi(k) scaled.
template <typename acc_t>
MEMCHECK_INLINE void add_keys(int64_t count, bool sums_only, ForwardScratch<acc_t>& x) {
  if (x.state.shape.decayed) scale_rows(x.k, {0, count}, x.decays.out);
  x.state.fade(x.decays.all);
  x.state.add_chunk(count, x.k.factor(0), x.values, nullptr, x.k.data, sums_only, &x.next);
  if (!sums_only) x.state.refresh();
}

// Leaves the last segment open. Causal, in the chunks of attend_along.
template <typename acc_t>
MEMCHECK_INLINE void sum_keys(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range keys,
                              ForwardScratch<acc_t>& x) {
  const int64_t step = p.shape.causal ? kChunk : kLongChunk;
  for (int64_t t = keys.begin; t < keys.end; t += step) {
    if (t > keys.begin && x.state.begins_at(t)) x.state.end_segment();
    const int64_t count = std::min(step, keys.end - t);
    load_keys(p, dtype, task, t, count, x);
    add_keys(count, true, x);
  }
}

// ---- queries

// inverse = 1 / den of each row: phi(q).z of the keys before, in the state, and the scores of the keys at hand.
template <typename acc_t>
MEMCHECK_INLINE void inverse_denominators(const ForwardScratch<acc_t>& x, Range rows, bool keys_at_hand, double eps,
                                          acc_t* inverse) {
  const acc_t* z = x.state.vector_of(x.state.seen);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    alignas(64) acc_t sums[kTileLanes] = {};
    if (keys_at_hand)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] = x.scores.row(row)[lane];
    for (int64_t i = 0; i < x.q.stride; i += kTileLanes)
      for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += x.q.row(row)[i + lane] * z[i + lane];
    for (int64_t lane = 0; lane < kTileLanes; ++lane) x.partial.row(row)[lane] = sums[lane];
  }
  sum_lanes(rows.end, x.partial, inverse);
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
  if (n.decayed) {
    scale_scores(x.scores, rows, x.decays.between);
    scale_rows(x.q, rows, x.decays.into);
  }
  alignas(64) acc_t inverse[kChunk];
  if (n.normalize) inverse_denominators(x, rows, keys > 0, p.eps, inverse);
  tile_rows<acc_t>(rows.count(), x.y.stride, term(n.D, x.q.factor(first), x.state.seen), seen,
                   n.normalize ? inverse + first : nullptr, y.result(0), &next);
  if (!direct) store_rows(dtype, y_place, rows.count(), n.Dv, y.data, y.stride);
}

// Causal: queries and keys of the same positions. The state then has all keys if they are the last and it is wanted.
template <typename acc_t>
MEMCHECK_INLINE void attend_along(const LinearAttentionForward& p, Dtype dtype, const Task& task, Range keys,
                                  ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Range heads = query_heads(n, task);
  for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
    const int64_t count = std::min(kChunk, keys.end - t);
    const int64_t s = t - (n.T - n.S);
    if (t > keys.begin && x.state.begins_at(t)) x.state.end_segment();
    load_keys(p, dtype, task, t, count, x);
    if (s + count > 0) {
      transpose_rows(x.k.data, x.k.stride, count, x.k.stride, x.k_transposed.data, kChunk);
      for (int64_t head = heads.begin; head < heads.end; ++head)
        attend(p, dtype, {task.b, head, s, {std::max<int64_t>(-s, 0), count}}, count, x);
    }
    if (t + kChunk < keys.end || (p.last && keys.end == n.T)) add_keys(count, false, x);
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
  const Slots<acc_t> slots(p.states, n, 0, key_slots(n), x.state.shape);
  const bool whole = pass.phase == Phase::Whole;
  const Range keys = whole ? Range{0, n.T} : segment_range(n, n.T, task.segment);
  const int64_t seen = n.causal ? task.segment - 1 : slots.slots - 1;
  x.state.start_from(pass.phase == Phase::Queries ? slots.at(n, task, seen) : nullptr);
  const bool continues = p.initial && keys.begin == 0;
  if (continues) x.state.load(p.initial, task, false, 1);
  if (pass.phase == Phase::KeySums || (whole && !n.causal)) sum_keys(p, pass.dtype, task, keys, x);
  if (pass.phase == Phase::KeySums) return x.state.store_segment(slots.at(n, task, task.segment), continues);
  if (n.causal) {
    attend_along(p, pass.dtype, task, keys, x);
    if (p.last && keys.end == n.T) x.state.store(p.last, task, false, 1);
    return;
  }
  if (whole) x.state.end_segment();
  attend_to_all(p, pass.dtype, task, whole ? Range{0, n.S} : segment_range(n, n.S, task.segment), x);
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const Pass<LinearAttentionForward>& pass, int64_t begin, int64_t end,
                                        int worker) {
  Arena arena = arena_of(pass.p.scratch, pass.scratch_bytes, worker);
  ForwardScratch<acc_t> x(arena, pass.p.shape);
  for (int64_t index = begin; index < end; ++index) forward_task(pass, pass.task(index), x);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, forward_tasks,
                       (const Pass<LinearAttentionForward>& pass, int64_t begin, int64_t end, int worker),
                       (pass, begin, end, worker))

template <typename acc_t>
void run_forward(const LinearAttentionForward& p, Dtype dtype, Phase phase, int64_t pieces) {
  const Pass<LinearAttentionForward> pass{p, dtype, phase, pieces, 0, scratch_bytes<ForwardScratch<acc_t>>(p.shape)};
  parallel_tasks(p.shape.B * p.shape.Hkv * pieces, useful_threads(p.shape, p.threads),
                 [&](int64_t begin, int64_t end, int worker) { forward_tasks<acc_t>(pass, begin, end, worker); });
}

// ---- one step

// Adds rows of a matrix in memory to rows of the state. `rows` is scratch for a chunk of them.
template <typename acc_t>
MEMCHECK_INLINE void add_rows(Dtype acc, const Strided<4>& from, const Task& task, int64_t count, int64_t columns,
                              const Matrix<acc_t>& rows, acc_t* to) {
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t some = std::min(kChunk, count - first);
    load_rows(acc, rows_at(acc, from, task.b, task.key_head, first), some, columns, rows.data, rows.stride);
    for (int64_t i = 0; i < some * rows.stride; ++i) to[first * rows.stride + i] += rows.data[i];
  }
}

// The new keys are summed, the state from memory is added, the queries of the group read it, and it goes back.
template <typename acc_t>
MEMCHECK_INLINE void step_task(const LinearAttentionStep& p, Dtype dtype, const Task& task, ForwardScratch<acc_t>& x) {
  const LinearAttentionShape& n = p.shape;
  const Dtype acc = dtype == Dtype::Float64 ? Dtype::Float64 : Dtype::Float32;
  const LinearAttentionForward forward{n, p.eps, p.q, p.k, p.v, p.y, nullptr, nullptr, p.threads};
  State<acc_t>& state = x.state;
  const auto place = [&](const Strided<4>& whole) { return rows_at(acc, whole, task.b, task.key_head, 0); };
  state.clear();
  sum_keys(forward, dtype, task, {0, n.T}, x);
  state.end_segment();
  add_rows(acc, p.m, task, n.D, n.Dv, x.y, state.seen.data);
  add_rows(acc, p.z, task, 1, n.D, x.q, state.vector_of(state.seen));
  attend_to_all(forward, dtype, task, {0, 1}, x);
  store_rows(acc, place(p.new_m), n.D, n.Dv, state.seen.data, state.seen.stride);
  store_rows(acc, place(p.new_z), 1, n.D, state.vector_of(state.seen), padded_columns(n.D));
}

template <typename acc_t>
MEMCHECK_INLINE void step_tasks_body(const Pass<LinearAttentionStep>& pass, int64_t begin, int64_t end, int worker) {
  Arena arena = arena_of(pass.p.scratch, pass.scratch_bytes, worker);
  ForwardScratch<acc_t> x(arena, pass.p.shape);
  for (int64_t index = begin; index < end; ++index) step_task(pass.p, pass.dtype, pass.task(index), x);
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
    const LinearAttentionShape& n = p.shape;
    if (!splits(n, p.threads)) return run_forward<acc_t>(p, dtype, Phase::Whole, 1);
    run_forward<acc_t>(p, dtype, Phase::KeySums, key_slots(n));
    scan_slots(Slots<acc_t>(p.states, n, 0, key_slots(n), forward_state(n)), false, useful_threads(n, p.threads));
    run_forward<acc_t>(p, dtype, Phase::Queries, query_segments(n));
  });
}

void step(const LinearAttentionStep& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    const Pass<LinearAttentionStep> pass{p, dtype, Phase::Whole, 1, 0, scratch_bytes<ForwardScratch<acc_t>>(p.shape)};
    parallel_tasks(p.shape.B * p.shape.Hkv, useful_threads(p.shape, p.threads),
                   [&](int64_t begin, int64_t end, int worker) { step_tasks<acc_t>(pass, begin, end, worker); });
  });
}

}  // namespace memcheck::linear_cpu
