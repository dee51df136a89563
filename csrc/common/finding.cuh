#pragma once

#include "common/finding.h"
#include "common/kernel.cuh"

namespace memcheck {

// Writes a finding where the host reads it: the rule last. Of several threads that find something, one is read.
__device__ __forceinline__ void report_finding(Finding finding, Finding* slot) {
  const Rule rule = finding.rule;
  finding.rule = Rule::None;
  *slot = finding;
#if !defined(MEMCHECK_HOST_CUDA)
  __threadfence_system();
#endif
  *const_cast<volatile Rule*>(&slot->rule) = rule;
}

}  // namespace memcheck
