#pragma once

#include "common/tile.cuh"
#include "softplus_attention/softplus_attention_sums_cuda.cuh"

// How CUDA kernels of softplus attention load and store tensors.
//
// Keys and values (B,R,T) are usually contiguous along positions. Each warp copies the positions of its two groups to
// shared memory, and each lane reads its own channel there. Queries and outputs (B,S,R) are usually contiguous along
// channels: lanes read and write them in global memory.

namespace memcheck {
namespace softplus_cuda {

// ---- a warp's tile of keys or values, or of their gradients, in shared memory

// A row of positions for each channel. Rows are 16 bytes longer than the positions, so that lanes that each read 16
// bytes of their own row have no bank conflicts.
template <typename scalar_t>
struct KeyTile {
  alignas(16) scalar_t channels[kLanes][kWarpPositions + kPackSize<scalar_t>];
};

template <typename scalar_t>
struct KeyTiles {
  KeyTile<scalar_t> k;
  KeyTile<scalar_t> v;
};

template <typename scalar_t>
__device__ __forceinline__ void unpack(const Pack<scalar_t>& pack, acc_type<scalar_t>* values) {
  unroll<pack.kCount>([&](int i) { values[i] = to_acc(pack.values[i]); });
}

// A bfloat16 is the upper half of a float. This takes one instruction for each element; compilers take more.
__device__ __forceinline__ void unpack(const Pack<__nv_bfloat16>& pack, float* values) {
  uint32_t words[pack.kCount / 2];
  __builtin_memcpy(words, pack.values, sizeof(words));
  unroll<pack.kCount / 2>([&](int i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  });
}

// kCount neighbouring values of a row of a tile, in whole packs.
template <int kCount, typename scalar_t>
__device__ __forceinline__ void read_row(const scalar_t* from, acc_type<scalar_t> (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += kPackSize<scalar_t>) unpack(load_pack(from + i), values + i);
}

// k and v of this lane's channel from row `row` of its group on; v is 0 where there are no values.
template <int kCount, typename scalar_t>
__device__ __forceinline__ void read_keys(const KeyTiles<scalar_t>& tiles, bool has_v, Thread me, int row,
                                          acc_type<scalar_t> (&k)[kCount], acc_type<scalar_t> (&v)[kCount]) {
  const int position = me.group % 2 * kRows + row;
  read_row(&tiles.k.channels[me.lane][position], k);
  if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
}

// ---- tiles in global memory

// How the channels of a tensor (B,R,T) lie in memory, which says how a warp copies a tile.
enum class TileOrder {
  Packs,      // along positions, and the first position of every channel is at a multiple of 16 bytes
  Rows,       // along positions
  Positions,  // neither; neighbouring threads take neighbouring positions
  Channels,   // channels are closer to each other than positions; neighbouring threads take neighbouring channels
};

struct TileOrders {
  TileOrder k, v, grad_k, grad_v;
};

template <typename scalar_t>
TileOrder tile_order(const Strided<3>& x) {
  constexpr int64_t kCount = kPackSize<scalar_t>;
  const bool packs =
      reinterpret_cast<uintptr_t>(x.data) % kPackBytes == 0 && x.stride[1] % kCount == 0 && x.stride[0] % kCount == 0;
  if (x.stride[2] == 1) return packs ? TileOrder::Packs : TileOrder::Rows;
  return x.stride[1] < x.stride[2] ? TileOrder::Channels : TileOrder::Positions;
}

// The elements from `shift` on of two packs that follow each other.
template <typename scalar_t>
__device__ __forceinline__ Pack<scalar_t> shifted_pack(const scalar_t* packs, int shift) {
  uint32_t words[8];
  unroll<2>([&](int i) {
    const uint4 pack = reinterpret_cast<const uint4*>(packs)[i];
    __builtin_memcpy(words + 4 * i, &pack, sizeof(pack));
  });
  const int bytes = shift * static_cast<int>(sizeof(scalar_t));
  unroll<6>([&](int i) { words[i] = bytes & 8 ? words[i + 2] : words[i]; });
  unroll<5>([&](int i) { words[i] = bytes & 4 ? words[i + 1] : words[i]; });
  unroll<4>(
      [&](int i) { words[i] = static_cast<uint32_t>((uint64_t{words[i + 1]} << 32 | words[i]) >> (bytes & 2) * 8); });
  Pack<scalar_t> pack;
  __builtin_memcpy(static_cast<void*>(pack.values), words, sizeof(pack));
  return pack;
}

// A warp's tile of a tensor (B,R,T) in global memory, of `positions` positions if its sequence has so many, as a thread
// copies it. If channels do not begin at multiples of 16 bytes, the packs are copied that begin at or before the
// channel's first position of the tile, and one more, and then shifted in shared memory. A tile at the begin or the end
// of a row of T positions is copied element by element, so that nothing outside of the tensor is read.
template <typename scalar_t>
class KeyTileInMemory {
 public:
  __device__ __forceinline__ KeyTileInMemory(const Strided<3>& x, TileOrder order, const Work& work, Thread me,
                                             int64_t T)
      : channel_stride_(x.stride[1]), position_stride_(x.stride[2]), channels_(work.channels) {
    const int64_t t = work.chunk * kChunk + me.warp() * kWarpPositions;
    const int64_t in_row = work.x.first_key + t;
    const int in_warp = me.in_warp();
    const int64_t left = work.x.keys - t;
    positions_ = left < 0 ? 0 : left < kWarpPositions ? static_cast<int>(left) : kWarpPositions;
    const bool along_positions = order == TileOrder::Packs || order == TileOrder::Rows;
    const bool is_inside = in_row >= kCount - 1 && in_row + kWarpPositions + kCount <= T;
    if (positions_ == 0 || (order == TileOrder::Packs && in_row % kCount == 0 && positions_ % kCount == 0))
      copies_ = Copies::Packs;
    else if (along_positions && is_inside)
      copies_ = Copies::ShiftedPacks;
    else
      copies_ = order == TileOrder::Channels ? Copies::Channels : Copies::Positions;
    if (has_packs()) {
      // Eight lanes at a time write 16 bytes each, to different banks in this way.
      constexpr bool kAlongChannels = Packs::kStep >= 8;
      channel_ = kAlongChannels ? in_warp % Packs::kStep : in_warp / Packs::kPerRow;
      position_ = (kAlongChannels ? in_warp / Packs::kStep : in_warp % Packs::kPerRow) * Packs::kSize;
    } else {
      channel_ = copies_ == Copies::Channels ? in_warp % kLanes : 0;
      position_ = copies_ == Copies::Channels ? in_warp / kLanes : in_warp;
    }
    at_ = x.at<scalar_t>(work.x.row, work.r + channel_, in_row + position_);
  }

  // Begins to load the tile; zeros for channels that do not exist. Packs arrive when cp_async_wait says so, and then
  // want `align`.
  __device__ __forceinline__ void request(KeyTile<scalar_t>& tile, Thread me) const {
    if (copies_ == Copies::Packs) {
      request_tile<Packs::kCount>(
          Packs{channel_, position_}, RowLayout{1, positions_, true}, [&](int channel) { return pack_at(channel); },
          [&](int channel) { return &tile.channels[channel][position_]; },
          [&](int channel) { return channel < channels_; });
    } else if (copies_ == Copies::ShiftedPacks) {
      unroll<Packs::kCount>([&](int i) { request_aligned(tile, channel_ + i * Packs::kStep, position_); });
      if (me.in_warp() < kLanes) request_aligned(tile, me.in_warp(), kWarpPositions);
    } else {
      each_element([&](scalar_t* at, bool exists,
                       scalar_t& in_tile) { in_tile = exists ? *at : from_acc<scalar_t>(acc_type<scalar_t>(0)); },
                   tile);
    }
  }

  // Shifts packs that have arrived, so that every channel's first position is the first of its row of the tile. All
  // threads of the warp must call it.
  __device__ __forceinline__ void align(KeyTile<scalar_t>& tile) const {
    if (copies_ != Copies::ShiftedPacks) return;
    Pack<scalar_t> packs[Packs::kCount];
    unroll<Packs::kCount>([&](int i) {
      const int channel = channel_ + i * Packs::kStep;
      packs[i] = shifted_pack(&tile.channels[channel][position_], misaligned(pack_at(channel)));
    });
    __syncwarp();
    unroll<Packs::kCount>([&](int i) { store_pack(packs[i], &tile.channels[channel_ + i * Packs::kStep][position_]); });
    __syncwarp();
  }

  // Stores the positions that exist.
  __device__ __forceinline__ void store(KeyTile<scalar_t>& tile, Thread me) const {
    if (copies_ == Copies::ShiftedPacks && positions_ == kWarpPositions) {
      store_aligned(tile, me);
    } else if (has_packs()) {
      store_tile<Packs::kCount>(
          Packs{channel_, position_}, RowLayout{1, positions_, copies_ == Copies::Packs},
          [&](int channel) { return pack_at(channel); },
          [&](int channel) { return &tile.channels[channel][position_]; },
          [&](int channel) { return channel < channels_; });
    } else {
      each_element(
          [&](scalar_t* at, bool exists, scalar_t& in_tile) {
            if (exists) *at = in_tile;
          },
          tile);
    }
  }

 private:
  static constexpr int kCount = kPackSize<scalar_t>;
  using Packs = TilePacks<scalar_t, kLanes, kWarpPositions, kWarpThreads>;
  enum class Copies { Packs, ShiftedPacks, Positions, Channels };

  __device__ __forceinline__ bool has_packs() const {
    return copies_ == Copies::Packs || copies_ == Copies::ShiftedPacks;
  }
  __device__ __forceinline__ scalar_t* pack_at(int channel) const {
    return at_ + (channel - channel_) * channel_stride_;
  }
  // Elements from the last multiple of 16 bytes to this one.
  __device__ __forceinline__ static int misaligned(const scalar_t* at) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(at) % kPackBytes / sizeof(scalar_t));
  }
  __device__ __forceinline__ void request_aligned(KeyTile<scalar_t>& tile, int channel, int position) const {
    const scalar_t* at = pack_at(channel) + (position - position_);
    cp_async_16(&tile.channels[channel][position], at - misaligned(at), channel < channels_);
  }
  // Whole packs at multiples of 16 bytes, and the elements before and behind them.
  __device__ __forceinline__ void store_aligned(const KeyTile<scalar_t>& tile, Thread me) const {
    unroll<Packs::kCount>([&](int i) {
      const int channel = channel_ + i * Packs::kStep;
      scalar_t* at = pack_at(channel);
      const int first = (kCount - misaligned(at)) % kCount;
      if (channel < channels_ && (first == 0 || position_ + kCount < kWarpPositions))
        store_pack(shifted_pack(&tile.channels[channel][position_], first), at + first);
    });
#pragma unroll
    for (int element = me.in_warp(); element < kLanes * kCount; element += kWarpThreads) {
      const int channel = element / kCount, i = element % kCount;
      scalar_t* const row = pack_at(channel) - position_;
      const int first = (kCount - misaligned(row)) % kCount;
      const int position = i < first ? i : kWarpPositions - kCount + i;
      if (channel < channels_ && first > 0) row[position] = tile.channels[channel][position];
    }
  }
  template <typename Each>
  __device__ __forceinline__ void each_element(const Each& each, KeyTile<scalar_t>& tile) const {
    const bool along_channels = copies_ == Copies::Channels;
    const int channel_step = along_channels ? 0 : 1;
    const int position_step = along_channels ? kWarpPositions / kRows : 0;
    const int64_t step = channel_step * channel_stride_ + position_step * position_stride_;
#pragma unroll 8
    for (int i = 0; i < kRows; ++i) {
      const int channel = channel_ + i * channel_step;
      const int position = position_ + i * position_step;
      each(at_ + i * step, channel < channels_ && position < positions_, tile.channels[channel][position]);
    }
  }

  int64_t channel_stride_, position_stride_;
  Copies copies_;
  int channels_, positions_;  // that exist
  int channel_, position_;    // of this thread's first element
  scalar_t* at_;              // it
};

// Begins to load this warp's keys, and the values if there are any.
template <typename scalar_t>
__device__ __forceinline__ void request_keys(const Strided<3>& k, const Strided<3>& v, const TileOrders& orders,
                                             const Work& work, Thread me, int64_t T, KeyTiles<scalar_t>& tiles) {
  KeyTileInMemory<scalar_t>(k, orders.k, work, me, T).request(tiles.k, me);
  if (v) KeyTileInMemory<scalar_t>(v, orders.v, work, me, T).request(tiles.v, me);
  cp_async_commit();
}

// Waits until the warp's tile has arrived. The arguments are those of request_keys.
template <typename scalar_t>
__device__ __forceinline__ void await_keys(const Strided<3>& k, const Strided<3>& v, const TileOrders& orders,
                                           const Work& work, Thread me, int64_t T, KeyTiles<scalar_t>& tiles) {
  cp_async_wait<0>();
  __syncwarp();
  KeyTileInMemory<scalar_t>(k, orders.k, work, me, T).align(tiles.k);
  if (v) KeyTileInMemory<scalar_t>(v, orders.v, work, me, T).align(tiles.v);
}

// ---- rows of a group in global memory

// Rows of a tensor (B,S,R), a lane for each channel.
template <typename scalar_t>
class QueryRows {
 public:
  // Of a chunk that begins at the sequence's position s, which may be negative.
  __device__ __forceinline__ QueryRows(const Strided<3>& x, const Work& work, Thread me, int64_t s)
      : stride_(x.stride[1]),
        at_(x.at<scalar_t>(work.x.row, work.x.first_query + s + me.group * kRows, work.channel(me))) {}

  // Zeros where no row exists.
  __device__ __forceinline__ void load(RowRange rows, scalar_t (&values)[kRows]) const {
    if (rows.all()) {
      unroll<kRows>([&](int row) { values[row] = at_[row * stride_]; });
    } else {
      unroll<kRows>([&](int row) {
        values[row] = rows.has(row) ? at_[row * stride_] : from_acc<scalar_t>(acc_type<scalar_t>(0));
      });
    }
  }
  __device__ __forceinline__ void store(RowRange rows, const scalar_t (&values)[kRows]) const {
    if (rows.all()) {
      unroll<kRows>([&](int row) { at_[row * stride_] = values[row]; });
    } else {
      unroll<kRows>([&](int row) {
        if (rows.has(row)) at_[row * stride_] = values[row];
      });
    }
  }

 private:
  int64_t stride_;
  scalar_t* at_;
};

// ---- weights of keys

// softplus(k) and softplus(k) v of a group's rows; 0 for rows that do not exist.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void weigh(const KeyTiles<scalar_t>& tiles, bool has_v, Thread me, RowRange rows,
                                      acc_t (&weights)[kRows], acc_t (&weighted)[kRows]) {
  constexpr int kCount = 8;  // rows that are loaded and computed together
#pragma unroll
  for (int start = 0; start < kRows; start += kCount) {
    acc_t k[kCount];
    acc_t v[kCount] = {};
    read_keys(tiles, has_v, me, start, k, v);
    unroll<kCount>([&](int i) {
      weights[start + i] = softplus_on_device<scalar_t>(k[i]);
      weighted[start + i] = weights[start + i] * v[i];
    });
  }
  clear_absent_rows(rows, weights);
  clear_absent_rows(rows, weighted);
}

}  // namespace softplus_cuda
}  // namespace memcheck
