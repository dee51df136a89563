#pragma once

#include "compressed_attention/compressed_attention_cpu.h"

// Tiles of queries, and what they see of a tile of blocks: for the forward and for grad_q.

namespace memcheck::compressed_cpu {

// Positions from s on of some heads, one head after the other: more than one head only where sequences are short.
struct QueryTile {
  int64_t b, key_head, head, heads, s, positions;

  MEMCHECK_INLINE int64_t rows() const { return heads * positions; }
  MEMCHECK_INLINE int64_t position(int64_t row) const { return s + row % positions; }
};

QueryTile query_tile(const CompressedAttentionShape& shape, int64_t index);

// The columns that some query of a tile sees. Tiles of columns begin at multiples of their size among all blocks or
// positions, so that the bits of a query depend neither on the others of its tile nor on where a state begins.
MEMCHECK_INLINE Span columns_seen(const Columns& columns, const QueryTile& tile) {
  const int64_t begin = (columns.first + columns.seen_by(tile.s).begin) / kBlocks * kBlocks - columns.first;
  return {begin > 0 ? begin : 0, columns.seen_by(tile.s + tile.positions - 1).end};
}
// Behind the tile that column j is in.
MEMCHECK_INLINE int64_t end_of_tile(const Columns& columns, int64_t j) {
  return ((columns.first + j) / kBlocks + 1) * kBlocks - columns.first;
}
MEMCHECK_INLINE bool ends_chunk(const Columns& columns, int64_t j) {
  return ((columns.first + j) / kBlocks + 1) % kChunkTiles == 0;
}

// The element of row `row` of a tile in x, (B,H,S).
template <typename acc_t>
MEMCHECK_INLINE acc_t& number_of(const Strided<3>& x, const QueryTile& tile, int64_t row) {
  return *x.at<acc_t>(tile.b, tile.head + row / tile.positions, tile.position(row));
}

// to (rows,padded_columns(D)) = a tile of x, (B,H,S,D).
template <typename acc_t>
MEMCHECK_INLINE void load_queries(Dtype dtype, const Strided<4>& x, const QueryTile& tile, int64_t D, acc_t* to) {
  const int64_t columns = padded_columns(D);
  for (int64_t head = 0; head < tile.heads; ++head)
    load_rows(dtype, rows_at(dtype, x, tile.b, tile.head + head, tile.s), tile.positions, D,
              to + head * tile.positions * columns, columns);
}

template <typename acc_t>
MEMCHECK_INLINE void store_queries(Dtype dtype, const Strided<4>& x, const QueryTile& tile, int64_t D,
                                   const acc_t* from) {
  const int64_t columns = padded_columns(D);
  for (int64_t head = 0; head < tile.heads; ++head)
    store_rows(dtype, rows_at(dtype, x, tile.b, tile.head + head, tile.s), tile.positions, D,
               from + head * tile.positions * columns, columns);
}

// to (lane tiles,columns,kLanes) = from (rows,columns) with queries along the lanes, and 0 where there are none.
template <typename acc_t>
MEMCHECK_INLINE void put_along_lanes(const acc_t* from, int64_t rows, int64_t columns, acc_t* to) {
  for (int64_t first = 0; first < rows; first += kLanes)
    transpose_rows(from + first * columns, columns, rows - first < kLanes ? rows - first : kLanes, columns,
                   to + first * columns, kLanes);
}

// What a tile of queries sees of a tile of columns.
template <typename acc_t>
struct Sight {
  int64_t count;               // of columns in the tile
  int64_t by_all;              // all queries see the columns before this one, from not_by_all on
  int64_t not_by_all = 0;      // not all queries see the columns before this one
  acc_t start[kQueries] = {};  // the first column of each query, set if not_by_all > 0
  acc_t limit[kQueries] = {};  // the column behind the last of each query, set if by_all < count

  // Of the tile from column j on.
  MEMCHECK_INLINE Sight(const Columns& columns, const QueryTile& tile, int64_t j)
      : count(std::min(end_of_tile(columns, j), columns_seen(columns, tile).end) - j), by_all(count) {
    const int64_t last_start = columns.seen_by(tile.s + tile.positions - 1).begin - j;
    if (last_start > 0) {
      not_by_all = last_start < count ? last_start : count;
      for (int64_t row = 0; row < tile.rows(); ++row)
        start[row] = static_cast<acc_t>(columns.seen_by(tile.position(row)).begin - j);
    }
    const int64_t fewest = columns.seen_by(tile.s).end - j;
    if (fewest >= count) return;
    by_all = fewest > 0 ? fewest : 0;
    for (int64_t row = 0; row < tile.rows(); ++row) {
      const int64_t seen = columns.seen_by(tile.position(row)).end - j;
      limit[row] = static_cast<acc_t>(seen < 0 ? 0 : seen < count ? seen : count);
    }
  }

  // scores (count,kLanes) of the queries from `first` on: times scale, and -inf where a query does not see the column.
  MEMCHECK_INLINE void scale_and_hide(int64_t first, acc_t scale, acc_t* scores) const {
    for (int64_t i = 0; i < by_all * kLanes; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) scores[i + lane] *= scale;
    for (int64_t j = by_all; j < count; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        acc_t& score = scores[j * kLanes + lane];
        score = static_cast<acc_t>(j) < limit[first + lane] ? score * scale : minus_infinity<acc_t>();
      }
    for (int64_t j = 0; j < not_by_all; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        acc_t& score = scores[j * kLanes + lane];
        score = static_cast<acc_t>(j) < start[first + lane] ? minus_infinity<acc_t>() : score;
      }
  }

  // The same of scores (count,kBlocks).
  MEMCHECK_INLINE void scale_and_hide_few(int64_t first, int64_t queries, acc_t scale, acc_t* scores) const {
    for (int64_t row = 0; row < queries; ++row) {
      acc_t* line = scores + row * kBlocks;
      const int64_t seen = by_all < count ? static_cast<int64_t>(limit[first + row]) : count;
      for (int64_t j = 0; j < seen; ++j) line[j] *= scale;
      for (int64_t j = seen; j < count; ++j) line[j] = minus_infinity<acc_t>();
      for (int64_t j = 0; j < not_by_all && static_cast<acc_t>(j) < start[first + row]; ++j)
        line[j] = minus_infinity<acc_t>();
    }
  }
};

}  // namespace memcheck::compressed_cpu
