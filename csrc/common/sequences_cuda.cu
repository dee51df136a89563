#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "common/finding.cuh"
#include "common/sequences.h"

// Tables of sequences on the GPU, padding of results, and findings in pinned memory.

namespace memcheck {
namespace {

// ---- findings

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

// ---- tables

constexpr int kTableThreads = 256;

// One block. All sequences are empty if one breaks a rule.
__global__ void __launch_bounds__(kTableThreads) table_kernel(SequenceTableBuild p, Finding* slot) {
  bool wrong = false;
  for (int64_t i = threadIdx.x; i < p.source.count; i += kTableThreads) {
    const Finding finding = check_sequence(p.op, p.source, i);
    if (finding.rule == Rule::None) continue;
    if (!wrong) report_finding(finding, slot);
    wrong = true;
  }
  if (threadIdx.x == 0) {
    const Finding ends = check_ends(p.op, p.source);
    if (ends.rule != Rule::None) {
      report_finding(ends, slot);
      wrong = true;
    }
  }
  const bool empty = __syncthreads_or(wrong) != 0;
  for (int64_t i = threadIdx.x; i < p.source.count; i += kTableThreads)
    p.table[i] = empty ? Sequence{p.source.packed ? 0 : i, 0, 0, 0, 0} : sequence_at(p.source, i);
}

void build(const SequenceTableBuild& p, Dtype, cudaStream_t stream) {
  launch({"table of sequences", dim3(1), dim3(kTableThreads), 0, stream}, table_kernel, p, finding_slots().sequences);
}

// ---- padding

constexpr int kFillThreads = 256;

// A thread for each element, in turns.
template <typename bits_t>
__global__ void __launch_bounds__(kFillThreads) fill_kernel(PaddingFill p) {
  const int64_t elements = p.sequences.count * p.outer * p.length * p.inner;
  for (int64_t i = int64_t{blockIdx.x} * kFillThreads + threadIdx.x; i < elements;
       i += int64_t{gridDim.x} * kFillThreads) {
    const int64_t inner = i % p.inner, position = i / p.inner % p.length;
    const int64_t outer = i / p.inner / p.length % p.outer, row = i / p.inner / p.length / p.outer;
    const PositionRange inside = p.inside(row);
    if (position < inside.begin || position >= inside.end)
      *p.x.at<bits_t>(row, outer, position, inner) = static_cast<bits_t>(p.bits);
  }
}

void fill_padding(const PaddingFill& p, Dtype dtype, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 20;
  const int64_t blocks = ceil_div(p.sequences.count * p.outer * p.length * p.inner, kFillThreads);
  const Launch with{"padding", dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))), dim3(kFillThreads), 0,
                    stream};
  switch (element_bytes(dtype)) {
    case 8:
      return launch(with, fill_kernel<uint64_t>, p);
    case 4:
      return launch(with, fill_kernel<uint32_t>, p);
    default:
      return launch(with, fill_kernel<uint16_t>, p);
  }
}

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

const SequenceKernels sequences_cuda{build, fill_padding};

}  // namespace memcheck
