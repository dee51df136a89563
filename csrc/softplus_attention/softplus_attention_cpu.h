#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/compensated_sum.h"
#include "common/formulas.h"
#include "common/matrix_tile.h"
#include "common/parallel.h"
#include "common/types.h"
#include "softplus_attention/softplus_attention.h"

// What forward, backward and step share on the CPU: tasks, sums over positions, and tiles of the operands.
//
// A task is one block of kTileLanes channels of one batch entry. It goes through all chunks of positions in their order
// or, where that leaves threads idle, takes one chunk. The sums of a chunk start at zero, and the sums of the chunks
// before are added where they are used. So both ways give the same bits.

namespace memcheck::softplus_cpu {

inline int64_t channel_blocks(const SoftplusAttentionShape& shape) {
  return ceil_div(shape.R, kTileLanes);
}

// A softplus takes as long as some 32 of them.
inline int64_t multiplications(const SoftplusAttentionShape& shape) {
  return 32 * shape.B * shape.R * (shape.S + 2 * shape.T);
}

// Of the threads there are, those worth waking.
inline int64_t useful_threads(const SoftplusAttentionShape& shape, int64_t threads) {
  return memcheck::useful_threads(multiplications(shape), threads);
}

// Whether every chunk is a task of its own.
inline bool splits(const SoftplusAttentionShape& shape, int64_t chunks, int64_t threads) {
  return cuts(shape.B * channel_blocks(shape), chunks, useful_threads(shape, threads), shape.causal);
}

struct Task {
  int64_t b;
  int64_t r;      // first channel
  int lanes;      // channels
  int64_t chunk;  // 0 where a task is all chunks
};

MEMCHECK_INLINE Task task_of(const SoftplusAttentionShape& shape, int64_t index, int64_t chunks) {
  const int64_t blocks = ceil_div(shape.R, kTileLanes);
  const int64_t block = index / chunks % blocks;
  const int64_t r = block * kTileLanes;
  const int64_t lanes = shape.R - r < kTileLanes ? shape.R - r : kTileLanes;
  return {index / chunks / blocks, r, static_cast<int>(lanes), index % chunks};
}

// ---- sums

// Sums in memory, (B,slots,planes,R).
template <typename acc_t>
struct Sums {
  acc_t* data;
  int64_t slots, planes, R;

  Sums() = default;
  Sums(void* memory, const SoftplusAttentionShape& shape, int64_t slots, int64_t planes = 2)
      : data(static_cast<acc_t*>(memory)), slots(slots), planes(planes), R(shape.R) {}

  MEMCHECK_INLINE acc_t* at(int64_t plane, int64_t slot, const Task& task) const {
    return data + ((task.b * slots + slot) * planes + plane) * R + task.r;
  }
  MEMCHECK_INLINE void load(int64_t plane, int64_t slot, const Task& task, acc_t* lanes) const {
    const acc_t* from = at(plane, slot, task);
    for (int lane = 0; lane < task.lanes; ++lane) lanes[lane] = from[lane];
  }
  MEMCHECK_INLINE void store(int64_t plane, int64_t slot, const Task& task, const acc_t* lanes) const {
    acc_t* to = at(plane, slot, task);
    for (int lane = 0; lane < task.lanes; ++lane) to[lane] = lanes[lane];
  }
};

// A sum over rows in three levels, each from zero: the rows of a tile, the tiles of a chunk, the chunks before.
// Rounding errors of equal terms all have one sign, so they grow with the number of terms in a level. The number of
// chunks has no limit: they are added with a compensated sum.
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

// One plane of a state, (2,B,R).
template <typename acc_t>
MEMCHECK_INLINE void load_plane(const Strided<3>& state, int64_t plane, const Task& task, acc_t* lanes) {
  if (!state) return;
  for (int lane = 0; lane < task.lanes; ++lane) lanes[lane] = *state.at<acc_t>(plane, task.b, task.r + lane);
}

template <typename acc_t>
MEMCHECK_INLINE void store_plane(const Strided<3>& state, int64_t plane, const Task& task, const acc_t* lanes) {
  if (!state) return;
  for (int lane = 0; lane < task.lanes; ++lane) *state.at<acc_t>(plane, task.b, task.r + lane) = lanes[lane];
}

template <typename acc_t>
MEMCHECK_INLINE void load_sum(const Strided<3>& state, const Strided<3>& rest, int64_t plane, const Task& task,
                              RunningSum<acc_t>& sum) {
  load_plane(state, plane, task, sum.before);
  load_plane(rest, plane, task, sum.rest);
}

template <typename acc_t>
MEMCHECK_INLINE void store_sum(const Strided<3>& state, const Strided<3>& rest, int64_t plane, const Task& task,
                               const RunningSum<acc_t>& sum) {
  store_plane(state, plane, task, sum.before);
  store_plane(rest, plane, task, sum.rest);
}

// W and X over the queries after the last position, (W, X) = (dA, -dZ), from the gradient of the state there.
template <typename acc_t>
MEMCHECK_INLINE void load_later(const SoftplusAttentionBackward& p, int64_t plane, const Task& task,
                                RunningSum<acc_t>& sum) {
  if (!p.grad_after) return;
  load_sum(p.grad_after, p.grad_after_rest, 1 - plane, task, sum);
  if (plane == 0) return;
  for (acc_t& x : sum.before) x = -x;
  for (acc_t& x : sum.rest) x = -x;
}

// Two sums over the same rows: Z and A, or in the backward W and X.
template <typename acc_t>
struct RunningPair {
  RunningSum<acc_t> first, second;

  MEMCHECK_INLINE void load(const Sums<acc_t>& sums, int64_t slot, const Task& task) {
    sums.load(0, slot, task, first.before);
    sums.load(1, slot, task, second.before);
  }
  MEMCHECK_INLINE void store(const Sums<acc_t>& sums, int64_t slot, const Task& task) const {
    sums.store(0, slot, task, first.before);
    sums.store(1, slot, task, second.before);
  }
  MEMCHECK_INLINE void load_state(const Strided<3>& state, const Strided<3>& rest, const Task& task) {
    load_sum(state, rest, 0, task, first);
    load_sum(state, rest, 1, task, second);
  }
  MEMCHECK_INLINE void store_state(const Strided<3>& state, const Strided<3>& rest, const Task& task) const {
    store_sum(state, rest, 0, task, first);
    store_sum(state, rest, 1, task, second);
  }
  MEMCHECK_INLINE void end_chunk() {
    first.end_chunk();
    second.end_chunk();
  }
};

// Each slot becomes the sum of itself and all slots before it (reversed: after it), added one by one, as a task over
// all chunks adds them. begin(plane, task, sum) loads what comes before the first; end(plane, task, sum) gets the sum
// of all.
template <typename acc_t, typename Begin, typename End>
void scan_slots(const SoftplusAttentionShape& shape, const Sums<acc_t>& sums, bool reversed, int64_t threads,
                const Begin& begin, const End& end) {
  const int64_t tasks = shape.B * channel_blocks(shape);
  parallel_tasks(sums.planes * tasks, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t index = first; index < last; ++index) {
      const Task task = task_of(shape, index % tasks, 1);
      const int64_t plane = index / tasks;
      RunningSum<acc_t> sum;
      begin(plane, task, sum);
      for (int64_t step = 0; step < sums.slots; ++step) {
        const int64_t slot = reversed ? sums.slots - 1 - step : step;
        sums.load(plane, slot, task, sum.chunk);
        sum.end_chunk();
        sums.store(plane, slot, task, sum.before);
      }
      end(plane, task, sum);
    }
  });
}

// ---- tiles

// A tile of q, y or one of their gradients, (B,S,R), from position s on.
MEMCHECK_INLINE MatrixPlace query_tile(Dtype dtype, const Strided<3>& x, const Task& task, int64_t s) {
  const int64_t first = task.b * x.stride[0] + s * x.stride[1] + task.r * x.stride[2];
  return {element_at(dtype, x.data, first), x.stride[1], x.stride[2]};
}

// A tile of k, v or one of their gradients, (B,R,T), from position t on.
MEMCHECK_INLINE MatrixPlace key_tile(Dtype dtype, const Strided<3>& x, const Task& task, int64_t t) {
  const int64_t first = task.b * x.stride[0] + task.r * x.stride[1] + t * x.stride[2];
  return {element_at(dtype, x.data, first), x.stride[2], x.stride[1]};
}

MEMCHECK_INLINE int rows_from(int64_t position, int64_t end) {
  return static_cast<int>(end - position < kTileRows ? end - position : kTileRows);
}

MEMCHECK_INLINE int64_t chunk_end(int64_t chunk, int64_t length) {
  const int64_t end = (chunk + 1) * kCarrySpacing;
  return end < length ? end : length;
}

// Causal, a query's last key is T - S positions further in time. Returns the first of `rows` keys from t on that is the
// last key of a query, or `rows` where none is.
MEMCHECK_INLINE int first_row_with_query(const SoftplusAttentionShape& shape, int64_t t, int rows) {
  const int64_t s = t - (shape.T - shape.S);
  return s < 0 ? static_cast<int>(-s < rows ? -s : rows) : 0;
}

// Rows of kTileLanes numbers, in scratch or in memory.
template <typename number_t>
struct TileRows {
  number_t* data;
  int64_t stride;

  MEMCHECK_INLINE number_t* operator[](int64_t row) const { return data + row * stride; }
};

// A tile to be read: in memory if it lies there as it would in scratch, else loaded into `tile`.
template <typename acc_t>
MEMCHECK_INLINE TileRows<const acc_t> rows_to_read(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t lanes,
                                                   acc_t* tile) {
  if (lies_as_scratch<acc_t>(dtype, place, lanes)) return {static_cast<const acc_t*>(place.data), place.row_stride};
  load_tile(dtype, place, rows, lanes, tile);
  return {tile, kTileLanes};
}

// A tile to be written: in memory, or in `tile`, to be stored when it is full.
template <typename acc_t>
MEMCHECK_INLINE TileRows<acc_t> rows_to_write(Dtype dtype, const MatrixPlace& place, int64_t lanes, acc_t* tile) {
  if (lies_as_scratch<acc_t>(dtype, place, lanes)) return {static_cast<acc_t*>(place.data), place.row_stride};
  return {tile, kTileLanes};
}

template <typename acc_t>
MEMCHECK_INLINE void store_written(Dtype dtype, const MatrixPlace& place, int64_t rows, int64_t lanes,
                                   const acc_t* tile) {
  if (!lies_as_scratch<acc_t>(dtype, place, lanes)) store_tile(dtype, place, rows, lanes, tile);
}

// run(Maths{}) for the maths of a dtype whose accumulation type is acc_t.
template <typename acc_t, typename Run>
MEMCHECK_INLINE void with_maths(Dtype dtype, const Run& run) {
  if constexpr (std::is_same_v<acc_t, float>) {
    if (dtype != Dtype::Float32) return run(CpuMathsFor16Bits{});
  }
  run(CpuMaths{});
}

// e = exp(-|x|) of the rows of a tile, while the rows of another are on their way.
template <typename Maths, typename acc_t>
MEMCHECK_INLINE void exponentials_of_rows(const TileRows<const acc_t>& x, int64_t rows, const NextTile<acc_t>& next,
                                          acc_t* __restrict e) {
  for (int64_t row = 0; row < rows; ++row) {
    next.prefetch(row);
    exponentials_minus_abs<Maths>(x[row], kTileLanes, e + row * kTileLanes);
  }
}

// ---- passes

// The memory for one dense batch.
SoftplusAttentionPlan plan(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads);
int64_t workers_bytes(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads);  // of the backward
void forward(SoftplusAttentionForward p, Dtype dtype);
void backward(const SoftplusAttentionBackward& p, Dtype dtype);
void step(const SoftplusAttentionStep& p, Dtype dtype);

}  // namespace memcheck::softplus_cpu
