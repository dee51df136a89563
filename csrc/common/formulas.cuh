#pragma once

#include "common/formulas.h"
#include "common/ptx.cuh"

// CUDA's maths for the formulas of formulas.h: an exponential and a division that use the hardware's approximations.
// In float64 they are the host's. A value that is read and stored in 16 bits gets fewer instructions and an error of
// 1e-5 at most, which is small beside the rounding, 2^-9 or 2^-12.

namespace memcheck {

// exp(-|x|), with an error of 3 units in the last place. With t near -|x| log2(e), a multiple of 2^-14, it is
// 2^t exp(r), where r = -|x| - t ln(2) is so small that exp(r) = 1 + r. The hardware's 2^t flushes numbers below 2^-126
// to 0, so the kernel computes 2^(t + 64), and the last product rounds once. Where |x| is so large that r has no
// correct digits, 2^(t + 64) is 0.
__device__ __forceinline__ float exp_minus_abs_on_device(float x) {
  constexpr float kLn2High = 0.693147182464599609375f;
  constexpr float kLn2Low = -1.90465429995776804525e-9f;
  constexpr float kRound = 768.0f;  // 1.5 * 2^9: numbers near it are multiples of 2^-14
  constexpr float kShift = 64.0f;
  const float negative = -fabsf(x);
  const float shifted = fmaf(negative, kLog2e, kRound + kShift);
  const float t = shifted - (kRound + kShift);
  const float r = fmaf(t, -kLn2Low, fmaf(t, -kLn2High, negative));
  const float power = exp2_flushed(shifted - kRound);
  return fmaf(power, fminf(r, 1.0f), power) * 0x1p-64f;
}

// The same as 2^u 2^u, so that it goes below 2^-126. Rounding u costs |x| 2^-24.
__device__ __forceinline__ float exp_minus_abs_for_16_bits(float x) {
  constexpr float kHalfLog2e = 0.72134752044448170f;
  const float power = exp2_flushed(-fabsf(x) * kHalfLog2e);
  return power * power;
}

// log1p_of_unit by a polynomial with an error of 1.3e-6.
__device__ __forceinline__ float log1p_of_unit_for_16_bits(float e) {
  float p = 0.014141024090349674f;
  p = fmaf(p, e, -0.06640180200338364f);
  p = fmaf(p, e, 0.14922387897968292f);
  p = fmaf(p, e, -0.2350386083126068f);
  p = fmaf(p, e, 0.33109450340270996f);
  p = fmaf(p, e, -0.4998696446418762f);
  p = fmaf(p, e, 0.9999987483024597f);
  return p * e;
}

// 1 / x for x from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_on_device(float x) {
  return reciprocal_flushed(x);
}

__device__ __forceinline__ double inverse_on_device(double x) {
  return 1.0 / x;
}

// For values that are read and stored as scalar_t.
template <typename scalar_t>
struct CudaMaths {
  using acc_t = acc_type<scalar_t>;

  __device__ __forceinline__ static acc_t exp_minus_abs(acc_t x) {
    if constexpr (sizeof(scalar_t) == 2) return exp_minus_abs_for_16_bits(x);
    if constexpr (sizeof(scalar_t) == 4) return exp_minus_abs_on_device(x);
    if constexpr (sizeof(scalar_t) == 8) return memcheck::exp_minus_abs(x);
  }
  __device__ __forceinline__ static acc_t exp_not_positive(acc_t x) { return exp(x); }
  __device__ __forceinline__ static acc_t log1p_of_unit(acc_t e) {
    if constexpr (sizeof(scalar_t) == 2) return log1p_of_unit_for_16_bits(e);
    if constexpr (sizeof(scalar_t) != 2) return memcheck::log1p_of_unit(e);
  }
  __device__ __forceinline__ static acc_t divide(acc_t a, acc_t b) { return a * inverse_on_device(b); }
};

template <typename scalar_t>
__device__ __forceinline__ SoftplusSigmoid<acc_type<scalar_t>> softplus_and_sigmoid_on_device(acc_type<scalar_t> x) {
  return softplus_and_sigmoid<CudaMaths<scalar_t>>(x);
}

template <typename scalar_t>
__device__ __forceinline__ acc_type<scalar_t> softplus_on_device(acc_type<scalar_t> x) {
  return softplus<CudaMaths<scalar_t>>(x);
}

}  // namespace memcheck
