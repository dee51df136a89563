#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/integer.h"
#include "common/kernel.h"
#include "common/macros.h"
#include "common/strided.h"
#include "common/task_list.h"

// Compressed attention: the parameters of its kernels, and the memory they need.
//
//     kc[b,h,j] = the mean of k[b,h,t] over block j: the positions t from j factor to (j + 1) factor - 1 that exist
//     vc[b,h,j] = the same mean of v
//     s[i,j] = scale q[i] . kc[j]     lse[i] = log sum_j exp(s[i,j])     y[i] = sum_j exp(s[i,j] - lse[i]) vc[j]
//
// B batch, H query heads, Hkv key/value heads, S query length, T key length, D head dimension, C blocks. Query head h
// reads key head h / (H / Hkv). Causal: query i sees the blocks that are complete at its own position i + T - S,
// strict: before it. A query that sees no block has y = 0 and lse = -inf. Sums are in the accumulation type (float32;
// float64 for float64); kc and vc are rounded to the dtype of the inputs.

namespace memcheck {

struct CompressedAttentionShape {
  int64_t B, H, Hkv, S, T, D, C;
  int64_t factor;
  bool causal, strict;

  MEMCHECK_INLINE int64_t group() const { return H / Hkv; }
  // The number of blocks that query s sees. They are the first.
  MEMCHECK_INLINE int64_t visible(int64_t s) const { return causal ? (s + T - S + (strict ? 0 : 1)) / factor : C; }
  // The first query that sees block j, as do all queries after it; S or more if no query does.
  MEMCHECK_INLINE int64_t first_query(int64_t j) const {
    const int64_t s = (j + 1) * factor - (strict ? 0 : 1) - (T - S);
    return causal && s > 0 ? s : 0;
  }
};

struct CompressedAttentionPooling {
  CompressedAttentionShape shape;
  Strided<4> k;     // (B,Hkv,T,D)
  Strided<4> v;     // (B,Hkv,T,D)
  Strided<4> kc;    // (B,Hkv,C,D)
  Strided<4> vc;    // (B,Hkv,C,D)
  void* scratch;    // the plan's forward_scratch_bytes
  int64_t threads;  // of the plan
};

struct CompressedAttentionForward {
  CompressedAttentionShape shape;
  double scale;
  Strided<4> q;     // (B,H,S,D)
  Strided<4> kc;    // (B,Hkv,C,D)
  Strided<4> vc;    // (B,Hkv,C,D)
  Strided<4> y;     // (B,H,S,D)
  void* lse;        // (B,H,S), null if no backward follows
  void* scratch;    // the plan's forward_scratch_bytes, or pooled_forward_scratch_bytes
  int64_t threads;  // of the plan
};

struct CompressedAttentionBackward {
  CompressedAttentionShape shape;
  double scale;
  Strided<4> grad_y;  // (B,H,S,D)
  Strided<4> q;       // (B,H,S,D)
  Strided<4> kc;      // (B,Hkv,C,D)
  Strided<4> vc;      // (B,Hkv,C,D), null if only grad_v is wanted, which does not depend on vc
  Strided<4> y;       // (B,H,S,D), null as vc is, and if y was rounded to 16 bits
  const void* lse;    // (B,H,S)
  // A block's gradient divided by its length is the gradient of each of its positions. If the inputs were pooled
  // already, a block is one position.
  int64_t block_length;     // factor, or 1
  int64_t gradient_length;  // T, or C
  Strided<4> grad_q;        // (B,H,S,D), null if not wanted, as the next two
  Strided<4> grad_k;        // (B,Hkv,gradient_length,D)
  Strided<4> grad_v;        // (B,Hkv,gradient_length,D)
  void* delta;              // (B,H,S): grad_y . y, null if grad_k is not wanted
  void* scratch;            // the plan's backward_scratch_bytes
  int64_t threads;          // of the plan
};

// The memory that kernels need beside inputs and outputs. That of the CPU depends on the number of threads, that of
// CUDA on shape and dtype only.
struct CompressedAttentionPlan {
  int64_t forward_scratch_bytes;         // of pooling and the forward after it
  int64_t pooled_forward_scratch_bytes;  // of the forward if keys and values were pooled already
  int64_t delta_bytes;
  int64_t backward_scratch_bytes;
};

struct CompressedAttentionKernels {
  CompressedAttentionPlan (*plan)(const CompressedAttentionShape& shape, Dtype dtype, int64_t threads);
  Kernel<CompressedAttentionPooling> pool;
  Kernel<CompressedAttentionForward> forward;
  Kernel<CompressedAttentionBackward> backward;
};
extern const CompressedAttentionKernels compressed_attention_cpu;
// The tasks of every pass on the CPU, for tests.
std::vector<TaskList> compressed_attention_tasks_cpu(const CompressedAttentionShape& shape, int64_t threads);
extern const CompressedAttentionKernels compressed_attention_cuda;

// ---- CUDA
//
// If there are too few tiles to keep a GPU busy, several thread blocks share a tile: in the forward each takes some of
// the blocks that the tile's queries see, in the backward some of the queries that see the tile's keys. Each writes its
// part in the accumulation type, and the parts are added in their order.
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

inline CompressedAttentionPlan compressed_attention_plan_cuda(const CompressedAttentionShape& shape, Dtype dtype,
                                                              int64_t /*threads*/) {
  const CompressedAttentionSplits splits = compressed_attention_splits_cuda(shape, dtype);
  const int64_t acc = acc_bytes(dtype);
  const int64_t queries = shape.B * shape.H * shape.S;
  // Every part's y (B,H,S,D) and lse (B,H,S).
  const int64_t forward = splits.forward > 1 ? splits.forward * queries * (shape.D + 1) * acc : 0;
  // Every part's gradients of kc and vc (B,Hkv,C,D).
  const int64_t backward = splits.keys > 1 ? splits.keys * 2 * shape.B * shape.Hkv * shape.C * shape.D * acc : 0;
  return {forward, forward, queries * acc, backward};
}

}  // namespace memcheck
