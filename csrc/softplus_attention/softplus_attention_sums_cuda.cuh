#pragma once

#include "common/compensated_sum.h"
#include "common/exchange.cuh"
#include "common/formulas.cuh"
#include "common/integer.h"
#include "common/kernel.cuh"
#include "softplus_attention/softplus_attention.h"

// Which block and thread of a CUDA kernel forms which sum, and where sums are kept.
//
// A block takes a chunk of kChunk positions of kLanes channels of one batch entry: 32 bytes of each row of 16-bit
// queries, the least that a GPU reads. Each half of a warp is a group: it has kRows consecutive positions, and each of
// its lanes one channel. Sums have three levels, and each starts from zero: the rows of a group, the groups of a chunk,
// the chunks. Rounding errors of equal terms all have one sign, so they grow with the number of terms of a level. The
// number of chunks has no limit: chunks are added with a compensated sum.

namespace memcheck {

// In softplus_attention_forward_cuda.cu and softplus_attention_backward_cuda.cu.
void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream);
void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream);

namespace softplus_cuda {

constexpr int kLanes = kSoftplusCudaChannels;
static_assert(kLanes == 16, "two groups in a warp");
constexpr int kRows = 16;
constexpr int kChunk = static_cast<int>(kCarrySpacing);
constexpr int kGroups = kChunk / kRows;
constexpr int kThreads = kGroups * kLanes;
constexpr int kWarpThreads = 32;
constexpr int kWarpPositions = 2 * kRows;

struct Thread {
  int group;
  int lane;

  __device__ __forceinline__ int warp() const { return group / 2; }
  __device__ __forceinline__ int in_warp() const { return group % 2 * kLanes + lane; }
};

__device__ __forceinline__ Thread this_thread() {
  return {static_cast<int>(threadIdx.x / kLanes), static_cast<int>(threadIdx.x % kLanes)};
}

// ---- the work of a block

struct Work {
  int64_t b;
  int64_t r;     // first channel
  int channels;  // from 1 to kLanes
  int64_t chunk;

  // Lanes beyond the channels compute the last channel again and write nothing.
  __device__ __forceinline__ int64_t channel(Thread me) const {
    return r + (me.lane < channels ? me.lane : channels - 1);
  }
  __device__ __forceinline__ bool has(Thread me) const { return me.lane < channels; }
};

// The factors of the grid's size fit 32 bits, in which a division is fast. Chunks vary slowest.
__device__ __forceinline__ Work work_of(const SoftplusAttentionShape& shape, unsigned block) {
  const auto bands = static_cast<unsigned>((shape.R + kLanes - 1) / kLanes);
  const auto B = static_cast<unsigned>(shape.B);
  const unsigned others = block / bands;
  const int64_t r = int64_t{block % bands} * kLanes;
  return {others % B, r, static_cast<int>(shape.R - r < kLanes ? shape.R - r : kLanes), others / B};
}

struct WorkLaunch {
  const char* kernel;  // its name in errors
  const SoftplusAttentionShape& shape;
  int64_t chunks;
  size_t shared_bytes;
  cudaStream_t stream;
};

template <typename... Params, typename... Args>
void launch_work(const WorkLaunch& with, void (*kernel)(Params...), const Args&... args) {
  const int64_t blocks = with.shape.B * ceil_div(with.shape.R, kLanes) * with.chunks;
  if (blocks > 0)
    launch({with.kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), with.shared_bytes, with.stream}, kernel,
           args...);
}

// ---- the rows of a group

// The rows of a group that exist: from `first` on, before `end`.
struct RowRange {
  int first, end;

  __device__ __forceinline__ bool all() const { return first == 0 && end == kRows; }
  __device__ __forceinline__ bool has(int row) const { return row >= first && row < end; }
};

__device__ __forceinline__ int clamp_rows(int64_t rows) {
  return rows < 0 ? 0 : rows < kRows ? static_cast<int>(rows) : kRows;
}

// Of a chunk that begins at `start` of `length` positions.
__device__ __forceinline__ RowRange rows_of(Thread me, int64_t start, int64_t length) {
  start += me.group * kRows;
  return {clamp_rows(-start), clamp_rows(length - start)};
}

template <typename acc_t>
__device__ __forceinline__ void clear_absent_rows(RowRange rows, acc_t (&values)[kRows]) {
  if (rows.all()) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (!rows.has(row)) values[row] = acc_t(0);
}

// Replaces each row by the sum of the rows up to it; reversed: by the sum of it and the rows after it. Returns the sum
// of all rows.
template <bool reversed, typename acc_t>
__device__ __forceinline__ acc_t scan_rows(acc_t (&rows)[kRows]) {
#pragma unroll
  for (int step = 1; step < kRows; ++step) {
    const int row = reversed ? kRows - 1 - step : step;
    rows[row] += rows[reversed ? row + 1 : row - 1];
  }
  return rows[reversed ? 0 : kRows - 1];
}

template <typename acc_t>
__device__ __forceinline__ acc_t sum_of_rows(const acc_t (&rows)[kRows]) {
  acc_t sum = rows[0];
#pragma unroll
  for (int row = 1; row < kRows; ++row) sum += rows[row];
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
using GroupSums = Pair<acc_t>[kGroups][kLanes];

// The sum of the groups before this one; reversed: of the groups after it.
template <bool reversed, typename acc_t>
__device__ __forceinline__ Pair<acc_t> sum_of_groups(const GroupSums<acc_t>& sums, Thread me) {
  Pair<acc_t> sum{acc_t(0), acc_t(0)};
  if (reversed) {
#pragma unroll 5
    for (int group = kGroups - 1; group > me.group; --group) sum = sum + sums[group][me.lane];
  } else {
#pragma unroll 5
    for (int group = 0; group < me.group; ++group) sum = sum + sums[group][me.lane];
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
  SoftplusAttentionState state = {};  // what comes before the first slot, and where the sums go too; of two planes
};

// Copies the compensated sums of all slots to `totals` (planes,B,R); zeros if there is no slot and no state. `totals`
// may be null if there is a state. For float and double.
template <typename acc_t>
void sum_slots(const SlotScan& scan, const Slots<acc_t>& slots, acc_t* totals, cudaStream_t stream);

// ---- states, (2,B,R)

inline bool has_state(const SoftplusAttentionState& state) {
  return state.before || state.after;
}

// Zeros where there is no state.
template <typename acc_t>
__device__ __forceinline__ Pair<acc_t> load_state(const Strided<3>& state, int64_t b, int64_t r) {
  if (!state) return {acc_t(0), acc_t(0)};
  return {*state.at<acc_t>(0, b, r), *state.at<acc_t>(1, b, r)};
}

template <typename acc_t>
__device__ __forceinline__ void store_state(const Strided<3>& state, int64_t b, int64_t r, Pair<acc_t> pair) {
  if (!state) return;
  *state.at<acc_t>(0, b, r) = pair.first;
  *state.at<acc_t>(1, b, r) = pair.second;
}

// ---- running sums, which blocks pass on

template <typename acc_t>
struct CompensatedPair {
  Pair<acc_t> sum, rest;

  __device__ __forceinline__ void add(Pair<acc_t> x) {
    add_to_sum(x.first, sum.first, rest.first);
    add_to_sum(x.second, sum.second, rest.second);
  }
};

// The sums over all chunks up to each; backwards: from each on. A block waits for the sums of its neighbour, adds its
// own chunk, and passes them on. So every tensor is read once, and the order of additions is always the same. Blocks
// take chunks by tickets: a block waits only for blocks that began before it, in whatever order the GPU starts them.
template <typename acc_t>
struct RunningSums {
  Slots<acc_t> sums;
  Slots<acc_t> rests;  // what rounding has left out of the sums
  uint32_t* ticket;    // null if there is one chunk, which waits for nothing

  // The place of this block's work in the order. All threads of the block must call it.
  __device__ __forceinline__ unsigned turn(uint32_t& in_shared) const {
    if (ticket == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) in_shared = take_ticket(ticket);
    __syncthreads();
    return in_shared;
  }
  __device__ __forceinline__ CompensatedPair<acc_t> await(int64_t b, int64_t slot, int64_t r) const {
    const acc_t* const from[4] = {sums.at(0, b, slot, r), sums.at(1, b, slot, r), rests.at(0, b, slot, r),
                                  rests.at(1, b, slot, r)};
    acc_t x[4];
    await_numbers(from, x);
    return {{x[0], x[1]}, {x[2], x[3]}};
  }
  __device__ __forceinline__ void pass_on(int64_t b, int64_t slot, int64_t r, const CompensatedPair<acc_t>& x) const {
    pass_number(x.sum.first, sums.at(0, b, slot, r));
    pass_number(x.sum.second, sums.at(1, b, slot, r));
    if (ticket == nullptr) return;
    pass_number(x.rest.first, rests.at(0, b, slot, r));
    pass_number(x.rest.second, rests.at(1, b, slot, r));
  }
};

// Running sums over `chunks` chunks: the sums at `sums`, the rests and the ticket at `others`, of
// softplus_attention_running_bytes.
template <typename acc_t>
RunningSums<acc_t> running_sums_in(const void* sums, const void* others, const SoftplusAttentionShape& shape,
                                   int64_t chunks, int64_t slots) {
  const auto rests = slots_in<acc_t>(others, shape, slots);
  auto* ticket = reinterpret_cast<uint32_t*>(rests.data + 2 * shape.B * slots * shape.R);
  return {slots_in<acc_t>(sums, shape, slots), rests, chunks > 1 ? ticket : nullptr};
}

// Makes running sums ready for a kernel: no sum has been passed on, and no ticket taken. For float and double.
template <typename acc_t>
void begin_sums(const char* kernel, const RunningSums<acc_t>& running, cudaStream_t stream);

// ---- the mean of the values seen, m = A / (Z + eps)

// The inverse of a float is computed from a quarter of Z + eps, so that it stays normal up to the largest number. If
// eps is so small that a quarter of it is not normal, the scale is 1.
__device__ __forceinline__ float normaliser_scale(float eps) {
  return eps < 0x1p-124f ? 1.0f : 0.25f;
}

__device__ __forceinline__ double normaliser_scale(double) {
  return 1.0;
}

// Means of the rows of a group, from the sums before the group and the running sums z and a within it.
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
