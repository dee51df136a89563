#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/integer.h"
#include "common/kernel.h"
#include "common/strided.h"
#include "common/task_list.h"

// Softplus attention: the parameters of its kernels, and the memory they need.
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

  // Sums are formed over the positions of a chunk, and then over chunks. So results do not depend on which thread forms
  // which sum.
  int64_t key_chunks() const { return (T + kCarrySpacing - 1) / kCarrySpacing; }
  int64_t query_chunks() const { return (S + kCarrySpacing - 1) / kCarrySpacing; }
  // Causal: Z and A at the end of every full chunk. Not causal: over all keys.
  int64_t carries() const { return causal ? T / kCarrySpacing : 1; }
};

// A sequence that is continued: Z and A over the positions before it, and up to its end. All (2,B,R), Z, then A. A rest
// is what rounding has left out of a sum. Null: zeros before, and not wanted after.
struct SoftplusAttentionState {
  Strided<3> before;
  Strided<3> before_rest;
  Strided<3> after;
  Strided<3> after_rest;  // null only if `after` is
};

struct SoftplusAttentionForward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> q;     // (B,S,R)
  Strided<3> k;     // (B,R,T)
  Strided<3> v;     // (B,R,T)
  Strided<3> y;     // (B,S,R)
  void* carries;    // (2,B,carries,R): Z, then A; null if no backward follows and the plan needs none
  void* sums;       // the plan's forward_sums_bytes
  int64_t threads;  // of the plan
  SoftplusAttentionState state;
};

struct SoftplusAttentionBackward {
  SoftplusAttentionShape shape;
  double eps;
  Strided<3> grad_y;            // (B,S,R)
  Strided<3> q;                 // (B,S,R)
  Strided<3> k;                 // (B,R,T)
  Strided<3> v;                 // (B,R,T), null if only grad_v is wanted, which does not depend on v
  Strided<3> grad_q;            // (B,S,R), null if not wanted, as the next two
  Strided<3> grad_k;            // (B,R,T)
  Strided<3> grad_v;            // (B,R,T)
  const void* carries;          // (2,B,carries,R)
  void* sums;                   // the plan's backward_sums_bytes
  void* scratch;                // the plan's backward_scratch_bytes
  int64_t threads;              // of the plan
  Strided<3> before;            // (2,B,R), of the forward's state; null: zeros, as the next two
  Strided<3> grad_after;        // (2,B,R)
  Strided<3> grad_after_rest;   // (2,B,R), what rounding has left out of grad_after; only if causal, as the last
  Strided<3> grad_before;       // (2,B,R), null if not wanted
  Strided<3> grad_before_rest;  // (2,B,R), null if not wanted
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

// The memory that kernels need beside inputs and outputs. That of the CPU depends on the number of threads, that of
// CUDA on shape and dtype only.
struct SoftplusAttentionPlan {
  bool forward_uses_carries;  // even when no backward will read them
  int64_t forward_sums_bytes;
  int64_t backward_sums_bytes;
  int64_t backward_scratch_bytes;
};

struct SoftplusAttentionKernels {
  SoftplusAttentionPlan (*plan)(const SoftplusAttentionShape& shape, Dtype dtype, int64_t threads);
  Kernel<SoftplusAttentionForward> forward;
  Kernel<SoftplusAttentionBackward> backward;
  Kernel<SoftplusAttentionStep> step;
};
extern const SoftplusAttentionKernels softplus_attention_cpu;
// The tasks of every pass on the CPU, for tests.
std::vector<TaskList> softplus_attention_tasks_cpu(const SoftplusAttentionShape& shape, int64_t threads);
extern const SoftplusAttentionKernels softplus_attention_cuda;

// ---- CUDA
//
// A block of threads takes some channels of one chunk of one batch entry. Causal: blocks pass their running sums on to
// the next chunk, in the memory of the carries where there are any; beside them it takes what rounding has left out of
// the sums, and a counter. Not causal: every chunk has a slot for its sums.
constexpr int64_t kSoftplusCudaChannels = 16;
constexpr int64_t kSoftplusCounterBytes = 16;

inline SoftplusAttentionPlan softplus_attention_plan_cuda(const SoftplusAttentionShape& shape, Dtype dtype,
                                                          int64_t /*threads*/) {
  const int64_t slot = shape.B * shape.R * acc_bytes(dtype);
  const int64_t keys = shape.key_chunks();
  const int64_t queries = shape.query_chunks();
  if (!shape.causal) return {true, keys > 1 ? 2 * keys * slot : 0, queries > 1 ? (1 + queries) * slot : slot, 0};
  if (keys < 2) return {false, 0, 0, 0};
  return {true, 2 * shape.carries() * slot + kSoftplusCounterBytes, 4 * (keys - 1) * slot + kSoftplusCounterBytes, 0};
}

}  // namespace memcheck
