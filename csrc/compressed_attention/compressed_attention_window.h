#pragma once

#include "compressed_attention/compressed_attention.h"

// Compressed attention with a window of size W. Query s, at position t = s + T - S, sees the positions from e(t) to t
// as they are (strict: to t - 1), and the blocks before e(t), in one softmax:
//
//     e(t) = factor floor(max(0, t - W + 1) / factor)

namespace memcheck {

struct CompressedAttentionWindow {
  int64_t size = 0;   // W, at most T; 0 if there is no window
  int64_t first = 0;  // the position of the first key of k; no query sees a position before it
  Strided<4> k;       // (B,Hkv,T-first,D), as the next
  Strided<4> v;       // null if only grad_v is wanted
  Strided<4> grad_k;  // null if not wanted, as the next; unless pooled, those of the positions in blocks too
  Strided<4> grad_v;

  // e(t)
  MEMCHECK_INLINE int64_t begin(int64_t t, int64_t factor) const {
    return t < size ? 0 : (t - size + 1) / factor * factor;
  }
};

struct CompressedAttentionWindowForward : CompressedAttentionForward {
  CompressedAttentionWindow window;
};

struct CompressedAttentionWindowBackward : CompressedAttentionBackward {
  CompressedAttentionWindow window;
};

struct CompressedAttentionWindowKernels {
  CompressedAttentionPlan (*plan)(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                                  Dtype dtype, int64_t threads);
  Kernel<CompressedAttentionWindowForward> forward;
  Kernel<CompressedAttentionWindowBackward> backward;
};
extern const CompressedAttentionWindowKernels compressed_attention_window_cpu;

}  // namespace memcheck
