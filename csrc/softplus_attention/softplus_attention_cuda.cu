#include <algorithm>

#include "common/integer.h"
#include "common/kernel.cuh"
#include "common/ptx.cuh"
#include "common/softplus.cuh"
#include "softplus_attention/softplus_attention.h"

// A block of threads takes kLanes channels of one batch entry, a lane of each warp for a channel, and goes through its
// positions a chunk at a time: of a chunk each warp takes kRows consecutive ones. Sums are formed in levels, each from
// zero: the rows of a warp, the warps of a chunk, the chunks. So rounding errors of equal terms, which all have one
// sign, grow with the longest level instead of the sequence; and a chunk's sums do not depend on who forms them, so
// blocks that take a few chunks each, after a first pass has summed every chunk, give the bits of one that takes all.
//
// Keys and values are contiguous along positions as a rule. Chunks of them come to shared memory as they are, one ahead
// of the one that is computed on, and each lane reads its own channel there. Queries and outputs are contiguous along
// channels: lanes read and write them where they are.

namespace memcheck {
namespace {

constexpr int kLanes = kSoftplusCudaChannels;
constexpr int kRows = 16;
constexpr int kWarps = static_cast<int>(kCarrySpacing) / kRows;
constexpr int kThreads = kLanes * kWarps;
static_assert(kLanes == 32, "channels are the lanes of a warp");

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

// A warp's rows of a chunk that begins at position `start` of `length`.
__device__ __forceinline__ Rows rows_of(Thread me, int64_t start, int64_t length) {
  if (start >= 0 && start + kCarrySpacing <= length) return {0, kRows};
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

template <typename acc_t>
using WarpSums = Pair<acc_t>[kWarps][kLanes];

// The sums of the warps before this one; reversed: after it.
template <bool reversed, typename acc_t>
__device__ __forceinline__ Pair<acc_t> sum_of_warps(const WarpSums<acc_t>& sums, Thread me) {
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
      sum += batch[i];
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

// A chunk, a row for each channel. Rows are 16 bytes longer than that: lanes that read 16 bytes each of their own rows
// meet no bank of shared memory twice.
template <typename scalar_t>
struct Tile {
  alignas(16) scalar_t channels[kLanes][kCarrySpacing + Pack<scalar_t>::kSize];
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

// How the threads of a block walk through a chunk of a tensor (B,R,T).
enum class Walk {
  Packs,      // along positions: those of every channel begin at a multiple of 16 bytes and are whole packs
  Positions,  // the same by elements
  Channels,   // by elements, neighbours at neighbouring channels
};

struct Walks {
  Walk k, v, grad_k, grad_v;
};

// A thread's elements of a chunk.
struct Elements {
  int channel, position;            // of the first
  int channel_step, position_step;  // from one to the next

  __device__ __forceinline__ explicit Elements(Walk walk) {
    constexpr int kPositions = static_cast<int>(kCarrySpacing);
    const bool along_channels = walk == Walk::Channels;
    channel = static_cast<int>(along_channels ? threadIdx.x % kLanes : threadIdx.x / kPositions);
    position = static_cast<int>(along_channels ? threadIdx.x / kLanes : threadIdx.x % kPositions);
    channel_step = along_channels ? 0 : kThreads / kPositions;
    position_step = along_channels ? kThreads / kLanes : 0;
  }
};

// A thread's packs of a chunk: one in every kStep channels.
template <typename scalar_t>
struct Packs {
  static constexpr int kSize = Pack<scalar_t>::kSize;
  static constexpr int kOfChannel = static_cast<int>(kCarrySpacing) / kSize;
  static constexpr int kStep = kThreads / kOfChannel;
  static constexpr int kCount = kLanes / kStep;

  int channel = static_cast<int>(threadIdx.x / kOfChannel);  // of the first
  int position = static_cast<int>(threadIdx.x % kOfChannel) * kSize;
};

// A tensor (B,R,T), a chunk of a block of channels at a time.
template <typename scalar_t>
class KeyChunks {
 public:
  __device__ __forceinline__ KeyChunks(const Strided<3>& x, Walk walk, const Work& work, int64_t chunk)
      : channel_stride_(x.stride[1]), position_stride_(x.stride[2]), walk_(walk), channels_(work.channels) {
    const Elements elements(walk);
    const Packs<scalar_t> packs;
    const bool packed = walk == Walk::Packs;
    at_ = x.at<scalar_t>(work.b, work.r + (packed ? packs.channel : elements.channel),
                         chunk * kCarrySpacing + (packed ? packs.position : elements.position));
  }

  // So many positions are there, or more: zeros beyond. Packs arrive when cp_async_wait says so.
  __device__ __forceinline__ void request(int64_t positions, Tile<scalar_t>& tile) const {
    if (walk_ == Walk::Packs) {
      const Packs<scalar_t> packs;
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

  __device__ __forceinline__ void store(int64_t positions, const Tile<scalar_t>& tile) const {
    if (walk_ == Walk::Packs) {
      const Packs<scalar_t> packs;
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
    const Elements elements(walk_);
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

// A tensor (B,S,R), a warp's rows of a chunk at a time, a lane for each channel.
template <typename scalar_t>
class QueryRows {
 public:
  // Row 0 is at s, which may be before the first.
  __device__ __forceinline__ QueryRows(const Strided<3>& x, const Work& work, Thread me, int64_t s)
      : stride_(x.stride[1]), at_(x.at<scalar_t>(work.b, s, work.channel(me))) {}

  __device__ __forceinline__ void move(int chunks) { at_ += chunks * kCarrySpacing * stride_; }
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

template <typename scalar_t>
struct KeyTiles {
  Tile<scalar_t> k;
  Tile<scalar_t> v;
};

// A chunk of float64 takes so much that there is room for one.
template <typename scalar_t>
constexpr int kStages = sizeof(scalar_t) > 4 ? 1 : 2;

// Asks for a chunk of k and v, which may be null.
template <typename scalar_t>
__device__ __forceinline__ void request_keys(const Strided<3>& k, const Strided<3>& v, const Walks& walks,
                                             const Work& work, int64_t T, int64_t chunk, KeyTiles<scalar_t>& tiles) {
  const int64_t positions = T - chunk * kCarrySpacing;
  KeyChunks<scalar_t>(k, walks.k, work, chunk).request(positions, tiles.k);
  if (v) KeyChunks<scalar_t>(v, walks.v, work, chunk).request(positions, tiles.v);
  cp_async_commit();
}

// Until the chunk that was requested last is there for all threads, which are done with all before it.
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

// softplus(k) and softplus(k) v of a warp's rows of a chunk that has so many positions: those beyond weigh nothing.
// weigh_group(row, k) makes weights of the keys from a row on.
template <typename scalar_t, typename acc_t, typename WeighGroup>
__device__ __forceinline__ void weigh(const KeyTiles<scalar_t>& tiles, bool has_v, Thread me, int64_t positions,
                                      const WeighGroup& weigh_group, acc_t (&weights)[kRows],
                                      acc_t (&weighted)[kRows]) {
#pragma unroll
  for (int start = 0; start < kRows; start += kGroup) {
    const int position = me.warp * kRows + start;
    acc_t k[kGroup];
    acc_t v[kGroup] = {};
    read_row(&tiles.k.channels[me.lane][position], k);
    if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
    weigh_group(start, k);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      weights[start + i] = k[i];
      weighted[start + i] = k[i] * v[i];
    }
  }
  if (positions < kCarrySpacing) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (me.warp * kRows + row >= positions) weights[row] = weighted[row] = acc_t(0);
  }
}

template <typename scalar_t>
struct SoftplusOfKeys {
  __device__ __forceinline__ void operator()(int, acc_type<scalar_t> (&k)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) k[i] = softplus_on_device<scalar_t>(k[i]);
  }
};

template <typename scalar_t>
struct ForwardShared {
  KeyTiles<scalar_t> stages[kStages<scalar_t>];
  WarpSums<acc_type<scalar_t>> warps;
  Pair<acc_type<scalar_t>> before[2][kLanes];  // the sums over all chunks before this one, and before the next
};

// Keys alone: each chunk's sums into its slot, or all of them into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) key_sums_kernel(SoftplusAttentionForward p, Segments segments, Walks walks,
                                                            bool of_each, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const bool writes = me.warp == kWarps - 1 && work.has(me);
  Pair<acc_t> all{acc_t(0), acc_t(0)};
  if (work.first_chunk < work.end_chunk) request_keys(p.k, p.v, walks, work, T, work.first_chunk, memory.stages[0]);
  for (int64_t chunk = work.first_chunk; chunk < work.end_chunk; ++chunk) {
    const int turn = static_cast<int>(chunk - work.first_chunk) % 2;
    const int stage = turn % kStages<scalar_t>;
    const bool more = chunk + 1 < work.end_chunk;
    await_keys();
    if (kStages<scalar_t> > 1 && more) request_keys(p.k, p.v, walks, work, T, chunk + 1, memory.stages[1 - stage]);
    acc_t z[kRows], a[kRows];
    weigh(memory.stages[stage], true, me, T - chunk * kCarrySpacing, SoftplusOfKeys<scalar_t>(), z, a);
    const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kStages<scalar_t> == 1 && more) request_keys(p.k, p.v, walks, work, T, chunk + 1, memory.stages[0]);
    if (!writes) continue;
    const Pair<acc_t> sums = sum_of_warps<false, acc_t>(memory.warps, me) + own;
    all = all + sums;
    if (of_each) slots.store(work.b, chunk, work.channel(me), sums);
  }
  if (writes && !of_each) slots.store(work.b, 0, work.channel(me), all);
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
__global__ void __launch_bounds__(kThreads) forward_causal_kernel(SoftplusAttentionForward p, Segments segments,
                                                                  Walks walks, Slots<acc_type<scalar_t>> carries) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const bool split = segments.count > 1;                   // then the carries are there
  int64_t s = work.first_chunk * kCarrySpacing - (T - S);  // the query whose last key is the chunk's first
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> y_rows(p.y, work, me, s + me.warp * kRows);
  request_keys(p.k, p.v, walks, work, T, work.first_chunk, memory.stages[0]);
  scalar_t q[kRows];
  q_rows.load(rows_of(me, s, S), q);
  if (me.warp == kWarps - 1) {
    const bool carried = split && work.first_chunk > 0;
    memory.before[0][me.lane] =
        carried ? carries.load(work.b, work.first_chunk - 1, work.channel(me)) : Pair<acc_t>{acc_t(0), acc_t(0)};
  }
  for (int64_t chunk = work.first_chunk; chunk < work.end_chunk; ++chunk, s += kCarrySpacing) {
    const int turn = static_cast<int>(chunk - work.first_chunk) % 2;
    const int stage = turn % kStages<scalar_t>;
    const bool more = chunk + 1 < work.end_chunk;
    await_keys();
    if (kStages<scalar_t> > 1 && more) request_keys(p.k, p.v, walks, work, T, chunk + 1, memory.stages[1 - stage]);
    acc_t z[kRows], a[kRows];
    weigh(memory.stages[stage], true, me, T - chunk * kCarrySpacing, SoftplusOfKeys<scalar_t>(), z, a);
    const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kStages<scalar_t> == 1 && more) request_keys(p.k, p.v, walks, work, T, chunk + 1, memory.stages[0]);
    const Pair<acc_t> before = memory.before[turn][me.lane];
    const Pair<acc_t> warps = sum_of_warps<false, acc_t>(memory.warps, me);
    if (me.warp == kWarps - 1) {
      const Pair<acc_t> after = before + (warps + own);
      memory.before[1 - turn][me.lane] = after;
      if (!split && carries.data != nullptr && chunk < carries.count && work.has(me))
        carries.store(work.b, chunk, work.channel(me), after);
    }
    attend(Means<acc_t>(before + warps, p.eps), z, a, q);
    if (work.has(me)) y_rows.store(rows_of(me, s, S), q);
    y_rows.move(1);
    q_rows.move(1);
    if (more) q_rows.load(rows_of(me, s + kCarrySpacing, S), q);
  }
}

// Not causal: a chunk of queries, which all see the same keys.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    forward_queries_kernel(SoftplusAttentionForward p, Segments segments, Slots<acc_type<scalar_t>> totals) {
  using acc_t = acc_type<scalar_t>;
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  const int64_t s = work.first_chunk * kCarrySpacing;
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

// Where sigmoid(k) of a chunk is kept: in place of k, or beside it where that is of 16 bits.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
struct Slopes {
  Tile<acc_t> tile;

  __device__ __forceinline__ Tile<acc_t>& of(KeyTiles<scalar_t>&) { return tile; }
};

template <typename acc_t>
struct Slopes<acc_t, acc_t> {
  __device__ __forceinline__ Tile<acc_t>& of(KeyTiles<acc_t>& tiles) { return tiles.k; }
};

template <typename scalar_t>
struct BackwardShared {
  using acc_t = acc_type<scalar_t>;

  KeyTiles<scalar_t> stages[kStages<scalar_t>];
  Slopes<scalar_t> slopes;
  WarpSums<acc_t> warps;
  WarpSums<acc_t> later_warps;
  Pair<acc_t> later[2][kLanes];  // the sums over all chunks after this one, and after the next
};

// W and X of a warp's rows: what comes after them, and their own running sums, over the scale.
template <typename acc_t>
struct LaterSums {
  acc_t scale;
  Pair<acc_t> after;
  acc_t (&w)[kRows];
  acc_t (&wm)[kRows];
};

// The gradients of a warp's rows replace k and v.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void differentiate_keys(const LaterSums<acc_t>& later, const acc_t (&weights)[kRows],
                                                   const Tile<acc_t>& slopes, bool has_v, Thread me,
                                                   KeyTiles<scalar_t>& tiles) {
  constexpr int kSize = Pack<scalar_t>::kSize;
#pragma unroll
  for (int start = 0; start < kRows; start += kSize) {
    const int position = me.warp * kRows + start;
    acc_t k[kSize];
    acc_t v[kSize] = {};
    read_row(&slopes.channels[me.lane][position], k);
    if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int row = start + i;
      const acc_t w = later.after.first + later.w[row] * later.scale;
      const acc_t wm = later.after.second + later.wm[row] * later.scale;
      const KeyGradients<acc_t> gradients({weights[row], k[i]}, v[i], w, wm);
      k[i] = gradients.of_k;
      v[i] = gradients.of_v;
    }
    write_row(&tiles.k.channels[me.lane][position], k);
    write_row(&tiles.v.channels[me.lane][position], v);
  }
}

// Chunks from the last to the first: in each along the sums for w and grad_q, then back for grad_k and grad_v. With
// sums_only slot i is given the sums of w and w m of chunk i + 1; else, where chunks are split, it holds those of all
// chunks after chunk i.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    backward_causal_kernel(SoftplusAttentionBackward p, Segments segments, Walks walks, bool sums_only,
                           Slots<acc_type<scalar_t>> carries, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<BackwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t first_chunk = work.first_chunk + (sums_only ? 1 : 0);
  const int64_t last_chunk = work.end_chunk - (sums_only ? 0 : 1);
  const bool wants_keys = sums_only || p.grad_k || p.grad_v;
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  int64_t s = last_chunk * kCarrySpacing - (T - S);  // the query whose last key is the chunk's first
  request_keys(p.k, p.v, walks, work, T, last_chunk, memory.stages[0]);
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
  for (int64_t chunk = last_chunk; chunk >= first_chunk; --chunk, s -= kCarrySpacing) {
    const int turn = static_cast<int>(last_chunk - chunk) % 2;
    const int stage = turn % kStages<scalar_t>;
    const bool more = chunk > first_chunk;
    KeyTiles<scalar_t>& tiles = memory.stages[stage];
    Tile<acc_t>& slopes = memory.slopes.of(tiles);
    await_keys();
    if (kStages<scalar_t> > 1 && more) request_keys(p.k, p.v, walks, work, T, chunk - 1, memory.stages[1 - stage]);
    const Pair<acc_t> carry = chunk > 0 ? carries.load(work.b, chunk - 1, work.channel(me)) : zero;
    const int64_t positions = T - chunk * kCarrySpacing;
    const Rows rows = rows_of(me, s, S);

    acc_t weights[kRows], w[kRows], wm[kRows];
    const auto weigh_group = [&](int row, acc_t(&k)[kGroup]) {
      acc_t sigmoids[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const SoftplusSigmoid<acc_t> both = softplus_and_sigmoid_on_device<scalar_t>(k[i]);
        k[i] = both.softplus;
        sigmoids[i] = both.sigmoid;
      }
      if (wants_keys) write_row(&slopes.channels[me.lane][me.warp * kRows + row], sigmoids);
    };
    acc_t(&a)[kRows] = wm;
    weigh(tiles, static_cast<bool>(p.v), me, positions, weigh_group, weights, a);
    memory.warps[me.warp][me.lane] = {sum_of_rows(weights), scan_rows<false>(a)};
    __syncthreads();

    const Means<acc_t> means(carry + sum_of_warps<false, acc_t>(memory.warps, me), p.eps);
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
      const Pair<acc_t> warps = sum_of_warps<true, acc_t>(memory.later_warps, me);
      if (me.warp == 0) {
        memory.later[1 - turn][me.lane] = later + (warps + own);
        if (sums_only && work.has(me)) slots.store(work.b, chunk - 1, work.channel(me), warps + own);
      }
      if (!sums_only)
        differentiate_keys(LaterSums<acc_t>{means.scale, later + warps, w, wm}, weights, slopes, static_cast<bool>(p.v),
                           me, tiles);
    }
    if (more) load_queries(s - kCarrySpacing);
    if (wants_keys && !sums_only) {
      __syncthreads();
      if (p.grad_k) KeyChunks<scalar_t>(p.grad_k, walks.grad_k, work, chunk).store(positions, tiles.k);
      if (p.grad_v) KeyChunks<scalar_t>(p.grad_v, walks.grad_v, work, chunk).store(positions, tiles.v);
    }
    if (kStages<scalar_t> == 1 && more) {
      __syncthreads();
      request_keys(p.k, p.v, walks, work, T, chunk - 1, tiles);
    }
  }
}

template <typename acc_t>
using QueryShared = acc_t[2][kWarps][kLanes];

// Not causal: chunks of queries, which all see the same keys: grad_q, and the sums of w of each chunk into its slot, or
// of all into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    backward_queries_kernel(SoftplusAttentionBackward p, Segments segments, bool of_each,
                            Slots<acc_type<scalar_t>> totals, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& warps = shared<QueryShared<acc_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const bool writes = me.warp == 0 && work.has(me);
  int64_t s = work.first_chunk * kCarrySpacing;
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> g_rows(p.grad_y, work, me, s + me.warp * kRows);
  QueryRows<scalar_t> grad_q_rows(p.grad_q ? p.grad_q : p.q, work, me, s + me.warp * kRows);
  scalar_t q[kRows], g[kRows];
  q_rows.load(rows_of(me, s, p.shape.S), q);
  g_rows.load(rows_of(me, s, p.shape.S), g);
  acc_t all = acc_t(0);
  for (int64_t chunk = work.first_chunk; chunk < work.end_chunk; ++chunk, s += kCarrySpacing) {
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
    grad_q_rows.move(1);
    q_rows.move(1);
    g_rows.move(1);
    if (chunk + 1 < work.end_chunk) {
      q_rows.load(rows_of(me, s + kCarrySpacing, p.shape.S), q);
      g_rows.load(rows_of(me, s + kCarrySpacing, p.shape.S), g);
    }
    sums[me.warp][me.lane] = sum_of_rows(w) * means.scale;
    __syncthreads();
    if (!writes) continue;
    acc_t sum = acc_t(0);
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][me.lane];
    all += sum;
    if (of_each) *slots.at(0, work.b, chunk, work.channel(me)) = sum;
  }
  if (writes && !of_each) *slots.at(0, work.b, 0, work.channel(me)) = all;
}

// Not causal: a chunk of keys, which all queries see: every key has the same W, and X = W m.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    backward_keys_kernel(SoftplusAttentionBackward p, Segments segments, Walks walks, Slots<acc_type<scalar_t>> totals,
                         Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = Pack<scalar_t>::kSize;
  auto& tiles = shared<KeyTiles<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  request_keys(p.k, p.v, walks, work, p.shape.T, work.first_chunk, tiles);
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
  const int64_t positions = p.shape.T - work.first_chunk * kCarrySpacing;
  if (p.grad_k) KeyChunks<scalar_t>(p.grad_k, walks.grad_k, work, work.first_chunk).store(positions, tiles.k);
  if (p.grad_v) KeyChunks<scalar_t>(p.grad_v, walks.grad_v, work, work.first_chunk).store(positions, tiles.v);
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
  for (int64_t chunk = 0; chunk < p.T; chunk += kCarrySpacing) {
    const int64_t chunk_end = chunk + kCarrySpacing < p.T ? chunk + kCarrySpacing : p.T;
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
    state = state + of_chunk;
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

// A block for each chunk.
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
void launch_work(const char* name, const SoftplusAttentionShape& shape, const Segments& segments, size_t shared_bytes,
                 cudaStream_t stream, void (*kernel)(Params...), const Args&... args) {
  const int64_t blocks = shape.B * ceil_div(shape.R, kLanes) * segments.count;
  if (blocks > 0)
    launch({name, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared_bytes, stream}, kernel, args...);
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
    launch_work("softplus_attention_forward, sums of keys", shape, divided(shape, carries.count), kBytes, stream,
                key_sums_kernel<scalar_t>, p, divided(shape, carries.count), walks, true, carries);
    launch_scan<acc_type<scalar_t>>("softplus_attention_forward, scan", carries, 2, false, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_forward", shape, segments, kBytes, stream, forward_causal_kernel<scalar_t>, p,
              segments, walks, carries);
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p, const Walks& walks, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<scalar_t>(p.carries, shape, 1);
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = splits || chunks == 0 ? slots_in<scalar_t>(p.sums, shape, chunks) : totals;
  const Segments keys = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_forward, sums of keys", shape, keys, sizeof(ForwardShared<scalar_t>), stream,
              key_sums_kernel<scalar_t>, p, keys, walks, splits, slots);
  // Of no keys it makes zeros.
  if (splits || chunks == 0) launch_scan("softplus_attention_forward, scan", slots, 2, false, totals.data, stream);
  const Segments queries = one_by_one(shape.query_chunks());
  launch_work("softplus_attention_forward, queries", shape, queries, 0, stream, forward_queries_kernel<scalar_t>, p,
              queries, totals);
}

template <typename scalar_t>
void backward_causal(SoftplusAttentionBackward p, const Walks& walks, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  if (shape.S == 0) p.q = p.grad_y = p.grad_q = p.k;  // as in the forward
  const auto carries = slots_in<scalar_t>(p.carries, shape, shape.carries());
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = slots_in<scalar_t>(splits ? p.sums : nullptr, shape, chunks - 1);
  constexpr size_t kBytes = sizeof(BackwardShared<scalar_t>);
  if (chunks == 0) return;
  if (splits && (p.grad_k || p.grad_v)) {
    launch_work("softplus_attention_backward, sums", shape, divided(shape, slots.count), kBytes, stream,
                backward_causal_kernel<scalar_t>, p, divided(shape, slots.count), walks, true, carries, slots);
    launch_scan<acc_type<scalar_t>>("softplus_attention_backward, scan", slots, 2, true, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work("softplus_attention_backward", shape, segments, kBytes, stream, backward_causal_kernel<scalar_t>, p,
              segments, walks, false, carries, slots);
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
  launch_work("softplus_attention_backward, queries", shape, queries, sizeof(QueryShared<acc_t>), stream,
              backward_queries_kernel<scalar_t>, p, queries, splits, totals, slots);
  if (!p.grad_k && !p.grad_v) return;
  if (splits) launch_scan<acc_t>("softplus_attention_backward, scan", slots, 1, false, nullptr, stream);
  // Of no queries it makes zeros.
  const auto none = slots_in<scalar_t>(p.sums, shape, 0);
  if (chunks == 0) launch_scan<acc_t>("softplus_attention_backward, scan", none, 1, false, slots.data, stream);
  const Segments keys = one_by_one(shape.key_chunks());
  launch_work("softplus_attention_backward, keys", shape, keys, sizeof(KeyTiles<scalar_t>), stream,
              backward_keys_kernel<scalar_t>, p, keys, walks, totals, slots);
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
