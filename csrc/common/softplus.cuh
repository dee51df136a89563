#pragma once

#include "common/ptx.cuh"
#include "common/softplus.h"

// softplus and sigmoid as CUDA kernels compute them: the formulas of softplus.h, around an exponential and a division
// that lean on the hardware's; in float64 they are those of the host. What is rounded to 16 bits in the end is worth
// fewer instructions: 5e-7 off, where everything around is 2^-9 or 2^-12.

namespace memcheck {

// exp(-|x|), 3 units in the last place off. With t near -|x| log2(e), a multiple of 2^-14, it is 2^t exp(r) where
// r = -|x| - t ln(2) is so small that exp(r) = 1 + r. The hardware's 2^t knows no number below 2^-126, so it is
// 2^(t + 64), and the last product rounds once. Where |x| is so large that r means nothing, 2^(t + 64) is 0.
__device__ __forceinline__ float exp_minus_abs_on_device(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693147182464599609375f;
  constexpr float kLn2Low = -1.90465429995776804525e-9f;
  constexpr float kRound = 768.0f;  // 1.5 * 2^9: near it numbers are multiples of 2^-14
  constexpr float kShift = 64.0f;
  const float negative = -fabsf(x);
  const float shifted = fmaf(negative, kLog2e, kRound + kShift);
  const float t = shifted - (kRound + kShift);
  const float r = fmaf(t, -kLn2Low, fmaf(t, -kLn2High, negative));
  const float power = exp2_flushed(shifted - kRound);
  return fmaf(power, fminf(r, 1.0f), power) * 0x1p-64f;
}

// The same as 2^u exp(r) 2^u, u near -|x| log2(e) / 2: twice the hardware's error, and no shift.
__device__ __forceinline__ float exp_minus_abs_for_16_bits(float x) {
  constexpr float kHalfLog2e = 0.72134752044448170f;
  constexpr float kTwoLn2 = 1.38629436111989061f;
  const float negative = -fabsf(x);
  const float u = negative * kHalfLog2e;
  const float r = fmaf(u, -kTwoLn2, negative);
  const float power = exp2_flushed(u);
  return power * fmaf(power, fminf(r, 1.0f), power);
}

// log1p_of_unit with less of a polynomial, 2.2e-7 off.
__device__ __forceinline__ float log1p_of_unit_for_16_bits(float e) {
  float p = -0.008778962306678295f;
  p = fmaf(p, e, 0.04498666897416115f);
  p = fmaf(p, e, -0.10902294516563416f);
  p = fmaf(p, e, 0.178472101688385f);
  p = fmaf(p, e, -0.24536867439746857f);
  p = fmaf(p, e, 0.3328406512737274f);
  p = fmaf(p, e, -0.4999817907810211f);
  return fmaf(e * e, p, e);
}

// 1 / x for x from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_on_device(float x) {
  return reciprocal_flushed(x);
}

__device__ __forceinline__ double inverse_on_device(double x) {
  return 1.0 / x;
}

// Of values that come from scalar_t, and go there.
template <typename scalar_t>
__device__ __forceinline__ SoftplusSigmoid<acc_type<scalar_t>> softplus_and_sigmoid_on_device(acc_type<scalar_t> x) {
  using acc_t = acc_type<scalar_t>;
  acc_t e, log;
  if constexpr (sizeof(scalar_t) == 2) {
    e = exp_minus_abs_for_16_bits(x);
    log = log1p_of_unit_for_16_bits(e);
  } else if constexpr (sizeof(scalar_t) == 4) {
    e = exp_minus_abs_on_device(x);
    log = log1p_of_unit(e);
  } else {
    e = exp_minus_abs(x);
    log = log1p_of_unit(e);
  }
  return {positive_part(x) + log, sigmoid_numerator(x, e) * inverse_on_device(acc_t(1) + e)};
}

template <typename scalar_t>
__device__ __forceinline__ acc_type<scalar_t> softplus_on_device(acc_type<scalar_t> x) {
  return softplus_and_sigmoid_on_device<scalar_t>(x).softplus;
}

}  // namespace memcheck
