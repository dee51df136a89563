#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "common/finding.cuh"

// Findings in pinned memory, which a GPU writes and the host reads.

namespace memcheck {
namespace {

constexpr int kSlots = 2;
std::atomic<Finding*> findings{nullptr};  // null until a kernel needs them

#if defined(MEMCHECK_HOST_CUDA)

Finding* allocate_findings() {
  return new Finding[kSlots];
}

#else

Finding* allocate_findings() {
  // While a stream is captured, a thread may allocate only if it says that this does not concern the capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&memory, kSlots * sizeof(Finding), cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (status == cudaSuccess) return new (memory) Finding[kSlots];
  cudaGetLastError();
  throw std::runtime_error(std::string("memcheck: CUDA gave no pinned memory: ") + cudaGetErrorString(status));
}

#endif

}  // namespace

FindingSlots finding_slots() {
  static Finding* const memory = findings = allocate_findings();
  return {memory, memory + 1};
}

Finding take_finding() {
  Finding* const memory = findings;
  for (int i = 0; memory != nullptr && i < kSlots; ++i) {
    if (*const_cast<volatile Rule*>(&memory[i].rule) == Rule::None) continue;
    const Finding finding = memory[i];
    memory[i] = {};
    return finding;
  }
  return {};
}

void wait_for_kernels([[maybe_unused]] cudaStream_t stream) {
#if !defined(MEMCHECK_HOST_CUDA)
  cudaStreamSynchronize(stream);
#endif
}

}  // namespace memcheck
