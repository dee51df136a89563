#include "common/kernel.cuh"
#include "common/sequences.h"

// Tables of sequences on the GPU.

namespace memcheck {
namespace {

constexpr int kTableThreads = 256;

// One block.
__global__ void __launch_bounds__(kTableThreads) table_kernel(SequenceTableBuild p) {
  bool wrong = false;
  for (int64_t i = threadIdx.x; i < p.source.count; i += kTableThreads) wrong |= !is_valid(p.source, i);
  const bool empty = __syncthreads_or(wrong) != 0;
  for (int64_t i = threadIdx.x; i < p.source.count; i += kTableThreads)
    p.table[i] = empty ? Sequence{p.source.packed ? 0 : i, 0, 0, 0, 0} : sequence_at(p.source, i);
}

}  // namespace

void build_sequences_cuda(const SequenceTableBuild& p, Dtype, cudaStream_t stream) {
  launch({"table of sequences", 1, dim3(kTableThreads), 0, stream}, table_kernel, p);
}

}  // namespace memcheck
