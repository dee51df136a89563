#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/integer.h"
#include "common/stream.h"
#include "common/strided.h"

// Softplus attention: what its kernels are given, and what they need beside it. No torch here.
//
//     Z[b,s,r] = sum over t <= s + T - S of softplus(k[b,r,t])
//     A[b,s,r] = the same sum of softplus(k[b,r,t]) v[b,r,t]
//     y = softplus(q) A / (Z + eps)
//
// B batch, S query length, T key length, R channels. Sums are in the accumulation type (float32; float64 for float64).
// Not causal: the sums run over all t, and Z and A are (B,R).

namespace memcheck {

// Positions from one saved pair of sums to the next.
constexpr int64_t kCarrySpacing = 256;

struct SoftplusAttentionShape {
  int64_t B, S, T, R;
  bool causal;

  // Sums are formed chunk by chunk: over positions within a chunk, then over chunks. Results do not depend on who forms
  // which.
  int64_t key_chunks() const { return (T + kCarrySpacing - 1) / kCarrySpacing; }
  int64_t query_chunks() const { return (S + kCarrySpacing - 1) / kCarrySpacing; }
  // Causal: Z and A at the end of every full chunk. Not causal: over all keys.
  int64_t carries() const { return causal ? T / kCarrySpacing : 1; }
};

struct SoftplusAttentionForward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> q;   // (B,S,R)
  Strided<3> k;   // (B,R,T)
  Strided<3> v;   // (B,R,T)
  Strided<3> y;   // (B,S,R)
  void* carries;  // (2,B,carries,R): Z, then A; null when nobody reads them and the plan does without
  void* sums;     // the plan's forward_sums_bytes
};

struct SoftplusAttentionBackward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> grad_y;    // (B,S,R)
  Strided<3> q;         // (B,S,R)
  Strided<3> k;         // (B,R,T)
  Strided<3> v;         // (B,R,T), null when only grad_v is wanted: it does not depend on v
  Strided<3> grad_q;    // (B,S,R), null when not wanted, as the next two
  Strided<3> grad_k;    // (B,R,T)
  Strided<3> grad_v;    // (B,R,T)
  const void* carries;  // (2,B,carries,R)
  void* sums;           // the plan's backward_sums_bytes
  void* scratch;        // the plan's backward_scratch_bytes
};

// One query more, and T new keys before it: their sums join the state, and the query reads it.
struct SoftplusAttentionStep {
  int64_t B, T, R;
  double eps;
  Strided<3> q;      // (B,1,R)
  Strided<3> k;      // (B,R,T)
  Strided<3> v;      // (B,R,T)
  Strided<3> z;      // (B,1,R), the state in the accumulation type, as the next three
  Strided<3> a;      // (B,1,R)
  Strided<3> y;      // (B,1,R)
  Strided<3> new_z;  // (B,1,R)
  Strided<3> new_a;  // (B,1,R)
};

// What the kernels take beside inputs and outputs: those of the CPU for so many threads, those of CUDA by shape and
// dtype alone, whatever the GPU.
struct SoftplusAttentionPlan {
  bool forward_uses_carries;  // even when no backward will read them
  int64_t forward_sums_bytes;
  int64_t backward_sums_bytes;
  int64_t backward_scratch_bytes;
};

SoftplusAttentionPlan softplus_attention_plan_cpu(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads);
void softplus_attention_forward_cpu(const SoftplusAttentionForward& p, Dtype dtype);
void softplus_attention_backward_cpu(const SoftplusAttentionBackward& p, Dtype dtype);
void softplus_attention_step_cpu(const SoftplusAttentionStep& p, Dtype dtype);

// CUDA: a block of threads takes so many channels of one batch entry and goes through all their positions, unless such
// blocks are too few to keep a GPU busy: then every few chunks have a block of their own, for which everything that is
// summed over positions is read once more. Half of a large GPU's multiprocessors take in about as much as that leaves.
constexpr int64_t kSoftplusCudaChannels = 32;
constexpr int64_t kSoftplusFewCudaBlocks = 64;

inline bool softplus_attention_splits_on_cuda(const SoftplusAttentionShape& shape, int64_t chunks) {
  return chunks > 1 && shape.B * ceil_div(shape.R, kSoftplusCudaChannels) < kSoftplusFewCudaBlocks;
}

inline SoftplusAttentionPlan softplus_attention_plan_cuda(const SoftplusAttentionShape& shape, Dtype dtype) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t keys = softplus_attention_splits_on_cuda(shape, shape.key_chunks()) ? shape.key_chunks() : 0;
  const int64_t queries = softplus_attention_splits_on_cuda(shape, shape.query_chunks()) ? shape.query_chunks() : 1;
  if (shape.causal) return {keys > 0, 0, keys > 0 ? 2 * (keys - 1) * slot : 0, 0};
  return {true, 2 * keys * slot, queries * slot, 0};
}
void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream);
void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream);
void softplus_attention_step_cuda(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
