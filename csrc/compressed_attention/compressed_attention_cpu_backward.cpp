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
template <typename acc_t>
MEMCHECK_INLINE void load_lanes(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                const QueryScratch<acc_t>& x) {
  const int64_t columns = padded_columns(p.shape.D);
  load_queries(dtype, p.q, tile, p.shape.D, x.product);
  put_along_lanes(x.product, tile.rows(), columns, x.q_lanes);
  load_queries(dtype, p.grad_y, tile, p.shape.D, x.product);
  put_along_lanes(x.product, tile.rows(), columns, x.grad_lanes);
}

// A tile of columns from j on, as a tile of queries sees it.
template <typename acc_t>
struct SeenColumns {
  Sight<acc_t> sight;
  Rows<acc_t> kc, vc;

  MEMCHECK_INLINE SeenColumns(Dtype dtype, const QueryTile& tile, const Columns& of, int64_t j,
                              const QueryScratch<acc_t>& x)
      : sight(of, tile, j),
        kc(dtype, rows_at(dtype, of.k, tile.b, tile.key_head, j), sight.count, of.shape.D, x.kc),
        vc(dtype, rows_at(dtype, of.v, tile.b, tile.key_head, j), sight.count, of.shape.D, x.vc) {}

  // Scores of the queries from `first` on, and the gradients of their weights.
  MEMCHECK_INLINE void score(const CompressedAttentionWindowBackward& p, int64_t first,
                             const QueryScratch<acc_t>& x) const {
    const int64_t skipped = first * padded_columns(p.shape.D);
    kc.multiply(x.q_lanes + skipped, x.scores);
    vc.multiply(x.grad_lanes + skipped, x.grad_weights);
    sight.scale_and_hide(first, static_cast<acc_t>(p.scale), x.scores);
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
  load_queries(dtype, p.y, tile, D, x.product);
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
    const Span seen = columns_seen(columns, tile);
    for (int64_t j = seen.begin; j < seen.end; j = end_of_tile(columns, j)) run(columns, j);
  }
}

// delta = sum_j p_j dp_j, where y was rounded to 16 bits: its error would be that of every score's gradient at once.
template <typename acc_t>
MEMCHECK_INLINE void delta_from_weights(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                        const QueryScratch<acc_t>& x, const acc_t* shift, acc_t* delta) {
  each_tile_of_columns(p, tile, [&](const Columns& of, int64_t j) MEMCHECK_INLINE_LAMBDA {
    const SeenColumns<acc_t> seen(dtype, tile, of, j, x);
    for (int64_t first = 0; first < tile.rows(); first += kLanes) {
      seen.score(p, first, x);
      add_weighted(seen.sight.count, shift + first, x.scores, x.grad_weights, delta + first);
    }
  });
}

// The numbers of each query of a tile that gradients of scores need.
template <typename acc_t>
struct QueryNumbers {
  alignas(64) acc_t shift[kQueries] = {};  // lse, as it is subtracted
  alignas(64) acc_t delta[kQueries] = {};

  MEMCHECK_INLINE QueryNumbers(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                               const QueryScratch<acc_t>& x) {
    for (int64_t row = 0; row < tile.rows(); ++row) shift[row] = softmax_shift(number_of<acc_t>(p.lse, tile, row));
    if (p.y) {
      delta_from_y(p, dtype, tile, x, delta);
    } else {
      delta_from_weights(p, dtype, tile, x, shift, delta);
    }
    for (int64_t row = 0; row < tile.rows(); ++row) {
      if (p.grad_lse) delta[row] -= number_of<acc_t>(p.grad_lse, tile, row);
      if (p.delta) number_of<acc_t>(p.delta, tile, row) = delta[row];
    }
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
template <typename acc_t>
MEMCHECK_INLINE void sum_over_blocks(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                     const QueryScratch<acc_t>& x, const QueryNumbers<acc_t>& of) {
  const int64_t columns = padded_columns(p.shape.D);
  const int64_t rows = tile.rows();
  x.sum.start(rows * columns);
  each_tile_of_columns(p, tile, [&](const Columns& seen_of, int64_t j) MEMCHECK_INLINE_LAMBDA {
    const SeenColumns<acc_t> seen(dtype, tile, seen_of, j, x);
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      seen.score(p, first, x);
      differentiate_scores(seen.sight.count, of.shift + first, of.delta + first, x.grad_weights, x.scores);
      seen.kc.weigh(count, along_lanes(x.scores), x.product + first * columns);
    }
    add(rows * columns, x.product, x.sum.chunk);
    if (ends_chunk(seen_of, j)) x.sum.end_chunk(rows * columns);
  });
  x.sum.end_chunk(rows * columns);
}

template <typename acc_t>
MEMCHECK_INLINE void query_gradient_task(const CompressedAttentionWindowBackward& p, Dtype dtype, const QueryTile& tile,
                                         const QueryScratch<acc_t>& x) {
  const int64_t size = tile.rows() * padded_columns(p.shape.D);
  load_lanes(p, dtype, tile, x);
  const QueryNumbers<acc_t> of(p, dtype, tile, x);
  if (!p.grad_q) return;
  sum_over_blocks(p, dtype, tile, x, of);
  scale_all(size, static_cast<acc_t>(p.scale), x.sum.total);
  store_queries(dtype, p.grad_q, tile, p.shape.D, x.sum.total);
}

template <typename acc_t>
MEMCHECK_INLINE void query_gradient_tasks_body(const CompressedAttentionWindowBackward& p, Dtype dtype, int64_t begin,
                                               int64_t end, const QueryScratch<acc_t>& x) {
  for (int64_t index = begin; index < end; ++index) query_gradient_task(p, dtype, query_tile(p.shape, index), x);
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
template <typename acc_t>
MEMCHECK_INLINE void load_lanes(Dtype dtype, const Strided<4>& x, const KeyTile& tile, int64_t D, acc_t* rows,
                                acc_t* to) {
  const int64_t columns = padded_columns(D);
  load_rows(dtype, rows_at(dtype, x, tile.b, tile.key_head, tile.j), tile.count, D, rows, columns);
  transpose_rows(rows, columns, tile.count, columns, to, kLanes);
}

// scores (count,kLanes) become the weights of softmax, 0 where a query does not see a block.
template <typename acc_t>
MEMCHECK_INLINE void weights_of_scores(const CompressedAttentionWindowBackward& p, const Columns& of,
                                       const KeyTile& tile, int64_t head, Span queries, acc_t* __restrict scores) {
  // A loop of its own: fused with the subtraction, a score would be rounded otherwise than in its lse.
  scale_all(queries.size() * kLanes, static_cast<acc_t>(p.scale), scores);
  const bool all_seen =
      of.seen_by(queries.begin).end >= tile.j + tile.count && of.seen_by(queries.end - 1).begin <= tile.j;
  for (int64_t s = queries.begin; s < queries.end; ++s) {
    acc_t* line = scores + (s - queries.begin) * kLanes;
    const acc_t shift = softmax_shift(*p.lse.at<acc_t>(tile.b, head, s));
    for (int64_t lane = 0; lane < kLanes; ++lane) line[lane] = softmax_weight(line[lane], shift);
    if (all_seen) continue;
    const Span seen = of.seen_by(s);
    for (int64_t lane = std::max<int64_t>(0, seen.end - tile.j); lane < kLanes; ++lane) line[lane] = acc_t(0);
    for (int64_t lane = 0; lane < std::min(kLanes, seen.begin - tile.j); ++lane) line[lane] = acc_t(0);
  }
}

// grad_weights (rows,kLanes) become the gradients of the scores.
template <typename acc_t>
MEMCHECK_INLINE void differentiate_weights(const CompressedAttentionWindowBackward& p, const KeyTile& tile,
                                           int64_t head, Span queries, const acc_t* __restrict weights,
                                           acc_t* __restrict grad_weights) {
  for (int64_t row = 0; row < queries.size(); ++row) {
    const acc_t delta = *p.delta.at<acc_t>(tile.b, head, queries.begin + row);
    for (int64_t i = row * kLanes; i < (row + 1) * kLanes; ++i)
      grad_weights[i] = softmax_gradient(weights[i], grad_weights[i], delta);
  }
}

// sum += a^T b, with a (rows,kLanes) and b (rows,D).
template <typename acc_t>
MEMCHECK_INLINE void add_product(const KeyTile& tile, const acc_t* a, const Rows<acc_t>& b, acc_t* product,
                                 const SumOfTiles<acc_t>& sum) {
  b.weigh(tile.count, along_lanes(a), product);
  add(tile.count * padded_columns(b.D), product, sum.chunk);
}

// Adds what some queries give to the gradients of a tile of blocks.
template <typename acc_t>
MEMCHECK_INLINE void add_queries(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                 const ColumnsToDifferentiate& of, const KeyTile& tile, int64_t head, Span queries,
                                 const KeyScratch<acc_t>& x) {
  const int64_t D = p.shape.D;
  const int64_t rows = queries.size();
  const Rows<acc_t> q(dtype, rows_at(dtype, p.q, tile.b, head, queries.begin), rows, D, x.q);
  const Rows<acc_t> grad_y(dtype, rows_at(dtype, p.grad_y, tile.b, head, queries.begin), rows, D, x.grad_y);
  q.multiply(x.kc_lanes, x.weights);
  weights_of_scores(p, of, tile, head, queries, x.weights);
  if (of.grad_k) {
    grad_y.multiply(x.vc_lanes, x.grad_weights);
    differentiate_weights(p, tile, head, queries, x.weights, x.grad_weights);
    add_product(tile, x.grad_weights, q, x.product, x.grad_k);
  }
  if (of.grad_v) add_product(tile, x.weights, grad_y, x.product, x.grad_v);
}

// grad_k / scale and grad_v of a tile of blocks, in scratch.
template <typename acc_t>
MEMCHECK_INLINE void sum_over_queries(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                      const ColumnsToDifferentiate& of, const KeyTile& tile,
                                      const KeyScratch<acc_t>& x) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  const auto end_chunks = [&]() MEMCHECK_INLINE_LAMBDA {
    x.grad_k.end_chunk(size);
    x.grad_v.end_chunk(size);
  };
  x.grad_k.start(size);
  x.grad_v.start(size);
  const Span queries{of.queries(tile.j).begin, of.queries(tile.j + tile.count - 1).end};
  const int64_t first_head = tile.key_head * p.shape.group();
  int64_t tiles = 0;
  for (int64_t head = first_head; head < first_head + p.shape.group(); ++head) {
    for (int64_t s = queries.begin; s < queries.end; s += kQueries) {
      add_queries(p, dtype, of, tile, head, {s, std::min(s + kQueries, queries.end)}, x);
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

template <typename acc_t>
MEMCHECK_INLINE void key_gradient_task(const CompressedAttentionWindowBackward& p, Dtype dtype,
                                       const ColumnsToDifferentiate& of, const KeyTile& tile,
                                       const KeyScratch<acc_t>& x) {
  const int64_t size = kLanes * padded_columns(p.shape.D);
  load_lanes(dtype, of.k, tile, p.shape.D, x.product, x.kc_lanes);
  if (of.grad_k) load_lanes(dtype, of.v, tile, p.shape.D, x.product, x.vc_lanes);
  sum_over_queries(p, dtype, of, tile, x);
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
  for (int64_t index = begin; index < end; ++index)
    key_gradient_task(p, dtype, of, key_tile(p.shape.Hkv, of.count, index), x);
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
