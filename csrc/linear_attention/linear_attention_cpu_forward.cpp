#include "common/cpu_level.h"
#include "common/half.h"
#include "linear_attention/linear_attention_cpu.h"

// Forward, and one step of decoding.

namespace memcheck::linear_cpu {

template <typename acc_t>
void scan_slots(const Slots<acc_t>& x, bool reversed, int64_t part) {
  const int64_t first = part * kScanPart;
  const int64_t count = std::min(kScanPart, x.state.size() - first);
  for (int64_t step = 1; step < x.count; ++step) {
    const int64_t index = reversed ? x.count - 1 - step : step;
    acc_t* __restrict slot = x.at(index) + first;
    const acc_t* __restrict last = x.at(reversed ? index + 1 : index - 1) + first;
    if (!x.state.decayed) {
      for (int64_t i = 0; i < count; ++i) slot[i] += last[i];
      continue;
    }
    const acc_t kept = x.at(index)[x.state.size()];
    alignas(64) acc_t faded[kScanPart];
    for (int64_t i = 0; i < count; ++i) faded[i] = kept * last[i];
    for (int64_t i = 0; i < count; ++i) slot[i] += faded[i];
  }
}

template void scan_slots(const Slots<float>&, bool, int64_t);
template void scan_slots(const Slots<double>&, bool, int64_t);

namespace {

using ForwardTask = Task<LinearAttentionForward>;

// A task, and the matrices of a chunk, with a row for each position.
template <typename acc_t>
struct ForwardHead {
  const LinearAttentionForward& p;
  const LinearAttentionShape& n;
  const Dtype dtype;
  State<acc_t> state;          // M, z
  Matrix<acc_t> q, k;          // phi(q), phi(k) (kChunk,D); k of a long chunk goes on over k_transposed
  Matrix<acc_t> k_transposed;  // (D,kChunk)
  Matrix<acc_t> v, y;          // (kChunk,Dv), where they cannot be used in memory; v of a long chunk goes on over y
  Matrix<acc_t> values;        // v, here or in memory (kChunk,Dv)
  Matrix<acc_t> scores;        // phi(q) phi(k)^T (kChunk,kChunk)
  NextPair next;               // the rows of k and v that come after
  Matrix<acc_t> partial;       // sums along rows before their lanes are added (kChunk,kTileLanes)
  ChunkDecays<acc_t> decays;

  ForwardHead(Arena& arena, const ForwardTask& task)
      : p(task.p),
        n(p.shape),
        dtype(task.dtype),
        state(state_shape(n, false), segment_step(n, n.T), n.causal ? Reading::Chunks : Reading::Ends, arena),
        q(arena, kChunk, n.D),
        k(arena, kChunk, n.D),
        k_transposed(arena, padded_columns(n.D), kChunk),
        v(arena, kChunk, n.Dv),
        y(arena, kChunk, n.Dv),
        values(v),
        scores(arena, kChunk, kChunk),
        partial(arena, kChunk, kTileLanes),
        decays(arena, n) {}

  // ---- keys

  // phi(k), v and decays of a chunk of keys, or phi(k) and v of a long one.
  MEMCHECK_INLINE void load_keys(int64_t t, int64_t count) {
    const MatrixPlace keys = rows_at(dtype, p.k, 0, 0, t);
    const MatrixPlace v_place = rows_at(dtype, p.v, 0, 0, t);
    const bool direct = lies_as_scratch<acc_t>(dtype, v_place, n.Dv);
    values = direct ? in_memory<acc_t>(v_place) : v;
    if (!direct) load_rows(dtype, v_place, count, n.Dv, v.data, v.stride);
    load_features(n, dtype, keys, count, {}, {}, k);
    next = {rows_after(dtype, keys, count, n.D), rows_after(dtype, v_place, count, n.Dv), count};
    decays.load(p.decay, t, count);
  }

  // M += phi(k)^T v and z += phi(k), after what decays leave of both. Leaves phi(k) scaled.
  MEMCHECK_INLINE void add_keys(int64_t count, bool sums_only) {
    if (n.decayed) scale_rows(k, {0, count}, decays.out);
    state.fade(decays.all);
    state.add_chunk(count, k.factor(0), values, nullptr, k.data, sums_only, &next);
    if (!sums_only) state.refresh();
  }

  // ---- queries

  // inverse = 1 / den of each row: phi(q).z of the keys before, in the state, and the scores of the keys at hand.
  MEMCHECK_INLINE void inverse_denominators(Span rows, bool keys_at_hand, acc_t* inverse) const {
    const acc_t* z = state.vector_of(state.seen);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      alignas(64) acc_t sums[kTileLanes] = {};
      if (keys_at_hand)
        for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] = scores.row(row)[lane];
      for (int64_t i = 0; i < q.stride; i += kTileLanes)
        for (int64_t lane = 0; lane < kTileLanes; ++lane) sums[lane] += q.row(row)[i + lane] * z[i + lane];
      for (int64_t lane = 0; lane < kTileLanes; ++lane) partial.row(row)[lane] = sums[lane];
    }
    sum_lanes(rows.end, partial, inverse);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      inverse[row] = acc_t(1) / (inverse[row] + static_cast<acc_t>(p.eps));
  }

  // y of rows of a chunk, from the state and, causal, from the keys of the chunk.
  MEMCHECK_INLINE void attend(const ChunkQueries& queries) {
    const Span rows = queries.rows;
    const int64_t first = rows.begin;
    const MatrixPlace q_place = queries.place(dtype, p.q);
    const MatrixPlace y_place = queries.place(dtype, p.y);
    const bool direct = lies_as_scratch<acc_t>(dtype, y_place, n.Dv);
    const Matrix<acc_t> to = direct ? in_memory<acc_t>(y_place) : y;
    load_features(n, dtype, q_place, rows.size(), {}, {}, q.rows_from(first));
    NextPair next_queries{rows_after(dtype, q_place, kChunk, n.D), {}, rows.size()};
    TileTerm<acc_t> seen{};
    if (n.causal) {
      multiply_visible(q, rows, n.D, k_transposed, scores);
      mask_later_keys(scores, rows);
      seen = term(first, scores.factor(first), values);
    }
    if (n.decayed) {
      scale_scores(scores, rows, decays.between);
      scale_rows(q, rows, decays.into);
    }
    alignas(64) acc_t inverse[kChunk];
    if (n.normalize) inverse_denominators(rows, n.causal, inverse);
    tile_rows<acc_t>(rows.size(), y.stride, term(n.D, q.factor(first), state.seen), seen,
                     n.normalize ? inverse + first : nullptr, to.result(0), &next_queries);
    if (!direct) store_rows(dtype, y_place, rows.size(), n.Dv, to.data, to.stride);
  }

  // Causal: queries and keys of the same positions. The state then has all keys if they are the last and it is wanted.
  MEMCHECK_INLINE void attend_along(Span keys) {
    for (int64_t t = keys.begin; t < keys.end; t += kChunk) {
      const int64_t count = std::min(kChunk, keys.end - t);
      if (t > keys.begin && state.begins_at(t)) state.end_segment();
      load_keys(t, count);
      ChunkQueries queries = queries_along(n, t, count);
      if (queries.rows.size() > 0) {
        transpose_rows(k.data, k.stride, count, k.stride, k_transposed.data, kChunk);
        for (; queries.head < n.H; ++queries.head) attend(queries);
      }
      if (t + kChunk < keys.end || (p.last && keys.end == n.T)) add_keys(count, false);
    }
  }

  // Queries that all see what the state holds.
  MEMCHECK_INLINE void attend_to_all(Span queries) {
    for (int64_t head = 0; head < n.H; ++head)
      for (int64_t s = queries.begin; s < queries.end; s += kChunk)
        attend({head, s, {0, std::min(kChunk, queries.end - s)}});
  }

  // A step: the state from memory is added to the sum of the new keys.
  MEMCHECK_INLINE void add_initial() {
    add_rows(p.initial.m, n.D, n.Dv, y, state.seen.data);
    add_rows(p.initial.z, 1, n.D, q, state.vector_of(state.seen));
  }

  // Adds rows of a matrix in memory to rows of the state. `rows` is scratch for a chunk of them.
  MEMCHECK_INLINE void add_rows(const Strided<4>& from, int64_t count, int64_t columns, const Matrix<acc_t>& rows,
                                acc_t* to) const {
    for (int64_t first = 0; first < count; first += kChunk) {
      const int64_t some = std::min(kChunk, count - first);
      load_rows(acc_dtype<acc_t>(), rows_at(acc_dtype<acc_t>(), from, 0, 0, first), some, columns, rows.data,
                rows.stride);
      for (int64_t i = 0; i < some * rows.stride; ++i) to[first * rows.stride + i] += rows.data[i];
    }
  }

  MEMCHECK_INLINE void run(const ForwardTask& task) {
    const Slots<acc_t> slots = slots_of<acc_t>(p, false);
    const bool whole = task.phase == Phase::Whole;
    const Span keys = task.keys();
    const bool continues = p.initial && keys.begin == 0 && n.causal;
    state.start_from(task.phase == Phase::Queries ? slots.at(n.causal ? task.piece - 1 : slots.count - 1) : nullptr);
    if (continues) state.load(p.initial, 1);
    // Causal, in the chunks of attend_along.
    if (task.phase == Phase::KeySums || (whole && !n.causal))
      sum_keys(*this, state, keys, n.causal ? kChunk : kLongChunk);
    if (task.phase == Phase::KeySums) return state.store_segment(slots.at(task.piece), continues);
    if (n.causal) {
      attend_along(keys);
    } else {
      if (whole) state.end_segment();
      if (p.initial) add_initial();
      attend_to_all(whole ? Span{0, n.S} : segment_span(n, n.S, task.piece));
    }
    if (p.last && (!n.causal || keys.end == n.T)) state.store(p.last, 1);
  }
};

template <typename acc_t>
MEMCHECK_INLINE void run_forward_body(const ForwardTask& task, Arena arena) {
  if (task.phase == Phase::KeyScan) return scan_slots(slots_of<acc_t>(task.p, false), false, task.piece);
  ForwardHead<acc_t>(arena, task).run(task);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, run_forward, (const ForwardTask& task, Arena arena), (task, arena))

}  // namespace

int64_t forward_scratch_bytes(const LinearAttentionShape& n, Dtype dtype) {
  ForwardTask task{.p = {}, .dtype = dtype, .phase = Phase::Whole, .piece = 0};
  task.p.shape = n;
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<ForwardHead<decltype(acc)>>(task); });
}

void forward(const LinearAttentionForward& p, Dtype dtype) {
  const Deal deal(p.shape, dtype, p.threads, false);
  for (const Phase phase : {Phase::Whole, Phase::KeySums, Phase::KeyScan, Phase::Queries})
    run_pass(p, deal, phase, [&](const ForwardTask& task, Arena arena) {
      with_acc_type(dtype, [&](auto acc) { run_forward<decltype(acc)>(task, arena); });
    });
}

}  // namespace memcheck::linear_cpu
