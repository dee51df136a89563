#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "common/finding.cuh"

// Findings in pinned memory, which a GPU writes and the host reads.

#if defined(MEMCHECK_HOST_CUDA)
extern "C" {
int host_cuda_device = 0;  // the current one, which tests set
}
#endif

namespace memcheck {
namespace {

constexpr int kDevices = 128;  // the most that torch knows
constexpr int kFindings = 2 * kDevices;
std::atomic<Finding*> findings{nullptr};  // of every GPU those of FindingSlots; null until a kernel needs them

#if defined(MEMCHECK_HOST_CUDA)

Finding* allocate_findings() {
  return new Finding[kFindings];
}

int current_device() {
  return host_cuda_device;
}

#else

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

Finding* allocate_findings() {
  // While a stream is captured, a thread may allocate only if it says that this does not concern the capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&memory, kFindings * sizeof(Finding), cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (status == cudaSuccess) return new (memory) Finding[kFindings];
  cudaGetLastError();
  throw std::runtime_error(std::string("memcheck: CUDA gave no pinned memory: ") + cudaGetErrorString(status));
}

#endif

}  // namespace

FindingSlots finding_slots() {
  static Finding* const memory = findings = allocate_findings();
  Finding* const of_device = memory + 2 * current_device();
  return {of_device, of_device + 1};
}

Finding take_finding() {
  if (findings == nullptr) return {};
  const FindingSlots slots = finding_slots();
  for (Finding* const slot : {slots.sequences, slots.decay}) {
    if (*const_cast<volatile Rule*>(&slot->rule) == Rule::None) continue;
    const Finding finding = *slot;
    *slot = {};
    return finding;
  }
  return {};
}

void wait_for_kernels([[maybe_unused]] cudaStream_t stream) {
#if !defined(MEMCHECK_HOST_CUDA)
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  if (capture != cudaStreamCaptureStatusNone)
    throw std::runtime_error(
        "memcheck: MEMCHECK_CHECK=1 waits for kernels, but those of a CUDA graph do not run while it is captured; "
        "capture it without MEMCHECK_CHECK=1");
  cudaStreamSynchronize(stream);
#endif
}

}  // namespace memcheck
