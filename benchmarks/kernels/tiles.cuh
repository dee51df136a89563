#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

#include "common/ptx.cuh"

// What the prototypes share: tiles of bfloat16 numbers in shared memory, and products of them on tensor cores. They are
// for D = Dv = 128 and elu(x) + 1, a block of 8 warps has a head, and torch is not needed: trial.py calls them by
// ctypes. They also run on the host, with the stand-in for CUDA of tests/host_cuda.

namespace memcheck::trial {

using bfloat16 = __nv_bfloat16;

constexpr int kDepth = 128;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kOnes = 0x3f803f80u;  // two ones

// ---- shared memory: addresses of 32 bits, which a thread forms by exclusive or

#if defined(MEMCHECK_HOST_CUDA)

using Address = uintptr_t;

inline Address address_of(const void* in_shared) {
  return reinterpret_cast<Address>(in_shared);
}
inline const void* pointer_to(Address address) {
  return reinterpret_cast<const void*>(address);
}

// The stand-in aligns shared memory to 128 bytes only.
constexpr size_t kAlignmentBytes = 1024;

template <typename Shared>
Shared& shared_tiles() {
  void* bytes = host_cuda::shared_memory(sizeof(Shared) + kAlignmentBytes, 16);
  return *reinterpret_cast<Shared*>((address_of(bytes) + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes);
}

#else

using Address = uint32_t;
constexpr size_t kAlignmentBytes = 0;  // more than a launch asks for

__device__ __forceinline__ Address address_of(const void* in_shared) {
  return shared_address(in_shared);
}
__device__ __forceinline__ const void* pointer_to(Address address) {
  return __cvta_shared_to_generic(address);
}

template <typename Shared>
__device__ __forceinline__ Shared& shared_tiles() {
  extern __shared__ __align__(1024) unsigned char aligned_bytes_of_the_launch[];
  return *reinterpret_cast<Shared*>(aligned_bytes_of_the_launch);
}

#endif

// The byte of the 16-byte pack `pack` of a row in a tile of kColumns columns. Eight rows have it in different banks.
template <int kColumns>
__device__ __forceinline__ uint32_t place(int row, int pack) {
  const int turned = kColumns >= 64 ? row & 7 : row / 2 & 3;
  return static_cast<uint32_t>((row * kColumns + (pack ^ turned) * 8) * 2);
}

// From a place in the first square of 16 by 16 numbers of a tile to the same one in the square at (row, column). For
// addresses, too, because tiles are aligned to 1,024 bytes.
template <int kColumns, typename Place>
__device__ __forceinline__ Place square(Place place, int row, int column) {
  return (place ^ static_cast<Place>(column * 32)) + static_cast<Place>(row * 16 * kColumns * 2);
}

// What a lane passes to ldmatrix for a square: as the left factor of a product, or transposed as the right one.
template <int kColumns>
__device__ __forceinline__ uint32_t wide() {
  return place<kColumns>(threadIdx.x % 16, threadIdx.x / 16 % 2);
}

// As the right factor of a product with the square's transpose, or transposed as the left one.
template <int kColumns>
__device__ __forceinline__ uint32_t tall() {
  return place<kColumns>(threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8, threadIdx.x / 8 % 2);
}

// Where two neighbours of a product's sums belong: in the square at (row, column), in half `low` of its rows and half
// `right` of its columns.
template <int kColumns>
__device__ __forceinline__ uint32_t place_of_sums(int row, int low, int column, int right) {
  const uint32_t first = place<kColumns>(threadIdx.x / 4 % 8, 0) + threadIdx.x % 4 * 4;
  return (first ^ static_cast<uint32_t>((column * 2 + right) * 16)) +
         static_cast<uint32_t>((row * 2 + low) * 8 * kColumns * 2);
}

__device__ __forceinline__ uint32_t& word(bfloat16* tile, uint32_t place) {
  return *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(tile) + place);
}
__device__ __forceinline__ uint4& pack(bfloat16* tile, uint32_t place) {
  return *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + place);
}

// ---- two numbers in a word

__device__ __forceinline__ uint32_t rounded(float x, float y) {
  return pack_pair(__float2bfloat16_rn(x), __float2bfloat16_rn(y));
}
__device__ __forceinline__ float first_of(uint32_t word) {
  return __uint_as_float(word << 16);
}
__device__ __forceinline__ float second_of(uint32_t word) {
  return __uint_as_float(word & 0xffff0000u);
}
// What rounding x and y to `word` has left out, rounded.
__device__ __forceinline__ uint32_t rest_of(uint32_t word, float x, float y) {
  return rounded(x - first_of(word), y - second_of(word));
}

// elu(x) + 1. Its derivative is the smaller one of it and 1.
__device__ __forceinline__ float feature(float x) {
  return x > 0 ? x + 1.0f : exp2_flushed(x * 1.44269504f);
}

// ---- tiles of kRows rows and kDepth columns: a thread has pack threadIdx.x % 16 of rows threadIdx.x / 16 + 16 i

__device__ __forceinline__ uint32_t own_pack(int i) {
  return square<kDepth>(place<kDepth>(threadIdx.x / 16, threadIdx.x % 16), i, 0);
}
__device__ __forceinline__ int64_t own_element() {
  return threadIdx.x * 8;
}

// `from` is this thread's first element in global memory; so is `to` of store_tile.
template <int kRows>
__device__ __forceinline__ void request_tile(bfloat16* tile, const bfloat16* from) {
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) cp_async_16(&pack(tile, own_pack(i)), from + 16 * i * kDepth);
}

template <int kRows>
__device__ __forceinline__ void store_tile(bfloat16* to, bfloat16* tile) {
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) *reinterpret_cast<uint4*>(to + 16 * i * kDepth) = pack(tile, own_pack(i));
}

// Features of what this thread copied, in place, times scale(i) for its i-th row.
template <int kRows, typename Scale>
__device__ __forceinline__ void map_tile(bfloat16* tile, const Scale& scale) {
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    uint4& of_tile = pack(tile, own_pack(i));
    uint4 x = of_tile;
    uint32_t* words = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = rounded(feature(first_of(words[j])) * scale(i), feature(second_of(words[j])) * scale(i));
    of_tile = x;
  }
}
template <int kRows>
__device__ __forceinline__ void map_tile(bfloat16* tile) {
  map_tile<kRows>(tile, [](int) { return 1.0f; });
}

// ---- products

__device__ __forceinline__ void load(uint32_t (&r)[4], Address address MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  ldmatrix_x4(r, pointer_to(address), caller);
#else
  ldmatrix_x4(r, pointer_to(address));
#endif
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], Address address MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  ldmatrix_x4_transposed(r, pointer_to(address), caller);
#else
  ldmatrix_x4_transposed(r, pointer_to(address));
#endif
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  mma_m16n8k16<bfloat16>(d, a, b);
}
// Both halves of 16 columns.
__device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  multiply(d[0], a, b[0], b[1]);
  multiply(d[1], a, b[2], b[3]);
}

// The number of squares on and below the diagonal of a tile of kRows by kRows scores.
template <int kRows>
constexpr int kSquares = kRows / 16 * (kRows / 16 + 1) / 2;

// The job-th of these squares.
struct Corner {
  int far, near;
};
__device__ __forceinline__ Corner corner_of(int job) {
  const int far = (job >= 1) + (job >= 3) + (job >= 6);
  return {far, job - far * (far + 1) / 2};
}

// Scores a b^T - minus(column) of the square at (row, column), stored in two parts; 0 on one side of the diagonal.
// kLater: that of the columns before the row. For the sums, seen(low, x, y) is given what is not 0, two columns at a
// time.
template <int kRows, bool kLater, typename Minus, typename Seen>
__device__ __forceinline__ void form_scores(bfloat16 (&scores)[2][kRows * kRows], Address a, Address b, int row,
                                            int column, const Minus& minus, const Seen& seen) {
  const int lane = threadIdx.x % 32;
  a = square<kDepth>(a + wide<kDepth>(), row, 0), b = square<kDepth>(b + tall<kDepth>(), column, 0);
  float sums[2][4] = {};
#pragma unroll
  for (int d = 0; d < kDepth / 16; ++d) {
    uint32_t x[4], y[4];
    load(x, square<kDepth>(a, 0, d));
    load(y, square<kDepth>(b, 0, d));
    multiply(sums, x, y);
  }
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int j = 16 * column + 8 * t + lane % 4 * 2;
    const float2 less = minus(j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 16 * row + 8 * h + lane / 4;
      const float x = (kLater ? j >= i : j <= i) ? sums[t][2 * h] - less.x : 0.0f;
      const float y = (kLater ? j + 1 >= i : j + 1 <= i) ? sums[t][2 * h + 1] - less.y : 0.0f;
      const uint32_t at = place_of_sums<kRows>(row, h, column, t), first = rounded(x, y);
      word(scores[0], at) = first;
      word(scores[1], at) = rest_of(first, x, y);
      seen(h, x, y);
    }
  }
}

// state += a^T b of tiles of kRows rows: kHigh squares of a's columns from square `row` on, kWide of b's from `column`.
template <int kRows, int kHigh, int kWide>
__device__ __forceinline__ void join(float (&state)[kHigh][kWide][2][4], Address a, int row, Address b, int column) {
  uint32_t x[kHigh][kRows / 16][4];
#pragma unroll
  for (int r = 0; r < kHigh; ++r)
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) load_transposed(x[r][n], square<kDepth>(a + tall<kDepth>(), n, row + r));
#pragma unroll
  for (int c = 0; c < kWide; ++c) {
    float sums[kHigh][2][4] = {};
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      uint32_t y[4];
      load_transposed(y, square<kDepth>(b + wide<kDepth>(), n, column + c));
#pragma unroll
      for (int r = 0; r < kHigh; ++r) multiply(sums[r], x[r][n], y);
    }
#pragma unroll
    for (int r = 0; r < kHigh; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[r][c][h][i] += sums[r][h][i];
  }
}

// ---- launches

// Queues a kernel with a block for each head. Returns 0, or 1 after a line on stderr that says why it failed.
template <typename... Params, typename... Args>
int run(const char* name, int heads, size_t shared_bytes, void* stream, void (*kernel)(Params...),
        const Args&... args) {
  try {
    launch({name, heads, dim3(kThreads), shared_bytes + kAlignmentBytes, static_cast<cudaStream_t>(stream)}, kernel,
           args...);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

inline const bfloat16* in(const void* tensor) {
  return static_cast<const bfloat16*>(tensor);
}
inline bfloat16* out(void* tensor) {
  return static_cast<bfloat16*>(tensor);
}

}  // namespace memcheck::trial
