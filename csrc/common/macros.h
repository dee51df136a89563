#pragma once

// A function of the maths shared by CPU and CUDA. On the CPU it must be inlined into the loop around it, which decides
// the instructions it is compiled for (common/cpu_level.h).
#if defined(__CUDACC__)
#define MEMCHECK_INLINE __host__ __device__ __forceinline__
#else
#define MEMCHECK_INLINE inline __attribute__((always_inline))
// The same for a lambda, behind its parameters.
#define MEMCHECK_INLINE_LAMBDA __attribute__((always_inline))
#endif

// Loops over registers must be unrolled before the compiler decides which variables are in memory.
#if defined(__clang__)
#define MEMCHECK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MEMCHECK_UNROLL _Pragma("GCC unroll 16")
#endif
