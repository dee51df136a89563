#pragma once

#include <cstdint>

#include "softplus_attention/softplus_attention.h"

// How CUDA kernels divide the work, and the memory that they need.
//
// A block of threads takes some channels of one chunk of one sequence. Causal: blocks pass the sums of chunks on to the
// blocks of later chunks. Not causal: every chunk has a slot for its sums.

namespace memcheck {

constexpr int64_t kSoftplusCudaChannels = 16;
constexpr int64_t kSoftplusCounterBytes = 16;
// Chunks of a hop: a block passes on the sums over all chunks so far only at the end of each hop.
constexpr int64_t kHopChunks = 32;

void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream);
void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream);

inline SoftplusAttentionPlan softplus_attention_plan_cuda(const SoftplusAttentionShape& shape, Dtype dtype,
                                                          int64_t /*threads*/) {
  const int64_t slot = shape.R * acc_bytes(dtype);
  const int64_t keys = key_tile_places(shape, kCarrySpacing);
  if (shape.causal) {
    const int64_t slots = 2 * (keys + key_tile_places(shape, kHopChunks * kCarrySpacing));
    const int64_t bytes = shape.key_chunks() > 1 ? slots * slot + kSoftplusCounterBytes : 0;
    return {0, bytes, bytes};
  }
  // The sums of a dense batch's only chunk are those of all.
  const bool sums_keys = shape.sequences || shape.key_chunks() > 1;
  const bool sums_queries = shape.sequences || shape.query_chunks() > 1;
  const int64_t queries = sums_queries ? query_tile_places(shape, kCarrySpacing) : 0;
  return {shape.carries_bytes(dtype), sums_keys ? 2 * keys * slot : 0, (sequence_count(shape) + queries) * slot};
}

}  // namespace memcheck
