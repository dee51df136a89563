#pragma once

#include "compressed_attention/compressed_attention_matrices_cuda.cuh"

// Which tiles a block of threads computes, and where split results lie in the plan's scratch.

namespace memcheck {

// In compressed_attention_pool_cuda.cu and compressed_attention_backward_cuda.cu.
void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream);
void compressed_attention_backward_cuda(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t stream);

namespace compressed_cuda {

// A tile of queries, and the tiles of blocks that it reads: all that any of its queries sees, or its part of them.
struct QueryWork {
  KeyHead of;
  int64_t row;     // the first
  int64_t column;  // the first of y or grad_q
  int64_t part;
  int64_t begin, end;  // tiles of blocks
  int64_t seen;        // by the last query
};

MEMCHECK_INLINE int64_t part_of(int64_t tiles, int64_t part, int64_t parts) {
  return tiles * part / parts;
}

// Late queries see most blocks. Their tiles go first, so that short tiles fill the end of the launch.
MEMCHECK_INLINE QueryWork query_work(const CompressedAttentionShape& shape, int64_t index, int64_t tile_rows,
                                     int64_t tile_keys, int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t key_heads = shape.B * shape.Hkv;
  const KeyHead of = key_head_at(shape, index % key_heads);
  const int64_t rows = of.group * shape.S;
  const int64_t row = (ceil_div(rows, tile_rows) - 1 - index / key_heads) * tile_rows;
  const int64_t seen = shape.visible((smaller(row + tile_rows, rows) - 1) / of.group);
  const int64_t tiles = ceil_div(seen, tile_keys);
  return {of, row, column, part, part_of(tiles, part, parts), part_of(tiles, part + 1, parts), seen};
}

// A tile of blocks, and the tiles of queries that it reads, from the first query that sees any of it.
struct KeyWork {
  KeyHead of;
  int64_t key;     // the first
  int64_t column;  // the first of the gradients
  int64_t part;
  int64_t first_row;   // of the queries
  int64_t begin, end;  // tiles of queries from there on
};

// Most queries see early keys. Their tiles go first.
MEMCHECK_INLINE KeyWork key_work(const CompressedAttentionShape& shape, int64_t index, int64_t tile_keys,
                                 int64_t tile_rows, int64_t column_tiles, int64_t tile_columns, int64_t parts) {
  const int64_t part = index % parts;
  index /= parts;
  const int64_t column = index % column_tiles * tile_columns;
  index /= column_tiles;
  const int64_t key_heads = shape.B * shape.Hkv;
  const KeyHead of = key_head_at(shape, index % key_heads);
  const int64_t key = index / key_heads * tile_keys;
  const int64_t first_row = smaller(shape.first_query(key), shape.S) * of.group;
  const int64_t tiles = ceil_div(of.group * shape.S - first_row, tile_rows);
  return {of, key, column, part, first_row, part_of(tiles, part, parts), part_of(tiles, part + 1, parts)};
}

// The positions of a block. Its gradient is divided by their number.
struct BlockPositions {
  int64_t begin, length;
};

MEMCHECK_INLINE BlockPositions positions_of(const CompressedAttentionBackward& p, int64_t j) {
  const int64_t begin = j * p.block_length;
  return {begin, smaller(p.gradient_length - begin, p.block_length)};
}

// Where the parts of a split forward lie in the plan's scratch: y (parts,B,H,S,D), then lse (parts,B,H,S).
template <typename acc_t>
struct ForwardParts {
  acc_t* y;
  acc_t* lse;
  int64_t count;

  ForwardParts(const CompressedAttentionForward& p, int64_t parts)
      : y(static_cast<acc_t*>(p.scratch)),
        lse(y == nullptr ? nullptr : y + parts * p.shape.B * p.shape.H * p.shape.S * p.shape.D),
        count(parts) {}
};

// Parts of the gradients of kc and vc in the plan's scratch, (parts,2,B,Hkv,C,D).
template <typename acc_t>
struct KeyParts {
  acc_t* gradients;
  int64_t count;

  __device__ __forceinline__ acc_t* at(const CompressedAttentionShape& shape, int64_t part, bool of_values,
                                       const KeyHead& of, int64_t j) const {
    const int64_t head = (part * 2 + of_values) * shape.B * shape.Hkv + of.b * shape.Hkv + of.head;
    return gradients + (head * shape.C + j) * shape.D;
  }
};

// For 16-bit types. They return false, and do nothing, if the head is too wide for tensor cores.
template <typename scalar_t>
bool forward_on_tensor_cores(const CompressedAttentionForward& p, const ForwardParts<float>& parts,
                             cudaStream_t stream);
template <typename scalar_t>
bool query_gradients_on_tensor_cores(const CompressedAttentionBackward& p, cudaStream_t stream);
template <typename scalar_t>
bool key_gradients_on_tensor_cores(const CompressedAttentionBackward& p, const KeyParts<float>& parts,
                                   cudaStream_t stream);

}  // namespace compressed_cuda
}  // namespace memcheck
