#pragma once

#include "common/tile.cuh"
#include "softplus_attention/softplus_attention_sums_cuda.cuh"

// How CUDA kernels of softplus attention load and store tensors.
//
// Keys and values (B,R,T) are usually contiguous along positions. Their tiles come to shared memory as they are, each
// tile while the one before it is computed, if there is room, and each lane reads its own channel there. Queries and
// outputs (B,S,R) are usually contiguous along channels: lanes read and write them in global memory.

namespace memcheck {
namespace softplus_cuda {

// ---- tiles of keys and values, and of their gradients, in shared memory

// A row of positions for each channel. Rows are 16 bytes longer than the positions, so that lanes that each read 16
// bytes of their own row have no bank conflicts.
template <typename scalar_t, int kPositions = kChunk>
struct KeyTile {
  alignas(16) scalar_t channels[kLanes][kPositions + kPackSize<scalar_t>];
};

template <typename scalar_t, int kPositions = kChunk>
struct KeyTiles {
  KeyTile<scalar_t, kPositions> k;
  KeyTile<scalar_t, kPositions> v;
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

// k and v of this lane's channel from `position` on; v is 0 where there are no values.
template <int kCount, typename scalar_t, int kPositions>
__device__ __forceinline__ void read_keys(const KeyTiles<scalar_t, kPositions>& tiles, bool has_v, Thread me,
                                          int position, acc_type<scalar_t> (&k)[kCount],
                                          acc_type<scalar_t> (&v)[kCount]) {
  read_row(&tiles.k.channels[me.lane][position], k);
  if (has_v) read_row(&tiles.v.channels[me.lane][position], v);
}

// ---- tiles in global memory

// The order in which the threads of a block take the elements of a tile of a tensor (B,R,T). There are two threads for
// each position.
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

// The elements of a tile that a thread takes one by one, kWarpRows of them.
template <int kPositions>
struct TileElements {
  int channel, position;            // of the first
  int channel_step, position_step;  // from one to the next

  __device__ __forceinline__ explicit TileElements(TileOrder order) {
    const bool along_channels = order == TileOrder::Channels;
    channel = static_cast<int>(along_channels ? threadIdx.x % kLanes : threadIdx.x / kPositions);
    position = static_cast<int>(along_channels ? threadIdx.x / kLanes : threadIdx.x % kPositions);
    channel_step = along_channels ? 0 : kLanes / kWarpRows;
    position_step = along_channels ? kPositions / kWarpRows : 0;
  }
};

// A tile of a tensor (B,R,T) in global memory, as a thread copies it.
template <typename scalar_t, int kPositions = kChunk>
class KeyTileInMemory {
 public:
  __device__ __forceinline__ KeyTileInMemory(const Strided<3>& x, TileOrder order, const Work& work, int64_t t)
      : channel_stride_(x.stride[1]), position_stride_(x.stride[2]), order_(order), channels_(work.channels) {
    const TileElements<kPositions> elements(order);
    const Packs packs;
    const bool packed = order == TileOrder::Packs;
    at_ = x.at<scalar_t>(work.b, work.r + (packed ? packs.row : elements.channel),
                         t + (packed ? packs.column : elements.position));
  }

  // Begins to load the first `positions` of the tile, or all if it has fewer; zeros beyond them. Packs arrive when
  // cp_async_wait says so.
  __device__ __forceinline__ void request(int64_t positions, KeyTile<scalar_t, kPositions>& tile) const {
    if (order_ == TileOrder::Packs) {
      const Packs packs;
      request_tile<Packs::kCount>(
          packs, RowLayout{1, positions, true}, [&](int channel) { return pack_at(packs, channel); },
          [&](int channel) { return &tile.channels[channel][packs.column]; },
          [&](int channel) { return channel < channels_; });
    } else {
      each_element(positions, [&](scalar_t* at, bool exists, int channel, int position) {
        tile.channels[channel][position] = exists ? *at : from_acc<scalar_t>(acc_type<scalar_t>(0));
      });
    }
  }

  __device__ __forceinline__ void store(int64_t positions, const KeyTile<scalar_t, kPositions>& tile) const {
    if (order_ == TileOrder::Packs) {
      const Packs packs;
      store_tile<Packs::kCount>(
          packs, RowLayout{1, positions, true}, [&](int channel) { return pack_at(packs, channel); },
          [&](int channel) { return &tile.channels[channel][packs.column]; },
          [&](int channel) { return channel < channels_; });
    } else {
      each_element(positions, [&](scalar_t* at, bool exists, int channel, int position) {
        if (exists) *at = tile.channels[channel][position];
      });
    }
  }

 private:
  using Packs = TilePacks<scalar_t, kLanes, kPositions, kPositions / kWarpRows * kLanes>;

  __device__ __forceinline__ scalar_t* pack_at(const Packs& packs, int channel) const {
    return at_ + (channel - packs.row) * channel_stride_;
  }
  template <typename Each>
  __device__ __forceinline__ void each_element(int64_t positions, const Each& each) const {
    const TileElements<kPositions> elements(order_);
    const int64_t step = elements.channel_step * channel_stride_ + elements.position_step * position_stride_;
#pragma unroll 8
    for (int i = 0; i < kWarpRows; ++i) {
      const int channel = elements.channel + i * elements.channel_step;
      const int position = elements.position + i * elements.position_step;
      each(at_ + i * step, channel < channels_ && position < positions, channel, position);
    }
  }

  int64_t channel_stride_, position_stride_;
  TileOrder order_;
  int channels_;  // that exist
  scalar_t* at_;  // this thread's first element
};

// Begins to load the keys, and the values if there are any, from position t on.
template <typename scalar_t, int kPositions>
__device__ __forceinline__ void request_keys(const Strided<3>& k, const Strided<3>& v, const TileOrders& orders,
                                             const Work& work, int64_t T, int64_t t,
                                             KeyTiles<scalar_t, kPositions>& tiles) {
  KeyTileInMemory<scalar_t, kPositions>(k, orders.k, work, t).request(T - t, tiles.k);
  if (v) KeyTileInMemory<scalar_t, kPositions>(v, orders.v, work, t).request(T - t, tiles.v);
  cp_async_commit();
}

// Waits until the tile that was requested last has arrived, and until all threads are done with the tiles before it.
__device__ __forceinline__ void await_keys() {
  cp_async_wait<0>();
  __syncthreads();
}

// Tiles in shared memory at a time. A chunk of float64 leaves room for one.
template <typename scalar_t>
constexpr int kMostStages = sizeof(scalar_t) > 4 ? 1 : 2;

// ---- rows of a warp in global memory

// Rows of a tensor (B,S,R), a lane for each channel.
template <typename scalar_t>
class QueryRows {
 public:
  // Row 0 is at position s, which may be negative.
  __device__ __forceinline__ QueryRows(const Strided<3>& x, const Work& work, Thread me, int64_t s)
      : stride_(x.stride[1]), at_(x.at<scalar_t>(work.b, s, work.channel(me))) {}

  __device__ __forceinline__ void move(int positions) { at_ += positions * stride_; }
  // Zeros where no row exists.
  __device__ __forceinline__ void load(RowRange rows, scalar_t (&values)[kWarpRows]) const {
    if (rows.all()) {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) values[row] = at_[row * stride_];
    } else {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row)
        values[row] = rows.has(row) ? at_[row * stride_] : from_acc<scalar_t>(acc_type<scalar_t>(0));
    }
  }
  __device__ __forceinline__ void store(RowRange rows, const scalar_t (&values)[kWarpRows]) const {
    if (rows.all()) {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) at_[row * stride_] = values[row];
    } else {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row)
        if (rows.has(row)) at_[row * stride_] = values[row];
    }
  }

 private:
  int64_t stride_;
  scalar_t* at_;
};

// ---- weights of keys

// Rows of keys that are loaded and computed together: as many as a pack of 16-bit elements.
constexpr int kGroup = 8;

// softplus(k) and softplus(k) v of a warp's rows of a tile; 0 for positions that do not exist.
template <typename scalar_t, int kPositions, typename acc_t>
__device__ __forceinline__ void weigh(const KeyTiles<scalar_t, kPositions>& tiles, bool has_v, Thread me,
                                      int64_t positions, acc_t (&weights)[kWarpRows], acc_t (&weighted)[kWarpRows]) {
#pragma unroll
  for (int start = 0; start < kWarpRows; start += kGroup) {
    acc_t k[kGroup];
    acc_t v[kGroup] = {};
    read_keys(tiles, has_v, me, me.warp * kWarpRows + start, k, v);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      weights[start + i] = softplus_on_device<scalar_t>(k[i]);
      weighted[start + i] = weights[start + i] * v[i];
    }
  }
  if (positions < kPositions) {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row)
      if (me.warp * kWarpRows + row >= positions) weights[row] = weighted[row] = acc_t(0);
  }
}

}  // namespace softplus_cuda
}  // namespace memcheck
