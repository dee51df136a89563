#include "common/half.h"

#include "common/cpu_level.h"

#if MEMCHECK_CPU_HAS_LEVELS
#include <immintrin.h>
#endif

namespace memcheck {
namespace {

#if MEMCHECK_CPU_HAS_LEVELS

constexpr int64_t kLanes = 8;

MEMCHECK_TARGET_AVX2 inline void convert_vector(const Half* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

MEMCHECK_TARGET_AVX2 inline void convert_vector(const float* from, Half* to) {
  const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

template <typename from_t, typename to_t>
MEMCHECK_TARGET_AVX2 void convert(const from_t* from, int64_t from_stride, int64_t rows, int64_t count, to_t* to,
                                  int64_t to_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const from_t* source = from + row * from_stride;
    to_t* target = to + row * to_stride;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) convert_vector(source + i, target + i);
    for (; i < count; ++i) target[i] = source[i];
  }
}

#else

template <typename from_t, typename to_t>
void convert(const from_t* from, int64_t from_stride, int64_t rows, int64_t count, to_t* to, int64_t to_stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < count; ++i) to[row * to_stride + i] = from[row * from_stride + i];
}

#endif

}  // namespace

void convert_lines(const Half* from, int64_t from_stride, int64_t rows, int64_t count, float* to, int64_t to_stride) {
  convert(from, from_stride, rows, count, to, to_stride);
}

void convert_lines(const float* from, int64_t from_stride, int64_t rows, int64_t count, Half* to, int64_t to_stride) {
  convert(from, from_stride, rows, count, to, to_stride);
}

void convert_line(const Half* from, int64_t count, float* to) {
  convert(from, count, 1, count, to, count);
}

void convert_line(const float* from, int64_t count, Half* to) {
  convert(from, count, 1, count, to, count);
}

}  // namespace memcheck
