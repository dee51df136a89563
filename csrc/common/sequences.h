#pragma once

#include <cstdint>

#include "common/types.h"

// Sequences as data of a kernel. A batch is packed (all sequences in one row, each behind the one before), padded (one
// sequence in each row) or dense (every row is a sequence). Packed and padded batches have a table of their sequences
// in memory that the kernels read. A dense batch has none.
//
// On CUDA the host knows the shape of a batch and the number of its sequences, but not their lengths. So grids and
// memory are for the most tiles that these can have, and blocks behind the last tile of a sequence do nothing.

namespace memcheck {

struct Sequence {
  int64_t row;  // of the batch
  int64_t first_query, queries;
  int64_t first_key, keys;
};

struct SequenceTable {
  const Sequence* sequences = nullptr;  // (count,), null if the batch is dense
  int64_t count = 0;
  bool packed = false;

  MEMCHECK_INLINE explicit operator bool() const { return sequences != nullptr; }
};

// ---- the sequences of a shape, which has B, S, T and a table `sequences`

template <typename Shape>
MEMCHECK_INLINE int64_t sequence_count(const Shape& n) {
  return n.sequences ? n.sequences.count : n.B;
}

template <typename Shape>
MEMCHECK_INLINE Sequence sequence_of(const Shape& n, int64_t index) {
  return n.sequences ? n.sequences.sequences[index] : Sequence{index, 0, n.S, 0, n.T};
}

// The shape of one sequence: a dense batch of one row.
template <typename Shape>
Shape shape_of(const Shape& n, const Sequence& x) {
  Shape one = n;
  one.B = 1;
  one.S = x.queries;
  one.T = x.keys;
  one.sequences = {};
  return one;
}

// ---- tiles of positions
//
// Sequence i begins with a tile of its own. In a packed batch its first tile is (its first position) / size + i: at or
// behind the end of the tiles of the sequence before, and found without a sum over lengths.

// Places for tiles in a batch whose rows have `length` positions. Without sequences there are none.
template <typename Shape>
MEMCHECK_INLINE int64_t tile_places(const Shape& n, int64_t length, int64_t size) {
  if (!n.sequences.packed || n.sequences.count == 0) return sequence_count(n) * ceil_div(length, size);
  return length / size + n.sequences.count;
}

// The place of a sequence's first tile; `first` is its first position.
template <typename Shape>
MEMCHECK_INLINE int64_t first_tile(const Shape& n, int64_t sequence, int64_t first, int64_t length, int64_t size) {
  return n.sequences.packed ? first / size + sequence : sequence * ceil_div(length, size);
}

// A tile of a sequence. In a packed batch it may lie behind the sequence's end.
struct SequenceTile {
  int64_t sequence, tile;
};

// The tile at a place, where first_of(sequence) is the first position of each: a search in the table if the batch is
// packed.
template <typename Shape, typename FirstOf>
MEMCHECK_INLINE SequenceTile tile_at(const Shape& n, int64_t place, int64_t length, int64_t size,
                                     const FirstOf& first_of) {
  if (!n.sequences.packed) return {place / ceil_div(length, size), place % ceil_div(length, size)};
  int64_t low = 0, high = n.sequences.count - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_tile(n, middle, first_of(n.sequences.sequences[middle]), length, size) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, place - first_tile(n, low, first_of(n.sequences.sequences[low]), length, size)};
}

struct FirstQuery {
  MEMCHECK_INLINE int64_t operator()(const Sequence& x) const { return x.first_query; }
};
struct FirstKey {
  MEMCHECK_INLINE int64_t operator()(const Sequence& x) const { return x.first_key; }
};

template <typename Shape>
MEMCHECK_INLINE int64_t query_tile_places(const Shape& n, int64_t size) {
  return tile_places(n, n.S, size);
}
template <typename Shape>
MEMCHECK_INLINE int64_t key_tile_places(const Shape& n, int64_t size) {
  return tile_places(n, n.T, size);
}
template <typename Shape>
MEMCHECK_INLINE SequenceTile key_tile_at(const Shape& n, int64_t place, int64_t size) {
  return tile_at(n, place, n.T, size, FirstKey());
}

// x from the element of this index on; null if x is.
template <int kRank>
Strided<kRank> starting_at(Strided<kRank> x, Dtype dtype, const int64_t (&index)[kRank]) {
  if (!x) return x;
  int64_t offset = 0;
  for (int i = 0; i < kRank; ++i) offset += index[i] * x.stride[i];
  x.data = static_cast<char*>(x.data) + offset * element_bytes(dtype);
  return x;
}

// ---- tables

// What a table is made of: the arguments of an operator.
struct SequenceSource {
  const void* queries;           // packed: cu_seqlens_q (N+1,), int32 or int64
  const void* keys;              // packed: cu_seqlens_k (N+1,); padded: lengths (B,)
  bool wide_queries, wide_keys;  // int64
  bool packed, left_padded, causal;
  int64_t count, S, T;

  MEMCHECK_INLINE static int64_t value(const void* from, bool wide, int64_t i) {
    return wide ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
  }
  MEMCHECK_INLINE int64_t query_value(int64_t i) const { return value(queries, wide_queries, i); }
  MEMCHECK_INLINE int64_t key_value(int64_t i) const { return value(keys, wide_keys, i); }
};

// A row of the table, if the source breaks no rule. Causal, query s is at position s + T - S, so padding ends or begins
// for queries where it does for keys. Else queries are padded as keys are if there are as many, and not at all if not.
MEMCHECK_INLINE Sequence sequence_at(const SequenceSource& x, int64_t i) {
  if (x.packed)
    return {0, x.query_value(i), x.query_value(i + 1) - x.query_value(i), x.key_value(i),
            x.key_value(i + 1) - x.key_value(i)};
  const int64_t keys = x.key_value(i);
  int64_t queries = x.S;
  if (x.causal || x.S == x.T) {
    const int64_t from_the_end = keys - (x.T - x.S);
    queries = x.left_padded ? (x.S < keys ? x.S : keys) : (from_the_end > 0 ? from_the_end : 0);
  }
  return {i, x.left_padded ? x.S - queries : 0, queries, x.left_padded ? x.T - keys : 0, keys};
}

// Whether sequence i breaks no rule. The rules as sentences are in common/torch/sequences.cpp.
MEMCHECK_INLINE bool is_valid(const SequenceSource& x, int64_t i) {
  const int64_t key = x.key_value(i);
  if (!x.packed) return key >= 0 && key <= x.T;
  const int64_t query = x.query_value(i), query_end = x.query_value(i + 1), key_end = x.key_value(i + 1);
  const bool begins = i > 0 || (query == 0 && key == 0);
  const bool ends = i + 1 < x.count || (query_end == x.S && key_end == x.T);
  const bool ascends = query >= 0 && query <= query_end && key >= 0 && key <= key_end;
  return begins && ends && ascends && (!x.causal || query_end - query <= key_end - key);
}

// A table to fill on a GPU: all sequences are empty if one breaks a rule, so that kernels stay within their tensors.
struct SequenceTableBuild {
  SequenceSource source;
  Sequence* table;  // (count,)
};

void build_sequences_cuda(const SequenceTableBuild& p, Dtype dtype, cudaStream_t stream);

}  // namespace memcheck
