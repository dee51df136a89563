#include <dlfcn.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "host_cuda/counters.h"

// Launches, the part of CUDA's library that kernel.cuh calls, and functions for tests.

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace host_cuda {

namespace {

Order thread_order = Order::Ascending;
uint64_t most_blocks = 0;
// Launches of a kernel, and the most threads and bytes of shared memory of a block.
struct Launches {
  int64_t count = 0;
  size_t threads = 0;
  size_t shared_bytes = 0;
};
std::map<std::pair<std::string, const void*>, Launches> launched;  // by kernel and function

void note_launch(const char* kernel, const void* function, size_t threads, size_t shared_bytes) {
  Launches& of = launched[{kernel, function}];
  of.count += 1;
  of.threads = std::max(of.threads, threads);
  of.shared_bytes = std::max(of.shared_bytes, shared_bytes);
}

// The GPU that the host stands for.
struct Gpu {
  int major = 8, minor = 0;
  size_t shared_bytes = size_t{163} << 10;
};
Gpu gpu;
cudaError_t last_error = cudaSuccess;

// The GPU's answer to a launch.
cudaError_t answer(dim3 grid, dim3 block, size_t shared_bytes) {
  if (gpu.major < 8) return cudaErrorNoKernelImageForDevice;
  if (shared_bytes > gpu.shared_bytes) return cudaErrorInvalidValue;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool fits =
      threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && grid.z <= 65535;
  return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

}  // namespace

void set_order(Order order) {
  thread_order = order;
}

void sample_blocks(uint64_t most) {
  most_blocks = most;
}

uint64_t sampled_blocks() {
  return most_blocks;
}

void stand_for(int major, int minor, size_t shared_bytes) {
  gpu = {major, minor, shared_bytes};
}

cudaError_t run(const char* kernel, const void* function, dim3 grid, dim3 block, size_t shared_bytes,
                const std::function<void()>& thread) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const cudaError_t refusal = answer(grid, block, shared_bytes);
  if (refusal != cudaSuccess) return last_error = refusal;
  const size_t threads = size_t{block.x} * block.y * block.z;
  note_launch(kernel, function, threads, shared_bytes);
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  gridDim = grid;
  blockDim = block;
  thread_body = &thread;
  failure = nullptr;
  try {
    const BlockLaunch launch{kernel, grid, block, shared_bytes, thread_order};
    const uint64_t runs = most_blocks == 0 ? blocks : std::min(most_blocks, blocks);
    count_launch(kernel, function, launch, runs);
    for (uint64_t i = 0; i < runs; ++i) {
      // One of each of `runs` equal ranges; i itself if all run. Its place in the range changes from range to range, by
      // the golden ratio, because blocks whose numbers differ by a power of two may be of one kind.
      const double place = std::fmod(0.5 + 0.6180339887498949 * static_cast<double>(i), 1.0);
      const auto number = static_cast<uint64_t>((static_cast<double>(i) + place) * blocks / runs);
      run_block(launch, thread_order == Order::Descending ? blocks - 1 - number : number);
    }
    count_launch_end();
  } catch (...) {
    // Fibers that stopped within a thread cannot be used again, nor deleted.
    for (auto& fiber : fibers) fiber.release();
    fibers.clear();
    throw;
  }
  return cudaSuccess;
}

}  // namespace host_cuda

extern "C" {

// ---- the part of CUDA's library that kernel.cuh calls

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(host_cuda::gpu.shared_bytes);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = host_cuda::gpu.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = host_cuda::gpu.minor;
      return cudaSuccess;
    default:
      return host_cuda::last_error = cudaErrorInvalidValue;
  }
}

cudaError_t cudaPeekAtLastError() {
  return host_cuda::last_error;
}

cudaError_t cudaGetLastError() {
  return std::exchange(host_cuda::last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    default:
      return "unknown error";
  }
}

// ---- for tests, which load this as a library

__attribute__((visibility("default"))) void host_cuda_stand_for(int major, int minor, int64_t shared_bytes) {
  host_cuda::stand_for(major, minor, static_cast<size_t>(shared_bytes));
}

// The last error that nobody has read yet, or 0.
__attribute__((visibility("default"))) int host_cuda_peek_at_last_error() {
  return cudaPeekAtLastError();
}

// 0 ascending, 1 descending, 2 shuffled.
__attribute__((visibility("default"))) void host_cuda_set_order(int order) {
  host_cuda::set_order(static_cast<host_cuda::Order>(order));
}

__attribute__((visibility("default"))) void host_cuda_sample_blocks(int64_t most) {
  host_cuda::sample_blocks(static_cast<uint64_t>(most));
}

__attribute__((visibility("default"))) void host_cuda_forget_launches() {
  host_cuda::launched.clear();
}

// A line for every kernel and function launched so far, with tabs between: its name, the address of the function in the
// library, the number of launches, the most threads of a block and the most bytes of shared memory. Valid until the
// next call.
__attribute__((visibility("default"))) const char* host_cuda_launches() {
  static std::string text;
  text.clear();
  for (const auto& [key, of] : host_cuda::launched) {
    Dl_info module = {};
    dladdr(key.second, &module);
    text += key.first + "\t" +
            std::to_string(static_cast<const char*>(key.second) - static_cast<const char*>(module.dli_fbase)) + "\t" +
            std::to_string(of.count) + "\t" + std::to_string(of.threads) + "\t" + std::to_string(of.shared_bytes) +
            "\n";
  }
  return text.c_str();
}
}
