#pragma once

#include <cstdint>
#include <type_traits>

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

// A CUDA stream, declared as CUDA declares it, for contracts that include no CUDA header.
typedef struct CUstream_st* cudaStream_t;

namespace memcheck {

// a / b rounded up, for a from 0 and b from 1.
MEMCHECK_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The numbers from begin on, and before end.
struct Span {
  int64_t begin, end;

  MEMCHECK_INLINE int64_t size() const { return end - begin; }
};

// A tensor of kRank dimensions for a kernel: the address of its first element, and its strides in elements. Null stands
// for no tensor.
template <int kRank>
struct Strided {
  void* data = nullptr;
  int64_t stride[kRank] = {};

  template <typename scalar_t, typename... Index>
  MEMCHECK_INLINE scalar_t* at(Index... index) const {
    static_assert(sizeof...(index) == kRank);
    const int64_t indices[kRank] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int i = 0; i < kRank; ++i) offset += indices[i] * stride[i];
    return static_cast<scalar_t*>(data) + offset;
  }
  MEMCHECK_INLINE explicit operator bool() const { return data != nullptr; }
};

// x with a dimension of length 1 before dimension d.
template <int kRank>
Strided<kRank + 1> with_dimension(const Strided<kRank>& x, int d) {
  Strided<kRank + 1> result{x.data};
  for (int i = 0; i < kRank; ++i) result.stride[i < d ? i : i + 1] = x.stride[i];
  return result;
}

// The dtypes of all operators.
enum class Dtype { Float64, Float32, Float16, BFloat16 };

// Bytes of one element.
inline int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::Float64 ? 8 : dtype == Dtype::Float32 ? 4 : 2;
}

// Bytes of one element of the accumulation type: float64 for float64, else float32.
inline int64_t acc_bytes(Dtype dtype) {
  return dtype == Dtype::Float64 ? 8 : 4;
}

// The type of sums, states and intermediates: float64 for float64, else float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// run(scalar_t{}) for the type of a dtype. half_t and bfloat16_t: the types of 16 bits, which the CPU and CUDA have
// their own of.
template <typename half_t, typename bfloat16_t, typename Run>
auto with_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::Float64:
      return run(double{});
    case Dtype::Float16:
      return run(half_t{});
    case Dtype::BFloat16:
      return run(bfloat16_t{});
    case Dtype::Float32:
      break;
  }
  return run(float{});
}

// run(acc_t{}) for the accumulation type of a dtype.
template <typename Run>
auto with_acc_type(Dtype dtype, const Run& run) {
  return dtype == Dtype::Float64 ? run(double{}) : run(float{});
}

// A kernel, as the table of an operator names it. On the CPU the stream is null.
template <typename Parameters>
using Kernel = void (*)(const Parameters& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
