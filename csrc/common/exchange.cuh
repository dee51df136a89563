#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "common/kernel.cuh"

// Numbers that one block passes to another in the same launch.
//
// Memory that is to receive a number first has every bit set, which is a NaN. A number is complete once it is there, so
// it needs no flag and no fence. On the host, blocks run one after the other: a number that is not there never comes.
// Where only some blocks run, to be counted, they take the place of their index and wait for nothing.
// There the counters do not see these accesses, nor look for races in them.

namespace memcheck {

#if defined(MEMCHECK_HOST_CUDA)
#define MEMCHECK_BETWEEN_BLOCKS inline __attribute__((noinline, no_sanitize("thread")))
#else
#define MEMCHECK_BETWEEN_BLOCKS __device__ __forceinline__
#endif

MEMCHECK_BETWEEN_BLOCKS void store_relaxed(uint32_t x, uint32_t* to) {
#if defined(MEMCHECK_HOST_CUDA)
  *to = x;
#else
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
#endif
}

MEMCHECK_BETWEEN_BLOCKS void store_relaxed(uint64_t x, uint64_t* to) {
#if defined(MEMCHECK_HOST_CUDA)
  *to = x;
#else
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
#endif
}

MEMCHECK_BETWEEN_BLOCKS uint32_t load_relaxed(const uint32_t* from) {
#if defined(MEMCHECK_HOST_CUDA)
  return *from;
#else
  uint32_t x;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
#endif
}

MEMCHECK_BETWEEN_BLOCKS uint64_t load_relaxed(const uint64_t* from) {
#if defined(MEMCHECK_HOST_CUDA)
  return *from;
#else
  uint64_t x;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
#endif
}

// Returns the number of calls so far, this one not counted, of all blocks.
MEMCHECK_BETWEEN_BLOCKS uint32_t take_ticket(uint32_t* next) {
#if defined(MEMCHECK_HOST_CUDA)
  return host_cuda::sampled_blocks() > 0 ? blockIdx.x : (*next)++;
#else
  return atomicAdd(next, 1u);
#endif
}

template <typename acc_t>
using WordOf = std::conditional_t<sizeof(acc_t) == 4, uint32_t, uint64_t>;

// A NaN with every bit set would look empty: another NaN is passed in its place.
__device__ __forceinline__ void pass_number(float x, float* to) {
  uint32_t word = 0x7FC00000u;
  if (x == x) __builtin_memcpy(&word, &x, sizeof(word));
  store_relaxed(word, reinterpret_cast<uint32_t*>(to));
}

__device__ __forceinline__ void pass_number(double x, double* to) {
  uint64_t word = 0x7FF8000000000000u;
  if (x == x) __builtin_memcpy(&word, &x, sizeof(word));
  store_relaxed(word, reinterpret_cast<uint64_t*>(to));
}

// Waits until all numbers have been passed. They are asked for together.
template <int kCount, typename acc_t>
__device__ __forceinline__ void await_numbers(const acc_t* const (&from)[kCount], acc_t (&x)[kCount]) {
  using word_t = WordOf<acc_t>;
  constexpr word_t kNotPassed = ~word_t(0);
  word_t words[kCount];
  bool all_passed;
  do {
    all_passed = true;
    unroll<kCount>([&](int i) { words[i] = load_relaxed(reinterpret_cast<const word_t*>(from[i])); });
    unroll<kCount>([&](int i) { all_passed = all_passed && words[i] != kNotPassed; });
#if defined(MEMCHECK_HOST_CUDA)
    if (!all_passed && host_cuda::sampled_blocks() == 0)
      throw std::logic_error("a block waits for a block that has not run");
    all_passed = true;
#else
    if (!all_passed) __nanosleep(32);
#endif
  } while (!all_passed);
  __builtin_memcpy(x, words, sizeof(x));
}

}  // namespace memcheck
