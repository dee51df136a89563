#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "linear_attention/linear_attention.h"

// Linear attention on CUDA: how blocks of threads share the work, and the memory that they need. Like every plan it
// needs no GPU.

namespace memcheck {

// A block of threads goes along a sequence of rows and the columns that they see, with a state (depth,width) of the
// columns it has passed. In the forward and for grad_q rows are queries and columns are keys; for grad_k and grad_v
// rows are keys and columns are queries.

enum class LinearAttentionRows { Queries, Keys };

// The positions of a chunk, and the columns of a state that one block has.
inline int64_t linear_attention_tile(Dtype dtype) {
  return dtype == Dtype::Float64 ? 32 : 64;
}

// The tiles of so many columns, of which each block has one; one of none.
MEMCHECK_INLINE int64_t linear_attention_parts(int64_t columns, int64_t tile) {
  return columns == 0 ? 1 : ceil_div(columns, tile);
}
inline int64_t linear_attention_parts(int64_t columns, Dtype dtype) {
  return linear_attention_parts(columns, linear_attention_tile(dtype));
}

// A sequence cut into segments of whole chunks, each with a state of its own in memory; one segment if there are enough
// blocks. Causal: rows are cut where columns are; else rows are cut into as many pieces as columns.
struct LinearAttentionSegments {
  int64_t count;  // with `shortest`: of the longest sequence that the batch may have
  // Rows are queries, and a block has those of all query heads of a key head.
  bool grouped;
  // With a table, a sequence has as many segments as it has times this length, or one. So its bits depend on no other
  // sequence. 0 if every sequence has `count`.
  int64_t shortest = 0;

  MEMCHECK_INLINE int64_t count_of(int64_t length) const {
    if (shortest == 0) return count;
    return length < 2 * shortest ? 1 : length / shortest;
  }
};

constexpr int64_t kLinearAttentionChunk = 64;

// The segment's positions, or the piece's rows. Segments differ by a chunk at most.
MEMCHECK_INLINE Span linear_attention_segment(int64_t count, int64_t segment, int64_t length) {
  const int64_t chunks = ceil_div(length, kLinearAttentionChunk);
  const int64_t begin = segment * chunks / count * kLinearAttentionChunk;
  const int64_t end = (segment + 1) * chunks / count * kLinearAttentionChunk;
  return {begin < length ? begin : length, end < length ? end : length};
}

// The elements of a segment's state: the sum of an outer product (D,Dv), and of a vector.
MEMCHECK_INLINE int64_t linear_attention_slot(int64_t D, int64_t Dv) {
  return D * Dv + (D > Dv ? D : Dv);
}

// Places for segments of all sequences.
MEMCHECK_INLINE int64_t linear_attention_places(const LinearAttentionShape& n, const LinearAttentionSegments& segments,
                                                int64_t length) {
  if (segments.count > 1 && n.sequences.packed) return tile_places(n, length, segments.shortest);
  return sequence_count(n) * segments.count;
}

inline int64_t linear_attention_row_heads(const LinearAttentionShape& n, LinearAttentionRows rows) {
  return n.B * (rows == LinearAttentionRows::Queries ? n.H : n.Hkv);
}

// A state deeper than this lies in memory, not in the shared memory of a block.
constexpr int64_t kLinearAttentionDeepest = 256;

constexpr int64_t kLinearAttentionMultiprocessors = 132;

// The most segments that blocks of one multiprocessor go through, of `count` for each of so many heads.
inline int64_t linear_attention_busiest(int64_t heads, int64_t count) {
  return ceil_div(heads * count, kLinearAttentionMultiprocessors);
}

// From `count` to half as many more: the segments with the shortest way for the busiest multiprocessor.
inline int64_t linear_attention_evened(int64_t heads, int64_t count, int64_t most) {
  int64_t best = count;
  for (int64_t more = count + 1; more <= std::min(most, count * 3 / 2); ++more)
    if (linear_attention_busiest(heads, more) * best < linear_attention_busiest(heads, best) * more) best = more;
  return best;
}

// The segments of columns, if there are blocks of rows for so many heads.
inline LinearAttentionSegments linear_attention_segments_of(const LinearAttentionShape& n, Dtype dtype,
                                                            LinearAttentionRows rows, int64_t heads) {
  constexpr int64_t kBlocks = 2 * kLinearAttentionMultiprocessors;
  constexpr int64_t kShortest = 256;
  // Blocks add each tile's sum to their state without compensation: the error of n tiles is at most n / 2 units in the
  // last place of float32 or float64, and the tolerance is above 32 + sqrt(positions). Segments are added with
  // compensation.
  const int64_t longest = dtype == Dtype::Float64 ? 4096 : 16384;
  // States take at most this part of the bytes of the keys, or so many bytes if that is more.
  constexpr int64_t kSmallBytes = 4 << 20;
  constexpr int64_t kPartOfKeys = 16;
  const int64_t length = n.causal || rows == LinearAttentionRows::Queries ? n.T : n.S;
  const int64_t states_bytes = std::max<int64_t>(1, n.B * n.Hkv * linear_attention_slot(n.D, n.Dv) * acc_bytes(dtype));
  const int64_t affordable =
      std::max(kSmallBytes, n.B * n.Hkv * n.T * n.D * element_bytes(dtype) / kPartOfKeys) / states_bytes;
  const int64_t fewest = std::max<int64_t>(1, ceil_div(length, longest));
  const int64_t wanted =
      std::max(fewest, std::min(heads >= kBlocks / 2 ? 1 : ceil_div(kBlocks, heads), length / kShortest));
  const int64_t evened = linear_attention_evened(heads, wanted, length / kShortest);
  return {std::max(fewest, std::min(evened, affordable)), false};
}

inline bool linear_attention_has_columns_for_tensor_cores(const LinearAttentionShape& n) {
  constexpr int64_t kFewest = 16, kWidest = 128;
  return std::min(n.D, n.Dv) >= kFewest && std::max(n.D, n.Dv) <= kWidest;
}

// Whether scans of the shape run on tensor cores: those of 16-bit types whose products have many terms, so that the
// errors of rounding the factors average out, and whose states one block can have.
inline bool linear_attention_suits_tensor_cores(const LinearAttentionShape& n, Dtype dtype) {
  return element_bytes(dtype) == 2 && linear_attention_has_columns_for_tensor_cores(n);
}

// The segments of a batch with a table. States take about a sixteenth of the bytes of the keys.
inline LinearAttentionSegments linear_attention_segments_of_table(const LinearAttentionShape& n, Dtype dtype,
                                                                  LinearAttentionRows rows) {
  constexpr int64_t kShortest = 256, kLongest = 16384, kPartOfKeys = 16;
  const int64_t length = n.causal || rows == LinearAttentionRows::Queries ? n.T : n.S;
  const int64_t of_state = ceil_div(linear_attention_slot(n.D, n.Dv) * acc_bytes(dtype) * kPartOfKeys,
                                    std::max<int64_t>(1, n.D) * element_bytes(dtype));
  const int64_t wanted = ceil_div(std::min(of_state, kLongest), kLinearAttentionChunk) * kLinearAttentionChunk;
  LinearAttentionSegments segments{1, false, std::max(kShortest, wanted)};
  segments.count = segments.count_of(length);
  return segments;
}

// The segments of columns. On tensor cores a block has all query heads of a group if that leaves two blocks to a
// multiprocessor.
inline LinearAttentionSegments linear_attention_segments(const LinearAttentionShape& n, Dtype dtype,
                                                         LinearAttentionRows rows) {
  const auto of = [&](int64_t heads) {
    return n.sequences ? linear_attention_segments_of_table(n, dtype, rows)
                       : linear_attention_segments_of(n, dtype, rows, std::max<int64_t>(1, heads));
  };
  if (rows == LinearAttentionRows::Queries && n.group() > 1 && linear_attention_suits_tensor_cores(n, dtype)) {
    LinearAttentionSegments together = of(n.B * n.Hkv);
    together.grouped = n.B * n.Hkv * together.count >= 2 * kLinearAttentionMultiprocessors;
    if (together.grouped) return together;
  }
  return of(linear_attention_row_heads(n, rows));
}

// The elements of a block's state: rows with padding, and the sum of a vector.
MEMCHECK_INLINE constexpr int64_t linear_attention_block_state(int64_t depth, int64_t tile) {
  return ceil_div(depth, tile) * tile * (tile + 5);
}

// The most blocks of a batch with a table whose states lie in memory. They take turns.
constexpr int64_t kLinearAttentionDeepBlocks = 2 * kLinearAttentionMultiprocessors;

// The bytes of all blocks' states (depth,width), if they lie in memory.
inline int64_t linear_attention_deep_bytes(const LinearAttentionShape& n, Dtype dtype, LinearAttentionRows rows,
                                           int64_t depth, int64_t width) {
  if (depth <= kLinearAttentionDeepest) return 0;
  const int64_t tile = linear_attention_tile(dtype);
  const int64_t segments = linear_attention_segments(n, dtype, rows).count;
  const int64_t blocks = linear_attention_row_heads(n, rows) * segments * std::max<int64_t>(1, ceil_div(width, tile));
  const int64_t at_once = n.sequences ? kLinearAttentionDeepBlocks : blocks;
  return at_once * linear_attention_block_state(depth, tile) * acc_bytes(dtype);
}

// The positions whose gradients of decays a block adds up.
constexpr int64_t kLinearAttentionDecays = 2048;

// Their sums in float64 lie behind the rows.
inline int64_t linear_attention_decay_sums_at(int64_t rows_bytes) {
  return ceil_div(rows_bytes, int64_t{sizeof(double)}) * int64_t{sizeof(double)};
}
inline int64_t linear_attention_decay_sums_bytes(const LinearAttentionShape& n) {
  return key_tile_places(n, kLinearAttentionDecays) * n.Hkv * int64_t{sizeof(double)};
}

inline LinearAttentionPlan linear_attention_plan_cuda(const LinearAttentionShape& n, Dtype dtype, int64_t /*threads*/) {
  const auto states_bytes = [&](LinearAttentionRows rows) {
    const LinearAttentionSegments segments = linear_attention_segments(n, dtype, rows);
    if (segments.count == 1) return int64_t{0};
    return n.B * n.Hkv * segments.count * (linear_attention_slot(n.D, n.Dv) + (n.decayed ? 1 : 0)) * acc_bytes(dtype);
  };
  const auto deep_bytes = [&](LinearAttentionRows rows) {
    return std::max(linear_attention_deep_bytes(n, dtype, rows, n.D, n.Dv),
                    linear_attention_deep_bytes(n, dtype, rows, n.Dv, n.D));
  };
  constexpr auto kQueries = LinearAttentionRows::Queries;
  constexpr auto kKeys = LinearAttentionRows::Keys;
  const int64_t of_queries = n.normalize || n.decayed ? 1 + linear_attention_parts(n.Dv, dtype) : 0;
  const int64_t of_keys = n.decayed ? linear_attention_parts(n.D, dtype) : 0;
  const int64_t rows_bytes = n.B * (of_queries * n.H * n.S + of_keys * n.Hkv * n.T) * acc_bytes(dtype);
  return {states_bytes(kQueries), linear_attention_deep_bytes(n, dtype, kQueries, n.D, n.Dv),
          n.decayed ? linear_attention_decay_sums_at(rows_bytes) + linear_attention_decay_sums_bytes(n) : rows_bytes,
          std::max(states_bytes(kQueries), states_bytes(kKeys)), std::max(deep_bytes(kQueries), deep_bytes(kKeys))};
}

}  // namespace memcheck
