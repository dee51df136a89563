#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/strided.h"

// Compressed attention: what its kernels are given, and what they need beside it. No torch here.
//
//     kc[b,h,j] = the mean of k[b,h,t] over block j, the positions t from j factor on, factor of them where there are
//     vc[b,h,j] = the same mean of v
//     s[i,j] = scale q[i] . kc[j]     lse[i] = log sum_j exp(s[i,j])     y[i] = sum_j exp(s[i,j] - lse[i]) vc[j]
//
// B batch, H query heads, Hkv key/value heads, S query length, T key length, D head dimension, C blocks. Query head h
// reads key head h / (H / Hkv). Causal: query i sees the blocks that are complete at its own position i + T - S,
// strict: before it. Who sees no block has y = 0 and lse = -inf. Sums are in the accumulation type (float32; float64
// for float64); kc and vc are rounded to the dtype of the inputs.

namespace memcheck {

struct CompressedAttentionShape {
  int64_t B, H, Hkv, S, T, D, C;
  int64_t factor;
  bool causal, strict;

  int64_t group() const { return H / Hkv; }
  // How many blocks query s sees: the first so many.
  int64_t visible(int64_t s) const { return causal ? (s + T - S + (strict ? 0 : 1)) / factor : C; }
  // The first query that sees block j, as all after it do; S or more where none does.
  int64_t first_query(int64_t j) const {
    const int64_t s = (j + 1) * factor - (strict ? 0 : 1) - (T - S);
    return causal && s > 0 ? s : 0;
  }
};

struct CompressedAttentionPooling {
  CompressedAttentionShape shape;
  Strided<4> k;   // (B,Hkv,T,D)
  Strided<4> v;   // (B,Hkv,T,D)
  Strided<4> kc;  // (B,Hkv,C,D)
  Strided<4> vc;  // (B,Hkv,C,D)
  void* scratch;  // the plan's forward_scratch_bytes
};

struct CompressedAttentionForward {
  CompressedAttentionShape shape;
  double scale;
  Strided<4> q;   // (B,H,S,D)
  Strided<4> kc;  // (B,Hkv,C,D)
  Strided<4> vc;  // (B,Hkv,C,D)
  Strided<4> y;   // (B,H,S,D)
  void* lse;      // (B,H,S), null when nobody reads it
  void* scratch;  // the plan's forward_scratch_bytes, or of keys that came pooled
};

struct CompressedAttentionBackward {
  CompressedAttentionShape shape;
  double scale;
  Strided<4> grad_y;  // (B,H,S,D)
  Strided<4> q;       // (B,H,S,D)
  Strided<4> kc;      // (B,Hkv,C,D)
  Strided<4> vc;      // (B,Hkv,C,D), null when only grad_v is wanted: it does not depend on it
  Strided<4> y;       // (B,H,S,D), null as vc, and where it was rounded to 16 bits
  const void* lse;    // (B,H,S)
  // A block's gradient, divided by its length, is that of each of its positions. Of keys that came pooled a block is
  // one position.
  int64_t block_length;     // factor, or 1
  int64_t gradient_length;  // T, or C
  Strided<4> grad_q;        // (B,H,S,D), null when not wanted, as the next two
  Strided<4> grad_k;        // (B,Hkv,gradient_length,D)
  Strided<4> grad_v;        // (B,Hkv,gradient_length,D)
  void* delta;              // (B,H,S): grad_y . y, for grad_k; else null
  void* scratch;            // the plan's backward_scratch_bytes
};

// What the CPU kernels take beside inputs and outputs, for so many threads.
struct CompressedAttentionPlan {
  int64_t forward_scratch_bytes;         // of the forward and the pooling before it
  int64_t pooled_forward_scratch_bytes;  // of keys and values that came pooled
  int64_t delta_bytes;
  int64_t backward_scratch_bytes;
};

CompressedAttentionPlan compressed_attention_plan_cpu(const CompressedAttentionShape& shape, Dtype dtype,
                                                      int64_t threads);
void compressed_attention_pool_cpu(const CompressedAttentionPooling& p, Dtype dtype);
void compressed_attention_forward_cpu(const CompressedAttentionForward& p, Dtype dtype);
void compressed_attention_backward_cpu(const CompressedAttentionBackward& p, Dtype dtype);

}  // namespace memcheck
