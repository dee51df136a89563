#include <type_traits>

#include "common/compensated_sum.h"
#include "common/cpu_level.h"
#include "compressed_attention/compressed_attention_cpu_queries.h"

// Backward. y = sum_j p_j vc_j with p = softmax(scale q . kc). With dp_j = grad_y . vc_j and delta = grad_y . y =
// sum_j p_j dp_j, the gradient of score j is ds_j = p_j (dp_j - delta). Over blocks j and queries i:
//
//     grad_q_i = scale sum_j ds_ij kc_j     grad_kc_j = scale sum_i ds_ij q_i     grad_vc_j = sum_i p_ij grad_y_i
//
// grad_q is query-stationary, the others are key-stationary. lse = log sum_j exp(s_j) depends on a score by p_j, so its
// gradient is subtracted from delta. A sink is a score s with a value of 0: its gradient is the sum of -p_s delta.

namespace memcheck::compressed_cpu {
namespace {

// ---- gradients of queries

template <typename acc_t>
struct QueryScratch {
  acc_t* kc;  // kBlocks x D, as the next
  acc_t* vc;
  acc_t* grad_lanes;  // D x kLanes for every kLanes queries, as the next
  acc_t* q_lanes;
  acc_t* product;         // kQueries x D
  SumOfTiles<acc_t> sum;  // kQueries x D
  acc_t* scores;          // kBlocks x kLanes, as the next
  acc_t* grad_weights;

  QueryScratch(Arena& arena, const CompressedAttentionShape& shape)
      : kc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        vc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        grad_lanes(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        q_lanes(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        product(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        sum(arena, kQueries * padded_columns(shape.D)),
        scores(arena.take<acc_t>(kBlocks * kLanes)),
        grad_weights(arena.take<acc_t>(kBlocks * kLanes)) {}
};

// q and grad_y along the lanes.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void load_lanes(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                const QueryScratch<acc_t>& x) {
  const int64_t columns = Rows::columns_of(p.shape.D);
  load_queries<Rows>(dtype, p.q, tile, p.shape.D, x.product);
  put_along_lanes(x.product, tile.rows(), columns, x.q_lanes);
  load_queries<Rows>(dtype, p.grad_y, tile, p.shape.D, x.product);
  put_along_lanes(x.product, tile.rows(), columns, x.grad_lanes);
}

// A tile of columns from j on, as a tile of queries sees it.
template <typename Rows>
struct SeenColumns {
  using acc_t = typename Rows::acc_t;

  Sight<acc_t> sight;
  Rows kc, vc;

  MEMCHECK_INLINE SeenColumns(Dtype dtype, const QueryTile& tile, const Columns& of, int64_t j, Factor of_kc,
                              const QueryScratch<acc_t>& x)
      : sight(of, tile, j),
        kc(dtype, rows_at(dtype, of.k, tile.b, tile.key_head, j), sight.count, of.shape.D, of_kc, x.kc),
        vc(dtype, rows_at(dtype, of.v, tile.b, tile.key_head, j), sight.count, of.shape.D, Factor::Left, x.vc) {}

  // Scores of the queries from `first` on, and the gradients of their weights.
  MEMCHECK_INLINE void score(const CompressedAttentionWindowBackward& p, int64_t first, const QueryScratch<acc_t>& x,
                             bool careful) const {
    const int64_t skipped = first * Rows::columns_of(p.shape.D);
    kc.multiply(x.q_lanes + skipped, x.scores);
    vc.multiply(x.grad_lanes + skipped, x.grad_weights);
    sight.scale_and_hide(first, static_cast<acc_t>(p.scale), x.scores);
    if (careful) hide_absent(kc, kLanes, kLanes, 1, x.scores);
  }
};

// delta = grad_y . y, in the chains of products over D that the gradient of a weight has: where a query sees one block
// these are the same numbers, and the gradient of the score is 0 as it should be.
template <typename acc_t>
MEMCHECK_INLINE void delta_from_y(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                  const QueryScratch<acc_t>& x, acc_t* delta) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  acc_t* y_lanes = x.sum.total;
  load_queries<WideRows<acc_t>>(dtype, p.y, tile, D, x.product);
  put_along_lanes(x.product, tile.rows(), columns, y_lanes);
  for (int64_t first = 0; first < tile.rows(); first += kLanes) {
    for (int64_t d = 0; d < D; d += kProductChain) {
      alignas(64) acc_t sum[kLanes] = {};
      const int64_t end = first * columns + std::min(D, d + kProductChain) * kLanes;
      for (int64_t i = first * columns + d * kLanes; i < end; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) sum[lane] += y_lanes[i + lane] * x.grad_lanes[i + lane];
      for (int64_t lane = 0; lane < kLanes; ++lane) delta[first + lane] += sum[lane];
    }
  }
}

// delta += sum_j p_j dp_j over a tile of blocks.
template <typename acc_t>
MEMCHECK_INLINE void add_weighted(int64_t blocks, const acc_t* shift, const acc_t* scores, const acc_t* grad_weights,
                                  acc_t* delta) {
  alignas(64) acc_t sum[kLanes] = {};
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum[lane] += weighted(softmax_weight(scores[j * kLanes + lane], shift[lane]), grad_weights[j * kLanes + lane]);
  for (int64_t lane = 0; lane < kLanes; ++lane) delta[lane] += sum[lane];
}

// Calls run(columns, j) for all tiles of columns that a tile of queries sees, from j on.
template <typename Run>
MEMCHECK_INLINE void each_tile_of_columns(const CompressedAttentionWindowBackward& p, const QueryTile& tile,
                                          const Run& run) {
  for (const bool of_window : {false, true}) {
    if (of_window && p.window.size == 0) return;
    const Columns columns(p, of_window);
    const int64_t end = end_of_columns(columns, tile);
    for (int64_t j = begin_of_columns(columns, tile); j < end; j = end_of_tile(columns, j)) run(columns, j);
  }
}

// delta = sum_j p_j dp_j, where y was rounded to 16 bits: its error would be that of every score's gradient at once.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void delta_from_weights(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                        const QueryScratch<acc_t>& x, bool careful, const acc_t* shift, acc_t* delta) {
  each_tile_of_columns(p, tile, [&](const Columns& of, int64_t j) MEMCHECK_INLINE_LAMBDA {
    const SeenColumns<Rows> seen(dtype, tile, of, j, Factor::Left, x);
    for (int64_t first = 0; first < tile.rows(); first += kLanes) {
      seen.score(p, first, x, careful);
      add_weighted(seen.sight.count, shift + first, x.scores, x.grad_weights, delta + first);
    }
  });
}

// The numbers of each query of a tile that gradients of scores need.
template <typename Rows>
struct QueryNumbers {
  using acc_t = typename Rows::acc_t;

  alignas(64) acc_t shift[kQueries] = {};  // lse, as it is subtracted
  alignas(64) acc_t delta[kQueries] = {};

  MEMCHECK_INLINE QueryNumbers(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                               const QueryScratch<acc_t>& x, bool careful) {
    for (int64_t row = 0; row < tile.rows(); ++row) shift[row] = softmax_shift(number_of<acc_t>(p.lse, tile, row));
    if (p.y) {
      delta_from_y(p, dtype, tile, x, delta);
    } else {
      delta_from_weights<Rows>(p, dtype, tile, x, careful, shift, delta);
    }
    for (int64_t row = 0; row < tile.rows(); ++row) {
      if (p.grad_lse) delta[row] -= number_of<acc_t>(p.grad_lse, tile, row);
      if (p.delta) number_of<acc_t>(p.delta, tile, row) = delta[row];
    }
  }

  MEMCHECK_INLINE bool finite(int64_t rows) const {
    acc_t zero = acc_t(0);
    for (int64_t row = 0; row < rows; ++row) zero += delta[row] * acc_t(0);
    return zero == acc_t(0);
  }
};

// scores (blocks,kLanes) become their gradients.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_scores(int64_t blocks, const acc_t* shift, const acc_t* delta,
                                          const acc_t* __restrict grad_weights, acc_t* __restrict scores) {
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = j * kLanes + lane;
      scores[i] = softmax_gradient(softmax_weight(scores[i], shift[lane]), grad_weights[i], delta[lane]);
    }
}

// grad_q / scale of a tile of queries, in scratch.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void sum_over_blocks(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                     const QueryScratch<acc_t>& x, const QueryNumbers<Rows>& of, bool careful) {
  const int64_t columns = padded_columns(p.shape.D);
  const int64_t rows = tile.rows();
  x.sum.start(rows * columns);
  each_tile_of_columns(p, tile, [&](const Columns& seen_of, int64_t j) MEMCHECK_INLINE_LAMBDA {
    const SeenColumns<Rows> seen(dtype, tile, seen_of, j, Factor::Both, x);
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      seen.score(p, first, x, careful);
      differentiate_scores(seen.sight.count, of.shift + first, of.delta + first, x.grad_weights, x.scores);
      seen.kc.weigh(careful, count, x.scores, x.product + first * columns);
    }
    add(rows * columns, x.product, x.sum.chunk);
    if (ends_chunk(seen_of, j)) x.sum.end_chunk(rows * columns);
  });
  x.sum.end_chunk(rows * columns);
}

template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void query_gradient_task(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                         const QueryScratch<acc_t>& x) {
  const int64_t size = tile.rows() * padded_columns(p.shape.D);
  load_lanes<Rows>(p, dtype, tile, x);
  for (const bool careful : {false, true}) {
    const QueryNumbers<Rows> of(p, dtype, tile, x, careful);
    if (!careful && !of.finite(tile.rows())) continue;
    if (!p.grad_q) return;
    sum_over_blocks<Rows>(p, dtype, tile, x, of, careful);
    if (!careful && !all_finite(size, x.sum.total)) continue;
    scale_all(size, static_cast<acc_t>(p.scale), x.sum.total);
    return store_queries(dtype, p.grad_q, tile, p.shape.D, x.sum.total);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void query_gradient_tasks_body(const CompressedAttentionWindowBackward& p, Dtype dtype, int64_t begin,
                                               int64_t end, const QueryScratch<acc_t>& x) {
  const PairRegisters registers(dtype);
  for (int64_t index = begin; index < end; ++index) {
    const QueryTile tile = query_tile(p.shape, index);
    if constexpr (std::is_same_v<acc_t, float>)
      if (cpu_multiplies_pairs(dtype) && !p.y) {
        query_gradient_task<PairedRows>(p, dtype, tile, x);
        continue;
      }
    query_gradient_task<WideRows<acc_t>>(p, dtype, tile, x);
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, query_gradient_tasks,
                       (const CompressedAttentionWindowBackward& p, Dtype dtype, int64_t begin, int64_t end,
                        const QueryScratch<acc_t>& x),
                       (p, dtype, begin, end, x))

// ---- gradients of keys and values, over the query heads of the group

template <typename acc_t>
struct KeyScratch {
  acc_t* kc_lanes;  // D x kLanes, as the next
  acc_t* vc_lanes;
  acc_t* product;  // kLanes x D
  acc_t* q;        // kQueries x D, as the next
  acc_t* grad_y;
  acc_t* weights;  // kQueries x kLanes, as the next
  acc_t* grad_weights;
  SumOfTiles<acc_t> grad_k;  // kLanes x D, as the next
  SumOfTiles<acc_t> grad_v;

  KeyScratch(Arena& arena, const CompressedAttentionShape& shape)
      : kc_lanes(arena.take<acc_t>(kLanes * padded_columns(shape.D))),
        vc_lanes(arena.take<acc_t>(kLanes * padded_columns(shape.D))),
        product(arena.take<acc_t>(kLanes * padded_columns(shape.D))),
        q(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        grad_y(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        weights(arena.take<acc_t>(kQueries * kLanes)),
        grad_weights(arena.take<acc_t>(kQueries * kLanes)),
        grad_k(arena, kLanes * padded_columns(shape.D)),
        grad_v(arena, kLanes * padded_columns(shape.D)) {}
};

struct KeyTile {
  int64_t b, key_head, j, count;
};

KeyTile key_tile(int64_t Hkv, int64_t columns, int64_t index) {
  const int64_t tiles = ceil_div(columns, kLanes);
  const int64_t j = front_and_back(index % tiles, tiles) * kLanes;
  return {index / tiles / Hkv, index / tiles % Hkv, j, std::min(kLanes, columns - j)};
}

// Columns, and the gradients of their keys and values, which are null if not wanted.
struct ColumnsToDifferentiate : Columns {
  Strided<4> grad_k, grad_v;

  MEMCHECK_INLINE ColumnsToDifferentiate(const CompressedAttentionWindowBackward& p, bool of_positions)
      : Columns(p, of_positions),
        grad_k(of_positions ? p.window.grad_k : p.grad_k),
        grad_v(of_positions ? p.window.grad_v : p.grad_v) {}
};

// to (D,kLanes) = a tile of kc or vc with blocks along the lanes.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void load_lanes(Dtype dtype, const Strided<4>& x, const KeyTile& tile, int64_t D, acc_t* rows,
                                acc_t* to) {
  const int64_t columns = Rows::columns_of(D);
  Rows::load(dtype, rows_at(dtype, x, tile.b, tile.key_head, tile.j), tile.count, D, rows);
  transpose_rows(rows, columns, tile.count, columns, to, kLanes);
}

// Queries from s on of one head.
struct QueryRange {
  int64_t head, s, count;
};

// scores (count,kLanes) become the weights of softmax, 0 where a query does not see a block.
template <typename acc_t>
MEMCHECK_INLINE void weights_of_scores(const CompressedAttentionWindowBackward& p, const Columns& of,
                                       const KeyTile& tile, const QueryRange& queries, acc_t* __restrict scores) {
  // A loop of its own: fused with the subtraction, a score would be rounded otherwise than in its lse.
  scale_all(queries.count * kLanes, static_cast<acc_t>(p.scale), scores);
  const bool all_seen = of.end(queries.s) >= tile.j + tile.count && of.begin(queries.s + queries.count - 1) <= tile.j;
  for (int64_t row = 0; row < queries.count; ++row) {
    acc_t* line = scores + row * kLanes;
    const acc_t shift = softmax_shift(*p.lse.at<acc_t>(tile.b, queries.head, queries.s + row));
    for (int64_t lane = 0; lane < kLanes; ++lane) line[lane] = softmax_weight(line[lane], shift);
    if (all_seen) continue;
    const int64_t seen = of.end(queries.s + row) - tile.j;
    for (int64_t lane = seen < 0 ? 0 : seen; lane < kLanes; ++lane) line[lane] = acc_t(0);
    const int64_t unseen = of.begin(queries.s + row) - tile.j;
    for (int64_t lane = 0; lane < unseen && lane < kLanes; ++lane) line[lane] = acc_t(0);
  }
}

// weights (count,kLanes) of absent blocks become 0.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void drop_absent(int64_t count, const KeyTile& tile, int64_t D, const acc_t* kc_lanes, acc_t* weights) {
  for (int64_t lane = 0; lane < tile.count; ++lane) {
    if (!Rows::is_absent_lane(kc_lanes, lane, D)) continue;
    for (int64_t row = 0; row < count; ++row) weights[row * kLanes + lane] = acc_t(0);
  }
}

// grad_weights (rows,kLanes) become the gradients of the scores.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_weights(const CompressedAttentionWindowBackward& p, const KeyTile& tile,
                                           const QueryRange& queries, const acc_t* __restrict weights,
                                           acc_t* __restrict grad_weights) {
  for (int64_t row = 0; row < queries.count; ++row) {
    const acc_t delta = *p.delta.at<acc_t>(tile.b, queries.head, queries.s + row);
    for (int64_t i = row * kLanes; i < (row + 1) * kLanes; ++i)
      grad_weights[i] = softmax_gradient(weights[i], grad_weights[i], delta);
  }
}

// sum += a^T b, with a (rows,kLanes) and b (rows,D). What a holds is lost.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void add_product(bool careful, const KeyTile& tile, acc_t* a, const Rows& b, acc_t* product,
                                 const SumOfTiles<acc_t>& sum) {
  b.weigh(careful, tile.count, a, product);
  add(tile.count * padded_columns(b.D), product, sum.chunk);
}

// Adds what some queries give to the gradients of a tile of blocks.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void add_queries(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                 const ColumnsToDifferentiate& of, const KeyTile& tile, const QueryRange& queries,
                                 const KeyScratch<acc_t>& x, bool careful) {
  const int64_t D = p.shape.D;
  const int64_t rows = queries.count;
  const Rows q(dtype, rows_at(dtype, p.q, tile.b, queries.head, queries.s), rows, D, Factor::Both, x.q);
  const Rows grad_y(dtype, rows_at(dtype, p.grad_y, tile.b, queries.head, queries.s), rows, D, Factor::Both, x.grad_y);
  q.multiply(x.kc_lanes, x.weights);
  weights_of_scores(p, of, tile, queries, x.weights);
  if (careful) drop_absent<Rows>(rows, tile, D, x.kc_lanes, x.weights);
  if (of.grad_k) {
    grad_y.multiply(x.vc_lanes, x.grad_weights);
    differentiate_weights(p, tile, queries, x.weights, x.grad_weights);
    add_product(careful, tile, x.grad_weights, q, x.product, x.grad_k);
  }
  if (of.grad_v) add_product(careful, tile, x.weights, grad_y, x.product, x.grad_v);
}

// grad_k / scale and grad_v of a tile of blocks, in scratch.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void sum_over_queries(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                      const ColumnsToDifferentiate& of, const KeyTile& tile, const KeyScratch<acc_t>& x,
                                      bool careful) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  const auto end_chunks = [&]() MEMCHECK_INLINE_LAMBDA {
    x.grad_k.end_chunk(size);
    x.grad_v.end_chunk(size);
  };
  x.grad_k.start(size);
  x.grad_v.start(size);
  const int64_t begin = of.first_query(tile.j);
  const int64_t end = of.end_of_queries(tile.j + tile.count - 1);
  int64_t tiles = 0;
  for (int64_t i = 0; i < p.shape.group(); ++i) {
    for (int64_t s = begin; s < end; s += kQueries) {
      const int64_t count = end - s < kQueries ? end - s : kQueries;
      add_queries<Rows>(p, dtype, of, tile, {tile.key_head * p.shape.group() + i, s, count}, x, careful);
      if (++tiles % kChunkTiles == 0) end_chunks();
    }
  }
  end_chunks();
}

// Every position of a block gets its share of the block's gradient.
template <typename acc_t>
MEMCHECK_INLINE void store_shares(const CompressedAttentionWindowBackward& p, Dtype dtype, const KeyTile& tile,
                                  const Strided<4>& to, acc_t* gradients) {
  const int64_t columns = padded_columns(p.shape.D);
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t t = (tile.j + i) * p.block_length();
    const int64_t left = p.gradient_length() - t;
    const int64_t length = left < p.block_length() ? left : p.block_length();
    acc_t* row = gradients + i * columns;
    for (int64_t column = 0; column < columns; ++column) row[column] /= static_cast<acc_t>(length);
    store_rows(dtype, rows_at(dtype, to, tile.b, tile.key_head, t), length, p.shape.D, row, 0);
  }
}

// The gradients of positions; unless pooled, `to` has the shares of their blocks' gradients, and they are added.
template <typename acc_t>
MEMCHECK_INLINE void store_positions(const CompressedAttentionWindowBackward& p, Dtype dtype, const KeyTile& tile,
                                     const Strided<4>& to, const KeyScratch<acc_t>& x, acc_t* gradients) {
  const int64_t columns = padded_columns(p.shape.D);
  const MatrixPlace place = rows_at(dtype, to, tile.b, tile.key_head, tile.j);
  if (!p.pooled) {
    load_rows(dtype, place, tile.count, p.shape.D, x.product, columns);
    add(tile.count * columns, x.product, gradients);
  }
  store_rows(dtype, place, tile.count, p.shape.D, gradients, columns);
}

template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void key_gradient_task(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                       const ColumnsToDifferentiate& of, const KeyTile& tile,
                                       const KeyScratch<acc_t>& x) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  load_lanes<Rows>(dtype, of.k, tile, p.shape.D, x.product, x.kc_lanes);
  if (of.grad_k) load_lanes<Rows>(dtype, of.v, tile, p.shape.D, x.product, x.vc_lanes);
  for (const bool careful : {false, true}) {
    sum_over_queries<Rows>(p, dtype, of, tile, x, careful);
    if (all_finite(size, x.grad_k.total) && all_finite(size, x.grad_v.total)) break;
  }
  const auto store = [&](const Strided<4>& to, acc_t* gradients) MEMCHECK_INLINE_LAMBDA {
    if (!to) return;
    if (of.of_window) return store_positions(p, dtype, tile, to, x, gradients);
    store_shares(p, dtype, tile, to, gradients);
  };
  scale_all(size, static_cast<acc_t>(p.scale), x.grad_k.total);
  store(of.grad_k, x.grad_k.total);
  store(of.grad_v, x.grad_v.total);
}

template <typename acc_t>
MEMCHECK_INLINE void key_gradient_tasks_body(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                             const ColumnsToDifferentiate& of, int64_t begin, int64_t end,
                                             const KeyScratch<acc_t>& x) {
  const PairRegisters registers(dtype);
  for (int64_t index = begin; index < end; ++index) {
    const KeyTile tile = key_tile(p.shape.Hkv, of.count, index);
    if constexpr (std::is_same_v<acc_t, float>)
      if (cpu_multiplies_pairs(dtype)) {
        key_gradient_task<PairedRows>(p, dtype, of, tile, x);
        continue;
      }
    key_gradient_task<WideRows<acc_t>>(p, dtype, of, tile, x);
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, key_gradient_tasks,
                       (const CompressedAttentionWindowBackward& p, Dtype dtype, const ColumnsToDifferentiate& of,
                        int64_t begin, int64_t end, const KeyScratch<acc_t>& x),
                       (p, dtype, of, begin, end, x))

// ---- gradients of sinks

// The sum over sequences, in their order, of what each gives alone.
template <typename acc_t>
acc_t sink_gradient(const CompressedAttentionWindowBackward& p, int64_t head) {
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  double total = 0;
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t i = 0; i < sequence_count(p.shape); ++i) {
    const Sequence x = sequence_of(p.shape, i);
    for (int64_t s = x.first_query; s < x.first_query + x.queries; ++s) {
      const acc_t weight = sink_gradient_weight(sink, *p.lse.at<acc_t>(x.row, head, s));
      add_to_sum(-weighted(weight, *p.delta.at<acc_t>(x.row, head, s)), sum, rest);
    }
    if (!p.shape.sequences) continue;
    total += sum + rest;
    sum = rest = acc_t(0);
  }
  return p.shape.sequences ? static_cast<acc_t>(total) : sum + rest;
}

}  // namespace

int64_t query_gradient_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<QueryScratch<decltype(acc)>>(shape); });
}

int64_t key_tasks(const CompressedAttentionShape& shape, int64_t columns) {
  return shape.B * shape.Hkv * ceil_div(columns, kLanes);
}

int64_t key_gradient_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<KeyScratch<decltype(acc)>>(shape); });
}

void query_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<QueryScratch<acc_t>>(query_tasks(p.shape), p, [&](int64_t begin, int64_t end, const auto& x) {
      query_gradient_tasks<acc_t>(p, dtype, begin, end, x);
    });
  });
}

void key_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    for (const bool of_window : {false, true}) {
      const ColumnsToDifferentiate of(p, of_window);
      if (!of.grad_k && !of.grad_v) continue;
      const int64_t tasks = key_tasks(p.shape, of.count);
      run_with_scratch<KeyScratch<acc_t>>(tasks, p, [&](int64_t begin, int64_t end, const auto& x) {
        key_gradient_tasks<acc_t>(p, dtype, of, begin, end, x);
      });
    }
  });
}

void sink_gradients(const CompressedAttentionWindowBackward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    parallel_tasks(p.shape.H, useful_threads(p.shape, p.window, p.threads), [&](int64_t begin, int64_t end, int) {
      for (int64_t head = begin; head < end; ++head)
        static_cast<acc_t*>(p.grad_sink)[head] = sink_gradient<acc_t>(p, head);
    });
  });
}

}  // namespace memcheck::compressed_cpu
