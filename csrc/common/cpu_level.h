#pragma once

#include <string>
#include <vector>

#include "common/types.h"

// One binary runs on any x86-64 with AVX2 and chooses its vector instructions when it is first used. A loop that gains
// from wide vectors is written once, as an always-inline function template `name_body`. MEMCHECK_PER_CPU_LEVEL compiles
// it once per level, each time in a plain function with the level's attribute (a lambda would not be compiled at the
// level of the function around it, unless it is inlined), and defines `name`, which calls the one for this machine.
#if defined(__x86_64__) && defined(__GNUC__)
#define MEMCHECK_CPU_HAS_LEVELS 1
#define MEMCHECK_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MEMCHECK_AVX512_FEATURES "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#if defined(__clang__)
// clang uses the full width anyway, and does not know target("prefer-vector-width=").
#define MEMCHECK_TARGET_AVX512 __attribute__((target(MEMCHECK_AVX512_FEATURES)))
#else
// Without the last word gcc uses vectors of 256 bits.
#define MEMCHECK_TARGET_AVX512 __attribute__((target(MEMCHECK_AVX512_FEATURES ",prefer-vector-width=512")))
#endif
#else
#define MEMCHECK_CPU_HAS_LEVELS 0
#define MEMCHECK_TARGET_AVX2
#define MEMCHECK_TARGET_AVX512
#endif

namespace memcheck {

enum class CpuLevel { Default, Avx2, Avx512 };  // Default: of processors other than x86-64.

// The level that MEMCHECK_CPU=avx2|avx512 asks for, without it the highest of this machine. Chosen once. Throws
// std::invalid_argument on another value or a level that this machine lacks, std::runtime_error on an x86-64 without
// AVX2.
CpuLevel cpu_level();

const char* cpu_level_name(CpuLevel level);

bool processor_is_by_amd();

// The names of this machine's levels, lowest first.
std::vector<std::string> cpu_levels();

// Whether the processor multiplies numbers of the dtype, at the level above: bfloat16 by AVX512-BF16, float16
// by AVX512-FP16, and wider numbers always.
bool cpu_has_instructions(Dtype dtype);

// Whether the library forms products of matrices with so many rows in the dtype itself. Without instructions for
// products in 16 bits (AVX512-BF16, AVX512-FP16) they take far longer than those of float32 copies, except of a few
// rows. Levels below avx512 have none of these instructions. Processors other than x86-64 are not judged:
// always true.
bool cpu_multiplies(Dtype dtype, int64_t rows);

}  // namespace memcheck

// `type` is the template parameter of `name_body`, as the parameters spell it.
#define MEMCHECK_LEVEL_FUNCTION(type, name, level, attribute, parameters, arguments) \
  template <typename type>                                                           \
  attribute void name##_##level parameters {                                         \
    name##_body<type> arguments;                                                     \
  }

#if MEMCHECK_CPU_HAS_LEVELS
#define MEMCHECK_PER_CPU_LEVEL(type, name, parameters, arguments)                            \
  MEMCHECK_LEVEL_FUNCTION(type, name, avx2, MEMCHECK_TARGET_AVX2, parameters, arguments)     \
  MEMCHECK_LEVEL_FUNCTION(type, name, avx512, MEMCHECK_TARGET_AVX512, parameters, arguments) \
  template <typename type>                                                                   \
  void name parameters {                                                                     \
    if (cpu_level() == CpuLevel::Avx512) return name##_avx512<type> arguments;               \
    name##_avx2<type> arguments;                                                             \
  }
#else
#define MEMCHECK_PER_CPU_LEVEL(type, name, parameters, arguments) \
  template <typename type>                                        \
  void name parameters {                                          \
    name##_body<type> arguments;                                  \
  }
#endif
