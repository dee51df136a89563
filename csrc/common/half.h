#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/types.h"

// The 16-bit types of the CPU. Kernels store them and compute in float: only conversions are defined, which round to
// the nearest number, and to the even one of two. They give the bits of torch's c10::Half and c10::BFloat16.

namespace memcheck {

MEMCHECK_INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

MEMCHECK_INLINE float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

#if defined(__aarch64__)

MEMCHECK_INLINE float half_to_float(uint16_t bits) {
  __fp16 x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

MEMCHECK_INLINE uint16_t half_from_float(float value) {
  const __fp16 x = static_cast<__fp16>(value);
  uint16_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

#else

// Without a branch, so that a loop over it becomes vector instructions: the number as a normal one and as a subnormal
// one, of which one is taken.
MEMCHECK_INLINE float half_to_float(uint16_t bits) {
  const uint32_t high = static_cast<uint32_t>(bits) << 16;
  const uint32_t sign = high & 0x80000000u;
  const uint32_t unsigned_high = high + high;
  // The exponent is raised by 0xE0, so that infinity and NaN stay what they are, and lowered by 2^-112 again.
  const float normal = float_of_bits((unsigned_high >> 4) + (0xE0u << 23)) * 0x1p-112f;
  // The mantissa below 0.5: 0.5 + mantissa 2^-24.
  const float subnormal = float_of_bits((unsigned_high >> 17) | (126u << 23)) - 0.5f;
  const bool is_subnormal = unsigned_high < (1u << 27);
  return float_of_bits(sign | (is_subnormal ? bits_of_float(subnormal) : bits_of_float(normal)));
}

// Adding a power of two that has the exponent of the last bit to be kept makes the processor round. Numbers that are
// too large become infinite in the first product.
MEMCHECK_INLINE uint16_t half_from_float(float value) {
  float base = (std::fabs(value) * 0x1p+112f) * 0x1p-110f;
  const uint32_t bits = bits_of_float(value);
  const uint32_t unsigned_bits = bits + bits;
  const uint32_t sign = bits & 0x80000000u;
  uint32_t exponent = unsigned_bits & 0xFF000000u;
  if (exponent < 0x71000000u) exponent = 0x71000000u;
  base = float_of_bits((exponent >> 1) + 0x07800000u) + base;
  const uint32_t rounded = bits_of_float(base);
  const uint32_t magnitude = ((rounded >> 13) & 0x00007C00u) + (rounded & 0x00000FFFu);
  const bool is_nan = unsigned_bits > 0xFF000000u;
  return static_cast<uint16_t>((sign >> 16) | (is_nan ? 0x7E00u : magnitude));
}

#endif

struct Half {
  uint16_t bits;

  Half() = default;
  MEMCHECK_INLINE Half(float value) : bits(half_from_float(value)) {}
  MEMCHECK_INLINE operator float() const { return half_to_float(bits); }
};

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  MEMCHECK_INLINE BFloat16(float value) : bits(rounded(value)) {}
  MEMCHECK_INLINE operator float() const { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

 private:
  MEMCHECK_INLINE static uint16_t rounded(float value) {
    if (std::isnan(value)) return 0x7FC0;
    const uint32_t wide = bits_of_float(value);
    return static_cast<uint16_t>((wide + (((wide >> 16) & 1) + 0x7FFFu)) >> 16);
  }
};

// to[i] = from[i], by the processor's instructions for float16 where it has them. They keep what a NaN carries.
void convert_line(const Half* from, int64_t count, float* to);
void convert_line(const float* from, int64_t count, Half* to);

// The same of rows of `count` numbers.
void convert_lines(const Half* from, int64_t from_stride, int64_t rows, int64_t count, float* to, int64_t to_stride);
void convert_lines(const float* from, int64_t from_stride, int64_t rows, int64_t count, Half* to, int64_t to_stride);

// run(scalar_t{}) for the C++ type of a dtype.
template <typename Run>
auto with_scalar_type(Dtype dtype, const Run& run) {
  return with_type<Half, BFloat16>(dtype, run);
}

}  // namespace memcheck
