#include <algorithm>

#include "common/cpu_level.h"
#include "common/formulas.h"
#include "common/half.h"
#include "common/parallel.h"
#include "softplus_attention/softplus_attention_cpu.h"

// Forward, and one step of decoding.

namespace memcheck::softplus_cpu {

namespace {

// ---- chunks

// weights = softplus(k) and values = softplus(k) v of a tile of keys.
template <typename acc_t>
MEMCHECK_INLINE void weigh_keys(const SoftplusAttentionForward& p, Dtype dtype, const Task& task, int64_t t, int rows,
                                acc_t* weights, acc_t* values) {
  const MatrixPlace k = key_tile(dtype, p.k, task, t);
  const MatrixPlace v = key_tile(dtype, p.v, task, t);
  load_tile(dtype, k, rows, task.lanes, weights);
  load_tile(dtype, v, rows, task.lanes, values);
  const NextTile<acc_t> next_k(dtype, k, kTileRows);
  const NextTile<acc_t> next_v(dtype, v, kTileRows);
  with_maths<acc_t>(dtype, [&](auto maths) MEMCHECK_INLINE_LAMBDA {
    using Maths = decltype(maths);
    alignas(64) acc_t e[kTileElements];
    exponentials_of_rows<Maths, acc_t>({weights, kTileLanes}, rows, next_k, e);
    for (int64_t row = 0; row < rows; ++row) {
      next_v.prefetch(row);
      for (int64_t i = row * kTileLanes; i < (row + 1) * kTileLanes; ++i) {
        weights[i] = softplus_from_exponential<Maths>(weights[i], e[i]);
        values[i] *= weights[i];
      }
    }
  });
}

// y of a tile of queries from position s on. y_of_row(maths, row, q, e, y) computes a row of it, with e = exp(-|q|).
template <typename acc_t, typename RowOfY>
MEMCHECK_INLINE void attend(const SoftplusAttentionForward& p, Dtype dtype, const Task& task, int64_t s, int rows,
                            const RowOfY& y_of_row) {
  alignas(64) acc_t q_tile[kTileElements];
  alignas(64) acc_t e[kTileElements];
  alignas(64) acc_t y_tile[kTileElements];
  const MatrixPlace q_place = query_tile(dtype, p.q, task, s);
  const MatrixPlace y_place = query_tile(dtype, p.y, task, s);
  const NextTile<acc_t> next_q(dtype, q_place, kTileRows);
  const NextTile<acc_t> next_y(dtype, y_place, kTileRows);
  const TileRows<const acc_t> q = rows_to_read(dtype, q_place, rows, task.lanes, q_tile);
  const TileRows<acc_t> y = rows_to_write(dtype, y_place, task.lanes, y_tile);
  with_maths<acc_t>(dtype, [&](auto maths) MEMCHECK_INLINE_LAMBDA {
    exponentials_of_rows<decltype(maths)>(q, rows, next_q, e);
    for (int64_t row = 0; row < rows; ++row) {
      next_y.prefetch(row);
      y_of_row(maths, row, q[row], e + row * kTileLanes, y[row]);
    }
  });
  store_written(dtype, y_place, rows, task.lanes, y_tile);
}

// Each query has its own Z and A.
template <typename acc_t>
MEMCHECK_INLINE void attend_from_sums(const SoftplusAttentionForward& p, Dtype dtype, const Task& task, int64_t s,
                                      int rows, const acc_t* z, const acc_t* a) {
  const acc_t eps = static_cast<acc_t>(p.eps);
  const auto y_of_row = [&](auto maths, int64_t row, const acc_t* __restrict q, const acc_t* __restrict e,
                            acc_t* __restrict y) MEMCHECK_INLINE_LAMBDA {
    using Maths = decltype(maths);
    const acc_t* __restrict a_row = a + row * kTileLanes;
    const acc_t* __restrict z_row = z + row * kTileLanes;
    for (int64_t i = 0; i < kTileLanes; ++i)
      y[i] = softplus_attention_from_sums(softplus_from_exponential<Maths>(q[i], e[i]), a_row[i], z_row[i], eps);
  };
  attend<acc_t>(p, dtype, task, s, rows, y_of_row);
}

// All queries have the same mean.
template <typename acc_t>
MEMCHECK_INLINE void attend_from_mean(const SoftplusAttentionForward& p, Dtype dtype, const Task& task, int64_t s,
                                      int rows, const acc_t* mean) {
  const auto y_of_row = [&](auto maths, int64_t, const acc_t* __restrict q, const acc_t* __restrict e,
                            acc_t* __restrict y) MEMCHECK_INLINE_LAMBDA {
    using Maths = decltype(maths);
    for (int64_t i = 0; i < kTileLanes; ++i)
      y[i] = softplus_attention_from_mean(softplus_from_exponential<Maths>(q[i], e[i]), mean[i]);
  };
  attend<acc_t>(p, dtype, task, s, rows, y_of_row);
}

// Adds one chunk of keys to Z and A. Where queries have their last keys in it (causal), writes their y.
template <typename acc_t>
MEMCHECK_INLINE void key_chunk(const SoftplusAttentionForward& p, Dtype dtype, const Task& task, int64_t chunk,
                               bool write_y, RunningPair<acc_t>& sums) {
  alignas(64) acc_t z[kTileElements];  // softplus(k), then the sum of it up to each row
  alignas(64) acc_t a[kTileElements];  // softplus(k) v, then the sum of it up to each row
  const int64_t end = chunk_end(chunk, p.shape.T);
  for (int64_t t = chunk * kCarrySpacing; t < end; t += kTileRows) {
    const int rows = rows_from(t, end);
    weigh_keys(p, dtype, task, t, rows, z, a);
    sums.first.template scan<false>(z, rows);
    sums.second.template scan<false>(a, rows);
    const int first = first_row_with_query(p.shape, t, rows);
    if (!write_y || first == rows) continue;
    const int64_t s = t - (p.shape.T - p.shape.S) + first;
    attend_from_sums(p, dtype, task, s, rows - first, z + first * kTileLanes, a + first * kTileLanes);
  }
  sums.end_chunk();
}

// y of one chunk of queries that all see the same keys.
template <typename acc_t>
MEMCHECK_INLINE void query_chunk(const SoftplusAttentionForward& p, Dtype dtype, const Task& task,
                                 const RunningPair<acc_t>& sums) {
  alignas(64) acc_t mean[kTileLanes];
  for (int lane = 0; lane < kTileLanes; ++lane)
    mean[lane] = sums.second.before[lane] / (sums.first.before[lane] + static_cast<acc_t>(p.eps));
  const int64_t end = chunk_end(task.chunk, p.shape.S);
  for (int64_t s = task.chunk * kCarrySpacing; s < end; s += kTileRows)
    attend_from_mean(p, dtype, task, s, rows_from(s, end), mean);
}

// ---- tasks of the forward

enum class ForwardPhase {
  AllChunks,    // a task goes through all chunks of keys: y if causal, and the carries
  ChunkSums,    // a task sums one chunk of keys into its slot
  CausalChunk,  // a task writes y for one chunk of keys, from the carry before it
  QueryChunk,   // not causal: a task writes y for one chunk of queries
};

// One pass over tasks that do the same.
template <typename acc_t>
struct ForwardPass {
  const SoftplusAttentionForward& p;
  Dtype dtype;
  ForwardPhase phase;
  Sums<acc_t> sums;  // the carries, or the sums of the chunks
  int64_t chunks;    // tasks of a block of channels
};

template <typename acc_t>
MEMCHECK_INLINE void key_task(const ForwardPass<acc_t>& pass, const Task& task) {
  const SoftplusAttentionShape& shape = pass.p.shape;
  const bool all = pass.phase == ForwardPhase::AllChunks;
  const bool writes_y = shape.causal && pass.phase != ForwardPhase::ChunkSums;
  const SoftplusAttentionState& state = pass.p.state;
  const bool ends_in_chunk = task.chunk == pass.sums.slots;  // the last chunk is not full, so the scan leaves it out
  RunningPair<acc_t> sums;
  if (all || (writes_y && task.chunk == 0))
    sums.load_state(state.before, state.before_rest, task);
  else if (writes_y && ends_in_chunk && state.after)
    sums.load_state(state.after, state.after_rest, task);
  else if (writes_y)
    sums.load(pass.sums, task.chunk - 1, task);
  const int64_t last = all ? shape.key_chunks() : task.chunk + 1;
  for (int64_t chunk = task.chunk; chunk < last; ++chunk) {
    key_chunk(pass.p, pass.dtype, task, chunk, writes_y, sums);
    if (all && writes_y && pass.sums.data != nullptr && chunk < pass.sums.slots) sums.store(pass.sums, chunk, task);
  }
  if (!writes_y) sums.store(pass.sums, task.chunk, task);
  if (all || (writes_y && ends_in_chunk)) sums.store_state(state.after, state.after_rest, task);
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const ForwardPass<acc_t>& pass, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(pass.p.shape, index, pass.chunks);
    if (pass.phase == ForwardPhase::QueryChunk) {
      RunningPair<acc_t> totals;
      totals.load(pass.sums, 0, task);
      query_chunk(pass.p, pass.dtype, task, totals);
    } else {
      key_task(pass, task);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, forward_tasks, (const ForwardPass<acc_t>& pass, int64_t begin, int64_t end),
                       (pass, begin, end))

template <typename acc_t>
void run(const ForwardPass<acc_t>& pass) {
  const int64_t tasks = pass.p.shape.B * channel_blocks(pass.p.shape) * pass.chunks;
  parallel_tasks(tasks, useful_threads(pass.p.shape, pass.p.threads),
                 [&](int64_t begin, int64_t end, int) { forward_tasks<acc_t>(pass, begin, end); });
}

// The sums of chunks become those up to the end of each, behind the state before, and the state after.
template <typename acc_t>
void scan_keys(const SoftplusAttentionForward& p, const Sums<acc_t>& sums) {
  const SoftplusAttentionState& state = p.state;
  scan_slots(
      p.shape, sums, false, useful_threads(p.shape, p.threads),
      [&](int64_t plane, const Task& task, RunningSum<acc_t>& sum) {
        load_sum(state.before, state.before_rest, plane, task, sum);
      },
      [&](int64_t plane, const Task& task, const RunningSum<acc_t>& sum) {
        store_sum(state.after, state.after_rest, plane, task, sum);
      });
}

template <typename acc_t>
void forward_causal(const SoftplusAttentionForward& p, Dtype dtype) {
  const SoftplusAttentionShape& shape = p.shape;
  const Sums<acc_t> carries(p.carries, shape, shape.carries());
  if (!splits(shape, shape.key_chunks(), p.threads))
    return run(ForwardPass<acc_t>{p, dtype, ForwardPhase::AllChunks, carries, 1});
  run(ForwardPass<acc_t>{p, dtype, ForwardPhase::ChunkSums, carries, shape.carries()});
  scan_keys(p, carries);
  run(ForwardPass<acc_t>{p, dtype, ForwardPhase::CausalChunk, carries, shape.key_chunks()});
}

template <typename acc_t>
void forward_not_causal(const SoftplusAttentionForward& p, Dtype dtype) {
  const SoftplusAttentionShape& shape = p.shape;
  const Sums<acc_t> totals(p.carries, shape, 1);
  const int64_t chunks = shape.key_chunks();
  if (splits(shape, chunks, p.threads)) {
    const Sums<acc_t> partial(p.scratch, shape, chunks);
    run(ForwardPass<acc_t>{p, dtype, ForwardPhase::ChunkSums, partial, chunks});
    scan_keys(p, partial);
    const int64_t pair = 2 * shape.R;
    for (int64_t b = 0; b < shape.B; ++b)
      std::copy_n(partial.data + ((b + 1) * chunks - 1) * pair, pair, totals.data + b * pair);
  } else {
    run(ForwardPass<acc_t>{p, dtype, ForwardPhase::AllChunks, totals, 1});
  }
  run(ForwardPass<acc_t>{p, dtype, ForwardPhase::QueryChunk, totals, shape.query_chunks()});
}

// ---- one step

// A row of a (B,1,R) state. With a stride of 0 to the next row nothing beyond the row is touched.
MEMCHECK_INLINE MatrixPlace state_row(Dtype acc, const Strided<3>& x, const Task& task) {
  const int64_t first = task.b * x.stride[0] + task.r * x.stride[2];
  return {element_at(acc, x.data, first), 0, x.stride[2]};
}

template <typename acc_t>
MEMCHECK_INLINE void step_tasks_body(const SoftplusAttentionStep& p, Dtype dtype, int64_t begin, int64_t end) {
  const Dtype acc = sizeof(acc_t) == sizeof(double) ? Dtype::Float64 : Dtype::Float32;
  const SoftplusAttentionShape shape{p.B, 1, p.T, p.R, false};
  const SoftplusAttentionForward forward{.shape = shape,
                                         .eps = p.eps,
                                         .q = p.q,
                                         .k = p.k,
                                         .v = p.v,
                                         .y = p.y,
                                         .carries = nullptr,
                                         .scratch = nullptr,
                                         .threads = 1,
                                         .state = {}};
  for (int64_t index = begin; index < end; ++index) {
    const Task task = task_of(shape, index, 1);
    RunningPair<acc_t> sums;
    load_tile(acc, state_row(acc, p.z, task), 1, task.lanes, sums.first.before);
    load_tile(acc, state_row(acc, p.a, task), 1, task.lanes, sums.second.before);
    for (int64_t chunk = 0; chunk < shape.key_chunks(); ++chunk) key_chunk(forward, dtype, task, chunk, false, sums);
    query_chunk(forward, dtype, task, sums);
    store_tile(acc, state_row(acc, p.new_z, task), 1, task.lanes, sums.first.before);
    store_tile(acc, state_row(acc, p.new_a, task), 1, task.lanes, sums.second.before);
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, step_tasks, (const SoftplusAttentionStep& p, Dtype dtype, int64_t begin, int64_t end),
                       (p, dtype, begin, end))

}  // namespace

void forward(SoftplusAttentionForward p, Dtype dtype) {
  const SoftplusAttentionPlan needs = plan(p.shape, dtype, p.threads);
  if (p.carries == nullptr && needs.forward_carries_bytes > 0) {
    p.carries = p.scratch;
    p.scratch = static_cast<char*>(p.scratch) + needs.forward_carries_bytes;
  }
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    p.shape.causal ? forward_causal<acc_t>(p, dtype) : forward_not_causal<acc_t>(p, dtype);
  });
}

void step(const SoftplusAttentionStep& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    parallel_tasks(p.B * ceil_div(p.R, kTileLanes), useful_threads({p.B, 1, p.T, p.R, false}, p.threads),
                   [&](int64_t begin, int64_t end, int) { step_tasks<decltype(acc)>(p, dtype, begin, end); });
  });
}

}  // namespace memcheck::softplus_cpu
