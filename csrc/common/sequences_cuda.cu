#include <algorithm>

#include "common/finding.cuh"
#include "common/sequences.h"

// Tables of sequences on the GPU, and padding of results.

namespace memcheck {
namespace {

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
  launch({"table of sequences", 1, dim3(kTableThreads), 0, stream}, table_kernel, p, finding_slots().sequences);
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
  const Launch with{"padding", std::min(blocks, kMostBlocks), dim3(kFillThreads), 0, stream};
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

const SequenceKernels sequences_cuda{build, fill_padding};

}  // namespace memcheck
