#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/formulas.cuh"
#include "common/tile.cuh"
#include "compressed_attention/compressed_attention_plan_cuda.h"

// Matrices of one key head in memory. The queries of all heads that read one key head are rows of one matrix, position
// by position: row r is position r / group of head r % group of the group. So neighbouring rows see the same blocks,
// whatever the group, and a few positions of many heads fill a tile.

namespace memcheck {
namespace compressed_cuda {

template <typename number_t>
MEMCHECK_INLINE number_t smaller(number_t a, number_t b) {
  return b < a ? b : a;
}

template <typename number_t>
MEMCHECK_INLINE number_t larger(number_t a, number_t b) {
  return a < b ? b : a;
}

// A row of the queries of a group: a position, and a head of the group.
struct QueryRow {
  int64_t position, head;
};

// A division of 64-bit numbers takes a hundred instructions.
MEMCHECK_INLINE QueryRow query_row(int64_t row, int64_t group) {
  if (group == 1) return {row, 0};
  constexpr int64_t kSmall = std::numeric_limits<uint32_t>::max();
  if (row > kSmall || group > kSmall) return {row / group, row % group};
  const uint32_t position = static_cast<uint32_t>(row) / static_cast<uint32_t>(group);
  return {position, static_cast<uint32_t>(row) - position * static_cast<uint32_t>(group)};
}

// The matrix of one key head: its keys, or, if grouped, the queries that read it.
template <typename scalar_t, bool kGrouped>
struct HeadMatrix {
  scalar_t* data;
  int64_t position_stride;
  int64_t head_stride;
  int64_t column_stride;
  int64_t group;       // heads
  int64_t first_head;  // of row 0
  int64_t count;
  int64_t columns;
  bool packed;  // rows may be read and written 16 bytes at a time

  MEMCHECK_INLINE scalar_t* at(int64_t row) const {
    if (!kGrouped) return data + row * position_stride;
    const QueryRow of = query_row(row + first_head, group);
    return data + of.position * position_stride + of.head * head_stride;
  }
  // The matrix without the rows before `row`.
  MEMCHECK_INLINE HeadMatrix from(int64_t row) const {
    HeadMatrix rows = *this;
    rows.count = count - row;
    if (kGrouped) {
      const QueryRow of = query_row(row + first_head, group);
      rows.data = data + of.position * position_stride;
      rows.first_head = of.head;
    } else {
      rows.data = data + row * position_stride;
    }
    return rows;
  }
  // Address of one of the first 256 rows, if the first head is in the group: the division is shorter than that of at.
  MEMCHECK_INLINE scalar_t* near(int row) const {
    if (!kGrouped || group == 1) return data + row * position_stride;
    const int64_t head = first_head + row;
    if (group >= 256) {
      const bool next = head >= group;
      return data + (next ? position_stride : 0) + (next ? head - group : head) * head_stride;
    }
    const uint32_t position = static_cast<uint32_t>(head) / static_cast<uint32_t>(group);
    return data + position * position_stride + (head - position * group) * head_stride;
  }
  MEMCHECK_INLINE RowLayout layout() const { return {column_stride, columns, packed}; }
  // The pack at `column` of the row at `address`; zeros where nothing exists.
  __device__ __forceinline__ Pack<scalar_t> read(const scalar_t* address, bool exists, int64_t column) const {
    return read_pack(address + column * column_stride, layout(), column, exists);
  }
};

template <typename scalar_t>
using QueryMatrix = HeadMatrix<scalar_t, true>;
template <typename scalar_t>
using KeyMatrix = HeadMatrix<scalar_t, false>;

// Whether rows of x may be read and written 16 bytes at a time.
template <typename scalar_t>
MEMCHECK_INLINE bool is_packed(const Strided<4>& x, int64_t columns) {
  constexpr int64_t kCount = kPackSize<scalar_t>;
  const bool strides = (x.stride[0] | x.stride[1] | x.stride[2]) % kCount == 0;
  return strides && x.stride[3] == 1 && columns % kCount == 0 && reinterpret_cast<uintptr_t>(x.data) % kPackBytes == 0;
}

// A key head of a sequence, and where this is in the tensors of the batch.
struct KeyHead {
  int64_t b, head, group;
  int64_t first_query, queries;
  int64_t first_key, keys;
  int64_t first_block, blocks;

  MEMCHECK_INLINE int64_t rows() const { return group * queries; }
  MEMCHECK_INLINE int64_t visible(const CompressedAttentionShape& shape, int64_t row) const {
    return alone(shape).visible(query_row(row, group).position);
  }
  // The positions of a window that a row sees.
  MEMCHECK_INLINE Span positions(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                                 int64_t row) const {
    return window.positions(alone(shape), query_row(row, group).position);
  }
  // The first row that sees block j.
  MEMCHECK_INLINE int64_t first_row(const CompressedAttentionShape& shape, int64_t j) const {
    return (j < blocks ? smaller(alone(shape).first_query(j), queries) : queries) * group;
  }
  // The rows from the first one that sees position j of a window, and before the first that sees none up to j any more.
  MEMCHECK_INLINE Span rows_seeing(const CompressedAttentionShape& shape, const CompressedAttentionWindow& window,
                                   int64_t j) const {
    const Span of = window.queries(alone(shape), j);
    return {of.begin * group, of.end * group};
  }

 private:
  MEMCHECK_INLINE CompressedAttentionShape alone(CompressedAttentionShape shape) const {
    shape.S = queries;
    shape.T = keys;
    shape.C = blocks;
    return shape;
  }
};

MEMCHECK_INLINE KeyHead key_head(const CompressedAttentionShape& shape, int64_t sequence, int64_t head) {
  const Sequence x = sequence_of(shape, sequence);
  return {x.row,
          head,
          shape.group(),
          x.first_query,
          x.queries,
          x.first_key,
          x.keys,
          shape.first_block(sequence, x),
          shape.sequences ? shape.blocks_of(x) : shape.C};
}

// x (B,H,S,D)
template <typename scalar_t>
MEMCHECK_INLINE QueryMatrix<scalar_t> queries_of(const CompressedAttentionShape& shape, const Strided<4>& x,
                                                 const KeyHead& of) {
  return {x.at<scalar_t>(of.b, of.head * of.group, of.first_query, 0),
          x.stride[2],
          x.stride[1],
          x.stride[3],
          of.group,
          0,
          of.rows(),
          shape.D,
          is_packed<scalar_t>(x, shape.D)};
}

// Rows of one key head of x (B,Hkv,length,D).
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> rows_of(const CompressedAttentionShape& shape, const Strided<4>& x,
                                            const KeyHead& of, int64_t first, int64_t count) {
  return {x.at<scalar_t>(of.b, of.head, first, 0), x.stride[2], 0, x.stride[3], 1, 0, count, shape.D,
          is_packed<scalar_t>(x, shape.D)};
}

// x (B,Hkv,T,D)
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> keys_of(const CompressedAttentionShape& shape, const Strided<4>& x,
                                            const KeyHead& of) {
  return rows_of<scalar_t>(shape, x, of, of.first_key, of.keys);
}

// x (B,Hkv,C,D)
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> blocks_of(const CompressedAttentionShape& shape, const Strided<4>& x,
                                              const KeyHead& of) {
  return rows_of<scalar_t>(shape, x, of, of.first_block, of.blocks);
}

// The query head of a row.
MEMCHECK_INLINE int64_t query_head(const KeyHead& of, int64_t row) {
  return of.head * of.group + query_row(row, of.group).head;
}

// Index of a row's element in a contiguous tensor (B,H,S).
MEMCHECK_INLINE int64_t query_index(const CompressedAttentionShape& shape, const KeyHead& of, int64_t row) {
  const QueryRow of_group = query_row(row, of.group);
  return (of.b * shape.H + of.head * of.group + of_group.head) * shape.S + of.first_query + of_group.position;
}

// A row's element of x (B,H,S).
template <typename acc_t>
MEMCHECK_INLINE acc_t& number_of(const Strided<3>& x, const KeyHead& of, int64_t row) {
  const QueryRow of_group = query_row(row, of.group);
  return *x.at<acc_t>(of.b, of.head * of.group + of_group.head, of.first_query + of_group.position);
}

// Stores kCount columns of a row, as far as they exist.
template <typename scalar_t, int kCount, bool kGrouped>
__device__ __forceinline__ void store_columns(const HeadMatrix<scalar_t, kGrouped>& to, int64_t row, int64_t column,
                                              const acc_type<scalar_t> (&x)[kCount]) {
  write_pack(rounded_pack<scalar_t>(x), to.at(row) + column * to.column_stride, to.layout(), column);
}

}  // namespace compressed_cuda
}  // namespace memcheck
