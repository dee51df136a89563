#include "common/cpu_products.h"

#include "common/cpu_level.h"

#if MEMCHECK_CPU_HAS_LEVELS
#include <cpuid.h>
#endif

namespace memcheck {
namespace {

// __builtin_cpu_supports does not know the name of AVX512-FP16 in older compilers.
bool processor_has_instructions([[maybe_unused]] Dtype dtype) {
#if MEMCHECK_CPU_HAS_LEVELS
  constexpr unsigned kFeatures = 7;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (dtype == Dtype::BFloat16) return __get_cpuid_count(kFeatures, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
  return __get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) && (edx >> 23 & 1);
#else
  return false;
#endif
}

}  // namespace

bool cpu_has_instructions(Dtype dtype) {
  if (element_bytes(dtype) > 2) return true;
  static const bool bfloat16 = processor_has_instructions(Dtype::BFloat16);
  static const bool float16 = processor_has_instructions(Dtype::Float16);
  return cpu_level() >= CpuLevel::Avx512 && (dtype == Dtype::BFloat16 ? bfloat16 : float16);
}

bool cpu_multiplies(Dtype dtype, int64_t rows) {
  constexpr int64_t kFewRows = 4;
  return rows < kFewRows || !MEMCHECK_CPU_HAS_LEVELS || cpu_has_instructions(dtype);
}

}  // namespace memcheck
