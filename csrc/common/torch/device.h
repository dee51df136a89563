#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>

#include "common/kernel.h"

#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace memcheck {

// The stream on which kernels of a device are queued; null on the CPU.
inline cudaStream_t current_stream([[maybe_unused]] c10::Device device) {
#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

// Whether several threads may run kernels on this device at the same time: those of the CPU. In the build for
// tests/host_cuda the kernels of CUDA run on tensors of the CPU.
inline bool kernels_run_side_by_side(c10::Device device) {
#if defined(MEMCHECK_HOST_CUDA)
  return false;
#else
  return device.is_cpu();
#endif
}

// What kernels need to know of the device of a tensor, which is the current device while this lives.
struct DeviceScope {
  explicit DeviceScope(const at::Tensor& x)
      : guard(x.device()), threads(at::get_num_threads()), stream(current_stream(x.device())) {}

  c10::DeviceGuard guard;
  int64_t threads;  // of the CPU, among which its kernels share their tasks
  cudaStream_t stream;
};

}  // namespace memcheck
