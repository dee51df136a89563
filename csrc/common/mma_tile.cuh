#pragma once

#include <type_traits>

#include "common/formulas.h"
#include "common/ptx.cuh"

// Tiles in shared memory for products on tensor cores, whose sums are float32, and numbers that are sums of 16-bit
// ones. A product has tiles of 16 rows and 8 columns. Of such a tile thread 4 g + c has columns 2 c and 2 c + 1 of rows
// g and g + 8.

namespace memcheck {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x) % 32;
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x) / 32;
}

// The row of this thread's c[m][n][2 half + i], counted from the warp's first row, and the column of c[m][n][2 half].
__device__ __forceinline__ int fragment_row(int m, int half, int lane = memcheck::lane()) {
  return 16 * m + 8 * half + lane / 4;
}
__device__ __forceinline__ int fragment_column(int n, int lane = memcheck::lane()) {
  return 8 * n + lane % 4 * 2;
}

// ---- shared memory: addresses of 32 bits, which a thread forms by exclusive or

#if defined(MEMCHECK_HOST_CUDA)

using Address = uintptr_t;

inline Address address_of(const void* in_shared) {
  return reinterpret_cast<Address>(in_shared);
}
inline const void* pointer_to(Address address) {
  return reinterpret_cast<const void*>(address);
}

#else

using Address = uint32_t;

__device__ __forceinline__ Address address_of(const void* in_shared) {
  return shared_address(in_shared);
}
__device__ __forceinline__ const void* pointer_to(Address address) {
  return __cvta_shared_to_generic(address);
}

#endif

// A tile of rows of 64, 128 or 256 numbers of 16 bits, or of sums of kParts such numbers. Eight rows have a pack of the
// same number, of 16 bytes, in different banks.
template <int kRows_, int kColumns_, int kParts_>
struct alignas(2 * kColumns_) Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kParts = kParts_;
  static constexpr uint32_t kPartBytes = kRows * kColumns * 2;

  unsigned char bytes[kParts * kPartBytes];

  // The byte of a row's pack.
  __device__ __forceinline__ static uint32_t place(int row, int pack) {
    return static_cast<uint32_t>((row * kColumns + (pack ^ (row & 7)) * 8) * 2);
  }
  // From a place in the first square of 16 by 16 numbers to the same one in the square at (row, column). For addresses,
  // too, because tiles are aligned to their rows.
  template <typename Place>
  __device__ __forceinline__ static Place square(Place place, int row, int column) {
    return (place ^ static_cast<Place>(column * 32)) + static_cast<Place>(row * 16 * kColumns * 2);
  }
  // Where two neighbours of a product's sums belong: in the square at (row, column), in half `low` of its rows and half
  // `right` of its columns.
  __device__ __forceinline__ static uint32_t place_of_sums(int row, int low, int column, int right) {
    const uint32_t first = place(lane() / 4, 0) + lane() % 4 * 4;
    return (first ^ static_cast<uint32_t>((column * 2 + right) * 16)) +
           static_cast<uint32_t>((row * 2 + low) * 8 * kColumns * 2);
  }
  __device__ __forceinline__ uint32_t& word(int part, uint32_t place) {
    return *reinterpret_cast<uint32_t*>(bytes + part * kPartBytes + place);
  }
  __device__ __forceinline__ uint4& pack(int part, uint32_t place) {
    return *reinterpret_cast<uint4*>(bytes + part * kPartBytes + place);
  }
};

// The same of scalar_t, of 16 bits.
template <typename scalar_t, int kRows, int kColumns>
struct HalfTile : Tile<kRows, kColumns, 1> {
  __device__ __forceinline__ scalar_t* pack(int row, int index) {
    return reinterpret_cast<scalar_t*>(this->bytes + this->place(row, index));
  }
  __device__ __forceinline__ const scalar_t* pack(int row, int index) const {
    return reinterpret_cast<const scalar_t*>(this->bytes + this->place(row, index));
  }
};

// The squares of a tile as a warp loads them for products. kTall: as the right factor of a product with the square's
// transpose, or transposed as a left one; else as the left factor, or transposed as the right one.
template <typename Of, bool kTall>
struct Squares {
  Address first;  // of this lane

  // first_row: of the squares of row 0, a multiple of 8.
  __device__ __forceinline__ explicit Squares(const Of& tile, int first_row = 0)
      : first(address_of(tile.bytes) + (kTall ? Of::place(first_row + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2)
                                              : Of::place(first_row + lane() % 16, lane() / 16))) {}
  template <bool kTransposed>
  __device__ __forceinline__ void load(int row, int column, uint32_t (&to)[4], int part = 0) const {
    const void* from = pointer_to(Of::square(first, row, column) + part * Of::kPartBytes);
    if constexpr (kTransposed)
      ldmatrix_x4_transposed(to, from);
    else
      ldmatrix_x4(to, from);
  }
  template <bool kTransposed>
  __device__ __forceinline__ void load(int row, int column, uint32_t (&to)[Of::kParts][4]) const {
    unroll<Of::kParts>([&](int part) { load<kTransposed>(row, column, to[part], part); });
  }
};
template <typename Of>
using Wide = Squares<Of, false>;
template <typename Of>
using Tall = Squares<Of, true>;

// ---- parts
//
// A number is a sum of numbers in bfloat16, x = high + low + ...: three have the bits of float32.

__device__ __forceinline__ uint32_t rounded_pair(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ __forceinline__ uint32_t rounded_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ __forceinline__ float low_half(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Splits two numbers into sums of bfloat16, the high parts first.
template <int kParts>
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = rounded_pair(bf16(), x, y);
    if (part == kParts - 1) break;
    x -= low_half(parts[part]);
    y -= high_half(parts[part]);
  }
}

template <int kParts>
__device__ __forceinline__ float2 sum_of_parts(const uint32_t (&parts)[kParts]) {
  float2 sum = {};
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
    sum.x += low_half(parts[part]);
    sum.y += high_half(parts[part]);
  }
  return sum;
}

// ---- products

// c += a b of eight columns, without the products of parts that are as small as what splitting left out. of(j, i): part
// j of register i of the right factor. With three parts the smallest products come first, and c is added by rounding:
// tensor cores cut sums towards 0.
template <int kA, int kB, typename Of>
__device__ __forceinline__ void multiply_parts(const uint32_t (&a)[kA][4], const Of& of, float (&c)[4]) {
  constexpr int kMost = kA > kB ? kA : kB;
  constexpr bool kApart = kA > 2 && kB > 2;
  float apart[4] = {};
  float(&sum)[4] = kApart ? apart : c;
  unroll<kMost, kA>([&](int i, int part) {
    const int sum_of_both = kApart ? kMost - 1 - i : i, other = sum_of_both - part;
    if (other < 0 || other >= kB) return;
    const uint32_t b[2] = {of(other, 0), of(other, 1)};
    mma_m16n8k16<bf16>(sum, a[part], b);
  });
  if (kApart) unroll<4>([&](int i) { c[i] += apart[i]; });
}

// The same of half of a right factor of 16 columns, or of both halves.
template <int kA, int kB>
__device__ __forceinline__ void multiply_half(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4], int half,
                                              float (&c)[4]) {
  multiply_parts<kA, kB>(a, [&](int part, int i) { return b[part][2 * half + i]; }, c);
}
template <int kA, int kB>
__device__ __forceinline__ void multiply_square(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4],
                                                float (&c)[2][4]) {
  unroll<2>([&](int half) { multiply_half(a, b, half, c[half]); });
}

}  // namespace memcheck
