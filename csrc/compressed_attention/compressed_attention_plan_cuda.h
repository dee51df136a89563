#pragma once

#include <algorithm>

#include "compressed_attention/compressed_attention.h"

// How CUDA kernels divide the work, and the memory that they need: tuning for an H100.
//
// If there are too few tiles to keep a GPU busy, several thread blocks share a tile: in the forward each takes some of
// the blocks that the tile's queries see, in the backward some of the queries that see the tile's keys. Each writes its
// part in the accumulation type, and the parts are added in their order. With a table of sequences nothing is split, so
// that the bits of a sequence do not depend on the others.

namespace memcheck {

constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kCompressedThreadBlocks = 2 * kMultiprocessors;
constexpr int64_t kCompressedFewestTiles = 4;  // for a part

inline bool is_empty(const CompressedAttentionShape& shape) {
  return shape.B == 0 || shape.H == 0 || shape.Hkv == 0 || shape.S == 0 || shape.D == 0;
}

// Whether the queries of a key head fit into a tile of 16 rows for each warp, as in decoding. Then loads take the time,
// and several blocks of threads load for each multiprocessor.
inline bool compressed_attention_has_few_queries_cuda(const CompressedAttentionShape& shape) {
  return shape.D <= 128 && shape.group() * shape.S <= 64;
}

constexpr int compressed_attention_few_blocks_cuda(int64_t D) {
  return D <= 64 ? 4 : 3;
}

// The parts of every tile of queries in the forward. They lie in scratch.
inline int64_t compressed_attention_query_parts_cuda(const CompressedAttentionShape& shape,
                                                     const CompressedAttentionWindow& window, Dtype dtype) {
  constexpr int64_t kTile = 64;
  constexpr int64_t kBytes = 1 << 20;
  if (is_empty(shape) || shape.sequences) return 1;
  const int64_t tiles = shape.B * shape.Hkv * ceil_div(shape.group() * shape.S, kTile);
  const int64_t part_bytes = shape.B * shape.H * shape.S * (shape.D + 1) * acc_bytes(dtype);
  int64_t key_tiles = ceil_div(shape.C, kTile);
  if (window.size > 0) {
    const int64_t seen = shape.visible(shape.S - 1);  // blocks, by the last query
    key_tiles = ceil_div(seen, kTile) + ceil_div(shape.T - seen * shape.factor, kTile);
  }
  const bool few = element_bytes(dtype) == 2 && compressed_attention_has_few_queries_cuda(shape);
  const int64_t blocks =
      few ? compressed_attention_few_blocks_cuda(shape.D) * kMultiprocessors : kCompressedThreadBlocks;
  const int64_t wanted = std::min(blocks / tiles, ceil_div(key_tiles, kCompressedFewestTiles));
  return std::max<int64_t>(1, std::min(wanted, kBytes / part_bytes));
}

// Bytes of a part of the gradients of kc and vc (B,Hkv,C,D).
inline int64_t compressed_attention_key_part_bytes_cuda(const CompressedAttentionShape& shape, Dtype dtype) {
  return 2 * shape.B * shape.Hkv * shape.C * shape.D * acc_bytes(dtype);
}

// The parts of every tile of keys in the backward. They lie in scratch.
inline int64_t compressed_attention_key_parts_cuda(const CompressedAttentionShape& shape, Dtype dtype) {
  constexpr int64_t kTile = 64;
  constexpr int64_t kBytes = 1 << 19;
  if (is_empty(shape) || shape.C == 0 || shape.sequences) return 1;
  const int64_t eighth = shape.B * shape.H * shape.S * shape.D * element_bytes(dtype) / 8;
  const int64_t room = std::max(eighth, kBytes) / compressed_attention_key_part_bytes_cuda(shape, dtype);
  const int64_t tiles = shape.B * shape.Hkv * ceil_div(shape.C, kTile);
  const int64_t steps = ceil_div(shape.group() * shape.S, kTile);
  const int64_t wanted = std::min(ceil_div(kCompressedThreadBlocks, tiles), ceil_div(steps, kCompressedFewestTiles));
  return std::max<int64_t>(1, std::min(wanted, room));
}

inline CompressedAttentionPlan compressed_attention_plan_cuda(const CompressedAttentionShape& shape,
                                                              const CompressedAttentionWindow& window, Dtype dtype,
                                                              int64_t /*threads*/) {
  const int64_t parts = compressed_attention_query_parts_cuda(shape, window, dtype);
  const int64_t acc = acc_bytes(dtype);
  const int64_t queries = shape.B * shape.H * shape.S;
  // Every part's y (B,H,S,D) and lse (B,H,S).
  const int64_t forward = parts > 1 ? parts * queries * (shape.D + 1) * acc : 0;
  const int64_t key_parts = compressed_attention_key_parts_cuda(shape, dtype);
  const int64_t backward = key_parts > 1 ? key_parts * compressed_attention_key_part_bytes_cuda(shape, dtype) : 0;
  return {forward, forward, queries * acc, backward};
}

}  // namespace memcheck
