#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/types.h"

// What every CUDA kernel uses: launches, shared memory and number types. The kernels' files are also compiled for the
// host, with the stand-in for the CUDA language in tests/host_cuda. So kernels use launch and shared, not <<<>>> and
// extern __shared__. A thread returns early only where no barrier and no exchange between threads is left for it.

namespace memcheck {

struct Launch {
  const char* kernel;  // its name in errors
  int64_t blocks;      // along the grid's x: y and z end at 65,535
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// ---- the GPU

// The shared memory that a block may have on every GPU of compute capability 8.0 or later. 8.6, 8.9 and 12.0 allow no
// more.
constexpr size_t kSharedBytesEverywhere = 99 << 10;

// An attribute of the current GPU, or 0 if CUDA returns an error.
inline int gpu_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// Whether a block may have that much shared memory on the current GPU.
inline bool fits_in_a_block(size_t shared_bytes) {
  return shared_bytes <= kSharedBytesEverywhere ||
         shared_bytes <= static_cast<size_t>(gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// Kernels that run float32 on tensor cores, in three parts, are built by request: no GPU has run them yet.
#if defined(MEMCHECK_FLOAT32_TENSOR_CORES)
constexpr bool kFloat32OnTensorCores = true;
#else
constexpr bool kFloat32OnTensorCores = false;
#endif

// Whether they are asked for: if MEMCHECK_FLOAT32_TENSOR_CORES is 1.
inline bool float32_runs_on_tensor_cores() {
  const char* asked = std::getenv("MEMCHECK_FLOAT32_TENSOR_CORES");
  if (asked == nullptr || std::strcmp(asked, "1") != 0) return false;
  if (!kFloat32OnTensorCores)
    throw std::runtime_error(
        "MEMCHECK_FLOAT32_TENSOR_CORES=1 needs kernels that this build lacks; build memcheck with it, too");
  return true;
}

// ---- launches

constexpr int64_t kMostBlocks = 0x7FFFFFFF;

inline dim3 grid_of(const Launch& with) {
  return dim3(static_cast<unsigned>(with.blocks));
}

#if defined(MEMCHECK_HOST_CUDA)

// The last parameter of a function that can fail on the host: the line of the call.
#define MEMCHECK_CALLER , [[maybe_unused]] host_cuda::Where caller = host_cuda::Where::here()

template <typename... Params, typename... Args>
cudaError_t queue(const Launch& with, void (*kernel)(Params...), const Args&... args) {
  const auto thread = [&] { kernel(args...); };
  // By reference: std::function would copy it to memory that counters take for the GPU's.
  return host_cuda::run(with.kernel, reinterpret_cast<const void*>(kernel), grid_of(with), with.block,
                        with.shared_bytes, std::ref(thread));
}

template <typename Shared>
Shared& shared() {
  return *static_cast<Shared*>(host_cuda::shared_memory(sizeof(Shared), alignof(Shared)));
}

#else

#define MEMCHECK_CALLER

template <typename... Params, typename... Args>
cudaError_t queue(const Launch& with, void (*kernel)(Params...), const Args&... args) {
  constexpr size_t kUnasked = 48 << 10;
  if (with.shared_bytes > kUnasked) {
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(with.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid_of(with);
  config.blockDim = with.block;
  config.dynamicSmemBytes = with.shared_bytes;
  config.stream = with.stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// The block's shared memory. The launch must ask for sizeof(Shared) bytes or more.
template <typename Shared>
__device__ __forceinline__ Shared& shared() {
  extern __shared__ __align__(512) unsigned char shared_bytes_of_the_launch[];
  return *reinterpret_cast<Shared*>(shared_bytes_of_the_launch);
}

#endif

// One line that says why a launch failed.
inline std::string launch_failure(const Launch& with, cudaError_t status) {
  const int major = gpu_attribute(cudaDevAttrComputeCapabilityMajor);
  if (major > 0 && major < 8)
    return std::string(with.kernel) + ": memcheck's CUDA kernels need a GPU of compute capability 8.0 or later, got " +
           std::to_string(major) + "." + std::to_string(gpu_attribute(cudaDevAttrComputeCapabilityMinor));
  return std::string(with.kernel) + ": CUDA could not launch the kernel: " + cudaGetErrorString(status) + "; " +
         std::to_string(with.blocks) + " blocks of " + std::to_string(with.block.x * with.block.y * with.block.z) +
         " threads, " + std::to_string(with.shared_bytes) +
         " bytes of shared memory for a block, of which this GPU gives " +
         std::to_string(gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) + " at most";
}

// Throws for a failed launch. CUDA keeps the error until it is read, and torch's next check would report it again; so
// it is read here.
inline void check_launch(const Launch& with, cudaError_t status) {
  if (status == cudaSuccess) return;
  const std::string failure = launch_failure(with, status);
  cudaGetLastError();
  throw std::runtime_error(failure);
}

// Queues the kernel on the stream, or does nothing if there are no blocks. Throws if CUDA refuses the launch.
template <typename... Params, typename... Args>
void launch(const Launch& with, void (*kernel)(Params...), const Args&... args) {
  if (with.blocks == 0) return;
  if (with.blocks > kMostBlocks)
    throw std::runtime_error(std::string(with.kernel) + ": CUDA launches at most " + std::to_string(kMostBlocks) +
                             " blocks, and this call needs " + std::to_string(with.blocks));
  check_launch(with, queue(with, kernel, args...));
}

// ---- loops over registers

// Calls run(i, j, ...) for all indices below the counts, the last one fastest: unrolled, as registers have no
// addresses.
template <int kCount, int... kInner, typename Run, typename... Outer>
__device__ __forceinline__ void unroll(const Run& run, Outer... outer) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof...(kInner) == 0)
      run(outer..., i);
    else
      unroll<kInner...>(run, outer..., i);
  }
}

// ---- number types

MEMCHECK_INLINE double to_acc(double x) {
  return x;
}
MEMCHECK_INLINE float to_acc(float x) {
  return x;
}
MEMCHECK_INLINE float to_acc(__half x) {
  return __half2float(x);
}
MEMCHECK_INLINE float to_acc(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename scalar_t>
MEMCHECK_INLINE scalar_t from_acc(acc_type<scalar_t> x) {
  return x;
}
template <>
MEMCHECK_INLINE __half from_acc<__half>(float x) {
  return __float2half_rn(x);
}
template <>
MEMCHECK_INLINE __nv_bfloat16 from_acc<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls run(scalar_t{}) with the device's type for a dtype.
template <typename Run>
void with_device_type(Dtype dtype, const Run& run) {
  with_type<__half, __nv_bfloat16>(dtype, run);
}

}  // namespace memcheck
