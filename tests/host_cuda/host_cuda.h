#pragma once

// The part of the CUDA language that memcheck's kernels use, on the host. With `-include host_cuda/host_cuda.h` a C++
// compiler compiles a .cu file, and its kernels run: one block at a time, every thread a fiber that runs until it waits
// for others. It finds mistakes without a GPU; it is not fast:
//   - threads take turns in one of three orders, so that a missing barrier changes the result or reads unset memory;
//   - shared memory is a block of the heap with exactly the size of the launch, filled with NaN for every block of
//   threads,
//     with a fence around it; the instructions of ptx.cuh may not copy or read outside of it;
//   - a launch is refused if its block asks for more shared memory than the GPU that the host stands for;
//   - these are errors that name kernel, block, thread and line: a barrier that not all threads reach, or reach at
//     different lines; a shuffle that a named lane does not call; a deadlock.

#include <cuda_runtime.h>
#include <math.h>  // exp(float) and others outside of any namespace, as CUDA has them

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#undef __grid_constant__
#define __grid_constant__
#define __launch_bounds__(...)

// Those of the thread that runs.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

namespace host_cuda {

constexpr int kLanes = 32;

// A place in the source. As a default argument it is the place of the call.
struct Where {
  const char* file;
  int line;
  static Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Order { Ascending, Descending, Shuffled };
void set_order(Order order);

// Sets the GPU that the host stands for: its compute capability, and the shared memory that a block may have. It begins
// as an A100.
void stand_for(int major, int minor, size_t shared_bytes);

// From now on a launch runs that many of its blocks, evenly spaced over the grid, and products of matrices are not
// formed: for counts of large shapes. 0: all blocks run.
void sample_blocks(uint64_t most);
uint64_t sampled_blocks();

// Runs thread() for every thread of the grid; it calls the kernel's function. If the GPU would refuse the launch,
// returns CUDA's error, which cudaGetLastError also returns once. Throws std::runtime_error with the rule that a kernel
// broke and the place.
cudaError_t run(const char* kernel, const void* function, dim3 grid, dim3 block, size_t shared_bytes,
                const std::function<void()>& thread);

// The shared memory of this block of threads. The launch must have asked for that many bytes.
void* shared_memory(size_t bytes, size_t alignment);

// Throws unless [address, address + bytes) is in shared memory and the address is aligned to `bytes`.
void check_shared(const void* address, size_t bytes, Where where);

// An operation of the lanes of a warp. They wait for each other, then `complete` gets the operand of every lane in the
// mask.
struct Collective {
  const char* name;
  void (*complete)(void* const (&operands)[kLanes], unsigned mask);
};
void meet(const Collective& collective, unsigned mask, void* operand, Where where);

// A barrier of all threads of a block. Returns how many of them passed yes.
int sync_threads(bool yes, Where where);

void copy_later(void* in_shared, const void* in_global, bool exists, Where where);
void commit_copies();
void await_copies(int pending);

// ---- shuffles and votes

template <typename T, int (*source)(int lane, int argument, int width)>
struct Shuffle {
  T value;
  int argument;
  int width;
  Where where;

  static void complete(void* const (&operands)[kLanes], unsigned mask) {
    T given[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane)
      if (mask >> lane & 1) given[lane] = static_cast<Shuffle*>(operands[lane])->value;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Shuffle& mine = *static_cast<Shuffle*>(operands[lane]);
      const int from = source(lane, mine.argument, mine.width);
      // The value of a lane outside of the mask is undefined.
      if (mask >> from & 1) {
        mine.value = given[from];
      } else {
        std::memset(static_cast<void*>(&mine.value), 0xFF, sizeof(T));
      }
    }
  }
  static T exchange(const char* name, unsigned mask, T value, int argument, int width, Where where) {
    static_assert(std::is_arithmetic_v<T> || sizeof(T) <= 8);
    Shuffle operand{value, argument, width, where};
    meet({name, &complete}, mask, &operand, where);
    return operand.value;
  }
};

inline int source_of_index(int lane, int index, int width) {
  return lane / width * width + (index & (width - 1));
}
inline int source_xor(int lane, int bits, int width) {
  const int from = lane ^ bits;
  return from / width == lane / width ? from : lane;
}
inline int source_up(int lane, int delta, int width) {
  return lane % width >= delta ? lane - delta : lane;
}
inline int source_down(int lane, int delta, int width) {
  return lane % width + delta < width ? lane + delta : lane;
}

unsigned ballot(const char* name, unsigned mask, bool yes, Where where);

// ---- the instructions of common/ptx.cuh

struct Mma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};
using Convert = float (*)(uint16_t bits);
// d += a b of a warp, in the layout that ptx.cuh describes.
void multiply(void* const (&operands)[kLanes], Convert convert);

template <typename scalar_t>
float converted(uint16_t bits) {
  scalar_t value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(bits));
  return static_cast<float>(value);
}

template <typename scalar_t>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  Mma operand{d, a, b};
  const auto complete = [](void* const(&operands)[kLanes], unsigned) { multiply(operands, &converted<scalar_t>); };
  meet({"mma_m16n8k16", complete}, ~0u, &operand, where);
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row, bool transposed, Where where);

inline void cp_async_16(void* in_shared, const void* in_global, bool exists, Where where) {
  copy_later(in_shared, in_global, exists, where);
}
inline void cp_async_commit() {
  commit_copies();
}
inline void cp_async_wait(int pending) {
  await_copies(pending);
}

}  // namespace host_cuda

// ---- the language

inline void __syncthreads(host_cuda::Where where = host_cuda::Where::here()) {
  host_cuda::sync_threads(false, where);
}
inline int __syncthreads_count(int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::sync_threads(yes != 0, where);
}
inline int __syncthreads_or(int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::sync_threads(yes != 0, where) > 0;
}
inline int __syncthreads_and(int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::sync_threads(yes == 0, where) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, host_cuda::Where where = host_cuda::Where::here()) {
  int operand = 0;
  host_cuda::meet({"__syncwarp", [](void* const(&)[host_cuda::kLanes], unsigned) {}}, mask, &operand, where);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize,
              host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::Shuffle<T, host_cuda::source_of_index>::exchange("__shfl_sync", mask, value, lane, width, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::Shuffle<T, host_cuda::source_xor>::exchange("__shfl_xor_sync", mask, value, bits, width, where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::Shuffle<T, host_cuda::source_up>::exchange("__shfl_up_sync", mask, value, static_cast<int>(delta),
                                                               width, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::Shuffle<T, host_cuda::source_down>::exchange("__shfl_down_sync", mask, value,
                                                                 static_cast<int>(delta), width, where);
}

inline unsigned __ballot_sync(unsigned mask, int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::ballot("__ballot_sync", mask, yes != 0, where);
}
inline int __any_sync(unsigned mask, int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::ballot("__any_sync", mask, yes != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int yes, host_cuda::Where where = host_cuda::Where::here()) {
  return host_cuda::ballot("__all_sync", mask, yes == 0, where) == 0;
}

inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
template <typename To, typename From>
To host_cuda_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline unsigned __float_as_uint(float x) {
  return host_cuda_bits<unsigned>(x);
}
inline int __float_as_int(float x) {
  return host_cuda_bits<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return host_cuda_bits<float>(x);
}
inline float __int_as_float(int x) {
  return host_cuda_bits<float>(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}

// Of two numbers of one type; CUDA has them outside of any namespace.
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
