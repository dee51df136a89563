#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>

#include "common/types.h"

#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace memcheck {

// Whether the GPUs of this process are simulated. Their memory has addresses and no bytes, and CUDA is not called.
bool is_simulated();
// Stands for the launch of a kernel on a simulated GPU, the current device. Throws if that is too old for kernels.
void launch_on_simulated_gpu();
// What is known of the tensor's numbers on a simulated GPU holds no longer, because a kernel writes them.
void forget_on_simulated_gpu(const at::Tensor& x);

// The stream on which kernels of a device are queued; null on the CPU and on a simulated GPU.
inline cudaStream_t current_stream([[maybe_unused]] c10::Device device) {
#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
  if (device.is_cuda() && !is_simulated()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

// Whether kernels of CUDA run on tensors of this device. In the build for host_cuda/ they run on those of the CPU.
inline bool has_cuda_kernels([[maybe_unused]] c10::Device device) {
#if defined(MEMCHECK_HOST_CUDA)
  return true;
#elif defined(MEMCHECK_WITH_CUDA)
  return device.is_cuda() && !is_simulated();
#else
  return false;
#endif
}

// Whether the values of an argument on this device are checked: always on the CPU, and on a GPU, for which the host
// then waits, if the environment has MEMCHECK_CHECK=1. Raises in a stream that is captured for a CUDA graph.
bool checks_values(c10::Device device);

// What kernels need to know of the device of a tensor, which is the current device while this lives.
struct DeviceScope {
  explicit DeviceScope(const at::Tensor& x)
      : guard(x.device()), threads(at::get_num_threads()), stream(current_stream(x.device())) {}

  c10::DeviceGuard guard;
  int64_t threads;  // of the CPU, among which its kernels share their tasks
  cudaStream_t stream;
};

}  // namespace memcheck
