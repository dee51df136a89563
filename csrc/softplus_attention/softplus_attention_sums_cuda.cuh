#pragma once

#include <algorithm>

#include "common/compensated_sum.h"
#include "common/formulas.cuh"
#include "common/integer.h"
#include "common/kernel.cuh"
#include "softplus_attention/softplus_attention.h"

// Which block, warp and thread of a CUDA kernel forms which sum, and where sums are kept.
//
// A block takes kLanes channels of one batch entry. Each lane of a warp has one channel. The block goes through the
// positions tile by tile; of a tile each warp has kWarpRows consecutive positions. Sums have four levels, and each
// starts from zero: the rows of a warp, the warps of a tile, the tiles of a chunk, the chunks. Rounding errors of equal
// terms all have one sign, so they grow with the number of terms of a level. The number of chunks has no limit:
// chunks are added with a compensated sum. The sums of a chunk do not depend on the block that forms them. So blocks
// that take a few chunks each, after a first pass that sums every chunk, give the same bits as one block for all.

namespace memcheck {

// In softplus_attention_forward_cuda.cu and softplus_attention_backward_cuda.cu.
void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream);
void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream);

namespace softplus_cuda {

constexpr int kLanes = kSoftplusCudaChannels;
constexpr int kWarpRows = 16;
constexpr int kChunk = static_cast<int>(kCarrySpacing);
static_assert(kLanes == 32, "a channel for each lane of a warp");

// A block whose tile is a chunk, as the backward needs it, has a multiprocessor for itself. Blocks of the forward are
// half as large, so that one computes while another waits.
constexpr int kWarps = kChunk / kWarpRows;
constexpr int kThreads = kWarps * kLanes;
constexpr int kForwardWarps = kWarps / 2;
constexpr int kForwardThreads = kForwardWarps * kLanes;
constexpr int kForwardTile = kForwardWarps * kWarpRows;

struct Thread {
  int warp;
  int lane;
};

__device__ __forceinline__ Thread this_thread() {
  return {static_cast<int>(threadIdx.x / kLanes), static_cast<int>(threadIdx.x % kLanes)};
}

// ---- the work of a block

// How chunks are divided among blocks: `count` segments of `length` chunks each; the last may be shorter.
struct Segments {
  int64_t chunks;
  int64_t length;
  int64_t count;
};

inline Segments undivided(int64_t chunks) {
  return {chunks, chunks, std::min<int64_t>(chunks, 1)};
}

// One chunk or tile for each block.
inline Segments one_by_one(int64_t chunks) {
  return {chunks, 1, chunks};
}

// Enough segments for two blocks on each multiprocessor of a large GPU.
inline Segments divided(const SoftplusAttentionShape& shape, int64_t chunks) {
  constexpr int64_t kBlocks = 264;
  const int64_t others = std::max<int64_t>(1, shape.B * ceil_div(shape.R, kLanes));
  const int64_t length = ceil_div(chunks, std::min(chunks, ceil_div(kBlocks, others)));
  return {chunks, length, ceil_div(chunks, length)};
}

struct Work {
  int64_t b;
  int64_t r;     // first channel
  int channels;  // from 1 to kLanes
  int64_t first_chunk, end_chunk;

  // Lanes beyond the channels compute the last channel again and write nothing.
  __device__ __forceinline__ int64_t channel(Thread me) const {
    return r + (me.lane < channels ? me.lane : channels - 1);
  }
  __device__ __forceinline__ bool has(Thread me) const { return me.lane < channels; }
};

// The factors of the grid's size fit 32 bits, in which a division is fast.
__device__ __forceinline__ Work work_of(const SoftplusAttentionShape& shape, const Segments& segments) {
  const auto blocks = static_cast<unsigned>((shape.R + kLanes - 1) / kLanes);
  const auto count = static_cast<unsigned>(segments.count);
  const unsigned others = blockIdx.x / blocks;
  const int64_t r = int64_t{blockIdx.x % blocks} * kLanes;
  const int64_t first = others % count * segments.length;
  const int64_t end = first + segments.length;
  return {others / count, r, static_cast<int>(shape.R - r < kLanes ? shape.R - r : kLanes), first,
          end < segments.chunks ? end : segments.chunks};
}

struct WorkLaunch {
  const char* kernel;  // its name in errors
  const SoftplusAttentionShape& shape;
  const Segments& segments;
  int threads;
  size_t shared_bytes;
  cudaStream_t stream;
};

template <typename... Params, typename... Args>
void launch_work(const WorkLaunch& with, void (*kernel)(Params...), const Args&... args) {
  const int64_t blocks = with.shape.B * ceil_div(with.shape.R, kLanes) * with.segments.count;
  if (blocks > 0)
    launch({with.kernel, dim3(static_cast<unsigned>(blocks)), dim3(with.threads), with.shared_bytes, with.stream},
           kernel, args...);
}

// ---- the rows of a warp

// The rows of a warp that exist: from `first` on, before `end`.
struct RowRange {
  int first, end;

  __device__ __forceinline__ bool all() const { return first == 0 && end == kWarpRows; }
  __device__ __forceinline__ bool has(int row) const { return row >= first && row < end; }
};

__device__ __forceinline__ int clamp_rows(int64_t rows) {
  return rows < 0 ? 0 : rows < kWarpRows ? static_cast<int>(rows) : kWarpRows;
}

// For a tile of kPositions that begins at `start` of `length`.
template <int kPositions = kChunk>
__device__ __forceinline__ RowRange rows_of(Thread me, int64_t start, int64_t length) {
  if (start >= 0 && start + kPositions <= length) return {0, kWarpRows};
  start += me.warp * kWarpRows;
  return {clamp_rows(-start), clamp_rows(length - start)};
}

template <typename acc_t>
__device__ __forceinline__ void clear_absent_rows(RowRange rows, acc_t (&values)[kWarpRows]) {
  if (rows.all()) return;
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row)
    if (!rows.has(row)) values[row] = acc_t(0);
}

// Replaces each row by the sum of the rows up to it; reversed: by the sum of it and the rows after it. Returns the sum
// of all rows.
template <bool reversed, typename acc_t>
__device__ __forceinline__ acc_t scan_rows(acc_t (&rows)[kWarpRows]) {
#pragma unroll
  for (int step = 1; step < kWarpRows; ++step) {
    const int row = reversed ? kWarpRows - 1 - step : step;
    rows[row] += rows[reversed ? row + 1 : row - 1];
  }
  return rows[reversed ? 0 : kWarpRows - 1];
}

template <typename acc_t>
__device__ __forceinline__ acc_t sum_of_rows(const acc_t (&rows)[kWarpRows]) {
  acc_t sum = rows[0];
#pragma unroll
  for (int row = 1; row < kWarpRows; ++row) sum += rows[row];
  return sum;
}

// ---- pairs of sums

// Z and A, or the sums of w and w m.
template <typename acc_t>
struct alignas(2 * sizeof(acc_t)) Pair {
  acc_t first, second;

  __device__ __forceinline__ Pair operator+(const Pair& other) const {
    return {first + other.first, second + other.second};
  }
};

template <typename acc_t>
__device__ __forceinline__ void add_pair_to_sum(const Pair<acc_t>& x, Pair<acc_t>& sum, Pair<acc_t>& rest) {
  add_to_sum(x.first, sum.first, rest.first);
  add_to_sum(x.second, sum.second, rest.second);
}

template <typename acc_t, int kWarps>
using WarpSums = Pair<acc_t>[kWarps][kLanes];

// The sum of the warps before this one; reversed: of the warps after it.
template <bool reversed, typename acc_t, int kWarps>
__device__ __forceinline__ Pair<acc_t> sum_of_warps(const Pair<acc_t> (&sums)[kWarps][kLanes], Thread me) {
  Pair<acc_t> sum{acc_t(0), acc_t(0)};
  if (reversed) {
#pragma unroll 5
    for (int warp = kWarps - 1; warp > me.warp; --warp) sum = sum + sums[warp][me.lane];
  } else {
#pragma unroll 5
    for (int warp = 0; warp < me.warp; ++warp) sum = sum + sums[warp][me.lane];
  }
  return sum;
}

// ---- sums in memory

// (planes,B,slots,R): a slot for each chunk, or one for all.
template <typename acc_t>
struct Slots {
  acc_t* data;
  int64_t B, count, R;

  __device__ __forceinline__ acc_t* at(int plane, int64_t b, int64_t slot, int64_t r) const {
    return data + ((plane * B + b) * count + slot) * R + r;
  }
  __device__ __forceinline__ Pair<acc_t> load(int64_t b, int64_t slot, int64_t r) const {
    return {*at(0, b, slot, r), *at(1, b, slot, r)};
  }
  __device__ __forceinline__ void store(int64_t b, int64_t slot, int64_t r, Pair<acc_t> pair) const {
    *at(0, b, slot, r) = pair.first;
    *at(1, b, slot, r) = pair.second;
  }
};

template <typename acc_t>
Slots<acc_t> slots_in(const void* data, const SoftplusAttentionShape& shape, int64_t count) {
  return {static_cast<acc_t*>(const_cast<void*>(data)), shape.B, count, shape.R};
}

struct SlotScan {
  const char* kernel;  // its name in errors
  int64_t planes;
  bool reversed;
};

// Replaces each slot by the sum of itself and the slots before it (reversed: after it), added in the order of a block
// that takes all chunks. Copies the last sums to `totals` (planes,B,R), unless it is null. For float and double.
template <typename acc_t>
void scan_slots(const SlotScan& scan, const Slots<acc_t>& slots, acc_t* totals, cudaStream_t stream);

// ---- the mean of the values seen, m = A / (Z + eps)

// The inverse of a float is computed from a quarter of Z + eps, so that it stays normal up to the largest number. If
// eps is so small that a quarter of it is not normal, the scale is 1.
__device__ __forceinline__ float normaliser_scale(float eps) {
  return eps < 0x1p-124f ? 1.0f : 0.25f;
}

__device__ __forceinline__ double normaliser_scale(double) {
  return 1.0;
}

// Means of the rows of a warp, from the sums before the warp and the running sums z and a within it.
template <typename acc_t>
struct Means {
  acc_t scale;
  Pair<acc_t> before;  // times the scale, with eps

  __device__ __forceinline__ Means(Pair<acc_t> sums, double eps)
      : scale(normaliser_scale(static_cast<acc_t>(eps))),
        before{(sums.first + static_cast<acc_t>(eps)) * scale, sums.second * scale} {}

  // 1 / (Z + eps), divided by the scale.
  __device__ __forceinline__ acc_t inverse(acc_t z) const { return inverse_on_device(before.first + z * scale); }
  __device__ __forceinline__ acc_t mean(acc_t a, acc_t inverse) const { return (before.second + a * scale) * inverse; }
};

}  // namespace softplus_cuda
}  // namespace memcheck
