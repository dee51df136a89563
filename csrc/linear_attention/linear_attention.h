#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/strided.h"

// Linear attention: what its kernels are given, and what they need beside it. No torch here.
//
//     M_i = sum over j <= i + T - S of phi(k_j) v_j^T        z_i = the same sum of phi(k_j)
//     den_i = phi(q_i).z_i + eps                             y_i = phi(q_i)^T M_i / den_i
//
// B batch, H query heads, Hkv key heads (query head h reads key head h / (H / Hkv)), S query length, T key length,
// D and Dv dimensions of a key and a value. Not causal: the sums run over all j. States and sums are in the
// accumulation type (float32; float64 for float64).

namespace memcheck {

// phi: x + 1 for x > 0, else exp(x); or x itself.
enum class FeatureMap { EluPlusOne, Identity };

struct LinearAttentionShape {
  int64_t B, H, Hkv, S, T, D, Dv;
  bool causal;
  FeatureMap feature_map;

  int64_t group() const { return Hkv == 0 ? 0 : H / Hkv; }
};

struct LinearAttentionForward {
  LinearAttentionShape shape;
  double eps;
  Strided<4> q;   // (B,H,S,D)
  Strided<4> k;   // (B,Hkv,T,D)
  Strided<4> v;   // (B,Hkv,T,Dv)
  Strided<4> y;   // (B,H,S,Dv)
  void* states;   // the plan's forward_states_bytes
  void* scratch;  // the plan's forward_scratch_bytes
};

struct LinearAttentionBackward {
  LinearAttentionShape shape;
  double eps;
  Strided<4> grad_y;  // (B,H,S,Dv)
  Strided<4> q;       // (B,H,S,D)
  Strided<4> k;       // (B,Hkv,T,D)
  Strided<4> v;       // (B,Hkv,T,Dv), null when only grad_v is wanted: it does not depend on v
  Strided<4> grad_q;  // (B,H,S,D), null when not wanted, as the next two
  Strided<4> grad_k;  // (B,Hkv,T,D)
  Strided<4> grad_v;  // (B,Hkv,T,Dv)
  void* rows;         // (2,B,H,S): 1 / den, then delta = (grad_y.y) / den
  void* states;       // the plan's backward_states_bytes
  void* scratch;      // the plan's backward_scratch_bytes
};

// One query more, and T new keys before it: they join the state, and the query reads it.
struct LinearAttentionStep {
  LinearAttentionShape shape;  // S = 1
  double eps;
  Strided<4> q;      // (B,H,1,D)
  Strided<4> k;      // (B,Hkv,T,D)
  Strided<4> v;      // (B,Hkv,T,Dv)
  Strided<4> m;      // (B,Hkv,D,Dv), the state in the accumulation type, as the next three
  Strided<4> z;      // (B,Hkv,1,D)
  Strided<4> y;      // (B,H,1,Dv)
  Strided<4> new_m;  // (B,Hkv,D,Dv)
  Strided<4> new_z;  // (B,Hkv,1,D)
  void* scratch;     // the plan's forward_scratch_bytes
};

// What the CPU kernels take beside inputs and outputs, for so many threads.
struct LinearAttentionPlan {
  int64_t forward_states_bytes;  // of segments of the sequence, where there are few heads
  int64_t forward_scratch_bytes;
  int64_t rows_bytes;
  int64_t backward_states_bytes;
  int64_t backward_scratch_bytes;
};

LinearAttentionPlan linear_attention_plan_cpu(const LinearAttentionShape& shape, Dtype dtype, int64_t threads);
void linear_attention_forward_cpu(const LinearAttentionForward& p, Dtype dtype);
void linear_attention_backward_cpu(const LinearAttentionBackward& p, Dtype dtype);
void linear_attention_step_cpu(const LinearAttentionStep& p, Dtype dtype);

}  // namespace memcheck
