#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/macros.h"

// softplus(x) = log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), whose derivative is sigmoid(x). Both come from one
// exponential. The float functions are straight-line arithmetic, so that a loop over them vectorises; NaN goes through,
// and no argument overflows. CUDA has its own exponential and division (softplus.cuh), and the rest from here.

namespace memcheck {

template <typename acc_t>
struct SoftplusSigmoid {
  acc_t softplus;
  acc_t sigmoid;
};

// exp(-|x|). exp(r) on |r| <= ln(2)/2 is a minimax polynomial, 3.2e-9 off; 2^n is applied as 2^(n + 64) 2^-64,
// so that results below 2^-126 are rounded once, to the right subnormal number.
MEMCHECK_INLINE float exp_minus_abs(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693145751953125f;  // 16 bits: n * kLn2High is exact
  constexpr float kLn2Low = 1.42860682030941723212e-6f;
  // 1.5 * 2^23: adding it rounds to an integer, which sits in the low bits; there with what makes it an exponent.
  constexpr float kRound = 12582912.0f + (127 + 64);
  constexpr float kLowest = -104.0f;  // exp(-104) is less than half the smallest float
  const float negative = -std::fabs(x);
  const float clamped = negative < kLowest ? kLowest : negative;
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  const float r2 = r * r;
  const float high = 0.041668348014354706f + r * 0.00836850330233574f + r2 * 0.001381568843498826f;
  const float low = 0.4999999403953552f + r * 0.1666652262210846f;
  const float less_one = r + r2 * (low + r2 * high);  // exp(r) - 1
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits <<= 23;  // the exponent of 2^(n + 64); what kRound had in the upper bits is shifted out
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return (less_one * power + power) * 0x1p-64f;
}

MEMCHECK_INLINE double exp_minus_abs(double x) {
  return std::exp(-std::fabs(x));
}

// log(1 + e) for 0 <= e <= 1: e times a minimax polynomial, 4.7e-9 off.
MEMCHECK_INLINE float log1p_of_unit(float e) {
  const float e2 = e * e;
  const float e4 = e2 * e2;
  const float p12 = -0.4999990165233612f + 0.3332996368408203f * e;
  const float p34 = -0.24954134225845337f + 0.1967594027519226f * e;
  const float p56 = -0.15305593609809875f + 0.10603656619787216f * e;
  const float p78 = -0.056959547102451324f + 0.01985146850347519f * e;
  const float high = (p56 + e2 * p78) - e4 * 0.0032440260984003544f;
  return e + e2 * ((p12 + e2 * p34) + e4 * high);
}

MEMCHECK_INLINE double log1p_of_unit(double e) {
  return std::log1p(e);
}

// What softplus and sigmoid are made of. NaN comes through e.
template <typename acc_t>
MEMCHECK_INLINE acc_t positive_part(acc_t x) {
  return x > acc_t(0) ? x : acc_t(0);
}

template <typename acc_t>
MEMCHECK_INLINE acc_t sigmoid_numerator(acc_t x, acc_t e) {
  return x < acc_t(0) ? e : acc_t(1);
}

template <typename acc_t>
MEMCHECK_INLINE acc_t softplus(acc_t x) {
  return positive_part(x) + log1p_of_unit(exp_minus_abs(x));
}

template <typename acc_t>
MEMCHECK_INLINE SoftplusSigmoid<acc_t> softplus_and_sigmoid(acc_t x) {
  const acc_t e = exp_minus_abs(x);
  return {positive_part(x) + log1p_of_unit(e), sigmoid_numerator(x, e) / (acc_t(1) + e)};
}

}  // namespace memcheck
