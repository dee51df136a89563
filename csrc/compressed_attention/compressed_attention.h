#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/integer.h"
#include "common/macros.h"
#include "common/stream.h"
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

  MEMCHECK_INLINE int64_t group() const { return H / Hkv; }
  // How many blocks query s sees: the first so many.
  MEMCHECK_INLINE int64_t visible(int64_t s) const { return causal ? (s + T - S + (strict ? 0 : 1)) / factor : C; }
  // The first query that sees block j, as all after it do; S or more where none does.
  MEMCHECK_INLINE int64_t first_query(int64_t j) const {
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

// What the kernels take beside inputs and outputs: those of the CPU for so many threads, those of CUDA by shape and
// dtype alone, whatever the GPU.
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

// Where there are too few tiles to keep a GPU busy, several thread blocks share one: in the forward each takes some of
// the blocks that its queries see, in the backward some of the queries that see its keys. Each writes what it has in
// the accumulation type, and the parts are put together in their order.
struct CompressedAttentionSplits {
  int64_t forward;  // parts of every tile of queries
  int64_t keys;     // parts of every tile of keys
};

inline CompressedAttentionSplits compressed_attention_splits_cuda(const CompressedAttentionShape& shape, Dtype dtype) {
  constexpr int64_t kThreadBlocks = 264;
  constexpr int64_t kTile = 64;
  constexpr int64_t kFewestTiles = 4;  // for a part
  constexpr int64_t kForwardBytes = 1 << 20;
  constexpr int64_t kBackwardBytes = 1 << 19;
  if (shape.B == 0 || shape.H == 0 || shape.Hkv == 0 || shape.S == 0 || shape.C == 0 || shape.D == 0) return {1, 1};
  const auto parts = [](int64_t tiles, int64_t steps, int64_t part_bytes, int64_t bytes) {
    const int64_t wanted = std::min(kThreadBlocks / tiles, ceil_div(steps, kFewestTiles));
    return std::max<int64_t>(1, std::min(wanted, bytes / part_bytes));
  };
  const int64_t query_tiles = ceil_div(shape.group() * shape.S, kTile);
  const int64_t key_tiles = ceil_div(shape.C, kTile);
  const int64_t key_heads = shape.B * shape.Hkv;
  const int64_t queries = shape.B * shape.H * shape.S;
  const int64_t acc = acc_bytes(dtype);
  const int64_t eighth = queries * shape.D * element_bytes(dtype) / 8;
  return {parts(key_heads * query_tiles, key_tiles, queries * (shape.D + 1) * acc, kForwardBytes),
          parts(key_heads * key_tiles, query_tiles, 2 * key_heads * shape.C * shape.D * acc,
                std::max(eighth, kBackwardBytes))};
}

inline CompressedAttentionPlan compressed_attention_plan_cuda(const CompressedAttentionShape& shape, Dtype dtype) {
  const CompressedAttentionSplits splits = compressed_attention_splits_cuda(shape, dtype);
  const int64_t acc = acc_bytes(dtype);
  const int64_t queries = shape.B * shape.H * shape.S;
  // Every part's y (B,H,S,D) and lse (B,H,S).
  const int64_t forward = splits.forward > 1 ? splits.forward * queries * (shape.D + 1) * acc : 0;
  // Every part's gradients of kc and vc (B,Hkv,C,D).
  const int64_t backward = splits.keys > 1 ? splits.keys * 2 * shape.B * shape.Hkv * shape.C * shape.D * acc : 0;
  return {forward, forward, queries * acc, backward};
}

void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_forward_cuda(const CompressedAttentionForward& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_backward_cuda(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
