#include <algorithm>
#include <cstdint>

#include "common/compensated_sum.h"
#include "common/cpu_level.h"
#include "common/dtype_cpu.h"
#include "common/integer.h"
#include "common/parallel.h"
#include "common/softplus.h"
#include "common/tile.h"
#include "softplus_attention/softplus_attention.h"

// A task is one block of kTileLanes channels of one batch entry, over all its chunks in order or, where such tasks are
// few, over one chunk. A chunk's sums start at zero and those before it are added where they are used, so both ways
// give the same bits.

namespace memcheck {
namespace {

constexpr int64_t kFewTasks = 8;

int64_t channel_blocks(const SoftplusAttentionShape& shape) {
  return ceil_div(shape.R, kTileLanes);
}

// Chunks become tasks of their own where channels alone give too few. By shape only: the plan must not depend on the
// machine.
bool splits(const SoftplusAttentionShape& shape, int64_t chunks) {
  return chunks > 1 && shape.B * channel_blocks(shape) < kFewTasks;
}

struct Task {
  int64_t b;
  int64_t r;      // first channel
  int lanes;      // channels
  int64_t chunk;  // 0 where a task is all chunks
};

MEMCHECK_INLINE Task task_of(const SoftplusAttentionShape& shape, int64_t index, int64_t chunks) {
  const int64_t blocks = (shape.R + kTileLanes - 1) / kTileLanes;
  const int64_t block = index / chunks % blocks;
  const int64_t r = block * kTileLanes;
  const int64_t lanes = shape.R - r < kTileLanes ? shape.R - r : kTileLanes;
  return {index / chunks / blocks, r, static_cast<int>(lanes), index % chunks};
}

// Sums kept in memory: (planes,B,slots,R).
template <typename acc_t>
struct Sums {
  acc_t* data;
  int64_t B, slots, R;

  MEMCHECK_INLINE acc_t* at(int64_t plane, int64_t slot, const Task& task) const {
    return data + ((plane * B + task.b) * slots + slot) * R + task.r;
  }
  MEMCHECK_INLINE void load(int64_t plane, int64_t slot, const Task& task, acc_t* lanes) const {
    const acc_t* from = at(plane, slot, task);
    for (int lane = 0; lane < task.lanes; ++lane) lanes[lane] = from[lane];
  }
  MEMCHECK_INLINE void store(int64_t plane, int64_t slot, const Task& task, const acc_t* lanes) const {
    acc_t* to = at(plane, slot, task);
    for (int lane = 0; lane < task.lanes; ++lane) to[lane] = lanes[lane];
  }
  MEMCHECK_INLINE void load_pair(int64_t slot, const Task& task, acc_t* first, acc_t* second) const {
    load(0, slot, task, first);
    load(1, slot, task, second);
  }
  MEMCHECK_INLINE void store_pair(int64_t slot, const Task& task, const acc_t* first, const acc_t* second) const {
    store(0, slot, task, first);
    store(1, slot, task, second);
  }
};

template <typename scalar_t>
Sums<acc_type<scalar_t>> sums_in(void* data, const SoftplusAttentionShape& shape, int64_t slots) {
  return {static_cast<acc_type<scalar_t>*>(data), shape.B, slots, shape.R};
}

// Sums over rows in three levels, each from zero: the rows of a tile, the tiles of a chunk, the chunks before. Rounding
// errors of equal terms all have one sign, and so grow with the number of terms of a level. That of the chunks before
// is unlimited: they are added with what rounding leaves out.
template <typename acc_t>
struct RunningSum {
  alignas(64) acc_t before[kTileLanes] = {};
  alignas(64) acc_t rest[kTileLanes] = {};  // of before
  alignas(64) acc_t chunk[kTileLanes] = {};

  // Each row of the tile becomes the sum over all rows up to it; reversed: from it on.
  template <bool reversed>
  MEMCHECK_INLINE void scan(acc_t* __restrict tile, int64_t rows) {
    alignas(64) acc_t local[kTileLanes] = {};
    for (int64_t step = 0; step < rows; ++step) {
      acc_t* row = tile + (reversed ? rows - 1 - step : step) * kTileLanes;
      for (int64_t lane = 0; lane < kTileLanes; ++lane) {
        local[lane] += row[lane];
        row[lane] = before[lane] + (chunk[lane] + local[lane]);
      }
    }
    for (int64_t lane = 0; lane < kTileLanes; ++lane) chunk[lane] += local[lane];
  }

  MEMCHECK_INLINE void end_chunk() {
    for (int64_t lane = 0; lane < kTileLanes; ++lane) {
      add_to_sum(chunk[lane], before[lane], rest[lane]);
      chunk[lane] = acc_t(0);
    }
  }
};

// Each slot becomes the sum of itself and all before it (after it, when reversed), added one by one as a task over all
// chunks does.
template <typename acc_t>
void scan_slots(const Sums<acc_t>& sums, int64_t planes, bool reversed) {
  const int64_t blocks = ceil_div(sums.R, kTileLanes);
  parallel_tasks(planes * sums.B * blocks, [&](int64_t begin, int64_t end, int) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t r = index % blocks * kTileLanes;
      const int64_t lanes = std::min<int64_t>(sums.R - r, kTileLanes);
      acc_t* first = sums.data + index / blocks * sums.slots * sums.R + r;
      RunningSum<acc_t> sum;
      for (int64_t step = 0; step < sums.slots; ++step) {
        acc_t* slot = first + (reversed ? sums.slots - 1 - step : step) * sums.R;
        std::copy_n(slot, lanes, sum.chunk);
        sum.end_chunk();
        std::copy_n(sum.before, lanes, slot);
      }
    }
  });
}

// A tile of positions from s on in q, y and their gradients, (B,S,R); from t on in k, v and theirs, (B,R,T).
template <typename scalar_t>
MEMCHECK_INLINE TilePlace<scalar_t> query_tile(const Strided<3>& x, const Task& task, int64_t s) {
  return {x.at<scalar_t>(task.b, s, task.r), x.stride[1], x.stride[2]};
}

template <typename scalar_t>
MEMCHECK_INLINE TilePlace<scalar_t> key_tile(const Strided<3>& x, const Task& task, int64_t t) {
  return {x.at<scalar_t>(task.b, task.r, t), x.stride[2], x.stride[1]};
}

MEMCHECK_INLINE int rows_from(int64_t position, int64_t end) {
  return static_cast<int>(end - position < kTileRows ? end - position : kTileRows);
}

MEMCHECK_INLINE int64_t chunk_end(int64_t chunk, int64_t length) {
  const int64_t end = (chunk + 1) * kCarrySpacing;
  return end < length ? end : length;
}

// One chunk of keys: z and a grow by its sums. Where queries look at its positions (causal), y is written.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void key_chunk(const SoftplusAttentionForward& p, const Task& task, int64_t chunk, bool write_y,
                               RunningSum<acc_t>& z, RunningSum<acc_t>& a) {
  alignas(64) acc_t k[kTile];
  alignas(64) acc_t v[kTile];
  alignas(64) acc_t q[kTile];
  const int64_t end = chunk_end(chunk, p.shape.T);
  for (int64_t t = chunk * kCarrySpacing; t < end; t += kTileRows) {
    const int rows = rows_from(t, end);
    const auto k_place = key_tile<scalar_t>(p.k, task, t);
    const auto v_place = key_tile<scalar_t>(p.v, task, t);
    k_place.load(rows, task.lanes, k);
    v_place.load(rows, task.lanes, v);
    const auto next_k = k_place.lines(kTileRows);
    const auto next_v = v_place.lines(kTileRows);
    for (int64_t row = 0; row < rows; ++row) {
      next_k.expect(row);
      next_v.expect(row);
      for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
        k[i] = softplus(k[i]);
        v[i] *= k[i];
      }
    }
    z.template scan<false>(k, rows);
    a.template scan<false>(v, rows);
    const int64_t s = t - (p.shape.T - p.shape.S);  // the query whose last key is row 0
    const int first = s < 0 ? static_cast<int>(-s < rows ? -s : rows) : 0;
    if (!write_y || first == rows) continue;
    const auto q_place = query_tile<scalar_t>(p.q, task, s + first);
    const auto y_place = query_tile<scalar_t>(p.y, task, s + first);
    q_place.load(rows - first, task.lanes, q);
    const auto next_q = q_place.lines(kTileRows);
    const auto next_y = y_place.lines(kTileRows);
    const acc_t eps = static_cast<acc_t>(p.eps);
    for (int64_t row = 0; row < rows - first; ++row) {
      next_q.expect(row);
      next_y.expect(row);
      for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i)
        q[i] = softplus(q[i]) * v[first * kTileLanes + i] / (k[first * kTileLanes + i] + eps);
    }
    y_place.store(rows - first, task.lanes, q);
  }
  z.end_chunk();
  a.end_chunk();
}

// One chunk of queries that all see the same keys.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void query_chunk(const SoftplusAttentionForward& p, const Task& task, const acc_t* z, const acc_t* a) {
  alignas(64) acc_t mean[kTileLanes];
  alignas(64) acc_t q[kTile];
  for (int lane = 0; lane < kTileLanes; ++lane) mean[lane] = a[lane] / (z[lane] + static_cast<acc_t>(p.eps));
  const int64_t end = chunk_end(task.chunk, p.shape.S);
  for (int64_t s = task.chunk * kCarrySpacing; s < end; s += kTileRows) {
    const int rows = rows_from(s, end);
    const auto q_place = query_tile<scalar_t>(p.q, task, s);
    const auto y_place = query_tile<scalar_t>(p.y, task, s);
    q_place.load(rows, task.lanes, q);
    const auto next_q = q_place.lines(kTileRows);
    const auto next_y = y_place.lines(kTileRows);
    for (int64_t row = 0; row < rows; ++row) {
      next_q.expect(row);
      next_y.expect(row);
      for (int64_t lane = 0; lane < kTileLanes; ++lane)
        q[row * kTileLanes + lane] = softplus(q[row * kTileLanes + lane]) * mean[lane];
    }
    y_place.store(rows, task.lanes, q);
  }
}

enum class ForwardPhase {
  AllChunks,    // a task goes through all chunks of keys: y if causal, and the carries
  ChunkSums,    // a task sums one chunk of keys into its slot
  CausalChunk,  // a task writes y for one chunk of keys, from the carry before it
  QueryChunk,   // not causal: a task writes y for one chunk of queries
};

template <typename scalar_t>
MEMCHECK_INLINE void forward_tasks_body(const SoftplusAttentionForward& p, ForwardPhase phase,
                                        const Sums<acc_type<scalar_t>>& sums, int64_t chunks, int64_t begin,
                                        int64_t end) {
  using acc_t = acc_type<scalar_t>;
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(p.shape, index, chunks);
    RunningSum<acc_t> z;
    RunningSum<acc_t> a;
    if (phase == ForwardPhase::QueryChunk) {
      sums.load_pair(0, task, z.before, a.before);
      query_chunk<scalar_t>(p, task, z.before, a.before);
      continue;
    }
    const bool all = phase == ForwardPhase::AllChunks;
    const bool writes_y = p.shape.causal && phase != ForwardPhase::ChunkSums;
    if (phase == ForwardPhase::CausalChunk && task.chunk > 0) sums.load_pair(task.chunk - 1, task, z.before, a.before);
    const int64_t last = all ? p.shape.key_chunks() : task.chunk + 1;
    for (int64_t chunk = task.chunk; chunk < last; ++chunk) {
      key_chunk<scalar_t>(p, task, chunk, writes_y, z, a);
      if (all && writes_y && sums.data != nullptr && chunk < sums.slots)
        sums.store_pair(chunk, task, z.before, a.before);
    }
    if (!writes_y) sums.store_pair(task.chunk, task, z.before, a.before);
  }
}

MEMCHECK_PER_CPU_LEVEL(forward_tasks,
                       (const SoftplusAttentionForward& p, ForwardPhase phase, const Sums<acc_type<scalar_t>>& sums,
                        int64_t chunks, int64_t begin, int64_t end),
                       (p, phase, sums, chunks, begin, end))

template <typename scalar_t>
void run_forward(const SoftplusAttentionForward& p, ForwardPhase phase, const Sums<acc_type<scalar_t>>& sums,
                 int64_t chunks) {
  const int64_t tasks = p.shape.B * channel_blocks(p.shape) * chunks;
  parallel_tasks(tasks,
                 [&](int64_t begin, int64_t end, int) { forward_tasks<scalar_t>(p, phase, sums, chunks, begin, end); });
}

template <typename scalar_t>
void forward_causal(const SoftplusAttentionForward& p) {
  const SoftplusAttentionShape& shape = p.shape;
  const auto carries = sums_in<scalar_t>(p.carries, shape, shape.carries());
  if (!splits(shape, shape.key_chunks())) return run_forward<scalar_t>(p, ForwardPhase::AllChunks, carries, 1);
  run_forward<scalar_t>(p, ForwardPhase::ChunkSums, carries, shape.carries());
  scan_slots(carries, 2, false);
  run_forward<scalar_t>(p, ForwardPhase::CausalChunk, carries, shape.key_chunks());
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p) {
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = sums_in<scalar_t>(p.carries, shape, 1);
  const int64_t chunks = shape.key_chunks();
  if (splits(shape, chunks)) {
    const auto partial = sums_in<scalar_t>(p.sums, shape, chunks);
    run_forward<scalar_t>(p, ForwardPhase::ChunkSums, partial, chunks);
    scan_slots(partial, 2, false);
    for (int64_t row = 0; row < 2 * shape.B; ++row)
      std::copy_n(partial.data + (row * chunks + chunks - 1) * shape.R, shape.R, totals.data + row * shape.R);
  } else {
    run_forward<scalar_t>(p, ForwardPhase::AllChunks, totals, 1);
  }
  run_forward<scalar_t>(p, ForwardPhase::QueryChunk, totals, shape.query_chunks());
}

// What one worker keeps of one chunk of keys between the pass along the sums and the pass back.
template <typename acc_t>
struct ChunkScratch {
  acc_t softplus_k[kCarrySpacing * kTileLanes];
  acc_t sigmoid_k[kCarrySpacing * kTileLanes];
  acc_t v[kCarrySpacing * kTileLanes];
  acc_t w[kCarrySpacing * kTileLanes];   // Z, then w = g softplus(q) / (Z + eps)
  acc_t wm[kCarrySpacing * kTileLanes];  // A, then w m, m = A / (Z + eps)
};

// softplus(k), sigmoid(k) and v of one tile; the next one begins `ahead` positions further.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void load_keys(const SoftplusAttentionBackward& p, const Task& task, int64_t t, int64_t ahead, int rows,
                               acc_t* softplus_k, acc_t* sigmoid_k, acc_t* v) {
  const auto k_place = key_tile<scalar_t>(p.k, task, t);
  const auto v_place = key_tile<scalar_t>(p.v ? p.v : p.k, task, t);
  k_place.load(rows, task.lanes, softplus_k);
  if (p.v) {
    v_place.load(rows, task.lanes, v);
  } else {
    for (int64_t i = 0; i < rows * kTileLanes; ++i) v[i] = acc_t(0);
  }
  const auto next_k = k_place.lines(ahead);
  const auto next_v = v_place.lines(ahead);
  for (int64_t row = 0; row < rows; ++row) {
    next_k.expect(row);
    next_v.expect(row);
    for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
      const auto both = softplus_and_sigmoid(softplus_k[i]);
      softplus_k[i] = both.softplus;
      sigmoid_k[i] = both.sigmoid;
    }
  }
}

// y = softplus(q) m, m = A / (Z + eps): w and w m replace Z and A, and grad_q = g m sigmoid(q).
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void differentiate_queries(const SoftplusAttentionBackward& p, const Task& task, int64_t s,
                                           int64_t ahead, int rows, bool write_grad_q, acc_t* z_to_w, acc_t* a_to_wm) {
  alignas(64) acc_t q[kTile];
  alignas(64) acc_t g[kTile];
  const auto q_place = query_tile<scalar_t>(p.q, task, s);
  const auto g_place = query_tile<scalar_t>(p.grad_y, task, s);
  q_place.load(rows, task.lanes, q);
  g_place.load(rows, task.lanes, g);
  const auto next_q = q_place.lines(ahead);
  const auto next_g = g_place.lines(ahead);
  const auto next_grad_q = query_tile<scalar_t>(p.grad_q ? p.grad_q : p.q, task, s).lines(ahead);
  const acc_t eps = static_cast<acc_t>(p.eps);
  for (int64_t row = 0; row < rows; ++row) {
    next_q.expect(row);
    next_g.expect(row);
    next_grad_q.expect(row);
    for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
      const auto both = softplus_and_sigmoid(q[i]);
      const acc_t inverse = acc_t(1) / (z_to_w[i] + eps);
      const acc_t m = a_to_wm[i] * inverse;
      const acc_t w = g[i] * both.softplus * inverse;
      q[i] = g[i] * m * both.sigmoid;
      z_to_w[i] = w;
      a_to_wm[i] = w * m;
    }
  }
  if (write_grad_q && p.grad_q) query_tile<scalar_t>(p.grad_q, task, s).store(rows, task.lanes, q);
}

// A += softplus(k) v and Z += softplus(k), so with W and X the sums of w and w m over the queries that see a key:
// grad_v = softplus(k) W and grad_k = sigmoid(k) (v W - X). They replace w and w m.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void key_gradients(const SoftplusAttentionBackward& p, const Task& task, int64_t t, int64_t ahead,
                                   int rows, const acc_t* softplus_k, const acc_t* sigmoid_k, const acc_t* v,
                                   acc_t* __restrict w_to_grad_v, acc_t* __restrict wm_to_grad_k) {
  const auto grad_k_place = key_tile<scalar_t>(p.grad_k ? p.grad_k : p.k, task, t);
  const auto grad_v_place = key_tile<scalar_t>(p.grad_v ? p.grad_v : p.k, task, t);
  const auto next_grad_k = grad_k_place.lines(ahead);
  const auto next_grad_v = grad_v_place.lines(ahead);
  for (int64_t row = 0; row < rows; ++row) {
    next_grad_k.expect(row);
    next_grad_v.expect(row);
    for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
      wm_to_grad_k[i] = sigmoid_k[i] * (v[i] * w_to_grad_v[i] - wm_to_grad_k[i]);
      w_to_grad_v[i] = softplus_k[i] * w_to_grad_v[i];
    }
  }
  if (p.grad_v) grad_v_place.store(rows, task.lanes, w_to_grad_v);
  if (p.grad_k) grad_k_place.store(rows, task.lanes, wm_to_grad_k);
}

// One chunk, causal: along the sums for w and grad_q, then back for grad_k and grad_v. w_sum and wm_sum come in as the
// sums over all later chunks, and grow by this one's.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void backward_chunk(const SoftplusAttentionBackward& p, const Task& task, int64_t chunk, bool sums_only,
                                    const Sums<acc_t>& carries, ChunkScratch<acc_t>& scratch, RunningSum<acc_t>& w_sum,
                                    RunningSum<acc_t>& wm_sum) {
  RunningSum<acc_t> z;
  RunningSum<acc_t> a;
  if (chunk > 0) carries.load_pair(chunk - 1, task, z.before, a.before);
  const int64_t start = chunk * kCarrySpacing;
  const int64_t end = chunk_end(chunk, p.shape.T);
  for (int64_t t = start; t < end; t += kTileRows) {
    const int rows = rows_from(t, end);
    // Chunks come last first, so what follows a chunk's last tile is the first of the chunk before.
    const int64_t ahead = t + kTileRows < end ? kTileRows : start - kCarrySpacing - t;
    const int64_t tile = (t - start) * kTileLanes;
    acc_t* softplus_k = scratch.softplus_k + tile;
    acc_t* v = scratch.v + tile;
    acc_t* w = scratch.w + tile;
    acc_t* wm = scratch.wm + tile;
    load_keys<scalar_t>(p, task, t, ahead, rows, softplus_k, scratch.sigmoid_k + tile, v);
    for (int64_t i = 0; i < rows * kTileLanes; ++i) {
      w[i] = softplus_k[i];
      wm[i] = softplus_k[i] * v[i];
    }
    z.template scan<false>(w, rows);
    a.template scan<false>(wm, rows);
    const int64_t s = t - (p.shape.T - p.shape.S);
    const int first = s < 0 ? static_cast<int>(-s < rows ? -s : rows) : 0;
    for (int64_t i = 0; i < first * kTileLanes; ++i) w[i] = wm[i] = acc_t(0);
    if (first < rows)
      differentiate_queries<scalar_t>(p, task, s + first, ahead, rows - first, !sums_only, w + first * kTileLanes,
                                      wm + first * kTileLanes);
  }
  if (!sums_only && !p.grad_k && !p.grad_v) return;
  for (int64_t t = start + (end - 1 - start) / kTileRows * kTileRows; t >= start; t -= kTileRows) {
    const int rows = rows_from(t, end);
    const int64_t tile = (t - start) * kTileLanes;
    acc_t* w = scratch.w + tile;
    acc_t* wm = scratch.wm + tile;
    w_sum.template scan<true>(w, rows);
    wm_sum.template scan<true>(wm, rows);
    if (sums_only) continue;
    key_gradients<scalar_t>(p, task, t, -kTileRows, rows, scratch.softplus_k + tile, scratch.sigmoid_k + tile,
                            scratch.v + tile, w, wm);
  }
  w_sum.end_chunk();
  wm_sum.end_chunk();
}

template <typename acc_t>
MEMCHECK_INLINE void fill_rows(acc_t* tile, int64_t rows, const acc_t* lanes) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t lane = 0; lane < kTileLanes; ++lane) tile[row * kTileLanes + lane] = lanes[lane];
}

// One chunk of queries that all see the same keys: grad_q, and the sum of g softplus(q) / (Z + eps).
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void backward_query_chunk(const SoftplusAttentionBackward& p, const Task& task, int64_t chunk,
                                          const acc_t* z, const acc_t* a, RunningSum<acc_t>& w_sum) {
  alignas(64) acc_t w[kTile];
  alignas(64) acc_t wm[kTile];
  const int64_t end = chunk_end(chunk, p.shape.S);
  for (int64_t s = chunk * kCarrySpacing; s < end; s += kTileRows) {
    const int rows = rows_from(s, end);
    fill_rows(w, rows, z);
    fill_rows(wm, rows, a);
    differentiate_queries<scalar_t>(p, task, s, kTileRows, rows, true, w, wm);
    w_sum.template scan<false>(w, rows);
  }
  w_sum.end_chunk();
}

// One chunk of keys that all queries see: every key has the same W, and X = W m.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void backward_key_chunk(const SoftplusAttentionBackward& p, const Task& task, const acc_t* z,
                                        const acc_t* a, const acc_t* w_sum) {
  alignas(64) acc_t softplus_k[kTile];
  alignas(64) acc_t sigmoid_k[kTile];
  alignas(64) acc_t v[kTile];
  alignas(64) acc_t w[kTile];
  alignas(64) acc_t wm[kTile];
  alignas(64) acc_t wm_sum[kTileLanes];
  for (int lane = 0; lane < kTileLanes; ++lane)
    wm_sum[lane] = w_sum[lane] * (a[lane] / (z[lane] + static_cast<acc_t>(p.eps)));
  const int64_t end = chunk_end(task.chunk, p.shape.T);
  for (int64_t t = task.chunk * kCarrySpacing; t < end; t += kTileRows) {
    const int rows = rows_from(t, end);
    load_keys<scalar_t>(p, task, t, kTileRows, rows, softplus_k, sigmoid_k, v);
    fill_rows(w, rows, w_sum);
    fill_rows(wm, rows, wm_sum);
    key_gradients<scalar_t>(p, task, t, kTileRows, rows, softplus_k, sigmoid_k, v, w, wm);
  }
}

enum class BackwardPhase {
  AllChunks,    // a task goes through all chunks: of keys and back if causal, else of queries for grad_q and W
  ChunkSums,    // a task sums one chunk's w, and w m if causal, into its slot (not causal: and writes grad_q)
  CausalChunk,  // a task writes the gradients of one chunk, from the sums over later ones
  KeyChunk,     // not causal: a task writes grad_k and grad_v of one chunk, from W
};

// What the phases of one backward share.
template <typename acc_t>
struct BackwardMemory {
  Sums<acc_t> carries;           // saved by the forward
  Sums<acc_t> sums;              // causal and split: of w and w m, per chunk; not causal: of w, its last slot W
  ChunkScratch<acc_t>* scratch;  // causal: one per worker
};

template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void backward_causal_task(const SoftplusAttentionBackward& p, BackwardPhase phase, const Task& task,
                                          const BackwardMemory<acc_t>& memory, ChunkScratch<acc_t>& scratch) {
  RunningSum<acc_t> w_sum;
  RunningSum<acc_t> wm_sum;
  const bool all = phase == BackwardPhase::AllChunks;
  const bool sums_only = phase == BackwardPhase::ChunkSums;
  if (phase == BackwardPhase::CausalChunk && task.chunk < memory.sums.slots)
    memory.sums.load_pair(task.chunk, task, w_sum.before, wm_sum.before);
  const int64_t first = sums_only ? task.chunk + 1 : task.chunk;  // nobody waits for the sums of chunk 0
  const int64_t last = all ? p.shape.key_chunks() - 1 : first;
  for (int64_t chunk = last; chunk >= first; --chunk)
    backward_chunk<scalar_t>(p, task, chunk, sums_only, memory.carries, scratch, w_sum, wm_sum);
  if (sums_only) memory.sums.store_pair(task.chunk, task, w_sum.before, wm_sum.before);
}

template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
MEMCHECK_INLINE void backward_not_causal_task(const SoftplusAttentionBackward& p, BackwardPhase phase, const Task& task,
                                              const BackwardMemory<acc_t>& memory) {
  alignas(64) acc_t z[kTileLanes] = {};
  alignas(64) acc_t a[kTileLanes] = {};
  RunningSum<acc_t> w_sum;
  memory.carries.load_pair(0, task, z, a);
  if (phase == BackwardPhase::KeyChunk) {
    memory.sums.load(0, memory.sums.slots - 1, task, w_sum.before);
    backward_key_chunk<scalar_t>(p, task, z, a, w_sum.before);
    return;
  }
  const bool all = phase == BackwardPhase::AllChunks;
  const int64_t last = all ? p.shape.query_chunks() : task.chunk + 1;
  for (int64_t chunk = task.chunk; chunk < last; ++chunk) backward_query_chunk<scalar_t>(p, task, chunk, z, a, w_sum);
  memory.sums.store(0, all ? 0 : task.chunk, task, w_sum.before);
}

template <typename scalar_t>
MEMCHECK_INLINE void backward_tasks_body(const SoftplusAttentionBackward& p, BackwardPhase phase,
                                         const BackwardMemory<acc_type<scalar_t>>& memory, int64_t chunks,
                                         int64_t begin, int64_t end, int worker) {
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(p.shape, index, chunks);
    if (p.shape.causal) {
      backward_causal_task<scalar_t>(p, phase, task, memory, memory.scratch[worker]);
    } else {
      backward_not_causal_task<scalar_t>(p, phase, task, memory);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(backward_tasks,
                       (const SoftplusAttentionBackward& p, BackwardPhase phase,
                        const BackwardMemory<acc_type<scalar_t>>& memory, int64_t chunks, int64_t begin, int64_t end,
                        int worker),
                       (p, phase, memory, chunks, begin, end, worker))

template <typename scalar_t>
void run_backward(const SoftplusAttentionBackward& p, BackwardPhase phase,
                  const BackwardMemory<acc_type<scalar_t>>& memory, int64_t chunks) {
  const int64_t tasks = p.shape.B * channel_blocks(p.shape) * chunks;
  parallel_tasks(tasks, [&](int64_t begin, int64_t end, int worker) {
    backward_tasks<scalar_t>(p, phase, memory, chunks, begin, end, worker);
  });
}

template <typename scalar_t>
void backward_causal(const SoftplusAttentionBackward& p, BackwardMemory<acc_type<scalar_t>> memory) {
  const SoftplusAttentionShape& shape = p.shape;
  if (!splits(shape, shape.key_chunks())) return run_backward<scalar_t>(p, BackwardPhase::AllChunks, memory, 1);
  memory.sums = sums_in<scalar_t>(p.sums, shape, shape.key_chunks() - 1);
  if (p.grad_k || p.grad_v) {
    run_backward<scalar_t>(p, BackwardPhase::ChunkSums, memory, shape.key_chunks() - 1);
    scan_slots(memory.sums, 2, true);
  }
  run_backward<scalar_t>(p, BackwardPhase::CausalChunk, memory, shape.key_chunks());
}

template <typename scalar_t>
void backward_not_causal(const SoftplusAttentionBackward& p, BackwardMemory<acc_type<scalar_t>> memory) {
  const SoftplusAttentionShape& shape = p.shape;
  const bool split = splits(shape, shape.query_chunks());
  memory.sums = sums_in<scalar_t>(p.sums, shape, split ? shape.query_chunks() : 1);
  if (split) {
    run_backward<scalar_t>(p, BackwardPhase::ChunkSums, memory, shape.query_chunks());
    scan_slots(memory.sums, 1, false);
  } else {
    run_backward<scalar_t>(p, BackwardPhase::AllChunks, memory, 1);
  }
  if (p.grad_k || p.grad_v) run_backward<scalar_t>(p, BackwardPhase::KeyChunk, memory, shape.key_chunks());
}

// One row of a (B,1,R) state; with no stride to a next row, no more than the row is read or written.
template <typename acc_t>
MEMCHECK_INLINE TilePlace<acc_t> state_row(const Strided<3>& x, const Task& task) {
  return {x.at<acc_t>(task.b, 0, task.r), 0, x.stride[2]};
}

template <typename scalar_t>
MEMCHECK_INLINE void step_tasks_body(const SoftplusAttentionStep& p, int64_t begin, int64_t end) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape shape{p.B, 1, p.T, p.R, false};
  const SoftplusAttentionForward forward{shape, p.eps, p.q, p.k, p.v, p.y, nullptr, nullptr};
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(shape, index, 1);
    RunningSum<acc_t> z;
    RunningSum<acc_t> a;
    state_row<acc_t>(p.z, task).load(1, task.lanes, z.before);
    state_row<acc_t>(p.a, task).load(1, task.lanes, a.before);
    for (int64_t chunk = 0; chunk < shape.key_chunks(); ++chunk) key_chunk<scalar_t>(forward, task, chunk, false, z, a);
    query_chunk<scalar_t>(forward, task, z.before, a.before);
    state_row<acc_t>(p.new_z, task).store(1, task.lanes, z.before);
    state_row<acc_t>(p.new_a, task).store(1, task.lanes, a.before);
  }
}

MEMCHECK_PER_CPU_LEVEL(step_tasks, (const SoftplusAttentionStep& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace

SoftplusAttentionPlan softplus_attention_plan_cpu(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t blocks = shape.B * channel_blocks(shape);
  const bool split_keys = splits(shape, shape.key_chunks());
  if (!shape.causal) {
    const bool split_queries = splits(shape, shape.query_chunks());
    return {true, split_keys ? 2 * shape.key_chunks() * slot : 0, (split_queries ? shape.query_chunks() : 1) * slot, 0};
  }
  const int64_t scratch = dtype == Dtype::Float64 ? sizeof(ChunkScratch<double>) : sizeof(ChunkScratch<float>);
  const int64_t workers = parallel_workers(split_keys ? blocks * shape.key_chunks() : blocks, threads);
  return {split_keys, 0, split_keys ? 2 * (shape.key_chunks() - 1) * slot : 0, scratch * workers};
}

void softplus_attention_forward_cpu(const SoftplusAttentionForward& p, Dtype dtype) {
  with_scalar_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    p.shape.causal ? forward_causal<scalar_t>(p) : forward_not_causal<scalar_t>(p);
  });
}

void softplus_attention_backward_cpu(const SoftplusAttentionBackward& p, Dtype dtype) {
  with_scalar_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    using acc_t = acc_type<scalar_t>;
    auto* carries = const_cast<void*>(p.carries);  // Sums also writes; these are only read
    const BackwardMemory<acc_t> memory{
        sums_in<scalar_t>(carries, p.shape, p.shape.carries()), {}, static_cast<ChunkScratch<acc_t>*>(p.scratch)};
    p.shape.causal ? backward_causal<scalar_t>(p, memory) : backward_not_causal<scalar_t>(p, memory);
  });
}

void softplus_attention_step_cpu(const SoftplusAttentionStep& p, Dtype dtype) {
  const int64_t tasks = p.B * ceil_div(p.R, kTileLanes);
  with_scalar_type(dtype, [&](auto scalar) {
    parallel_tasks(tasks, [&](int64_t begin, int64_t end, int) { step_tasks<decltype(scalar)>(p, begin, end); });
  });
}

}  // namespace memcheck
