#include "common/cpu_level.h"
#include "common/formulas.h"
#include "common/half.h"
#include "common/parallel.h"
#include "softplus_attention/softplus_attention_cpu.h"

// Backward. W and X of a key are the sums of w and w m over the queries that see it (softplus_query_gradients,
// softplus_key_gradients).

namespace memcheck::softplus_cpu {
namespace {

// ---- tiles

// What a worker keeps of positions of keys: those of a chunk between the pass along the sums and the pass back, or
// those of a tile.
template <typename acc_t, int64_t kPositions>
struct KeyScratch {
  acc_t softplus_k[kPositions * kTileLanes];
  acc_t sigmoid_k[kPositions * kTileLanes];
  acc_t v[kPositions * kTileLanes];
  acc_t pair[2][kPositions * kTileLanes];  // of KeyTile: one pair after the other
};

template <typename acc_t>
using ChunkScratch = KeyScratch<acc_t, kCarrySpacing>;

// One tile of it. Each of the four pairs lies where the one before it lay, which is then not needed any more.
template <typename acc_t>
struct KeyTile {
  acc_t *softplus_k, *sigmoid_k, *v;
  acc_t *z, *a;           // Z and A of the query whose last key it is
  acc_t *w, *wm;          // w and w m of that query
  acc_t *w_sum, *wm_sum;  // W and X
  acc_t *grad_v, *grad_k;

  template <int64_t kPositions>
  MEMCHECK_INLINE KeyTile(KeyScratch<acc_t, kPositions>& scratch, int64_t position)
      : softplus_k(scratch.softplus_k + position * kTileLanes),
        sigmoid_k(scratch.sigmoid_k + position * kTileLanes),
        v(scratch.v + position * kTileLanes),
        z(scratch.pair[0] + position * kTileLanes),
        a(scratch.pair[1] + position * kTileLanes),
        w(z),
        wm(a),
        w_sum(z),
        wm_sum(a),
        grad_v(z),
        grad_k(a) {}
};

// Positions of a tile. The next tile begins `ahead` positions further.
struct TilePositions {
  int64_t begin;
  int rows;
  int64_t ahead;
};

// softplus(k), sigmoid(k) and v of a tile of keys.
template <typename acc_t>
MEMCHECK_INLINE void load_keys(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                               const TilePositions& at, const KeyTile<acc_t>& x) {
  const MatrixPlace k = key_tile(dtype, p.k, task, at.begin);
  const MatrixPlace v = key_tile(dtype, p.v ? p.v : p.k, task, at.begin);
  load_tile(dtype, k, at.rows, task.lanes, x.softplus_k);
  if (p.v) {
    load_tile(dtype, v, at.rows, task.lanes, x.v);
  } else {
    for (int64_t i = 0; i < at.rows * kTileLanes; ++i) x.v[i] = acc_t(0);
  }
  const NextTile<acc_t> next_k(dtype, k, at.ahead);
  const NextTile<acc_t> next_v(dtype, v, at.ahead);
  with_maths<acc_t>(dtype, [&](auto maths) MEMCHECK_INLINE_LAMBDA {
    using Maths = decltype(maths);
    alignas(64) acc_t e[kTileElements];
    exponentials_of_rows<Maths, acc_t>({x.softplus_k, kTileLanes}, at.rows, next_k, e);
    for (int64_t row = 0; row < at.rows; ++row) {
      next_v.prefetch(row);
      for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
        const SoftplusSigmoid<acc_t> k = softplus_and_sigmoid_from_exponential<Maths>(x.softplus_k[i], e[i]);
        x.softplus_k[i] = k.softplus;
        x.sigmoid_k[i] = k.sigmoid;
      }
    }
  });
}

// grad_q of a row of queries, with e = exp(-|q|). w and w m replace Z and A.
template <typename Maths, typename acc_t>
MEMCHECK_INLINE void differentiate_query_row(const acc_t* __restrict q, const acc_t* __restrict e,
                                             const acc_t* __restrict g, acc_t eps, acc_t* __restrict grad_q,
                                             acc_t* __restrict z_to_w, acc_t* __restrict a_to_wm) {
  for (int64_t lane = 0; lane < kTileLanes; ++lane) {
    const acc_t inverse = acc_t(1) / (z_to_w[lane] + eps);
    const acc_t m = a_to_wm[lane] * inverse;
    const auto of_q = softplus_and_sigmoid_from_exponential<Maths>(q[lane], e[lane]);
    const auto gradients = softplus_query_gradients(g[lane], of_q, inverse, m);
    grad_q[lane] = gradients.grad_q;
    z_to_w[lane] = gradients.w;
    a_to_wm[lane] = gradients.wm;
  }
}

// grad_q of a tile of queries. w and w m replace Z and A.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_queries(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                           const TilePositions& at, bool write_grad_q, acc_t* z_to_w, acc_t* a_to_wm) {
  alignas(64) acc_t q_tile[kTileElements];
  alignas(64) acc_t g_tile[kTileElements];
  alignas(64) acc_t grad_q_tile[kTileElements];
  alignas(64) acc_t e[kTileElements];
  const MatrixPlace q_place = query_tile(dtype, p.q, task, at.begin);
  const MatrixPlace g_place = query_tile(dtype, p.grad_y, task, at.begin);
  const bool writes = write_grad_q && p.grad_q;
  const MatrixPlace grad_q_place = query_tile(dtype, p.grad_q ? p.grad_q : p.q, task, at.begin);
  const TileRows<const acc_t> q = rows_to_read(dtype, q_place, at.rows, task.lanes, q_tile);
  const TileRows<const acc_t> g = rows_to_read(dtype, g_place, at.rows, task.lanes, g_tile);
  const TileRows<acc_t> grad_q =
      writes ? rows_to_write(dtype, grad_q_place, task.lanes, grad_q_tile) : TileRows<acc_t>{grad_q_tile, kTileLanes};
  const NextTile<acc_t> next_q(dtype, q_place, at.ahead);
  const NextTile<acc_t> next_g(dtype, g_place, at.ahead);
  const NextTile<acc_t> next_grad_q(dtype, grad_q_place, at.ahead);
  const acc_t eps = static_cast<acc_t>(p.eps);
  with_maths<acc_t>(dtype, [&](auto maths) MEMCHECK_INLINE_LAMBDA {
    using Maths = decltype(maths);
    exponentials_of_rows<Maths>(q, at.rows, next_q, e);
    for (int64_t row = 0; row < at.rows; ++row) {
      next_g.prefetch(row);
      next_grad_q.prefetch(row);
      const int64_t i = row * kTileLanes;
      differentiate_query_row<Maths>(q[row], e + i, g[row], eps, grad_q[row], z_to_w + i, a_to_wm + i);
    }
  });
  if (writes) store_written(dtype, grad_q_place, at.rows, task.lanes, grad_q_tile);
}

// grad_v and grad_k replace W and X in a row of a tile of keys.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_key_row(const acc_t* softplus_k, const acc_t* sigmoid_k, const acc_t* v,
                                           acc_t* __restrict w_sum_to_grad_v, acc_t* __restrict wm_sum_to_grad_k) {
  for (int64_t lane = 0; lane < kTileLanes; ++lane) {
    const SoftplusSigmoid<acc_t> k{softplus_k[lane], sigmoid_k[lane]};
    const auto gradients = softplus_key_gradients(k, v[lane], w_sum_to_grad_v[lane], wm_sum_to_grad_k[lane]);
    wm_sum_to_grad_k[lane] = gradients.grad_k;
    w_sum_to_grad_v[lane] = gradients.grad_v;
  }
}

// grad_k and grad_v of a tile of keys, from W and X of each.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_keys(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                        const TilePositions& at, const KeyTile<acc_t>& x) {
  const MatrixPlace grad_k = key_tile(dtype, p.grad_k ? p.grad_k : p.k, task, at.begin);
  const MatrixPlace grad_v = key_tile(dtype, p.grad_v ? p.grad_v : p.k, task, at.begin);
  const NextTile<acc_t> next_grad_k(dtype, grad_k, at.ahead);
  const NextTile<acc_t> next_grad_v(dtype, grad_v, at.ahead);
  for (int64_t row = 0; row < at.rows; ++row) {
    const int64_t i = row * kTileLanes;
    next_grad_k.prefetch(row);
    next_grad_v.prefetch(row);
    differentiate_key_row(x.softplus_k + i, x.sigmoid_k + i, x.v + i, x.w_sum + i, x.wm_sum + i);
  }
  if (p.grad_v) store_tile(dtype, grad_v, at.rows, task.lanes, x.grad_v);
  if (p.grad_k) store_tile(dtype, grad_k, at.rows, task.lanes, x.grad_k);
}

// ---- chunks

// Causal, along the sums: grad_q of one chunk, and w and w m of its queries in the rows of their last keys.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_along(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                         int64_t chunk, bool write_grad_q, const Sums<acc_t>& carries,
                                         ChunkScratch<acc_t>& scratch) {
  RunningPair<acc_t> sums;
  if (chunk > 0)
    sums.load(carries, chunk - 1, task);
  else
    sums.load_state(p.before, {}, task);
  const int64_t start = chunk * kCarrySpacing;
  const int64_t end = chunk_end(chunk, p.shape.T);
  for (int64_t t = start; t < end; t += kTileRows) {
    const int rows = rows_from(t, end);
    // Chunks come last first, so the tile after the last one of a chunk is the first of the chunk before.
    const int64_t ahead = t + kTileRows < end ? kTileRows : start - kCarrySpacing - t;
    const KeyTile<acc_t> x(scratch, t - start);
    load_keys(p, dtype, task, {.begin = t, .rows = rows, .ahead = ahead}, x);
    for (int64_t i = 0; i < rows * kTileLanes; ++i) {
      x.z[i] = x.softplus_k[i];
      x.a[i] = x.softplus_k[i] * x.v[i];
    }
    sums.first.template scan<false>(x.z, rows);
    sums.second.template scan<false>(x.a, rows);
    const int first = first_row_with_query(p.shape, t, rows);
    for (int64_t i = 0; i < first * kTileLanes; ++i) x.w[i] = x.wm[i] = acc_t(0);
    if (first == rows) continue;
    const TilePositions queries{.begin = t - (p.shape.T - p.shape.S) + first, .rows = rows - first, .ahead = ahead};
    differentiate_queries(p, dtype, task, queries, write_grad_q, x.z + first * kTileLanes, x.a + first * kTileLanes);
  }
}

// Causal, back: grad_k and grad_v of one chunk, unless only the sums are wanted. `later` comes in as W and X over all
// later chunks, and gets those of this one as its chunk.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_back(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                        int64_t chunk, bool sums_only, ChunkScratch<acc_t>& scratch,
                                        RunningPair<acc_t>& later) {
  const int64_t start = chunk * kCarrySpacing;
  const int64_t end = chunk_end(chunk, p.shape.T);
  for (int64_t t = start + (end - 1 - start) / kTileRows * kTileRows; t >= start; t -= kTileRows) {
    const int rows = rows_from(t, end);
    const KeyTile<acc_t> x(scratch, t - start);
    later.first.template scan<true>(x.w_sum, rows);
    later.second.template scan<true>(x.wm_sum, rows);
    if (!sums_only) differentiate_keys(p, dtype, task, {.begin = t, .rows = rows, .ahead = -kTileRows}, x);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void fill_rows(acc_t* tile, int64_t rows, const acc_t* lanes) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t lane = 0; lane < kTileLanes; ++lane) tile[row * kTileLanes + lane] = lanes[lane];
}

// Not causal: grad_q of one chunk of queries, and the sum of their w.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_query_chunk(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                               int64_t chunk, const RunningPair<acc_t>& totals,
                                               RunningSum<acc_t>& w_sum) {
  alignas(64) acc_t z_to_w[kTileElements];
  alignas(64) acc_t a_to_wm[kTileElements];
  const int64_t end = chunk_end(chunk, p.shape.S);
  for (int64_t s = chunk * kCarrySpacing; s < end; s += kTileRows) {
    const int rows = rows_from(s, end);
    fill_rows(z_to_w, rows, totals.first.before);
    fill_rows(a_to_wm, rows, totals.second.before);
    const TilePositions at{.begin = s, .rows = rows, .ahead = kTileRows};
    differentiate_queries(p, dtype, task, at, true, z_to_w, a_to_wm);
    w_sum.template scan<false>(z_to_w, rows);
  }
  w_sum.end_chunk();
}

// Not causal: grad_k and grad_v of one chunk of keys. All keys have the same W and X.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_key_chunk(const SoftplusAttentionBackward& p, Dtype dtype, const Task& task,
                                             const acc_t* w_sum, const acc_t* wm_sum) {
  alignas(64) KeyScratch<acc_t, kTileRows> scratch;
  const KeyTile<acc_t> x(scratch, 0);
  const int64_t end = chunk_end(task.chunk, p.shape.T);
  for (int64_t t = task.chunk * kCarrySpacing; t < end; t += kTileRows) {
    const TilePositions at{.begin = t, .rows = rows_from(t, end), .ahead = kTileRows};
    load_keys(p, dtype, task, at, x);
    fill_rows(x.w_sum, at.rows, w_sum);
    fill_rows(x.wm_sum, at.rows, wm_sum);
    differentiate_keys(p, dtype, task, at, x);
  }
}

// ---- tasks

enum class BackwardPhase {
  AllChunks,    // a task goes through all chunks: of keys and back if causal, else of queries for grad_q and W
  ChunkSums,    // a task sums one chunk's w, and w m if causal, into its slot (not causal: and writes grad_q)
  CausalChunk,  // a task writes the gradients of one chunk, from the sums over later ones
  KeyChunk,     // not causal: a task writes grad_k and grad_v of one chunk, from W
  StateBefore,  // not causal: a task writes grad_before, from W
};

// One pass over tasks that do the same.
template <typename acc_t>
struct BackwardPass {
  const SoftplusAttentionBackward& p;
  Dtype dtype;
  BackwardPhase phase;
  Sums<acc_t> sums;  // causal and split: of w and w m, per chunk; not causal: of w, with W in the last slot
  int64_t chunks;    // tasks of a block of channels

  // Saved by the forward.
  MEMCHECK_INLINE Sums<acc_t> carries() const {
    // Sums can write, but these are only read.
    return {const_cast<void*>(p.carries), p.shape, p.shape.carries()};
  }
};

MEMCHECK_INLINE bool wants_sums(const SoftplusAttentionBackward& p) {
  return p.grad_k || p.grad_v || p.grad_before;
}

// The gradient of the state before, from W and X over all queries: (dZ, dA) = (-X, W).
template <typename acc_t>
MEMCHECK_INLINE void store_grad_before(const Strided<3>& grad_before, const Task& task, const acc_t* w_sum,
                                       const acc_t* wm_sum) {
  alignas(64) acc_t grad_z[kTileLanes];
  for (int lane = 0; lane < kTileLanes; ++lane) grad_z[lane] = -wm_sum[lane];
  store_plane(grad_before, 0, task, grad_z);
  store_plane(grad_before, 1, task, w_sum);
}

// Adds chunk 0, and its rest if that is wanted. A task of its own does not have the rest of the later chunks, which the
// scan has left in the place of the result.
template <typename acc_t>
MEMCHECK_INLINE void finish_grad_before(const SoftplusAttentionBackward& p, const Task& task, bool own_task,
                                        RunningPair<acc_t>& later) {
  if (p.grad_before_rest) {
    if (own_task) {
      load_plane(p.grad_before_rest, 0, task, later.first.rest);
      load_plane(p.grad_before_rest, 1, task, later.second.rest);
    }
    later.end_chunk();
    store_grad_before(p.grad_before_rest, task, later.first.rest, later.second.rest);
  } else {
    for (int lane = 0; lane < kTileLanes; ++lane) {
      later.first.before[lane] += later.first.chunk[lane];
      later.second.before[lane] += later.second.chunk[lane];
    }
  }
  store_grad_before(p.grad_before, task, later.first.before, later.second.before);
}

template <typename acc_t>
MEMCHECK_INLINE void causal_task(const BackwardPass<acc_t>& pass, const Task& task, ChunkScratch<acc_t>& scratch) {
  const SoftplusAttentionBackward& p = pass.p;
  const bool sums_only = pass.phase == BackwardPhase::ChunkSums;
  RunningPair<acc_t> later;
  if (pass.phase == BackwardPhase::CausalChunk && task.chunk < pass.sums.slots) {
    later.load(pass.sums, task.chunk, task);
  } else if (!sums_only) {
    load_later(p, 0, task, later.first);
    load_later(p, 1, task, later.second);
  }
  const int64_t first = sums_only ? task.chunk + 1 : task.chunk;  // no chunk needs the sums of chunk 0
  const int64_t last = pass.phase == BackwardPhase::AllChunks ? p.shape.key_chunks() - 1 : first;
  for (int64_t chunk = last; chunk >= first; --chunk) {
    differentiate_along(p, pass.dtype, task, chunk, !sums_only, pass.carries(), scratch);
    if (sums_only || wants_sums(p)) differentiate_back(p, pass.dtype, task, chunk, sums_only, scratch, later);
    if (chunk > 0) later.end_chunk();
  }
  if (sums_only) later.store(pass.sums, task.chunk, task);
  if (!sums_only && task.chunk == 0 && p.grad_before)
    finish_grad_before(p, task, pass.phase == BackwardPhase::CausalChunk, later);
}

// Not causal: W and X of every key, from W over the queries. All queries see every key, so X = W m; then the gradient
// of the state after is added.
template <typename acc_t>
MEMCHECK_INLINE void later_sums(const SoftplusAttentionBackward& p, const Task& task, const RunningPair<acc_t>& totals,
                                acc_t* w_sum, acc_t* wm_sum) {
  for (int lane = 0; lane < kTileLanes; ++lane)
    wm_sum[lane] = w_sum[lane] * (totals.second.before[lane] / (totals.first.before[lane] + static_cast<acc_t>(p.eps)));
  if (!p.grad_after) return;
  RunningPair<acc_t> later;
  load_later(p, 0, task, later.first);
  load_later(p, 1, task, later.second);
  for (int lane = 0; lane < kTileLanes; ++lane) {
    w_sum[lane] += later.first.before[lane];
    wm_sum[lane] += later.second.before[lane];
  }
}

template <typename acc_t>
MEMCHECK_INLINE void not_causal_task(const BackwardPass<acc_t>& pass, const Task& task) {
  const SoftplusAttentionBackward& p = pass.p;
  RunningPair<acc_t> totals;
  RunningSum<acc_t> w_sum;
  totals.load(pass.carries(), 0, task);
  if (pass.phase == BackwardPhase::KeyChunk || pass.phase == BackwardPhase::StateBefore) {
    pass.sums.load(0, pass.sums.slots - 1, task, w_sum.before);
    alignas(64) acc_t wm_sum[kTileLanes];
    later_sums(p, task, totals, w_sum.before, wm_sum);
    if (pass.phase == BackwardPhase::StateBefore) return store_grad_before(p.grad_before, task, w_sum.before, wm_sum);
    return differentiate_key_chunk(p, pass.dtype, task, w_sum.before, wm_sum);
  }
  const bool all = pass.phase == BackwardPhase::AllChunks;
  const int64_t last = all ? p.shape.query_chunks() : task.chunk + 1;
  for (int64_t chunk = task.chunk; chunk < last; ++chunk)
    differentiate_query_chunk(p, pass.dtype, task, chunk, totals, w_sum);
  pass.sums.store(0, all ? 0 : task.chunk, task, w_sum.before);
}

template <typename acc_t>
MEMCHECK_INLINE void backward_tasks_body(const BackwardPass<acc_t>& pass, int64_t begin, int64_t end, int worker) {
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(pass.p.shape, index, pass.chunks);
    if (pass.p.shape.causal) {
      causal_task(pass, task, static_cast<ChunkScratch<acc_t>*>(pass.p.scratch)[worker]);
    } else {
      not_causal_task(pass, task);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, backward_tasks, (const BackwardPass<acc_t>& pass, int64_t begin, int64_t end, int worker),
                       (pass, begin, end, worker))

template <typename acc_t>
void run(const BackwardPass<acc_t>& pass) {
  const int64_t tasks = pass.p.shape.B * channel_blocks(pass.p.shape) * pass.chunks;
  parallel_tasks(tasks, useful_threads(pass.p.shape, pass.p.threads),
                 [&](int64_t begin, int64_t end, int worker) { backward_tasks<acc_t>(pass, begin, end, worker); });
}

template <typename acc_t>
void backward_causal(const SoftplusAttentionBackward& p, Dtype dtype) {
  const SoftplusAttentionShape& shape = p.shape;
  const int64_t chunks = shape.key_chunks();
  if (!splits(shape, chunks, p.threads)) return run(BackwardPass<acc_t>{p, dtype, BackwardPhase::AllChunks, {}, 1});
  void* const behind_workers = static_cast<char*>(p.scratch) + workers_bytes(shape, dtype, p.threads);
  const Sums<acc_t> sums(behind_workers, shape, chunks - 1);
  if (wants_sums(p)) {
    run(BackwardPass<acc_t>{p, dtype, BackwardPhase::ChunkSums, sums, chunks - 1});
    scan_slots(
        shape, sums, true, useful_threads(shape, p.threads),
        [&](int64_t plane, const Task& task, RunningSum<acc_t>& sum) { load_later(p, plane, task, sum); },
        [&](int64_t plane, const Task& task, const RunningSum<acc_t>& sum) {
          store_plane(p.grad_before_rest, plane, task, sum.rest);
        });
  }
  run(BackwardPass<acc_t>{p, dtype, BackwardPhase::CausalChunk, sums, chunks});
}

template <typename acc_t>
void backward_not_causal(const SoftplusAttentionBackward& p, Dtype dtype) {
  const SoftplusAttentionShape& shape = p.shape;
  const bool split = splits(shape, shape.query_chunks(), p.threads);
  const Sums<acc_t> sums(p.scratch, shape, split ? shape.query_chunks() : 1, /*planes=*/1);
  if (split) {
    run(BackwardPass<acc_t>{p, dtype, BackwardPhase::ChunkSums, sums, shape.query_chunks()});
    const auto nothing = [](int64_t, const Task&, const RunningSum<acc_t>&) {};
    scan_slots(shape, sums, false, useful_threads(shape, p.threads), nothing, nothing);
  } else {
    run(BackwardPass<acc_t>{p, dtype, BackwardPhase::AllChunks, sums, 1});
  }
  if (p.grad_k || p.grad_v) run(BackwardPass<acc_t>{p, dtype, BackwardPhase::KeyChunk, sums, shape.key_chunks()});
  if (p.grad_before) run(BackwardPass<acc_t>{p, dtype, BackwardPhase::StateBefore, sums, 1});
}

}  // namespace

int64_t workers_bytes(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  if (!shape.causal) return 0;
  const int64_t chunks = splits(shape, shape.key_chunks(), threads) ? shape.key_chunks() : 1;
  const int64_t workers = parallel_workers(shape.B * channel_blocks(shape) * chunks, useful_threads(shape, threads));
  return workers * with_acc_type(dtype, [](auto acc) -> int64_t { return sizeof(ChunkScratch<decltype(acc)>); });
}

void backward(const SoftplusAttentionBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    p.shape.causal ? backward_causal<acc_t>(p, dtype) : backward_not_causal<acc_t>(p, dtype);
  });
}

}  // namespace memcheck::softplus_cpu
