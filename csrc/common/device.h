#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace memcheck {

// The one place that chooses a kernel by device.
template <typename RunCpu>
void run_on(const char* op, c10::Device device, const RunCpu& run_cpu) {
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), op, ": there is no kernel for ", device.type(), " yet, got tensors on ",
                              device, "; move them to the CPU");
  run_cpu();
}

}  // namespace memcheck
