#include <algorithm>
#include <type_traits>

#include "common/compensated_sum.h"
#include "common/integer.h"
#include "common/kernel.cuh"
#include "common/ptx.cuh"
#include "common/softplus.cuh"
#include "softplus_attention/softplus_attention.h"

// A block of threads takes kLanes channels of one batch entry, a lane of each warp for a channel, and goes through its
// positions a tile at a time, of which each warp takes kRows consecutive ones. Sums are formed in levels, each from
// zero: the rows of a warp, the warps of a tile, the tiles of a chunk, the chunks. So rounding errors of equal terms,
// which all have one sign, grow with the number of terms of a level. That of the chunks is unlimited: they are added
// with what rounding leaves out. A chunk's sums do not depend on who forms them, so blocks that take a few chunks each,
// after a first pass has summed every chunk, give the bits of one that takes all.
//
// Keys and values are contiguous along positions as a rule. Tiles of them come to shared memory as they are, one ahead
// of the one that is computed on where there is room, and each lane reads its own channel there. Queries and outputs
// are contiguous along channels: lanes read and write them where they are.

namespace memcheck {
namespace {

constexpr int kLanes = kSoftplusCudaChannels;
constexpr int kRows = 16;
constexpr int kChunk = static_cast<int>(kCarrySpacing);
static_assert(kLanes == 32, "channels are the lanes of a warp");

// Blocks whose tile is a chunk, which the backward needs, and has a multiprocessor for itself. And half as much for the
// forward, so that while one block waits another computes.
constexpr int kWarps = kChunk / kRows;
constexpr int kThreads = kWarps * kLanes;
constexpr int kForwardWarps = kWarps / 2;
constexpr int kForwardThreads = kForwardWarps * kLanes;
constexpr int kForwardTile = kForwardWarps * kRows;

struct Thread {
  int warp;
  int lane;
};

__device__ __forceinline__ Thread this_thread() {
  return {static_cast<int>(threadIdx.x / kLanes), static_cast<int>(threadIdx.x % kLanes)};
}

// ---- who does what

// Chunks are dealt to blocks: `count` segments of `length` chunks each, the last of what is left.
struct Segments {
  int64_t chunks;
  int64_t length;
  int64_t count;
};

struct Work {
  int64_t b;
  int64_t r;     // first channel
  int channels;  // from 1 to kLanes
  int64_t first_chunk, end_chunk;

  // Lanes beyond the channels work on the last one, and write nothing.
  __device__ __forceinline__ int64_t channel(Thread me) const {
    return r + (me.lane < channels ? me.lane : channels - 1);
  }
  __device__ __forceinline__ bool has(Thread me) const { return me.lane < channels; }
};

// The numbers of blocks that a grid is the product of fit 32 bits, in which dividing is quick.
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

__device__ __forceinline__ int clamp_rows(int64_t rows) {
  return rows < 0 ? 0 : rows < kRows ? static_cast<int>(rows) : kRows;
}

// Of a warp's rows those from `first` on and before `end` are there.
struct Rows {
  int first, end;

  __device__ __forceinline__ bool all() const { return first == 0 && end == kRows; }
  __device__ __forceinline__ bool has(int row) const { return row >= first && row < end; }
};

// A warp's rows of a tile of so many positions that begins at `start` of `length`.
template <int kTile = kChunk>
__device__ __forceinline__ Rows rows_of(Thread me, int64_t start, int64_t length) {
  if (start >= 0 && start + kTile <= length) return {0, kRows};
  start += me.warp * kRows;
  return {clamp_rows(-start), clamp_rows(length - start)};
}

// ---- sums

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

// Sums kept in memory: (planes,B,slots,R).
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

template <typename scalar_t>
Slots<acc_type<scalar_t>> slots_in(const void* data, const SoftplusAttentionShape& shape, int64_t count) {
  return {static_cast<acc_type<scalar_t>*>(const_cast<void*>(data)), shape.B, count, shape.R};
}

// Each row becomes the sum of the rows up to it; reversed: from it on. Returns the sum of all.
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

template <typename acc_t, int kWarps>
using WarpSums = Pair<acc_t>[kWarps][kLanes];

// The sums of the warps before this one; reversed: after it.
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

// Each slot becomes the sum of itself and all before it (after it, when reversed), added one by one as a block that
// takes all chunks does. `totals` (planes,B,R), if any, are given the last sums. A thread takes a channel.
template <typename acc_t>
__global__ void scan_kernel(Slots<acc_t> slots, int64_t channels, bool reversed, acc_t* totals) {
  constexpr int kBatch = 16;  // loads that wait for each other no more than the additions do
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= channels) return;
  acc_t* row = slots.data + index / slots.R * slots.count * slots.R + index % slots.R;
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t start = 0; start < slots.count; start += kBatch) {
    acc_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = reversed ? slots.count - 1 - start - i : start + i;
      batch[i] = start + i < slots.count ? row[slot * slots.R] : acc_t(0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = reversed ? slots.count - 1 - start - i : start + i;
      if (start + i >= slots.count) break;
      add_to_sum(batch[i], sum, rest);
      row[slot * slots.R] = sum;
    }
  }
  if (totals != nullptr) totals[index] = sum;
}

// ---- keys and values, and their gradients, by way of shared memory

// 16 bytes.
template <typename scalar_t>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(scalar_t);
  scalar_t values[kSize];
};

// So many positions, a row for each channel. Rows are 16 bytes longer than that: lanes that read 16 bytes each of their
// own rows meet no bank of shared memory twice.
template <typename scalar_t, int kPositions = kChunk>
struct Tile {
  alignas(16) scalar_t channels[kLanes][kPositions + Pack<scalar_t>::kSize];
};

template <typename scalar_t>
__device__ __forceinline__ void unpack(const Pack<scalar_t>& pack, acc_type<scalar_t>* values) {
#pragma unroll
  for (int i = 0; i < pack.kSize; ++i) values[i] = to_acc(pack.values[i]);
}

// A bfloat16 is the upper half of a float: an instruction each, where compilers take one apart first.
__device__ __forceinline__ void unpack(const Pack<__nv_bfloat16>& pack, float* values) {
  uint32_t words[pack.kSize / 2];
  __builtin_memcpy(words, pack.values, sizeof(words));
#pragma unroll
  for (int i = 0; i < pack.kSize / 2; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// kCount values, whole packs, of a row of a tile.
template <int kCount, typename scalar_t>
__device__ __forceinline__ void read_row(const scalar_t* from, acc_type<scalar_t> (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += Pack<scalar_t>::kSize)
    unpack(*reinterpret_cast<const Pack<scalar_t>*>(from + i), values + i);
}

template <int kCount, typename scalar_t, typename acc_t>
__device__ __forceinline__ void write_row(scalar_t* to, const acc_t (&values)[kCount]) {
  constexpr int kSize = Pack<scalar_t>::kSize;
#pragma unroll
  for (int i = 0; i < kCount; i += kSize) {
    Pack<scalar_t> pack;
#pragma unroll
    for (int j = 0; j < kSize; ++j) pack.values[j] = from_acc<scalar_t>(values[i + j]);
    *reinterpret_cast<Pack<scalar_t>*>(to + i) = pack;
  }
}

// How the threads of a block walk through a tile of a tensor (B,R,T). There are two for each position of it.
enum class Walk {
  Packs,      // along positions: those of every channel begin at a multiple of 16 bytes and are whole packs
  Positions,  // the same by elements
  Channels,   // by elements, neighbours at neighbouring channels
};

struct Walks {
  Walk k, v, grad_k, grad_v;
};

// A thread's elements of a tile, kRows of them.
template <int kPositions>
struct Elements {
  int channel, position;            // of the first
  int channel_step, position_step;  // from one to the next

  __device__ __forceinline__ explicit Elements(Walk walk) {
    const bool along_channels = walk == Walk::Channels;
    channel = static_cast<int>(along_channels ? threadIdx.x % kLanes : threadIdx.x / kPositions);
    position = static_cast<int>(along_channels ? threadIdx.x / kLanes : threadIdx.x % kPositions);
    channel_step = along_channels ? 0 : kLanes / kRows;
    position_step = along_channels ? kPositions / kRows : 0;
  }
};

// A thread's packs of a tile: one in every kStep channels.
template <typename scalar_t, int kPositions>
struct Packs {
  static constexpr int kSize = Pack<scalar_t>::kSize;
  static constexpr int kOfChannel = kPositions / kSize;
  static constexpr int kCount = kRows / kSize;
  static constexpr int kStep = kLanes / kCount;

  int channel = static_cast<int>(threadIdx.x / kOfChannel);  // of the first
  int position = static_cast<int>(threadIdx.x % kOfChannel) * kSize;
};

// Where a tile of a tensor (B,R,T) is in memory.
template <typename scalar_t, int kPositions = kChunk>
class TilePlace {
 public:
  __device__ __forceinline__ TilePlace(const Strided<3>& x, Walk walk, const Work& work, int64_t t)
      : channel_stride_(x.stride[1]), position_stride_(x.stride[2]), walk_(walk), channels_(work.channels) {
    const Elements<kPositions> elements(walk);
    const Packs<scalar_t, kPositions> packs;
    const bool packed = walk == Walk::Packs;
    at_ = x.at<scalar_t>(work.b, work.r + (packed ? packs.channel : elements.channel),
                         t + (packed ? packs.position : elements.position));
  }

  // So many positions are there, or more: zeros beyond. Packs arrive when cp_async_wait says so.
  __device__ __forceinline__ void request(int64_t positions, Tile<scalar_t, kPositions>& tile) const {
    if (walk_ == Walk::Packs) {
      const Packs<scalar_t, kPositions> packs;
      const bool inside = packs.position < positions;
#pragma unroll
      for (int i = 0; i < packs.kCount; ++i) {
        const int channel = packs.channel + i * packs.kStep;
        cp_async_16(&tile.channels[channel][packs.position], at_ + i * packs.kStep * channel_stride_,
                    inside && channel < channels_);
      }
    } else {
      each_element(positions, [&](scalar_t* at, bool there, int channel, int position) {
        tile.channels[channel][position] = there ? *at : from_acc<scalar_t>(acc_type<scalar_t>(0));
      });
    }
  }

  __device__ __forceinline__ void store(int64_t positions, const Tile<scalar_t, kPositions>& tile) const {
    if (walk_ == Walk::Packs) {
      const Packs<scalar_t, kPositions> packs;
      const bool inside = packs.position < positions;
#pragma unroll
      for (int i = 0; i < packs.kCount; ++i) {
        const int channel = packs.channel + i * packs.kStep;
        const auto* from = reinterpret_cast<const Pack<scalar_t>*>(&tile.channels[channel][packs.position]);
        if (inside && channel < channels_)
          *reinterpret_cast<Pack<scalar_t>*>(at_ + i * packs.kStep * channel_stride_) = *from;
      }
    } else {
      each_element(positions, [&](scalar_t* at, bool there, int channel, int position) {
        if (there) *at = tile.channels[channel][position];
      });
    }
  }

 private:
  template <typename Each>
  __device__ __forceinline__ void each_element(int64_t positions, const Each& each) const {
    const Elements<kPositions> elements(walk_);
    const int64_t step = elements.channel_step * channel_stride_ + elements.position_step * position_stride_;
#pragma unroll 8
    for (int i = 0; i < kRows; ++i) {
      const int channel = elements.channel + i * elements.channel_step;
      const int position = elements.position + i * elements.position_step;
      each(at_ + i * step, channel < channels_ && position < positions, channel, position);
    }
  }

  int64_t channel_stride_, position_stride_;
  Walk walk_;
  int channels_;  // that are there
  scalar_t* at_;  // this thread's first item
};

// A tensor (B,S,R), a warp's rows at a time, a lane for each channel.
template <typename scalar_t>
class QueryRows {
 public:
  // Row 0 is at s, which may be before the first.
  __device__ __forceinline__ QueryRows(const Strided<3>& x, const Work& work, Thread me, int64_t s)
      : stride_(x.stride[1]), at_(x.at<scalar_t>(work.b, s, work.channel(me))) {}

  __device__ __forceinline__ void move(int positions) { at_ += positions * stride_; }
  // Zeros where nothing is.
  __device__ __forceinline__ void load(Rows rows, scalar_t (&values)[kRows]) const {
    if (rows.all()) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) values[row] = at_[row * stride_];
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        values[row] = rows.has(row) ? at_[row * stride_] : from_acc<scalar_t>(acc_type<scalar_t>(0));
    }
  }
  __device__ __forceinline__ void store(Rows rows, const scalar_t (&values)[kRows]) const {
    if (rows.all()) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) at_[row * stride_] = values[row];
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (rows.has(row)) at_[row * stride_] = values[row];
    }
  }

 private:
  int64_t stride_;
  scalar_t* at_;
};

template <typename scalar_t, int kPositions = kChunk>
struct KeyTiles {
  Tile<scalar_t, kPositions> k;
  Tile<scalar_t, kPositions> v;
};

// A chunk of float64 takes so much that there is room for one.
template <typename scalar_t>
constexpr int kStages = sizeof(scalar_t) > 4 ? 1 : 2;

// Asks for the keys, and values if there are such, from position t on.
template <typename scalar_t, int kPositions>
__device__ __forceinline__ void request_keys(const Strided<3>& k, const Strided<3>& v, const Walks& walks,
                                             const Work& work, int64_t T, int64_t t,
                                             KeyTiles<scalar_t, kPositions>& tiles) {
  TilePlace<scalar_t, kPositions>(k, walks.k, work, t).request(T - t, tiles.k);
  if (v) TilePlace<scalar_t, kPositions>(v, walks.v, work, t).request(T - t, tiles.v);
  cp_async_commit();
}

// Until the tile that was requested last is there for all threads, which are done with all before it.
__device__ __forceinline__ void await_keys() {
  cp_async_wait<0>();
  __syncthreads();
}

// ---- the mean of the values seen, m = A / (Z + eps)

// A float's inverse is computed of a quarter of Z + eps, so that it stays normal up to the largest number. An eps so
// small that a quarter of it is not normal does without.
__device__ __forceinline__ float normaliser_scale(float eps) {
  return eps < 0x1p-124f ? 1.0f : 0.25f;
}

__device__ __forceinline__ double normaliser_scale(double) {
  return 1.0;
}

// Z and A of rows of a warp: what was before them, and their own running sums beside it.
template <typename acc_t>
struct Means {
  acc_t scale;
  Pair<acc_t> before;  // times the scale, with eps

  __device__ __forceinline__ Means(Pair<acc_t> sums, double eps)
      : scale(normaliser_scale(static_cast<acc_t>(eps))),
        before{(sums.first + static_cast<acc_t>(eps)) * scale, sums.second * scale} {}

  // 1 / (Z + eps), over the scale.
  __device__ __forceinline__ acc_t inverse(acc_t z) const { return inverse_on_device(before.first + z * scale); }
  __device__ __forceinline__ acc_t mean(acc_t a, acc_t inverse) const { return (before.second + a * scale) * inverse; }
};

// ---- forward

// Rows of keys that are computed together, and so loaded: a pack of 16-bit ones.
constexpr int kGroup = 8;

// softplus(k) and softplus(k) v of a warp's rows of a tile; positions beyond those that are there weigh nothing.
template <typename scalar_t, int kPositions, typename acc_t>
__device__ __forceinline__ void weigh(const KeyTiles<scalar_t, kPositions>& tiles, bool has_v, Thread me,
                                      int64_t positions, acc_t (&weights)[kRows], acc_t (&weighted)[kRows]) {
#pragma unroll
  for (int start = 0; start < kRows; start += kGroup) {
    const int position = me.warp * kRows + start;
    acc_t k[kGroup];
    acc_t v[kGroup] = {};
    read_row(&tiles.k.channels[me.lane][position], k);
    if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      weights[start + i] = softplus_on_device<scalar_t>(k[i]);
      weighted[start + i] = weights[start + i] * v[i];
    }
  }
  if (positions < kPositions) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (me.warp * kRows + row >= positions) weights[row] = weighted[row] = acc_t(0);
  }
}

template <typename scalar_t>
struct ForwardShared {
  KeyTiles<scalar_t, kForwardTile> stages[kStages<scalar_t>];
  WarpSums<acc_type<scalar_t>, kForwardWarps> warps;
  Pair<acc_type<scalar_t>> before[2][kLanes];  // the sums over all tiles before this one, and before the next
};

// Keys alone: each chunk's sums into its slot, or all of them into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 2)
    key_sums_kernel(SoftplusAttentionForward p, Segments segments, Walks walks, bool of_each,
                    Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t end = work.end_chunk * kChunk < T ? work.end_chunk * kChunk : T;
  const bool writes = me.warp == kForwardWarps - 1 && work.has(me);
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  Pair<acc_t> of_chunk = zero;
  Pair<acc_t> of_all = zero;
  Pair<acc_t> rest = zero;
  int stage = 0;
  request_keys(p.k, p.v, walks, work, T, work.first_chunk * kChunk, memory.stages[0]);
  for (int64_t t = work.first_chunk * kChunk; t < end; t += kForwardTile) {
    const bool more = t + kForwardTile < end;
    await_keys();
    auto& tiles = memory.stages[stage];
    stage = (stage + 1) % kStages<scalar_t>;
    if (kStages<scalar_t> > 1 && more) request_keys(p.k, p.v, walks, work, T, t + kForwardTile, memory.stages[stage]);
    acc_t z[kRows], a[kRows];
    weigh(tiles, true, me, T - t, z, a);
    const Pair<acc_t> own{sum_of_rows(z), sum_of_rows(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kStages<scalar_t> == 1 && more) request_keys(p.k, p.v, walks, work, T, t + kForwardTile, tiles);
    if (!writes) continue;
    of_chunk = of_chunk + (sum_of_warps<false>(memory.warps, me) + own);
    if ((t + kForwardTile) % kChunk != 0 && more) continue;
    if (of_each) slots.store(work.b, t / kChunk, work.channel(me), of_chunk);
    add_pair_to_sum(of_chunk, of_all, rest);
    of_chunk = zero;
  }
  if (writes && !of_each) slots.store(work.b, 0, work.channel(me), of_all);
}

// y = softplus(q) m. q becomes y.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void attend(const Means<acc_t>& means, const acc_t (&z)[kRows], const acc_t (&a)[kRows],
                                       scalar_t (&q)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const acc_t m = means.mean(a[row], means.inverse(z[row]));
    q[row] = from_acc<scalar_t>(softplus_on_device<scalar_t>(to_acc(q[row])) * m);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 2)
    forward_causal_kernel(SoftplusAttentionForward p, Segments segments, Walks walks,
                          Slots<acc_type<scalar_t>> carries) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t end = work.end_chunk * kChunk < T ? work.end_chunk * kChunk : T;
  const bool split = segments.count > 1;            // then the carries are there
  int64_t s = work.first_chunk * kChunk - (T - S);  // the query whose last key is the tile's first
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> y_rows(p.y, work, me, s + me.warp * kRows);
  request_keys(p.k, p.v, walks, work, T, work.first_chunk * kChunk, memory.stages[0]);
  scalar_t q[kRows];
  q_rows.load(rows_of<kForwardTile>(me, s, S), q);
  // The last warp knows what is before the tile: chunks, and tiles of this one.
  const bool is_last_warp = me.warp == kForwardWarps - 1;
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  Pair<acc_t> of_chunk = zero;
  Pair<acc_t> of_chunks = zero;
  Pair<acc_t> rest = zero;
  if (is_last_warp && split && work.first_chunk > 0)
    of_chunks = carries.load(work.b, work.first_chunk - 1, work.channel(me));
  if (is_last_warp) memory.before[0][me.lane] = of_chunks;
  int turn = 0;
  for (int64_t t = work.first_chunk * kChunk; t < end; t += kForwardTile) {
    const bool more = t + kForwardTile < end;
    await_keys();
    auto& tiles = memory.stages[turn % kStages<scalar_t>];
    if (kStages<scalar_t> > 1 && more)
      request_keys(p.k, p.v, walks, work, T, t + kForwardTile, memory.stages[(turn + 1) % kStages<scalar_t>]);
    acc_t z[kRows], a[kRows];
    weigh(tiles, true, me, T - t, z, a);
    const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kStages<scalar_t> == 1 && more) request_keys(p.k, p.v, walks, work, T, t + kForwardTile, tiles);
    const Pair<acc_t> warps = sum_of_warps<false>(memory.warps, me);
    const Means<acc_t> means(memory.before[turn][me.lane] + warps, p.eps);
    turn = 1 - turn;
    if (is_last_warp) {
      of_chunk = of_chunk + (warps + own);
      if ((t + kForwardTile) % kChunk == 0) {
        const int64_t chunk = t / kChunk;
        const bool has_carry = carries.data != nullptr && chunk < carries.count;
        // A sum that began at this block's first chunk would lack the rest of those before.
        if (split && has_carry)
          of_chunks = carries.load(work.b, chunk, work.channel(me));
        else
          add_pair_to_sum(of_chunk, of_chunks, rest);
        of_chunk = zero;
        if (!split && has_carry && work.has(me)) carries.store(work.b, chunk, work.channel(me), of_chunks);
      }
      memory.before[turn][me.lane] = of_chunks + of_chunk;
    }
    attend(means, z, a, q);
    if (work.has(me)) y_rows.store(rows_of<kForwardTile>(me, s, S), q);
    s += kForwardTile;
    y_rows.move(kForwardTile);
    q_rows.move(kForwardTile);
    if (more) q_rows.load(rows_of<kForwardTile>(me, s, S), q);
  }
}

// Not causal: a chunk of queries, which all see the same keys.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 2)
    forward_queries_kernel(SoftplusAttentionForward p, Segments segments, Slots<acc_type<scalar_t>> totals) {
  using acc_t = acc_type<scalar_t>;
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  const int64_t s = work.first_chunk * kChunk;
  const Rows rows = rows_of(me, s, p.shape.S);
  scalar_t q[kRows];
  QueryRows<scalar_t>(p.q, work, me, s + me.warp * kRows).load(rows, q);
#pragma unroll
  for (int row = 0; row < kRows; ++row) q[row] = from_acc<scalar_t>(softplus_on_device<scalar_t>(to_acc(q[row])) * m);
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s + me.warp * kRows).store(rows, q);
}

// ---- backward

// y = softplus(q) m, m = A / (Z + eps): grad_q = g m sigmoid(q), and what comes back to the sums is w = g softplus(q) /
// (Z + eps) and w m. w is over the scale of the means.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
struct QueryGradients {
  acc_t of_q, w, wm;

  __device__ __forceinline__ QueryGradients(const Means<acc_t>& means, acc_t z, acc_t a, acc_t q, acc_t g) {
    const acc_t inverse = means.inverse(z);
    const acc_t m = means.mean(a, inverse);
    const SoftplusSigmoid<acc_t> both = softplus_and_sigmoid_on_device<scalar_t>(q);
    of_q = g * m * both.sigmoid;
    w = g * both.softplus * inverse;
    wm = w * m;
  }
};

template <typename acc_t>
__device__ __forceinline__ void keep_only(Rows rows, acc_t (&values)[kRows]) {
  if (rows.all()) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (!rows.has(row)) values[row] = acc_t(0);
}

// A += softplus(k) v and Z += softplus(k), so with W and X the sums of w and w m over the queries that see a key:
// grad_v = softplus(k) W and grad_k = sigmoid(k) (v W - X).
template <typename acc_t>
struct KeyGradients {
  acc_t of_k, of_v;

  __device__ __forceinline__ KeyGradients(SoftplusSigmoid<acc_t> of_key, acc_t v, acc_t w, acc_t wm)
      : of_k(of_key.sigmoid * (v * w - wm)), of_v(of_key.softplus * w) {}
};

// kStages tiles of keys and values: of the chunk that is computed on, and where there are two, of the next. None where
// a chunk takes too much: then each lane goes along its channel in memory.
template <typename scalar_t, int kStages>
struct BackwardShared {
  using acc_t = acc_type<scalar_t>;
  struct Nothing {};

  std::conditional_t<kStages == 0, Nothing, KeyTiles<scalar_t>[kStages == 0 ? 1 : kStages]> stages;
  WarpSums<acc_t, kWarps> warps;
  WarpSums<acc_t, kWarps> later_warps;
  Pair<acc_t> later[2][kLanes];  // the sums over all chunks after this one, and after the next
};

// W and X of a warp's rows: what comes after them, and their own running sums, over the scale.
template <typename acc_t>
struct LaterSums {
  acc_t scale;
  Pair<acc_t> after;
  acc_t (&w)[kRows];
  acc_t (&wm)[kRows];

  // The gradients of a row's key and value. softplus(k) and sigmoid(k) are formed once more: there is no room to keep
  // them, neither in shared memory nor in registers.
  template <typename scalar_t>
  __device__ __forceinline__ KeyGradients<acc_t> gradients(int row, acc_t k, acc_t v) const {
    return {softplus_and_sigmoid_on_device<scalar_t>(k), v, after.first + w[row] * scale,
            after.second + wm[row] * scale};
  }
};

// The gradients of a warp's rows replace k and v.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void differentiate_keys(const LaterSums<acc_t>& later, bool has_v, Thread me,
                                                   KeyTiles<scalar_t>& tiles) {
  constexpr int kSize = Pack<scalar_t>::kSize;
#pragma unroll
  for (int start = 0; start < kRows; start += kSize) {
    const int position = me.warp * kRows + start;
    acc_t k[kSize];
    acc_t v[kSize] = {};
    read_row(&tiles.k.channels[me.lane][position], k);
    if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const auto gradients = later.template gradients<scalar_t>(start + i, k[i], v[i]);
      k[i] = gradients.of_k;
      v[i] = gradients.of_v;
    }
    write_row(&tiles.k.channels[me.lane][position], k);
    write_row(&tiles.v.channels[me.lane][position], v);
  }
}

// A warp's rows of a chunk of a tensor (B,R,T), where they are in memory.
template <typename scalar_t>
__device__ __forceinline__ QueryRows<scalar_t> key_rows(const Strided<3>& x, const Work& work, Thread me, int64_t t) {
  Strided<3> by_position = x;
  by_position.stride[1] = x.stride[2];
  by_position.stride[2] = x.stride[1];
  return {by_position, work, me, t + me.warp * kRows};
}

template <typename scalar_t>
__device__ __forceinline__ void load_key_rows(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                              int64_t t, scalar_t (&k)[kRows], scalar_t (&v)[kRows]) {
  const Rows rows = rows_of(me, t, p.shape.T);
  key_rows<scalar_t>(p.k, work, me, t).load(rows, k);
#pragma unroll
  for (int row = 0; row < kRows; ++row) v[row] = from_acc<scalar_t>(acc_type<scalar_t>(0));
  if (p.v) key_rows<scalar_t>(p.v, work, me, t).load(rows, v);
}

// As weigh and differentiate_keys, without tiles.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void weigh_in_memory(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                                int64_t t, acc_t (&weights)[kRows], acc_t (&weighted)[kRows]) {
  scalar_t k[kRows], v[kRows];
  load_key_rows(p, work, me, t, k, v);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    weights[row] = softplus_on_device<scalar_t>(to_acc(k[row]));
    weighted[row] = weights[row] * to_acc(v[row]);
  }
  const Rows rows = rows_of(me, t, p.shape.T);
  keep_only(rows, weights);
  keep_only(rows, weighted);
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void differentiate_in_memory(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                                        int64_t t, const LaterSums<acc_t>& later) {
  scalar_t k[kRows], v[kRows];
  load_key_rows(p, work, me, t, k, v);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const auto gradients = later.template gradients<scalar_t>(row, to_acc(k[row]), to_acc(v[row]));
    k[row] = from_acc<scalar_t>(gradients.of_k);
    v[row] = from_acc<scalar_t>(gradients.of_v);
  }
  if (!work.has(me)) return;
  const Rows rows = rows_of(me, t, p.shape.T);
  if (p.grad_k) key_rows<scalar_t>(p.grad_k, work, me, t).store(rows, k);
  if (p.grad_v) key_rows<scalar_t>(p.grad_v, work, me, t).store(rows, v);
}

// Chunks from the last to the first: in each along the sums for w and grad_q, then back for grad_k and grad_v. With
// sums_only slot i is given the sums of w and w m of chunk i + 1; else, where chunks are split, it holds those of all
// chunks after chunk i.
template <typename scalar_t, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    backward_causal_kernel(SoftplusAttentionBackward p, Segments segments, Walks walks, bool sums_only,
                           Slots<acc_type<scalar_t>> carries, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<BackwardShared<scalar_t, kStages>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t first_chunk = work.first_chunk + (sums_only ? 1 : 0);
  const int64_t last_chunk = work.end_chunk - (sums_only ? 0 : 1);
  const bool wants_keys = sums_only || p.grad_k || p.grad_v;
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  int64_t s = last_chunk * kChunk - (T - S);  // the query whose last key is the chunk's first
  const auto request = [&](int64_t t, [[maybe_unused]] int stage) {
    if constexpr (kStages > 0) request_keys(p.k, p.v, walks, work, T, t, memory.stages[stage]);
  };
  request(last_chunk * kChunk, 0);
  scalar_t q[kRows], g[kRows];
  const auto load_queries = [&](int64_t s) {
    const Rows rows = rows_of(me, s, S);
    QueryRows<scalar_t>(p.q, work, me, s + me.warp * kRows).load(rows, q);
    QueryRows<scalar_t>(p.grad_y, work, me, s + me.warp * kRows).load(rows, g);
  };
  load_queries(s);
  if (me.warp == 0) {
    const bool sums_follow = segments.count > 1 && !sums_only && last_chunk < slots.count;
    memory.later[0][me.lane] = sums_follow ? slots.load(work.b, last_chunk, work.channel(me)) : zero;
  }
  const bool reads_sums = segments.count > 1 && !sums_only;
  Pair<acc_t> rest = zero;
  for (int64_t chunk = last_chunk; chunk >= first_chunk; --chunk, s -= kChunk) {
    const int turn = static_cast<int>(last_chunk - chunk) % 2;
    [[maybe_unused]] const int stage = kStages > 1 ? turn : 0;
    const bool more = chunk > first_chunk;
    await_keys();
    const int64_t t = chunk * kChunk;
    if (kStages > 1 && more) request(t - kChunk, 1 - stage);
    const Pair<acc_t> carry = chunk > 0 ? carries.load(work.b, chunk - 1, work.channel(me)) : zero;
    const Rows rows = rows_of(me, s, S);

    acc_t weights[kRows], w[kRows], wm[kRows];
    acc_t(&a)[kRows] = wm;
    if constexpr (kStages > 0) {
      weigh(memory.stages[stage], static_cast<bool>(p.v), me, T - t, weights, a);
    } else {
      weigh_in_memory<scalar_t>(p, work, me, t, weights, a);
    }
    memory.warps[me.warp][me.lane] = {sum_of_rows(weights), scan_rows<false>(a)};
    __syncthreads();

    const Means<acc_t> means(carry + sum_of_warps<false>(memory.warps, me), p.eps);
    acc_t z = acc_t(0);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      z += weights[row];
      const QueryGradients<scalar_t> gradients(means, z, a[row], to_acc(q[row]), to_acc(g[row]));
      q[row] = from_acc<scalar_t>(gradients.of_q);
      w[row] = gradients.w;
      wm[row] = gradients.wm;
    }
    keep_only(rows, w);
    keep_only(rows, wm);
    if (p.grad_q && !sums_only && work.has(me))
      QueryRows<scalar_t>(p.grad_q, work, me, s + me.warp * kRows).store(rows, q);
    if (wants_keys) {
      const Pair<acc_t> own{scan_rows<true>(w) * means.scale, scan_rows<true>(wm) * means.scale};
      memory.later_warps[me.warp][me.lane] = own;
      __syncthreads();
      const Pair<acc_t> later = memory.later[turn][me.lane];
      const Pair<acc_t> warps = sum_of_warps<true>(memory.later_warps, me);
      if (me.warp == 0) {
        Pair<acc_t> sum = later;
        // As in the forward, a sum that began at this block's first chunk would lack a rest.
        if (reads_sums && chunk > 0)
          sum = slots.load(work.b, chunk - 1, work.channel(me));
        else
          add_pair_to_sum(warps + own, sum, rest);
        memory.later[1 - turn][me.lane] = sum;
        if (sums_only && work.has(me)) slots.store(work.b, chunk - 1, work.channel(me), warps + own);
      }
      if (!sums_only) {
        const LaterSums<acc_t> sums{means.scale, later + warps, w, wm};
        if constexpr (kStages > 0) {
          differentiate_keys(sums, static_cast<bool>(p.v), me, memory.stages[stage]);
        } else {
          differentiate_in_memory<scalar_t>(p, work, me, t, sums);
        }
      }
    }
    if (more) load_queries(s - kChunk);
    if constexpr (kStages > 0) {
      if (wants_keys && !sums_only) {
        __syncthreads();
        if (p.grad_k) TilePlace<scalar_t>(p.grad_k, walks.grad_k, work, t).store(T - t, memory.stages[stage].k);
        if (p.grad_v) TilePlace<scalar_t>(p.grad_v, walks.grad_v, work, t).store(T - t, memory.stages[stage].v);
      }
    }
    if (kStages == 1 && more) {
      __syncthreads();
      request(t - kChunk, 0);
    }
  }
}

template <typename acc_t>
using QueryShared = acc_t[2][kWarps][kLanes];

// Not causal: chunks of queries, which all see the same keys: grad_q, and the sums of w of each chunk into its slot, or
// of all into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    backward_queries_kernel(SoftplusAttentionBackward p, Segments segments, bool of_each,
                            Slots<acc_type<scalar_t>> totals, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& warps = shared<QueryShared<acc_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const bool writes = me.warp == 0 && work.has(me);
  int64_t s = work.first_chunk * kChunk;
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> g_rows(p.grad_y, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> grad_q_rows(p.grad_q ? p.grad_q : p.q, work, me, s + me.warp * kRows);
  scalar_t q[kRows], g[kRows];
  q_rows.load(rows_of(me, s, p.shape.S), q);
  g_rows.load(rows_of(me, s, p.shape.S), g);
  acc_t all = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t chunk = work.first_chunk; chunk < work.end_chunk; ++chunk, s += kChunk) {
    auto& sums = warps[(chunk - work.first_chunk) % 2];
    const Rows rows = rows_of(me, s, p.shape.S);
    acc_t w[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const QueryGradients<scalar_t> gradients(means, acc_t(0), acc_t(0), to_acc(q[row]), to_acc(g[row]));
      q[row] = from_acc<scalar_t>(gradients.of_q);
      w[row] = gradients.w;
    }
    keep_only(rows, w);
    if (p.grad_q && work.has(me)) grad_q_rows.store(rows, q);
    grad_q_rows.move(kChunk);
    q_rows.move(kChunk);
    g_rows.move(kChunk);
    if (chunk + 1 < work.end_chunk) {
      q_rows.load(rows_of(me, s + kChunk, p.shape.S), q);
      g_rows.load(rows_of(me, s + kChunk, p.shape.S), g);
    }
    sums[me.warp][me.lane] = sum_of_rows(w) * means.scale;
    __syncthreads();
    if (!writes) continue;
    acc_t sum = acc_t(0);
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][me.lane];
    add_to_sum(sum, all, rest);
    if (of_each) *slots.at(0, work.b, chunk, work.channel(me)) = sum;
  }
  if (writes && !of_each) *slots.at(0, work.b, 0, work.channel(me)) = all;
}

// Not causal: a tile of keys, which all queries see: every key has the same W, and X = W m.
template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 4)
    backward_keys_kernel(SoftplusAttentionBackward p, Segments segments, Walks walks, Slots<acc_type<scalar_t>> totals,
                         Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = Pack<scalar_t>::kSize;
  auto& tiles = shared<KeyTiles<scalar_t, kForwardTile>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t t = work.first_chunk * kForwardTile;
  request_keys(p.k, p.v, walks, work, T, t, tiles);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t w = *slots.at(0, work.b, slots.count - 1, work.channel(me));
  const acc_t wm = w * means.mean(acc_t(0), means.inverse(acc_t(0)));
  await_keys();
#pragma unroll
  for (int start = 0; start < kRows; start += kSize) {
    const int position = me.warp * kRows + start;
    acc_t k[kSize];
    acc_t v[kSize] = {};
    read_row(&tiles.k.channels[me.lane][position], k);
    if (p.v) read_row(&tiles.v.channels[me.lane][position], v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const KeyGradients<acc_t> gradients(softplus_and_sigmoid_on_device<scalar_t>(k[i]), v[i], w, wm);
      k[i] = gradients.of_k;
      v[i] = gradients.of_v;
    }
    write_row(&tiles.k.channels[me.lane][position], k);
    write_row(&tiles.v.channels[me.lane][position], v);
  }
  __syncthreads();
  if (p.grad_k) TilePlace<scalar_t, kForwardTile>(p.grad_k, walks.grad_k, work, t).store(T - t, tiles.k);
  if (p.grad_v) TilePlace<scalar_t, kForwardTile>(p.grad_v, walks.grad_v, work, t).store(T - t, tiles.v);
}

// ---- decoding

constexpr int kStepThreads = 128;

// A thread takes a channel.
template <typename scalar_t>
__global__ void __launch_bounds__(kStepThreads) step_kernel(SoftplusAttentionStep p) {
  using acc_t = acc_type<scalar_t>;
  const int64_t index = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;
  if (index >= p.B * p.R) return;
  const int64_t b = index / p.R;
  const int64_t r = index % p.R;
  Pair<acc_t> state{*p.z.at<acc_t>(b, 0, r), *p.a.at<acc_t>(b, 0, r)};
  Pair<acc_t> rest{acc_t(0), acc_t(0)};
  for (int64_t chunk = 0; chunk < p.T; chunk += kChunk) {
    const int64_t chunk_end = chunk + kChunk < p.T ? chunk + kChunk : p.T;
    Pair<acc_t> of_chunk{acc_t(0), acc_t(0)};
    for (int64_t start = chunk; start < chunk_end; start += kRows) {
      const int64_t end = start + kRows < chunk_end ? start + kRows : chunk_end;
      Pair<acc_t> of_rows{acc_t(0), acc_t(0)};
      for (int64_t t = start; t < end; ++t) {
        const acc_t weight = softplus_on_device<scalar_t>(to_acc(*p.k.at<scalar_t>(b, r, t)));
        of_rows = of_rows + Pair<acc_t>{weight, weight * to_acc(*p.v.at<scalar_t>(b, r, t))};
      }
      of_chunk = of_chunk + of_rows;
    }
    add_pair_to_sum(of_chunk, state, rest);
  }
  const Means<acc_t> means(state, p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  *p.y.at<scalar_t>(b, 0, r) = from_acc<scalar_t>(softplus_on_device<scalar_t>(to_acc(*p.q.at<scalar_t>(b, 0, r))) * m);
  *p.new_z.at<acc_t>(b, 0, r) = state.first;
  *p.new_a.at<acc_t>(b, 0, r) = state.second;
}

// ---- launches

// All chunks for one block.
Segments undivided(int64_t chunks) {
  return {chunks, chunks, std::min<int64_t>(chunks, 1)};
}

// A block for each of so many chunks or tiles.
Segments one_by_one(int64_t chunks) {
  return {chunks, 1, chunks};
}

// So many chunks for a block that there are two blocks for each multiprocessor of a large GPU.
Segments divided(const SoftplusAttentionShape& shape, int64_t chunks) {
  constexpr int64_t kBlocks = 264;
  const int64_t others = std::max<int64_t>(1, shape.B * ceil_div(shape.R, kLanes));
  const int64_t length = ceil_div(chunks, std::min(chunks, ceil_div(kBlocks, others)));
  return {chunks, length, ceil_div(chunks, length)};
}

template <typename... Params, typename... Args>
void launch_work(const char* name, const SoftplusAttentionShape& shape, const Segments& segments, int threads,
                 size_t shared_bytes, cudaStream_t stream, void (*kernel)(Params...), const Args&... args) {
  const int64_t blocks = shape.B * ceil_div(shape.R, kLanes) * segments.count;
  if (blocks > 0)
    launch({name, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared_bytes, stream}, kernel, args...);
}

template <typename acc_t>
void launch_scan(const char* name, const Slots<acc_t>& slots, int64_t planes, bool reversed, acc_t* totals,
                 cudaStream_t stream) {
  constexpr int64_t kScanThreads = 128;
  const int64_t channels = planes * slots.B * slots.R;
  const auto blocks = static_cast<unsigned>(ceil_div(channels, kScanThreads));
  if (blocks > 0)
    launch({name, dim3(blocks), dim3(kScanThreads), 0, stream}, scan_kernel<acc_t>, slots, channels, reversed, totals);
}

template <typename scalar_t>
Walk walk_through(const Strided<3>& x, int64_t T) {
  constexpr int64_t kSize = Pack<scalar_t>::kSize;
  const bool packs = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[2] == 1 && x.stride[1] % kSize == 0 &&
                     x.stride[0] % kSize == 0 && T % kSize == 0;
  return packs ? Walk::Packs : x.stride[1] < x.stride[2] ? Walk::Channels : Walk::Positions;
}

template <typename scalar_t>
void forward_causal(SoftplusAttentionForward p, const Walks& walks, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  // Addresses are made of queries that are not there, and not used: of other memory than none.
  if (shape.S == 0) p.q = p.y = p.k;
  const auto carries = slots_in<scalar_t>(p.carries, shape, shape.carries());
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  constexpr size_t kBytes = sizeof(ForwardShared<scalar_t>);
  if (chunks == 0) return;
  if (splits) {
    launch_work("softplus_attention_forward, sums of keys", shape, divided(shape, carries.count), kForwardThreads,
                kBytes, stream, key_sums_kernel<scalar_t>, p, divided(shape, carries.count), walks, true, carries);
    launch_scan<acc_type<scalar_t>>("softplus_attention_forward, scan", carries, 2, false, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_forward", shape, segments, kForwardThreads, kBytes, stream,
              forward_causal_kernel<scalar_t>, p, segments, walks, carries);
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p, const Walks& walks, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<scalar_t>(p.carries, shape, 1);
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = splits || chunks == 0 ? slots_in<scalar_t>(p.sums, shape, chunks) : totals;
  const Segments keys = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_forward, sums of keys", shape, keys, kForwardThreads, sizeof(ForwardShared<scalar_t>),
              stream, key_sums_kernel<scalar_t>, p, keys, walks, splits, slots);
  // Of no keys it makes zeros.
  if (splits || chunks == 0) launch_scan("softplus_attention_forward, scan", slots, 2, false, totals.data, stream);
  const Segments queries = one_by_one(shape.query_chunks());
  launch_work("softplus_attention_forward, queries", shape, queries, kThreads, 0, stream,
              forward_queries_kernel<scalar_t>, p, queries, totals);
}

template <typename scalar_t, int kStages>
void backward_causal_in_stages(SoftplusAttentionBackward p, const Walks& walks, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  if (shape.S == 0) p.q = p.grad_y = p.grad_q = p.k;  // as in the forward
  const auto carries = slots_in<scalar_t>(p.carries, shape, shape.carries());
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = slots_in<scalar_t>(splits ? p.sums : nullptr, shape, chunks - 1);
  constexpr size_t kBytes = sizeof(BackwardShared<scalar_t, kStages>);
  if (chunks == 0) return;
  if (splits && (p.grad_k || p.grad_v)) {
    launch_work("softplus_attention_backward, sums", shape, divided(shape, slots.count), kThreads, kBytes, stream,
                backward_causal_kernel<scalar_t, kStages>, p, divided(shape, slots.count), walks, true, carries, slots);
    launch_scan<acc_type<scalar_t>>("softplus_attention_backward, scan", slots, 2, true, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_backward", shape, segments, kThreads, kBytes, stream,
              backward_causal_kernel<scalar_t, kStages>, p, segments, walks, false, carries, slots);
}

// With as many stages as the GPU has room for, which changes no bit.
template <typename scalar_t>
void backward_causal(const SoftplusAttentionBackward& p, const Walks& walks, cudaStream_t stream) {
  constexpr int kMost = kStages<scalar_t>;
  constexpr size_t kBytes = sizeof(BackwardShared<scalar_t, kMost>);
  if constexpr (kBytes > kSharedBytesEverywhere) {
    static_assert(sizeof(BackwardShared<scalar_t, kMost - 1>) <= kSharedBytesEverywhere);
    if (!fits_in_a_block(kBytes)) return backward_causal_in_stages<scalar_t, kMost - 1>(p, walks, stream);
  }
  backward_causal_in_stages<scalar_t, kMost>(p, walks, stream);
}

template <typename scalar_t>
void backward_not_causal(const SoftplusAttentionBackward& p, const Walks& walks, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<scalar_t>(p.carries, shape, 1);
  const int64_t chunks = shape.query_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = slots_in<scalar_t>(p.sums, shape, splits ? chunks : 1);
  const Segments queries = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_backward, queries", shape, queries, kThreads, sizeof(QueryShared<acc_t>), stream,
              backward_queries_kernel<scalar_t>, p, queries, splits, totals, slots);
  if (!p.grad_k && !p.grad_v) return;
  if (splits) launch_scan<acc_t>("softplus_attention_backward, scan", slots, 1, false, nullptr, stream);
  // Of no queries it makes zeros.
  const auto none = slots_in<scalar_t>(p.sums, shape, 0);
  if (chunks == 0) launch_scan<acc_t>("softplus_attention_backward, scan", none, 1, false, slots.data, stream);
  const Segments keys = one_by_one(ceil_div(shape.T, kForwardTile));
  launch_work("softplus_attention_backward, keys", shape, keys, kForwardThreads,
              sizeof(KeyTiles<scalar_t, kForwardTile>), stream, backward_keys_kernel<scalar_t>, p, keys, walks, totals,
              slots);
}

}  // namespace

void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const int64_t T = p.shape.T;
    const Walks walks{walk_through<scalar_t>(p.k, T), walk_through<scalar_t>(p.v, T), {}, {}};
    p.shape.causal ? forward_causal<scalar_t>(p, walks, stream) : forward_not_causal<scalar_t>(p, walks, stream);
  });
}

void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const int64_t T = p.shape.T;
    const Walks walks{walk_through<scalar_t>(p.k, T), walk_through<scalar_t>(p.v, T),
                      walk_through<scalar_t>(p.grad_k, T), walk_through<scalar_t>(p.grad_v, T)};
    p.shape.causal ? backward_causal<scalar_t>(p, walks, stream) : backward_not_causal<scalar_t>(p, walks, stream);
  });
}

void softplus_attention_step_cuda(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.B * p.R, kStepThreads));
  if (blocks == 0) return;
  with_device_type(dtype, [&](auto scalar) {
    launch({"softplus_attention_step", dim3(blocks), dim3(kStepThreads), 0, stream}, step_kernel<decltype(scalar)>, p);
  });
}

}  // namespace memcheck
