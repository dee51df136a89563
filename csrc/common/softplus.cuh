#pragma once

#include "common/ptx.cuh"
#include "common/softplus.h"

// softplus and sigmoid as CUDA kernels compute them: the formulas of softplus.h, around an exponential and a division
// that lean on the hardware's. In float64 they are those of the host.

namespace memcheck {

// exp(-|x|), 3 units in the last place off. With t near -|x| log2(e), a multiple of 2^-14, it is 2^t exp(r) where
// r = -|x| - t ln(2) is so small that exp(r) = 1 + r. The hardware's 2^t knows no number below 2^-126, so it is 2^(t +
// 64), and the last product rounds once. Where |x| is so large that r means nothing, 2^(t + 64) is 0.
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

__device__ __forceinline__ double exp_minus_abs_on_device(double x) {
  return exp_minus_abs(x);
}

// 1 / x for x from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_on_device(float x) {
  return reciprocal_flushed(x);
}

__device__ __forceinline__ double inverse_on_device(double x) {
  return 1.0 / x;
}

template <typename acc_t>
__device__ __forceinline__ acc_t softplus_on_device(acc_t x) {
  return softplus_from(x, exp_minus_abs_on_device(x));
}

template <typename acc_t>
__device__ __forceinline__ SoftplusSigmoid<acc_t> softplus_and_sigmoid_on_device(acc_t x) {
  const acc_t e = exp_minus_abs_on_device(x);
  return {softplus_from(x, e), sigmoid_numerator(x, e) * inverse_on_device(acc_t(1) + e)};
}

}  // namespace memcheck
