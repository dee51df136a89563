#pragma once

#include <cmath>
#include <cstdint>

#include "common/sequences.h"
#include "common/types.h"

// Linear attention: the parameters of its kernels, and the memory they need.
//
//     M_i = sum over j <= i + T - S of phi(k_j) v_j^T        z_i = the same sum of phi(k_j)
//     den_i = phi(q_i).z_i + eps                             y_i = phi(q_i)^T M_i / den_i
//
// B batch, H query heads, Hkv key heads (query head h reads key head h / (H / Hkv)), S query length, T key length,
// D and Dv dimensions of a key and a value. Not causal: the sums run over all j. States and sums are in the
// accumulation type (float32; float64 for float64).
//
// Causal, the sums may go on from a state and may decay: with decays a_i,
//
//     M_i = a_i M_(i-1) + phi(k_i) v_i^T                     z_i = a_i z_(i-1) + phi(k_i)
//
// Not normalized: y_i = phi(q_i)^T M_i, without z and eps.
//
// Where a batch is packed or padded, each of its N sequences is as if alone. Nothing is read or written of padding. N
// is B where it is neither.

namespace memcheck {

// phi: x + 1 for x > 0, else exp(x); or x itself.
enum class FeatureMap { EluPlusOne, Identity };

struct LinearAttentionShape {
  int64_t B, H, Hkv, S, T, D, Dv;
  bool causal;
  FeatureMap feature_map;
  bool normalize = true;
  bool decayed = false;          // causal only, as the next two
  bool decays_learn = false;     // backward: the gradient of the decays is wanted
  bool continued = false;        // it begins with a state, or the state that it ends with is wanted
  SequenceTable sequences = {};  // of a batch that is packed or padded

  MEMCHECK_INLINE int64_t group() const { return Hkv == 0 ? 0 : H / Hkv; }
  // Without decays and states, and normalized.
  MEMCHECK_INLINE bool is_plain() const { return normalize && !decayed && !continued; }
};

// A state in memory, or its gradient, in the accumulation type. Both are null if there is none.
struct LinearAttentionState {
  Strided<4> m;  // (N,Hkv,D,Dv), null if it is a gradient that is not wanted
  Strided<4> z;  // (N,Hkv,1,D), null too if y is not normalized

  MEMCHECK_INLINE explicit operator bool() const { return m || z; }
};

// Decays, or null if nothing decays.
struct LinearAttentionDecay {
  Strided<3> given;  // (B,Hkv,T) in the accumulation type: decays in (0, 1], or their logarithms, at most 0
  bool logarithms = false;

  MEMCHECK_INLINE explicit operator bool() const { return static_cast<bool>(given); }
  MEMCHECK_INLINE bool allows(double value) const { return logarithms ? value <= 0 : value > 0 && value <= 1; }
  template <typename acc_t>
  MEMCHECK_INLINE double at(int64_t row, int64_t head, int64_t t) const {
    return decay_of(*given.template at<const acc_t>(row, head, t));
  }
  MEMCHECK_INLINE double decay_of(double value) const { return logarithms ? std::exp(value) : value; }
};

struct LinearAttentionForward {
  LinearAttentionShape shape;
  double eps;
  Strided<4> q;     // (B,H,S,D)
  Strided<4> k;     // (B,Hkv,T,D)
  Strided<4> v;     // (B,Hkv,T,Dv)
  Strided<4> y;     // (B,H,S,Dv)
  void* states;     // the plan's forward_states_bytes; null in a step
  void* scratch;    // the plan's forward_scratch_bytes
  int64_t threads;  // of the plan
  LinearAttentionDecay decay = {};
  LinearAttentionState initial = {};  // before the first key
  LinearAttentionState last = {};     // behind the last key, written if it is wanted

  // Decoding: one query, not causal, from an initial state, to which the keys are added before the query reads it.
  bool is_step() const { return initial && !shape.causal; }
};

struct LinearAttentionBackward {
  LinearAttentionShape shape;
  double eps;
  Strided<4> grad_y;  // (B,H,S,Dv)
  Strided<4> q;       // (B,H,S,D)
  Strided<4> k;       // (B,Hkv,T,D)
  Strided<4> v;       // (B,Hkv,T,Dv), null if only grad_v is wanted, which does not depend on v
  Strided<4> grad_q;  // (B,H,S,D), null if not wanted, as the next two
  Strided<4> grad_k;  // (B,Hkv,T,D)
  Strided<4> grad_v;  // (B,Hkv,T,Dv)
  // CPU (2,H/Hkv,S) of each key head: 1 / den, then delta = (grad_y.y) / den. CUDA (1+parts,B,H,S): 1 / den,
  // then grad_y.y; behind them, if it decays, phi(k).(grad phi(k)) of each key (parts,B,Hkv,T), and sums of the
  // gradients of decays.
  void* rows;
  void* states;     // the plan's backward_states_bytes
  void* scratch;    // the plan's backward_scratch_bytes
  int64_t threads;  // of the plan
  LinearAttentionDecay decay = {};
  LinearAttentionState initial = {};
  LinearAttentionState last = {};          // CUDA: read for grad_decay if there is grad_last
  LinearAttentionState grad_last = {};     // null if the last state has no gradient
  LinearAttentionState grad_initial = {};  // null if not wanted, as the next
  Strided<3> grad_decay = {};              // (B,Hkv,T)
};

// The gradient of a decay for each head, from those for each position.
struct LinearAttentionDecaySum {
  int64_t B, Hkv, T;
  Strided<3> from;  // (B,Hkv,T)
  Strided<1> to;    // (Hkv,)
};

// The memory that kernels need beside inputs and outputs. That of the CPU depends on the number of threads and on the
// lengths of sequences, that of CUDA on shape and dtype only.
struct LinearAttentionPlan {
  int64_t forward_states_bytes;  // of segments of the sequence, if there are too few heads
  int64_t forward_scratch_bytes;
  int64_t rows_bytes;
  int64_t backward_states_bytes;
  int64_t backward_scratch_bytes;
};

struct LinearAttentionKernels {
  LinearAttentionPlan (*plan)(const LinearAttentionShape& shape, Dtype dtype, int64_t threads);
  Kernel<SequenceTableBuild> build_sequences;  // null on the CPU, where the glue builds the table
  Kernel<LinearAttentionForward> forward;
  Kernel<LinearAttentionBackward> backward;
  Kernel<LinearAttentionDecaySum> sum_decays;
};
extern const LinearAttentionKernels linear_attention_cpu;
extern const LinearAttentionKernels linear_attention_cuda;

}  // namespace memcheck
