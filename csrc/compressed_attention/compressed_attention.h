#pragma once

#include <cstdint>

#include "common/sequences.h"
#include "common/types.h"

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
//
// A sink is a score of each head that every query sees, with a value of 0: lse becomes log(exp(lse) + exp(sink[h])).
//
// With a window of size W, query s at position t = s + T - S sees the positions from e(t) to t as they are (strict: to
// t - 1), and the blocks before e(t), in one softmax:
//
//     e(t) = factor floor(max(0, t - W + 1) / factor)
//
// With a table of sequences, B, S and T are those of the batch, and C counts places for blocks: blocks begin anew with
// each sequence, those of sequence i at place first_block(i). Padding, and places without a block, are not written.

namespace memcheck {

struct CompressedAttentionShape {
  int64_t B, H, Hkv, S, T, D, C;
  int64_t factor;
  bool causal, strict;
  SequenceTable sequences = {};
  // How many positions later a query sees a block than without a window: its size, less 1 if strict.
  int64_t lag = 0;

  MEMCHECK_INLINE int64_t group() const { return H / Hkv; }
  // The number of blocks that query s sees. They are the first.
  MEMCHECK_INLINE int64_t visible(int64_t s) const {
    const int64_t positions = s + T - S + (strict ? 0 : 1) - lag;
    return !causal ? C : positions > 0 ? positions / factor : 0;
  }
  // The first query that sees block j, as do all queries after it; S or more if no query does.
  MEMCHECK_INLINE int64_t first_query(int64_t j) const {
    const int64_t s = (j + 1) * factor - (strict ? 0 : 1) + lag - (T - S);
    return causal && s > 0 ? s : 0;
  }
  // The first query at position t or later; S if there is none.
  MEMCHECK_INLINE int64_t query_from(int64_t t) const {
    const int64_t s = t - (T - S);
    return s < 0 ? 0 : s < S ? s : S;
  }
  // A sequence has at most one block more than its share of those of all positions.
  MEMCHECK_INLINE int64_t first_block(int64_t sequence, const Sequence& x) const {
    return sequences.packed ? x.first_key / factor + sequence : 0;
  }
  // Keys and values that came pooled may have no block for the positions after the last whole one.
  MEMCHECK_INLINE int64_t blocks_of(const Sequence& x) const {
    const int64_t blocks = ceil_div(x.keys, factor);
    return blocks < C ? blocks : C;
  }
};

// The places for blocks of keys of T positions. They do not depend on the lengths of the sequences.
template <typename Size>
Size compressed_attention_blocks(const Size& T, int64_t factor, bool packed, const Size& sequences) {
  return packed ? T / factor + sequences : (T + (factor - 1)) / factor;
}

struct CompressedAttentionWindow {
  int64_t size = 0;   // W, at most T; 0 if there is no window
  int64_t first = 0;  // the position of the first key of k; no query sees a position before it
  Strided<4> k;       // (B,Hkv,T-first,D), as the next
  Strided<4> v;       // null if only grad_v is wanted
  Strided<4> grad_k;  // null if not wanted, as the next; unless pooled, those of the positions in blocks too
  Strided<4> grad_v;

  // The positions that query s sees as they are, counted from `first`.
  MEMCHECK_INLINE Span positions(const CompressedAttentionShape& shape, int64_t s) const {
    const int64_t t = s + shape.T - shape.S;
    const int64_t begin = t < size ? 0 : (t - size + 1) / shape.factor * shape.factor;
    return {begin - first, t + (shape.strict ? 0 : 1) - first};
  }
  // The queries from the first one that sees position j, and before the first one that sees none up to j any more.
  MEMCHECK_INLINE Span queries(const CompressedAttentionShape& shape, int64_t j) const {
    const int64_t t = first + j;
    return {shape.query_from(t + (shape.strict ? 1 : 0)),
            shape.query_from((t / shape.factor + 1) * shape.factor + size - 1)};
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
  Strided<4> q;      // (B,H,S,D)
  Strided<4> kc;     // (B,Hkv,C,D)
  Strided<4> vc;     // (B,Hkv,C,D)
  const void* sink;  // (H,), null if there is none
  Strided<4> y;      // (B,H,S,D)
  Strided<3> lse;    // (B,H,S), null if it is not wanted and no backward follows
  void* scratch;     // the plan's forward_scratch_bytes, or pooled_forward_scratch_bytes
  int64_t threads;   // of the plan
};

struct CompressedAttentionBackward {
  CompressedAttentionShape shape;
  double scale;
  Strided<4> grad_y;    // (B,H,S,D)
  Strided<3> grad_lse;  // (B,H,S), null for zeros
  Strided<4> q;         // (B,H,S,D)
  Strided<4> kc;        // (B,Hkv,C,D)
  Strided<4> vc;        // (B,Hkv,C,D), null if only grad_v is wanted, which does not depend on vc
  Strided<4> y;         // (B,H,S,D), null as vc is, and if y was rounded to 16 bits
  Strided<3> lse;       // (B,H,S)
  const void* sink;     // (H,), null if there is none
  bool pooled;          // grad_k and grad_v are those of kc and vc
  Strided<4> grad_q;    // (B,H,S,D), null if not wanted, as the next three
  Strided<4> grad_k;    // (B,Hkv,gradient_length,D)
  Strided<4> grad_v;    // (B,Hkv,gradient_length,D)
  void* grad_sink;      // (H,)
  Strided<3> delta;     // (B,H,S): grad_y . y - grad_lse, null if neither grad_k nor grad_sink is wanted
  void* scratch;        // the plan's backward_scratch_bytes
  int64_t threads;      // of the plan

  // A block's gradient divided by its length is the gradient of each of its positions. Pooled, it is one position.
  MEMCHECK_INLINE int64_t block_length() const { return pooled ? 1 : shape.factor; }
  MEMCHECK_INLINE int64_t gradient_length() const { return pooled ? shape.C : shape.T; }
};

struct CompressedAttentionWindowForward : CompressedAttentionForward {
  CompressedAttentionWindow window;
};

struct CompressedAttentionWindowBackward : CompressedAttentionBackward {
  CompressedAttentionWindow window;
};

// ---- blocks that go on from a state
//
// The new positions of a sequence complete its open block and others, and leave an open block. Each of these blocks is
// a row of results: a mean, or the last one a sum. The first row begins with the state's sum.

struct CompressedAttentionNew {
  int64_t row, first, count;  // where the new positions are in k and v
  int64_t positions;          // of the open block before them
  int64_t to, place;          // of the first mean, in kc and vc
  int64_t first_result;       // how many rows the sequences before have

  MEMCHECK_INLINE int64_t blocks(int64_t factor) const { return (positions + count) / factor; }
};

// A row of results.
struct CompressedAttentionNewRow {
  const CompressedAttentionNew& of;
  int64_t sequence;
  int64_t j;           // of its blocks
  bool complete;       // it is a mean
  int64_t begin, end;  // its positions in k and v
};

// Backward, all tensors are gradients: those of results are read, and null where there is none, and those of inputs are
// written, and null where they are not wanted.
struct CompressedAttentionExtension {
  CompressedAttentionShape shape;           // B Hkv C rows of results, and no queries
  const CompressedAttentionNew* sequences;  // in memory of the CPU
  int64_t count;
  Strided<4> k, v;                  // (rows,Hkv,positions,D)
  Strided<4> k_sum, v_sum;          // (count,Hkv,1,D) in the accumulation type, as the next
  Strided<4> new_k_sum, new_v_sum;  // (count,Hkv,1,D)
  Strided<4> kc, vc;                // (rows,Hkv,places,D)
  void* scratch;                    // the plan's extension_scratch_bytes
  int64_t threads;                  // of the plan

  // table: the sequences, in memory that the kernel reads
  MEMCHECK_INLINE CompressedAttentionNewRow row(const CompressedAttentionNew* table, int64_t index) const {
    int64_t low = 0, end_of_search = count;
    while (end_of_search - low > 1) {
      const int64_t middle = (low + end_of_search) / 2;
      (table[middle].first_result <= index ? low : end_of_search) = middle;
    }
    const CompressedAttentionNew& of = table[low];
    const int64_t j = index - of.first_result, begin = j * shape.factor - of.positions;
    const int64_t end = begin + shape.factor < of.count ? begin + shape.factor : of.count;
    return {of, low, j, j < of.blocks(shape.factor), of.first + (begin > 0 ? begin : 0), of.first + end};
  }
};

// The memory that kernels need beside inputs and outputs. That of the CPU depends on the number of threads, that of
// CUDA on shape and dtype only.
struct CompressedAttentionPlan {
  int64_t forward_scratch_bytes;         // of pooling and the forward after it
  int64_t pooled_forward_scratch_bytes;  // of the forward if keys and values were pooled already
  int64_t delta_bytes;
  int64_t backward_scratch_bytes;
  int64_t extension_scratch_bytes = 0;  // of an extension of the same shape
};

struct CompressedAttentionKernels {
  CompressedAttentionPlan (*plan)(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                                  Dtype dtype, int64_t threads);
  Kernel<CompressedAttentionPooling> pool;
  Kernel<CompressedAttentionWindowForward> forward;
  Kernel<CompressedAttentionWindowBackward> backward;
  Kernel<CompressedAttentionExtension> extend;
  Kernel<CompressedAttentionExtension> extend_backward;
  Kernel<SequenceTableBuild> build_sequences;  // null on the CPU, where the glue builds the table
};
extern const CompressedAttentionKernels compressed_attention_cpu;
extern const CompressedAttentionKernels compressed_attention_cuda;

}  // namespace memcheck
