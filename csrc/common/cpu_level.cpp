#include "common/cpu_level.h"

#include <cstdlib>
#include <stdexcept>

#if MEMCHECK_CPU_HAS_LEVELS
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace memcheck {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::Default, CpuLevel::Avx2, CpuLevel::Avx512, CpuLevel::Avx512Bf16,
                                CpuLevel::Amx};

#if MEMCHECK_CPU_HAS_PAIRS

// Linux gives a process the registers of AMX when it asks for them.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Of a processor with AVX-512.
CpuLevel level_of_pairs() {
  // __builtin_cpu_supports does not know these names in older compilers.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
  if (!bf16) return CpuLevel::Avx512;
  const bool amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1) && (edx >> 24 & 1);
  return amx && may_use_tiles() ? CpuLevel::Amx : CpuLevel::Avx512Bf16;
}

#endif

CpuLevel find_machine_level() {
#if MEMCHECK_CPU_HAS_LEVELS
  __builtin_cpu_init();
  // f16c is not checked: older clangs do not know its name, and every processor with avx2 has it.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuLevel::Default;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if MEMCHECK_CPU_HAS_PAIRS
  if (avx512) return level_of_pairs();
#endif
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
  if (value == nullptr) return highest == CpuLevel::Avx512Bf16 && !processor_is_by_amd() ? CpuLevel::Avx512 : highest;
  for (CpuLevel level : kLevels) {
    if (value != std::string(cpu_level_name(level))) continue;
    if (level <= highest) return level;
    throw std::invalid_argument("MEMCHECK_CPU=" + std::string(value) + " asks for more than this machine has (" +
                                cpu_level_name(highest) + ")");
  }
  throw std::invalid_argument("MEMCHECK_CPU must be default, avx2, avx512, avx512_bf16 or amx, got '" +
                              std::string(value) + "'");
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
    case CpuLevel::Amx:
      return "amx";
    case CpuLevel::Avx512Bf16:
      return "avx512_bf16";
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
