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
#pragma unroll
  for (int i = 0; i < pack.kCount; ++i) values[i] = to_acc(pack.values[i]);
}

// A bfloat16 is the upper half of a float. This takes one instruction for each element; compilers take more.
__device__ __forceinline__ void unpack(const Pack<__nv_bfloat16>& pack, float* values) {
  uint32_t words[pack.kCount / 2];
  __builtin_memcpy(words, pack.values, sizeof(words));
#pragma unroll
  for (int i = 0; i < pack.kCount / 2; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
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

// The order in which the threads of a warp take the elements of a tile of a tensor (B,R,T).
enum class TileOrder {
  Packs,      // packs along positions: every channel begins at a multiple of 16 bytes and is a multiple of it long
  Positions,  // single elements, neighbouring threads at neighbouring positions
  Channels,   // single elements, neighbouring threads at neighbouring channels
};

struct TileOrders {
  TileOrder k, v, grad_k, grad_v;
};

template <typename scalar_t>
TileOrder tile_order(const Strided<3>& x, int64_t T) {
  constexpr int64_t kCount = kPackSize<scalar_t>;
  const bool packs = reinterpret_cast<uintptr_t>(x.data) % kPackBytes == 0 && x.stride[2] == 1 &&
                     x.stride[1] % kCount == 0 && x.stride[0] % kCount == 0 && T % kCount == 0;
  return packs ? TileOrder::Packs : x.stride[1] < x.stride[2] ? TileOrder::Channels : TileOrder::Positions;
}

// A warp's tile of a tensor (B,R,T) in global memory, of `positions` positions if it has so many, as a thread copies
// it.
template <typename scalar_t>
class KeyTileInMemory {
 public:
  __device__ __forceinline__ KeyTileInMemory(const Strided<3>& x, TileOrder order, const Work& work, Thread me,
                                             int64_t T)
      : channel_stride_(x.stride[1]), position_stride_(x.stride[2]), order_(order), channels_(work.channels) {
    const int64_t t = work.chunk * kChunk + me.warp() * kWarpPositions;
    const int in_warp = me.in_warp();
    const int64_t left = T - t;
    positions_ = left < 0 ? 0 : left < kWarpPositions ? static_cast<int>(left) : kWarpPositions;
    if (order == TileOrder::Packs) {
      // Eight lanes at a time write 16 bytes each, to different banks in this way.
      constexpr bool kAlongChannels = Packs::kStep >= 8;
      channel_ = kAlongChannels ? in_warp % Packs::kStep : in_warp / Packs::kPerRow;
      position_ = (kAlongChannels ? in_warp / Packs::kStep : in_warp % Packs::kPerRow) * Packs::kSize;
    } else {
      channel_ = order == TileOrder::Channels ? in_warp % kLanes : 0;
      position_ = order == TileOrder::Channels ? in_warp / kLanes : in_warp;
    }
    at_ = x.at<scalar_t>(work.b, work.r + channel_, t + position_);
  }

  // Begins to load the positions that exist; zeros beyond them. Packs arrive when cp_async_wait says so.
  __device__ __forceinline__ void request(KeyTile<scalar_t>& tile) const {
    if (order_ == TileOrder::Packs) {
      request_tile<Packs::kCount>(
          Packs{channel_, position_}, RowLayout{1, positions_, true}, [&](int channel) { return pack_at(channel); },
          [&](int channel) { return &tile.channels[channel][position_]; },
          [&](int channel) { return channel < channels_; });
    } else {
      each_element([&](scalar_t* at, bool exists,
                       scalar_t& in_tile) { in_tile = exists ? *at : from_acc<scalar_t>(acc_type<scalar_t>(0)); },
                   tile);
    }
  }

  __device__ __forceinline__ void store(KeyTile<scalar_t>& tile) const {
    if (order_ == TileOrder::Packs) {
      store_tile<Packs::kCount>(
          Packs{channel_, position_}, RowLayout{1, positions_, true}, [&](int channel) { return pack_at(channel); },
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
  using Packs = TilePacks<scalar_t, kLanes, kWarpPositions, kWarpThreads>;

  __device__ __forceinline__ scalar_t* pack_at(int channel) const {
    return at_ + (channel - channel_) * channel_stride_;
  }
  template <typename Each>
  __device__ __forceinline__ void each_element(const Each& each, KeyTile<scalar_t>& tile) const {
    const bool along_channels = order_ == TileOrder::Channels;
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
  TileOrder order_;
  int channels_, positions_;  // that exist
  int channel_, position_;    // of this thread's first element
  scalar_t* at_;              // it
};

// Begins to load this warp's keys, and the values if there are any.
template <typename scalar_t>
__device__ __forceinline__ void request_keys(const Strided<3>& k, const Strided<3>& v, const TileOrders& orders,
                                             const Work& work, Thread me, int64_t T, KeyTiles<scalar_t>& tiles) {
  KeyTileInMemory<scalar_t>(k, orders.k, work, me, T).request(tiles.k);
  if (v) KeyTileInMemory<scalar_t>(v, orders.v, work, me, T).request(tiles.v);
  cp_async_commit();
}

// Waits until the warp's tile has arrived.
__device__ __forceinline__ void await_keys() {
  cp_async_wait<0>();
  __syncwarp();
}

// ---- rows of a group in global memory

// Rows of a tensor (B,S,R), a lane for each channel.
template <typename scalar_t>
class QueryRows {
 public:
  // Of a chunk that begins at position s, which may be negative.
  __device__ __forceinline__ QueryRows(const Strided<3>& x, const Work& work, Thread me, int64_t s)
      : stride_(x.stride[1]), at_(x.at<scalar_t>(work.b, s + me.group * kRows, work.channel(me))) {}

  // Zeros where no row exists.
  __device__ __forceinline__ void load(RowRange rows, scalar_t (&values)[kRows]) const {
    if (rows.all()) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) values[row] = at_[row * stride_];
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        values[row] = rows.has(row) ? at_[row * stride_] : from_acc<scalar_t>(acc_type<scalar_t>(0));
    }
  }
  __device__ __forceinline__ void store(RowRange rows, const scalar_t (&values)[kRows]) const {
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
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      weights[start + i] = softplus_on_device<scalar_t>(k[i]);
      weighted[start + i] = weights[start + i] * v[i];
    }
  }
  clear_absent_rows(rows, weights);
  clear_absent_rows(rows, weighted);
}

}  // namespace softplus_cuda
}  // namespace memcheck
