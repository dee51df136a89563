#include <algorithm>

#include "common/finding.cuh"
#include "common/sequences.h"

// Tables of sequences on the GPU.

namespace memcheck {
namespace {

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

}  // namespace

const SequenceKernels sequences_cuda{build};

}  // namespace memcheck
