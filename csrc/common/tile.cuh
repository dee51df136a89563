#pragma once

#include <cstdint>

#include "common/kernel.cuh"
#include "common/ptx.cuh"

// Packs of 16 bytes, and tiles that are copied between global and shared memory a pack at a time. Rows whose elements
// are not contiguous or not aligned are copied element by element by the same functions.

namespace memcheck {

constexpr int kPackBytes = 16;

// Elements in a pack.
template <typename scalar_t>
constexpr int kPackSize = kPackBytes / static_cast<int>(sizeof(scalar_t));

constexpr int pack_alignment(int bytes) {
  return bytes < kPackBytes ? bytes : kPackBytes;
}

// Neighbouring elements that are read and written by one instruction: 16 bytes, unless another count is given.
template <typename scalar_t, int kElements = kPackSize<scalar_t>>
struct alignas(pack_alignment(kElements * sizeof(scalar_t))) Pack {
  static constexpr int kCount = kElements;
  scalar_t values[kElements];
};

template <int kCount, typename scalar_t>
__device__ __forceinline__ Pack<scalar_t, kCount> load_pack(const scalar_t* from) {
  return *reinterpret_cast<const Pack<scalar_t, kCount>*>(from);
}

template <typename scalar_t>
__device__ __forceinline__ Pack<scalar_t> load_pack(const scalar_t* from) {
  return load_pack<kPackSize<scalar_t>>(from);
}

template <typename scalar_t, int kCount>
__device__ __forceinline__ void store_pack(const Pack<scalar_t, kCount>& pack, scalar_t* to) {
  *reinterpret_cast<Pack<scalar_t, kCount>*>(to) = pack;
}

// The same to global memory. Compilers split what store_pack stores where the pack's elements are stored, too.
template <typename scalar_t, int kCount>
__device__ __forceinline__ void store_pack_globally(const Pack<scalar_t, kCount>& pack, scalar_t* to) {
  if constexpr (sizeof(pack) % kPackBytes == 0) {
    uint4 bits[sizeof(pack) / kPackBytes];
    __builtin_memcpy(bits, pack.values, sizeof(pack));
    for (const uint4& each : bits) store_global_16(reinterpret_cast<char*>(to) + kPackBytes * (&each - bits), each);
  } else {
    store_pack(pack, to);
  }
}

template <typename scalar_t, int kCount>
__device__ __forceinline__ Pack<scalar_t, kCount> rounded_pack(const acc_type<scalar_t> (&values)[kCount]) {
  Pack<scalar_t, kCount> pack;
  unroll<kCount>([&](int i) { pack.values[i] = from_acc<scalar_t>(values[i]); });
  return pack;
}

// ---- rows of any stride

// How a row lies in memory: elements `stride` apart, of which `columns` exist. Packed: contiguous, with every pack
// whole and aligned to 16 bytes.
struct RowLayout {
  int64_t stride;
  int64_t columns;
  bool packed;
};

// The first `count` elements, at least one, `stride` apart; zeros after them.
template <int kCount, typename scalar_t>
__device__ __forceinline__ Pack<scalar_t, kCount> gather_pack(const scalar_t* from, int64_t stride, int64_t count) {
  Pack<scalar_t, kCount> pack;
  // The gradient of a sum is one number, with a stride of 0.
  const bool all_equal = stride == 0;
  const scalar_t first = from[0];
  unroll<kCount>([&](int i) {
    pack.values[i] = from_acc<scalar_t>(0);
    if (i < count) pack.values[i] = all_equal || i == 0 ? first : from[i * stride];
  });
  return pack;
}

// The pack at `column`, which is at `from`; zeros where nothing exists.
template <typename scalar_t>
__device__ __forceinline__ Pack<scalar_t> read_pack(const scalar_t* from, const RowLayout& layout, int64_t column,
                                                    bool row_exists) {
  constexpr int kCount = kPackSize<scalar_t>;
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (row_exists && column < layout.columns) {
    if (layout.packed) {
      bits = *reinterpret_cast<const uint4*>(from);
    } else {
      const Pack<scalar_t> pack = gather_pack<kCount>(from, layout.stride, layout.columns - column);
      __builtin_memcpy(&bits, pack.values, sizeof(bits));
    }
  }
  Pack<scalar_t> pack;
  __builtin_memcpy(static_cast<void*>(pack.values), &bits, sizeof(bits));
  return pack;
}

// Stores the elements of the pack at `column` that exist; the pack belongs at `to`.
template <typename scalar_t, int kCount>
__device__ __forceinline__ void write_pack(const Pack<scalar_t, kCount>& pack, scalar_t* to, const RowLayout& layout,
                                           int64_t column) {
  if (layout.packed) {
    if (column < layout.columns) store_pack_globally(pack, to);
    return;
  }
  unroll<kCount>([&](int i) {
    if (column + i < layout.columns) to[i * layout.stride] = pack.values[i];
  });
}

// ---- tiles

// How kThreads threads share a tile of kRows rows and kColumns columns: a thread has one pack of every kStep-th row.
template <typename scalar_t, int kRows, int kColumns, int kThreads, int kElements = kPackSize<scalar_t>>
struct TilePacks {
  static constexpr int kSize = kElements;
  static constexpr int kPerRow = kColumns / kSize;
  static constexpr int kStep = kThreads / kPerRow;
  static constexpr int kCount = kRows / kStep;
  static_assert(kCount * kStep == kRows && kStep * kPerRow == kThreads);

  int row = static_cast<int>(threadIdx.x) / kPerRow;  // of the thread's first pack
  int column = static_cast<int>(threadIdx.x) % kPerRow * kSize;
};

// Begins to copy this thread's packs of a tile to shared memory. Packed ones arrive when cp_async_wait says so, others
// at once; zeros where nothing exists. source(row) is where the thread's pack of a row is in memory, place(row) where
// it belongs in the tile, and exists(row) tells whether there is such a row.
template <int kUnroll, typename Packs, typename Source, typename Place, typename Exists>
__device__ __forceinline__ void request_tile(const Packs& packs, const RowLayout& layout, const Source& source,
                                             const Place& place, const Exists& exists) {
  if (layout.packed) {
#pragma unroll kUnroll
    for (int i = 0; i < Packs::kCount; ++i) {
      const int row = packs.row + i * Packs::kStep;
      cp_async_16(place(row), source(row), exists(row) && packs.column < layout.columns);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < Packs::kCount; ++i) {
    const int row = packs.row + i * Packs::kStep;
    store_pack(read_pack(source(row), layout, packs.column, exists(row)), place(row));
  }
}

// Copies this thread's packs of a tile from shared memory, as far as they exist; the names are those of request_tile.
template <int kUnroll, typename Packs, typename Target, typename Place, typename Exists>
__device__ __forceinline__ void store_tile(const Packs& packs, const RowLayout& layout, const Target& target,
                                           const Place& place, const Exists& exists) {
#pragma unroll kUnroll
  for (int i = 0; i < Packs::kCount; ++i) {
    const int row = packs.row + i * Packs::kStep;
    if (exists(row)) write_pack(load_pack(place(row)), target(row), layout, packs.column);
  }
}

}  // namespace memcheck
