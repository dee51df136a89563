#include "common/cpu_level.h"

#include <cstdlib>
#include <stdexcept>

namespace memcheck {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::Default, CpuLevel::Avx2, CpuLevel::Avx512};

CpuLevel find_machine_level() {
#if MEMCHECK_CPU_HAS_LEVELS
  __builtin_cpu_init();
  // f16c is not checked: older clangs do not know its name, and every processor with avx2 has it.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuLevel::Default;
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
  throw std::invalid_argument("MEMCHECK_CPU must be default, avx2 or avx512, got '" + std::string(value) + "'");
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

}  // namespace memcheck
