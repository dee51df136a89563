#pragma once

#include <cstdint>
#include <type_traits>

#include "common/kernel.cuh"

// PTX instructions that C++ has no syntax for. Each also has a body for the host (tests/host_cuda); on a GPU the tests
// first compare the host bodies with the hardware. For mma and ldmatrix every lane of a warp must call.

namespace memcheck {

#if !defined(MEMCHECK_HOST_CUDA)

__device__ __forceinline__ uint32_t shared_address(const void* in_shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(in_shared));
}

#endif

// Two 16-bit values in one register; the first is in the low half.
template <typename scalar_t>
MEMCHECK_INLINE uint32_t pack_pair(scalar_t low, scalar_t high) {
  uint16_t bits[2];
  static_assert(sizeof(scalar_t) == sizeof(uint16_t));
  __builtin_memcpy(&bits[0], &low, 2);
  __builtin_memcpy(&bits[1], &high, 2);
  return static_cast<uint32_t>(bits[0]) | static_cast<uint32_t>(bits[1]) << 16;
}

// d (16,8) += a (16,16) b (16,8): products of 16-bit values, summed in float32. Lane l, with g = l / 4 and c = l % 4,
// has
//   a[0] = A[g][2c, 2c+1]      a[1] = A[g+8][2c, 2c+1]    a[2] = A[g][2c+8, 2c+9]    a[3] = A[g+8][2c+8, 2c+9]
//   b[0] = B[2c, 2c+1][g]      b[1] = B[2c+8, 2c+9][g]
//   d[0], d[1] = D[g][2c, 2c+1]                           d[2], d[3] = D[g+8][2c, 2c+1]
template <typename scalar_t>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2] MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::mma_m16n8k16<scalar_t>(d, a, b, caller);
#else
  if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<scalar_t, __half>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

// Loads four 8x8 matrices of 16-bit values from shared memory. Lane l passes the address of row l % 8 of matrix l / 8,
// 16 bytes aligned to 16, and receives r[i] = matrix i [l / 4][2 (l % 4), 2 (l % 4) + 1].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::ldmatrix_x4(r, row, false, caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// The same for transposed matrices: r[i] = matrix i [2 (l % 4), 2 (l % 4) + 1][l / 4].
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::ldmatrix_x4(r, row, true, caller);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// Begins to copy 16 bytes from global to shared memory, both aligned to 16. If `exists` is false, it reads nothing and
// stores zeros. The bytes have arrived for this thread after cp_async_wait, for other threads after a barrier.
__device__ __forceinline__ void cp_async_16(void* in_shared, const void* in_global,
                                            bool exists = true MEMCHECK_CALLER) {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::cp_async_16(in_shared, in_global, exists, caller);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(in_shared)), "l"(in_global), "r"(exists ? 16 : 0)
               : "memory");
#endif
}

// Stores 16 bytes in global memory, which are aligned to 16.
__device__ __forceinline__ void store_global_16(void* to, const uint4& bits) {
#if defined(MEMCHECK_HOST_CUDA)
  *static_cast<uint4*>(to) = bits;
#else
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
               :
               : "l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups but the last kPending have arrived.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if defined(MEMCHECK_HOST_CUDA)
  host_cuda::cp_async_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

#if defined(MEMCHECK_HOST_CUDA)

inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

#endif

// 2^x, with an error of 2 units in the last place.
__device__ __forceinline__ float exp2_approximate(float x) {
#if defined(MEMCHECK_HOST_CUDA)
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// The same in one instruction: arguments and results below 2^-126 are taken as 0.
__device__ __forceinline__ float exp2_flushed(float x) {
#if defined(MEMCHECK_HOST_CUDA)
  return flushed(exp2f(flushed(x)));
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / x, with an error of 1 unit in the last place, in one instruction too.
__device__ __forceinline__ float reciprocal_flushed(float x) {
#if defined(MEMCHECK_HOST_CUDA)
  return flushed(1.0f / flushed(x));
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace memcheck
