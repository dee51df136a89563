#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/types.h"

// The formulas of the operators, for CPU kernels, CUDA kernels and the host: every formula once, its derivative under
// it. A formula is arithmetic on a few numbers (float or double) without a branch, so that a loop over it becomes
// vector instructions. NaN passes through, and no argument overflows.
//
// Each device has its own fastest exponential, logarithm and division. A formula that needs one takes it from the class
// Maths, whose functions are static: CpuMaths below, CUDA's in common/formulas.cuh.
//
//     exp_minus_abs(x)      exp(-|x|)
//     exp_not_positive(x)   exp(x) for x <= 0
//     log1p_of_unit(e)      log(1 + e) for 0 <= e <= 1
//     divide(a, b)          a / b

namespace memcheck {

// ---- exponential and logarithm

constexpr float kLog2e = 1.44269504088896341f;

// exp(-|x|) = 2^n exp(r) with an integer n and |r| <= ln(2)/2. The low bits of `shifted` are n + 127 + 64.
struct ReducedExponent {
  float r, shifted;
};

MEMCHECK_INLINE ReducedExponent reduce_minus_abs(float x) {
  constexpr float kLn2High = 0.693145751953125f;  // 16 bits: n * kLn2High is exact
  constexpr float kLn2Low = 1.42860682030941723212e-6f;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. 127 + 64 makes it the exponent of 2^(n + 64).
  constexpr float kRound = 12582912.0f + (127 + 64);
  constexpr float kLowest = -104.0f;  // exp(-104) is less than half of the smallest float
  const float negative = -std::fabs(x);
  const float clamped = negative < kLowest ? kLowest : negative;
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  return {(clamped - n * kLn2High) - n * kLn2Low, shifted};
}

// 2^n (1 + less_one). 2^n is applied as 2^(n + 64) 2^-64, so that a result below 2^-126 is rounded once, to the right
// subnormal number.
MEMCHECK_INLINE float times_power_of_two(float less_one, float shifted) {
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits <<= 23;  // the exponent of 2^(n + 64); the upper bits are shifted out
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return (less_one * power + power) * 0x1p-64f;
}

// exp(r) is a minimax polynomial with an error of 3.2e-9.
MEMCHECK_INLINE float exp_minus_abs(float x) {
  const ReducedExponent reduced = reduce_minus_abs(x);
  const float r = reduced.r;
  const float r2 = r * r;
  const float high = 0.041668348014354706f + r * 0.00836850330233574f + r2 * 0.001381568843498826f;
  const float low = 0.4999999403953552f + r * 0.1666652262210846f;
  return times_power_of_two(r + r2 * (low + r2 * high), reduced.shifted);
}

MEMCHECK_INLINE double exp_minus_abs(double x) {
  return std::exp(-std::fabs(x));
}

// log(1 + e) for 0 <= e <= 1: e times a minimax polynomial, with an error of 4.7e-9.
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

struct CpuMaths {
  template <typename acc_t>
  MEMCHECK_INLINE static acc_t exp_minus_abs(acc_t x) {
    return memcheck::exp_minus_abs(x);
  }
  template <typename acc_t>
  MEMCHECK_INLINE static acc_t exp_not_positive(acc_t x) {
    return memcheck::exp_minus_abs(x);
  }
  template <typename acc_t>
  MEMCHECK_INLINE static acc_t log1p_of_unit(acc_t e) {
    return memcheck::log1p_of_unit(e);
  }
  template <typename acc_t>
  MEMCHECK_INLINE static acc_t divide(acc_t a, acc_t b) {
    return a / b;
  }
};

// For values that are read and stored in 16 bits: shorter polynomials. The errors of softplus and its derivative are
// below 5e-7, which is small beside the rounding of the values, 2^-9 or 2^-12.
struct CpuMathsFor16Bits : CpuMaths {
  // The polynomial has an error of 1.1e-7.
  MEMCHECK_INLINE static float exp_minus_abs(float x) {
    const ReducedExponent reduced = reduce_minus_abs(x);
    const float r = reduced.r;
    const float r2 = r * r;
    const float high = 0.041890330612659454f + r * 0.008312501944601536f;
    const float low = 0.499992311000824f + r * 0.16667115688323975f;
    return times_power_of_two(r + r2 * (low + r2 * high), reduced.shifted);
  }
  // The polynomial has an error of 2.2e-7.
  MEMCHECK_INLINE static float log1p_of_unit(float e) {
    const float e2 = e * e;
    const float p12 = -0.4999817907810211f + 0.3328406512737274f * e;
    const float p34 = -0.24536867439746857f + 0.178472101688385f * e;
    const float p56 = -0.10902294516563416f + 0.04498666897416115f * e;
    const float high = p56 - e2 * 0.008778962306678295f;
    return e + e2 * ((p12 + e2 * p34) + (e2 * e2) * high);
  }
};

// ---- the feature map of linear attention, phi(x) = elu(x) + 1: x + 1 for x > 0, else exp(x)

// exp_x is exp(x) for x <= 0, and anything for x > 0, where it is not used. exp(-|x|) will do.
template <typename acc_t>
MEMCHECK_INLINE acc_t elu_plus_one(acc_t x, acc_t exp_x) {
  return x > acc_t(0) ? x + acc_t(1) : exp_x;
}

// phi'(x): 1 for x > 0, else exp(x).
template <typename acc_t>
MEMCHECK_INLINE acc_t elu_plus_one_derivative(acc_t x, acc_t exp_x) {
  return x > acc_t(0) ? acc_t(1) : exp_x;
}

// phi'(x) from phi(x), for a kernel that has kept phi(x) and not x: phi(x) > 1 where x > 0. Where x + 1 rounds to 1,
// phi(x) is 1, and so is the derivative.
template <typename acc_t>
MEMCHECK_INLINE acc_t elu_plus_one_derivative_of_value(acc_t phi) {
  return phi > acc_t(1) ? acc_t(1) : phi;
}

// ---- softplus(x) = log(1 + exp(x)) = max(x, 0) + log(1 + e) and its derivative sigmoid(x) = 1 / (1 + exp(-x)), both
// from one exponential e = exp(-|x|)

template <typename acc_t>
struct SoftplusSigmoid {
  acc_t softplus;
  acc_t sigmoid;
};

// max(x, 0). NaN becomes 0 here, and comes back through e.
template <typename acc_t>
MEMCHECK_INLINE acc_t positive_part(acc_t x) {
  return x > acc_t(0) ? x : acc_t(0);
}

// sigmoid(x) (1 + e)
template <typename acc_t>
MEMCHECK_INLINE acc_t sigmoid_numerator(acc_t x, acc_t e) {
  return x < acc_t(0) ? e : acc_t(1);
}

template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE acc_t softplus_from_exponential(acc_t x, acc_t e) {
  return positive_part(x) + Maths::log1p_of_unit(e);
}

template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE SoftplusSigmoid<acc_t> softplus_and_sigmoid_from_exponential(acc_t x, acc_t e) {
  return {softplus_from_exponential<Maths>(x, e), Maths::divide(sigmoid_numerator(x, e), acc_t(1) + e)};
}

template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE acc_t softplus(acc_t x) {
  return softplus_from_exponential<Maths>(x, Maths::exp_minus_abs(x));
}

template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE SoftplusSigmoid<acc_t> softplus_and_sigmoid(acc_t x) {
  return softplus_and_sigmoid_from_exponential<Maths>(x, Maths::exp_minus_abs(x));
}

// exp(-|x|) of many numbers. The rest of softplus follows in a loop of its own: it and the exponential are chains of
// operations that each wait for the one before, and a processor works on more numbers at once where chains are short.
template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE void exponentials_minus_abs(const acc_t* __restrict x, int64_t count, acc_t* __restrict e) {
  for (int64_t i = 0; i < count; ++i) e[i] = Maths::exp_minus_abs(x[i]);
}

// ---- the combinator, y = softplus(a) b

// grad_a = g b sigmoid(a) and grad_b = g softplus(a), where g is the gradient of y.
template <typename acc_t>
struct CombinatorGradients {
  acc_t grad_a, grad_b;
};

template <typename acc_t>
MEMCHECK_INLINE CombinatorGradients<acc_t> combinator_gradients(acc_t g, SoftplusSigmoid<acc_t> a, acc_t b) {
  return {g * b * a.sigmoid, g * a.softplus};
}

// ---- softplus attention, y = softplus(q) A / (Z + eps)
//
// Z = sum of softplus(k) and A = sum of softplus(k) v over the keys that the query sees; m = A / (Z + eps).

// With the sums of this query alone: one division an element, and one rounding fewer than with m.
template <typename acc_t>
MEMCHECK_INLINE acc_t softplus_attention_from_sums(acc_t softplus_q, acc_t a, acc_t z, acc_t eps) {
  return softplus_q * a / (z + eps);
}

// With m, where many queries share it, or where a division costs more than it does on the CPU (CUDA).
template <typename acc_t>
MEMCHECK_INLINE acc_t softplus_attention_from_mean(acc_t softplus_q, acc_t m) {
  return softplus_q * m;
}

// grad_q = g m sigmoid(q), and the gradients of the sums, w of A and -w m of Z, where g is the gradient of y and
// inverse = 1 / (Z + eps).
template <typename acc_t>
struct SoftplusQueryGradients {
  acc_t grad_q, w, wm;
};

template <typename acc_t>
MEMCHECK_INLINE SoftplusQueryGradients<acc_t> softplus_query_gradients(acc_t g, SoftplusSigmoid<acc_t> q, acc_t inverse,
                                                                       acc_t m) {
  const acc_t w = g * q.softplus * inverse;
  return {g * m * q.sigmoid, w, w * m};
}

// With W and X the sums of w and w m over the queries that see the key:
// grad_k = sigmoid(k) (v W - X) and grad_v = softplus(k) W.
template <typename acc_t>
struct SoftplusKeyGradients {
  acc_t grad_k, grad_v;
};

template <typename acc_t>
MEMCHECK_INLINE SoftplusKeyGradients<acc_t> softplus_key_gradients(SoftplusSigmoid<acc_t> k, acc_t v, acc_t w_sum,
                                                                   acc_t wm_sum) {
  return {k.sigmoid * (v * w_sum - wm_sum), k.softplus * w_sum};
}

// ---- softmax, tile by tile (online)
//
//     p_j = exp(s_j - lse)     lse = log(sum over j of exp(s_j))     y = sum over j of p_j v_j
//
// The scores s_j come in tiles. A row keeps the maximum of its scores so far, and sums of exp(s_j - maximum). A tile
// with a higher maximum first makes the earlier sums relative to the new one:
//
//     sum = sum exp(old maximum - maximum) + (sum over the tile of exp(s_j - maximum))

template <typename acc_t>
MEMCHECK_INLINE constexpr acc_t minus_infinity() {
  return -std::numeric_limits<acc_t>::infinity();
}

// What is subtracted from scores before the exponential: their maximum, or 0 where that is -inf, because
// exp(-inf - -inf) is NaN. Of an lse the same.
template <typename acc_t>
MEMCHECK_INLINE acc_t softmax_shift(acc_t max) {
  return max == minus_infinity<acc_t>() ? acc_t(0) : max;
}

// exp(score - shift). Of earlier sums, that are relative to `score`, it is the factor that makes them relative to the
// maximum behind `shift`.
template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE acc_t softmax_weight(acc_t score, acc_t shift) {
  return Maths::exp_not_positive(score - shift);
}

// The same of a sink, which may be infinite, and then has all the weight.
template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE acc_t sink_weight(acc_t sink, acc_t shift) {
  return sink == shift ? acc_t(1) : softmax_weight<Maths>(sink, shift);
}

// In a gradient: that of an infinite sink is 0.
template <typename Maths = CpuMaths, typename acc_t>
MEMCHECK_INLINE acc_t sink_gradient_weight(acc_t sink, acc_t lse) {
  return lse == -minus_infinity<acc_t>() ? acc_t(0) : softmax_weight<Maths>(sink, softmax_shift(lse));
}

// The sum of both, where `rescale` makes the earlier sum relative to the maximum of `added`. The same for a sum of
// weights and for one of weighted values.
template <typename acc_t>
MEMCHECK_INLINE acc_t softmax_sum(acc_t sum, acc_t rescale, acc_t added) {
  return sum * rescale + added;
}

// weight x, and 0 for a weight of 0, whatever x is: where a query does not see a key, x may be NaN or infinite.
template <typename acc_t>
MEMCHECK_INLINE acc_t weighted(acc_t weight, acc_t x) {
  return weight == acc_t(0) ? acc_t(0) : weight * x;
}

// The gradient of score j: p_j (dp_j - delta) with dp_j = grad_y . v_j and delta = grad_y . y, which is the sum of
// p_j dp_j over j.
template <typename acc_t>
MEMCHECK_INLINE acc_t softmax_gradient(acc_t p, acc_t dp, acc_t delta) {
  return weighted(p, dp - delta);
}

}  // namespace memcheck
