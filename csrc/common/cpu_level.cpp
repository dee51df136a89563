#include "common/cpu_level.h"

#include <cstdlib>
#include <stdexcept>

#if MEMCHECK_CPU_HAS_LEVELS
#include <cpuid.h>
#endif

namespace memcheck {
namespace {

#if MEMCHECK_CPU_HAS_LEVELS
constexpr CpuLevel kLevels[] = {CpuLevel::Avx2, CpuLevel::Avx512};
#else
constexpr CpuLevel kLevels[] = {CpuLevel::Default};
#endif

CpuLevel find_machine_level() {
#if MEMCHECK_CPU_HAS_LEVELS
  __builtin_cpu_init();
  // f16c is not checked: older clangs do not know its name, and every processor with avx2 has it.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    throw std::runtime_error("memcheck's operators need AVX2 and FMA, which this processor lacks");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? CpuLevel::Avx512 : CpuLevel::Avx2;
#else
  return CpuLevel::Default;
#endif
}

CpuLevel machine_level() {
  static const CpuLevel level = find_machine_level();
  return level;
}

CpuLevel chosen_level() {
  const CpuLevel highest = machine_level();
  const char* value = std::getenv("MEMCHECK_CPU");
  if (value == nullptr) return highest;
  for (CpuLevel level : kLevels) {
    if (value != std::string(cpu_level_name(level))) continue;
    if (level <= highest) return level;
    throw std::invalid_argument("MEMCHECK_CPU=" + std::string(value) + " asks for more than this machine has (" +
                                cpu_level_name(highest) + ")");
  }
  std::string names;
  for (CpuLevel level : kLevels) names += (names.empty() ? "" : " or ") + std::string(cpu_level_name(level));
  throw std::invalid_argument("MEMCHECK_CPU must be " + names + ", got '" + std::string(value) + "'");
}

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

bool processor_is_by_amd() {
#if MEMCHECK_CPU_HAS_LEVELS
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

CpuLevel cpu_level() {
  static const CpuLevel level = chosen_level();
  return level;
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::Avx512:
      return "avx512";
    case CpuLevel::Avx2:
      return "avx2";
    case CpuLevel::Default:
      break;
  }
  return "default";
}

std::vector<std::string> cpu_levels() {
  std::vector<std::string> names;
  for (CpuLevel level : kLevels) {
    if (level <= machine_level()) names.emplace_back(cpu_level_name(level));
  }
  return names;
}

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
