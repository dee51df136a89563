#pragma once

#include <cstdint>

#include "common/sequences.h"
#include "common/types.h"

// Softplus attention: the parameters of its kernels, and the memory they need.
//
//     Z[b,s,r] = sum over t <= s + T - S of softplus(k[b,r,t])
//     A[b,s,r] = the same sum of softplus(k[b,r,t]) v[b,r,t]
//     y = softplus(q) A / (Z + eps)
//
// B batch, S query length, T key length, R channels. Sums are in the accumulation type (float32; float64 for float64).
// Not causal: the sums run over all t. Of a packed or padded batch, all of this holds for each sequence (common/
// sequences.h), and N is the number of sequences. Else N = B.

namespace memcheck {

// Positions of a chunk. Sums are formed over the positions of a chunk, and then over chunks. So results do not depend
// on which thread forms which sum.
constexpr int64_t kCarrySpacing = 256;

struct SoftplusAttentionShape {
  int64_t B, S, T, R;
  bool causal;
  SequenceTable sequences = {};

  int64_t key_chunks() const { return ceil_div(T, kCarrySpacing); }
  int64_t query_chunks() const { return ceil_div(S, kCarrySpacing); }
  // C, the carries of a row of the batch. Causal: Z and A at the end of every full chunk. Not causal: over all keys of
  // each sequence.
  int64_t carries() const { return causal ? T / kCarrySpacing : sequences.packed ? sequences.count : 1; }
  int64_t carries_bytes(Dtype dtype) const { return 2 * B * carries() * R * acc_bytes(dtype); }
  // The first carry of a sequence among those of all rows.
  MEMCHECK_INLINE int64_t first_carry(const Sequence& x, int64_t sequence) const {
    return causal ? x.row * (T / kCarrySpacing) + x.first_key / kCarrySpacing : sequence;
  }
};

// Sequences that are continued: Z and A over the positions before them, and up to their ends. All (2,N,R), Z, then A. A
// rest is what rounding has left out of a sum. Null: zeros before, and not wanted after.
struct SoftplusAttentionState {
  Strided<3> before;
  Strided<3> before_rest;
  Strided<3> after;
  Strided<3> after_rest;  // null only if `after` is
};

struct SoftplusAttentionForward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> q;   // (B,S,R)
  Strided<3> k;   // (B,R,T)
  Strided<3> v;   // (B,R,T)
  Strided<3> y;   // (B,S,R)
  void* carries;  // (B,C,2,R): Z and A; null if no backward follows
  void* scratch;  // the plan's forward_scratch_bytes, and if carries are null its forward_carries_bytes before these
  int64_t threads;
  SoftplusAttentionState state;
};

struct SoftplusAttentionBackward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> grad_y;    // (B,S,R)
  Strided<3> q;         // (B,S,R)
  Strided<3> k;         // (B,R,T)
  Strided<3> v;         // (B,R,T), null if only grad_v is wanted, which does not depend on v
  Strided<3> grad_q;    // (B,S,R), null if not wanted, as the next two
  Strided<3> grad_k;    // (B,R,T)
  Strided<3> grad_v;    // (B,R,T)
  const void* carries;  // (B,C,2,R)
  void* scratch;        // the plan's backward_scratch_bytes
  int64_t threads;
  Strided<3> before;            // (2,N,R), of the forward's state; null: zeros, as the next two
  Strided<3> grad_after;        // (2,N,R)
  Strided<3> grad_after_rest;   // (2,N,R), what rounding has left out of grad_after; only if causal, as the last
  Strided<3> grad_before;       // (2,N,R), null if not wanted
  Strided<3> grad_before_rest;  // (2,N,R), null if not wanted
};

// Decoding: the sums of T new keys are added to the state, and one query reads it.
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
  int64_t threads;   // that may be used
};

// The memory that kernels need beside inputs and outputs. That of the CPU depends on the number of threads and on the
// sequences, that of CUDA on shape, dtype and the number of sequences only.
struct SoftplusAttentionPlan {
  int64_t forward_carries_bytes;  // only where carries are not kept
  int64_t forward_scratch_bytes;
  int64_t backward_scratch_bytes;
};

struct SoftplusAttentionKernels {
  SoftplusAttentionPlan (*plan)(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads);
  Kernel<SoftplusAttentionForward> forward;
  Kernel<SoftplusAttentionBackward> backward;
  Kernel<SoftplusAttentionStep> step;
  Kernel<SequenceTableBuild> build_sequences;  // null on the CPU, where the glue builds the table
};
extern const SoftplusAttentionKernels softplus_attention_cpu;
extern const SoftplusAttentionKernels softplus_attention_cuda;

}  // namespace memcheck
