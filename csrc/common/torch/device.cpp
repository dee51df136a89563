#include "common/torch/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace memcheck {

// What simulates GPUs is a library that is loaded before torch and exports these functions.

bool is_simulated() {
  static const auto gpus = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "memcheck_is_simulated"));
  return gpus != nullptr && gpus() > 0;
}

void launch_on_simulated_gpu() {
  using Properties = void(int device, int* major, int* minor, int* multiprocessors, int64_t* shared_bytes);
  static const auto ask = reinterpret_cast<Properties*>(dlsym(RTLD_DEFAULT, "memcheck_simulated_properties"));
  int major = 0, minor = 0, multiprocessors = 0;
  int64_t shared_bytes = 0;
  ask(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index(), &major, &minor, &multiprocessors, &shared_bytes);
  if (major < 8)
    throw std::runtime_error("memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got " +
                             std::to_string(major) + "." + std::to_string(minor));
}

void forget_on_simulated_gpu(const at::Tensor& x) {
  if (!is_simulated() || !x.is_cuda()) return;
  static const auto written =
      reinterpret_cast<void (*)(const c10::StorageImpl*)>(dlsym(RTLD_DEFAULT, "memcheck_simulated_written"));
  written(x.storage().unsafeGetStorageImpl());
}

bool checks_values(c10::Device device) {
  if (!has_cuda_kernels(device)) return device.is_cpu();
  const char* const check = std::getenv("MEMCHECK_CHECK");
  if (check == nullptr || std::string_view(check) != "1") return false;
#if defined(MEMCHECK_WITH_CUDA) && !defined(MEMCHECK_HOST_CUDA)
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(current_stream(device), &capture));
  TORCH_CHECK(capture == cudaStreamCaptureStatusNone,
              "memcheck: MEMCHECK_CHECK=1 waits for values on the GPU, which a CUDA graph does not have while it is "
              "captured; capture it without MEMCHECK_CHECK=1");
#endif
  return true;
}

}  // namespace memcheck
