#pragma once

#include "common/compensated_sum.h"
#include "common/exchange.cuh"
#include "common/formulas.cuh"
#include "common/kernel.cuh"
#include "common/types.h"
#include "softplus_attention/softplus_attention_plan_cuda.h"

// Which block and thread of a CUDA kernel forms which sum, and where sums are kept.
//
// A block takes a chunk of kChunk positions of kLanes channels of one sequence: 32 bytes of each row of 16-bit queries,
// the least that a GPU reads. Each half of a warp is a group: it has kRows consecutive positions, and each of its lanes
// one channel. Sums have three levels, and each starts from zero: the rows of a group, the groups of a chunk, the
// chunks. Rounding errors of equal terms all have one sign, so they grow with the number of terms of a level. The
// number of chunks has no limit: chunks are added with a compensated sum, always in their order.

namespace memcheck {
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

// The places of a sequence's chunks, or of its hops, among those of all sequences.
struct Places {
  int64_t first, stride;

  __device__ __forceinline__ int64_t at(int64_t i) const { return first + i * stride; }
};

// `first` is the sequence's first position. If the batch is not packed, the first chunks of all sequences come before
// the second ones.
__device__ __forceinline__ Places places_of(const SoftplusAttentionShape& n, int64_t sequence, int64_t first,
                                            int64_t size) {
  if (n.sequences.packed) return {first / size + sequence, 1};
  return {sequence, sequence_count(n)};
}

// A chunk of a sequence, in some channels.
struct Work {
  Sequence x;
  int64_t sequence, chunk;
  int64_t r;     // first channel
  int channels;  // from 1 to kLanes

  // Lanes beyond the channels compute the last channel again and write nothing.
  __device__ __forceinline__ int64_t channel(Thread me) const {
    return r + (me.lane < channels ? me.lane : channels - 1);
  }
  __device__ __forceinline__ bool has(Thread me) const { return me.lane < channels; }
};

// Of a block whose place is `turn`, among chunks of rows of `length` positions; the chunk may lie behind the sequence's
// end. Turns fit 32 bits, in which a division is fast. Channels vary fastest.
template <typename FirstOf>
__device__ __forceinline__ Work work_of(const SoftplusAttentionShape& n, unsigned turn, int64_t length,
                                        const FirstOf& first_of) {
  const auto bands = static_cast<unsigned>((n.R + kLanes - 1) / kLanes);
  const auto count = static_cast<unsigned>(sequence_count(n));
  const unsigned place = turn / bands;
  const int64_t r = int64_t{turn % bands} * kLanes;
  SequenceTile tile{place % count, place / count};
  if (n.sequences.packed) tile = tile_at(n, place, length, kChunk, first_of);
  return {sequence_of(n, tile.sequence), tile.sequence, tile.tile, r,
          static_cast<int>(n.R - r < kLanes ? n.R - r : kLanes)};
}

__device__ __forceinline__ Work key_work(const SoftplusAttentionShape& n, unsigned turn) {
  return work_of(n, turn, n.T, FirstKey());
}
__device__ __forceinline__ Work query_work(const SoftplusAttentionShape& n, unsigned turn) {
  return work_of(n, turn, n.S, FirstQuery());
}

// At least one: the block of a sequence without positions passes its state on.
__device__ __forceinline__ int64_t chunks_of(int64_t positions) {
  return positions > 0 ? (positions + kChunk - 1) / kChunk : 1;
}

struct WorkLaunch {
  const char* kernel;  // its name in errors
  const SoftplusAttentionShape& shape;
  int64_t places;  // of chunks
  size_t shared_bytes;
  cudaStream_t stream;
};

template <typename... Params, typename... Args>
void launch_work(const WorkLaunch& with, void (*kernel)(Params...), const Args&... args) {
  launch({with.kernel, ceil_div(with.shape.R, kLanes) * with.places, dim3(kThreads), with.shared_bytes, with.stream},
         kernel, args...);
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
  unroll<kRows>([&](int row) {
    if (!rows.has(row)) values[row] = acc_t(0);
  });
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

// (slots,planes,R)
template <typename acc_t>
struct Slots {
  acc_t* data;
  int64_t R;
  int planes;

  __device__ __forceinline__ acc_t* at(int plane, int64_t slot, int64_t r) const {
    return data + (slot * planes + plane) * R + r;
  }
  __device__ __forceinline__ Pair<acc_t> load(int64_t slot, int64_t r) const {
    return {*at(0, slot, r), *at(1, slot, r)};
  }
  __device__ __forceinline__ void store(int64_t slot, int64_t r, Pair<acc_t> pair) const {
    *at(0, slot, r) = pair.first;
    *at(1, slot, r) = pair.second;
  }
};

template <typename acc_t>
Slots<acc_t> slots_in(const void* data, const SoftplusAttentionShape& shape, int planes = 2) {
  return {static_cast<acc_t*>(const_cast<void*>(data)), shape.R, planes};
}

struct SlotSums {
  const char* kernel;  // its name in errors
  const SoftplusAttentionShape& shape;
  bool of_queries;                    // chunks of queries, else of keys
  SoftplusAttentionState state = {};  // what comes before the first slot, and where the sums go too; of two planes
};

// Writes the compensated sums of each sequence's slots, one for each of its chunks, to `totals` (N,planes,R); zeros if
// there is no slot and no state. `totals` may be null if there is a state. For float and double.
template <typename acc_t>
void sum_slots(const SlotSums& sums, const Slots<acc_t>& slots, acc_t* totals, cudaStream_t stream);

// ---- states, (2,N,R)

inline bool has_state(const SoftplusAttentionState& state) {
  return state.before || state.after;
}

// Zeros where there is no state.
template <typename acc_t>
__device__ __forceinline__ Pair<acc_t> load_state(const Strided<3>& state, int64_t sequence, int64_t r) {
  if (!state) return {acc_t(0), acc_t(0)};
  return {*state.at<acc_t>(0, sequence, r), *state.at<acc_t>(1, sequence, r)};
}

template <typename acc_t>
__device__ __forceinline__ void store_state(const Strided<3>& state, int64_t sequence, int64_t r, Pair<acc_t> pair) {
  if (!state) return;
  *state.at<acc_t>(0, sequence, r) = pair.first;
  *state.at<acc_t>(1, sequence, r) = pair.second;
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

template <typename acc_t>
struct ChainShared {
  Pair<acc_t> chunks[kHopChunks][kLanes];  // the sums of each earlier chunk of the hop
  Pair<acc_t> before[kLanes];
  uint32_t turn;
};

// What a block passes on: its chunk, where that is, and the sums of the chunk. `step` counts chunks in the order in
// which they are added, of which there are `steps`.
template <typename acc_t>
struct Link {
  const Work& work;
  Thread me;
  int64_t step, steps;
  bool leads;       // this thread is of the one group that has the sums of the chunk
  Pair<acc_t> own;  // them
};

// The sums over all chunks of a sequence before each. A block passes on the sums of its own chunk at once. It waits for
// those of the earlier chunks of its hop, and for the sums over all earlier hops, which the last block of the hop
// before passes on. So every tensor is read once, a wait follows another one only once in a hop, and the order of
// additions is always the same. Blocks take chunks by tickets: a block waits only for blocks that began before it, in
// whatever order the GPU starts them.
template <typename acc_t>
struct Chain {
  SoftplusAttentionShape shape;
  Slots<acc_t> sums;   // a slot for each step: of its chunk; of the last step of a hop: over all chunks up to it
  Slots<acc_t> rests;  // a slot for each hop: what rounding has left out of the latter
  uint32_t* ticket;    // null if no sequence has two chunks

  // The place of this block's work in the order. All threads of the block must call it.
  __device__ __forceinline__ unsigned turn(uint32_t& in_shared) const {
    if (ticket == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) in_shared = take_ticket(ticket);
    __syncthreads();
    return in_shared;
  }

  // The sums over all chunks before this one; all threads of the block must call it. begin() loads what comes before
  // the first chunk; end(sums) gets the sums with this chunk. Both run in the group that leads.
  template <typename Begin, typename End>
  __device__ __forceinline__ Pair<acc_t> pass(const Link<acc_t>& link, ChainShared<acc_t>& memory, const Begin& begin,
                                              const End& end) const {
    const Thread me = link.me;
    const int64_t r = link.work.channel(me), first_key = link.work.x.first_key;
    const Places places = places_of(shape, link.work.sequence, first_key, kChunk);
    const Places hops = places_of(shape, link.work.sequence, first_key, kHopChunks * kChunk);
    const int in_hop = static_cast<int>(link.step % kHopChunks);
    const int64_t hop = link.step / kHopChunks;
    const bool sends = link.leads && link.work.has(me) && link.step + 1 < link.steps;
    const bool closes = in_hop == kHopChunks - 1;
    if (sends && !closes) pass_pair(link.own, sums, places.at(link.step), r);
    for (int i = me.group; i < in_hop; i += kGroups)
      memory.chunks[i][me.lane] = await_pair(sums, places.at(link.step - in_hop + i), r);
    CompensatedPair<acc_t> total{};
    if (link.leads) total = hop == 0 ? begin() : await_hop(places.at(link.step - in_hop - 1), hops.at(hop - 1), r);
    __syncthreads();
    if (link.leads) {
      for (int i = 0; i < in_hop; ++i) total.add(memory.chunks[i][me.lane]);
      memory.before[me.lane] = total.sum;
      total.add(link.own);
      if (sends && closes) {
        pass_pair(total.rest, rests, hops.at(hop), r);
        pass_pair(total.sum, sums, places.at(link.step), r);
      }
      if (link.work.has(me)) end(total);
    }
    __syncthreads();
    return memory.before[me.lane];
  }

 private:
  __device__ __forceinline__ static void pass_pair(Pair<acc_t> x, const Slots<acc_t>& to, int64_t slot, int64_t r) {
    pass_number(x.first, to.at(0, slot, r));
    pass_number(x.second, to.at(1, slot, r));
  }
  __device__ __forceinline__ static Pair<acc_t> await_pair(const Slots<acc_t>& from, int64_t slot, int64_t r) {
    const acc_t* const at[2] = {from.at(0, slot, r), from.at(1, slot, r)};
    acc_t x[2];
    await_numbers(at, x);
    return {x[0], x[1]};
  }
  __device__ __forceinline__ CompensatedPair<acc_t> await_hop(int64_t slot, int64_t hop, int64_t r) const {
    const acc_t* const at[4] = {sums.at(0, slot, r), sums.at(1, slot, r), rests.at(0, hop, r), rests.at(1, hop, r)};
    acc_t x[4];
    await_numbers(at, x);
    return {{x[0], x[1]}, {x[2], x[3]}};
  }
};

// A chain in the plan's scratch, in which nothing has been passed on and no ticket taken. For float and double.
template <typename acc_t>
Chain<acc_t> begin_chain(const char* kernel, const SoftplusAttentionShape& shape, void* scratch, cudaStream_t stream);

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
