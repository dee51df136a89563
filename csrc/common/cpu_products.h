#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace memcheck {

// Whether the processor multiplies numbers of the dtype, at the level of cpu_level.h: bfloat16 by AVX512-BF16, float16
// by AVX512-FP16, and wider numbers always.
bool cpu_has_instructions(Dtype dtype);

// Whether the library forms products of matrices with so many rows in the dtype itself. Without instructions for
// products in 16 bits (AVX512-BF16, AVX512-FP16) they take far longer than those of float32 copies, except of a few
// rows. Levels below avx512 (cpu_level.h) have none of these instructions. Processors other than x86-64 are not judged:
// always true.
bool cpu_multiplies(Dtype dtype, int64_t rows);

}  // namespace memcheck
