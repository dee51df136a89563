#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>

#include <cstdint>

#include "common/stream.h"

#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

// Where an operator runs. Its glue is written once, for a Device made from one of its tensors, which plans its memory
// and runs its kernels: one type per device, derived from one of these.

namespace memcheck {

struct OnCpu {
  explicit OnCpu(const at::Tensor&) : threads(at::get_num_threads()) {}

  int64_t threads;
};

#if defined(MEMCHECK_HOST_CUDA)

// CUDA kernels that run on the host (host_cuda/), on tensors of the CPU.
#define MEMCHECK_CUDA_KEY CPU

struct OnCuda {
  explicit OnCuda(const at::Tensor&) {}

  cudaStream_t stream = nullptr;
};

#else
#define MEMCHECK_CUDA_KEY CUDA
#endif

#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)

// The tensor's device is the current one as long as this lives; kernels are queued on its current stream.
struct OnCuda {
  explicit OnCuda(const at::Tensor& x) : guard(x.device()), stream(c10::cuda::getCurrentCUDAStream().stream()) {}

  c10::cuda::CUDAGuard guard;
  cudaStream_t stream;
};

#endif

}  // namespace memcheck
