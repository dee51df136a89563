#include <cmath>

#include "common/cpu_level.h"
#include "compressed_attention/compressed_attention_cpu_queries.h"

// Forward, query-stationary.

namespace memcheck::compressed_cpu {

// ---- tiles of queries

static int64_t heads_per_tile(const CompressedAttentionShape& shape) {
  return std::max<int64_t>(1, std::min(shape.group(), kQueries / std::max<int64_t>(1, shape.S)));
}

int64_t query_tasks(const CompressedAttentionShape& shape) {
  if (shape.B == 0 || shape.H == 0) return 0;
  return shape.B * shape.Hkv * ceil_div(shape.group(), heads_per_tile(shape)) * ceil_div(shape.S, kQueries);
}

std::vector<double> query_work(const CompressedAttentionShape& shape) {
  std::vector<double> work;
  for (int64_t index = 0; index < query_tasks(shape); ++index) {
    const QueryTile tile = query_tile(shape, index);
    work.push_back(static_cast<double>(tile.rows() * end_of_blocks(shape, tile)));
  }
  return work;
}

QueryTile query_tile(const CompressedAttentionShape& shape, int64_t index) {
  const int64_t heads = heads_per_tile(shape);
  const int64_t head_tiles = ceil_div(shape.group(), heads);
  const int64_t position_tiles = ceil_div(shape.S, kQueries);
  const int64_t s = front_and_back(index % position_tiles, position_tiles) * kQueries;
  const int64_t row = index / position_tiles;
  const int64_t in_group = row % head_tiles * heads;
  const int64_t key_head = row / head_tiles % shape.Hkv;
  return {row / head_tiles / shape.Hkv,
          key_head,
          key_head * shape.group() + in_group,
          std::min(heads, shape.group() - in_group),
          s,
          std::min(kQueries, shape.S - s)};
}

namespace {

constexpr int64_t kFewQueries = 4;  // for so few a product with 32 lanes costs more than dot products

template <typename acc_t>
struct ForwardScratch {
  acc_t* kc;  // kBlocks x D, as the next
  acc_t* vc;
  acc_t* q;               // kQueries x D
  acc_t* q_lanes;         // D x kLanes for every kLanes queries
  acc_t* product;         // kQueries x D
  SumOfTiles<acc_t> sum;  // kQueries x D
  acc_t* scores;          // kBlocks x kLanes

  ForwardScratch(Arena& arena, const CompressedAttentionShape& shape)
      : kc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        vc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        q(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        q_lanes(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        product(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        sum(arena, kQueries * padded_columns(shape.D)),
        scores(arena.take<acc_t>(kBlocks * kLanes)) {}
};

// ---- scores

// a . b over columns, a multiple of kLanes: along the lanes first, then a tree over the lanes.
template <typename acc_t>
MEMCHECK_INLINE acc_t dot(const acc_t* a, const acc_t* b, int64_t columns) {
  alignas(64) acc_t lanes[kLanes] = {};
  for (int64_t i = 0; i < columns; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += lanes[lane + 16];
  for (int64_t lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
  for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// scores (blocks,kLanes) of the `count` queries from `first` on.
template <typename acc_t>
MEMCHECK_INLINE void multiply_queries(int64_t blocks, const MatrixView<acc_t>& kc, int64_t first, int64_t count,
                                      int64_t D, const ForwardScratch<acc_t>& x) {
  const int64_t columns = padded_columns(D);
  if (count > kFewQueries) return multiply_rows(blocks, kc, x.q_lanes + first * columns, D, x.scores);
  fill_zero(x.scores, blocks * kLanes);
  for (int64_t j = 0; j < blocks; ++j)
    for (int64_t row = 0; row < count; ++row)
      x.scores[j * kLanes + row] = dot(kc.row(j), x.q + (first + row) * columns, columns);
}

// ---- softmax

// The maximum of each query's scores so far, and the sums of exponentials relative to it.
template <typename acc_t>
struct Softmax {
  alignas(64) acc_t max[kQueries];
  alignas(64) acc_t sum[kQueries] = {};      // of this chunk
  alignas(64) acc_t before[kQueries] = {};   // of the chunks before,
  alignas(64) acc_t before_max[kQueries];    // relative to the maximum as it was
  alignas(64) acc_t rescale[kQueries] = {};  // makes sums that are relative to the last maximum relative to this one

  MEMCHECK_INLINE Softmax() {
    for (int64_t i = 0; i < kQueries; ++i) max[i] = before_max[i] = minus_infinity<acc_t>();
  }

  // scores (blocks,kLanes) of the queries from `first` on become exponentials.
  MEMCHECK_INLINE void add(int64_t first, int64_t blocks, acc_t* __restrict scores) {
    alignas(64) acc_t highest[kLanes];
    alignas(64) acc_t shift[kLanes];
    alignas(64) acc_t tile_sum[kLanes] = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) highest[lane] = max[first + lane];
    for (int64_t j = 0; j < blocks; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const acc_t score = scores[j * kLanes + lane];
        highest[lane] = score > highest[lane] ? score : highest[lane];
      }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      shift[lane] = softmax_shift(highest[lane]);
      rescale[first + lane] = softmax_weight(max[first + lane], shift[lane]);
      max[first + lane] = highest[lane];
    }
    for (int64_t j = 0; j < blocks; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const acc_t weight = softmax_weight(scores[j * kLanes + lane], shift[lane]);
        scores[j * kLanes + lane] = weight;
        tile_sum[lane] += weight;
      }
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum[first + lane] = softmax_sum(sum[first + lane], rescale[first + lane], tile_sum[lane]);
  }

  MEMCHECK_INLINE void end_chunk() {
    for (int64_t i = 0; i < kQueries; ++i) {
      rescale[i] = softmax_weight(before_max[i], softmax_shift(max[i]));
      before[i] = softmax_sum(before[i], rescale[i], sum[i]);
      before_max[i] = max[i];
      sum[i] = acc_t(0);
    }
  }

  // A score that one query sees too, after the last chunk. The sum of its weighted values is to be multiplied by the
  // result.
  MEMCHECK_INLINE acc_t add_sink(int64_t row, acc_t score) {
    const acc_t highest = score > max[row] ? score : max[row];
    const acc_t shift = softmax_shift(highest);
    const acc_t of_sum = softmax_weight(max[row], shift);
    before[row] = softmax_sum(before[row], of_sum, softmax_weight(score, shift));
    max[row] = highest;
    return of_sum;
  }

  // The same for sums of weighted values, to (rows,columns).
  MEMCHECK_INLINE void rescale_and_add(int64_t rows, int64_t columns, const acc_t* __restrict from,
                                       acc_t* __restrict to) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = row * columns; i < (row + 1) * columns; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
          to[i + lane] = softmax_sum(to[i + lane], rescale[row], from[i + lane]);
  }
};

template <typename acc_t>
MEMCHECK_INLINE void end_chunk(int64_t rows, int64_t columns, Softmax<acc_t>& softmax, const SumOfTiles<acc_t>& sum) {
  softmax.end_chunk();
  softmax.rescale_and_add(rows, columns, sum.chunk, sum.total);
  fill_zero(sum.chunk, rows * columns);
}

// ---- tasks

// The sum of weighted values of a tile of queries, which are in scratch.
template <typename acc_t>
MEMCHECK_INLINE void attend(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                            const ForwardScratch<acc_t>& x, bool careful, Softmax<acc_t>& softmax) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t rows = tile.rows();
  const int64_t end = end_of_blocks(p.shape, tile);
  x.sum.start(rows * columns);
  int64_t tiles = 0;
  for (int64_t j = 0; j < end; j += kBlocks) {
    const Sight<acc_t> sight(p.shape, tile, j, end - j < kBlocks ? end - j : kBlocks);
    const auto kc = view_rows(dtype, rows_at(dtype, p.kc, tile.b, tile.key_head, j), sight.blocks, D, x.kc);
    const auto vc = view_rows(dtype, rows_at(dtype, p.vc, tile.b, tile.key_head, j), sight.blocks, D, x.vc);
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      multiply_queries(sight.blocks, kc, first, count, D, x);
      sight.scale_and_hide(first, static_cast<acc_t>(p.scale), x.scores);
      if (careful) hide_absent(sight.blocks, kc, D, x.scores);
      softmax.add(first, sight.blocks, x.scores);
      const TileFactor<acc_t> weights{x.scores, 1, kLanes};
      multiply_weights(careful, count, columns, sight.blocks, weights, vc, x.product + first * columns);
    }
    softmax.rescale_and_add(rows, columns, x.product, x.sum.chunk);
    if (++tiles % kChunkTiles == 0) end_chunk(rows, columns, softmax, x.sum);
  }
  end_chunk(rows, columns, softmax, x.sum);
}

// y = sum of weighted values / sum of weights, and 0 where nothing was seen, or only scores of -inf.
template <typename acc_t>
MEMCHECK_INLINE void finish_queries(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                                    Softmax<acc_t>& softmax, acc_t* y) {
  const int64_t columns = padded_columns(p.shape.D);
  for (int64_t row = 0; row < tile.rows(); ++row) {
    if (p.sink != nullptr) {
      const acc_t sink = static_cast<const acc_t*>(p.sink)[tile.head + row / tile.positions];
      scale_all(columns, softmax.add_sink(row, sink), y + row * columns);
    }
    const bool sees = softmax.before[row] != acc_t(0);
    const acc_t divisor = sees ? softmax.before[row] : acc_t(1);
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) y[i] /= divisor;
    if (p.lse == nullptr) continue;
    static_cast<acc_t*>(p.lse)[query_index(p.shape, tile, row)] =
        sees ? softmax.max[row] + std::log(divisor) : minus_infinity<acc_t>();
  }
  store_queries(dtype, p.y, tile, p.shape.D, y);
}

template <typename acc_t>
MEMCHECK_INLINE void forward_task(const CompressedAttentionForward& p, Dtype dtype, const QueryTile& tile,
                                  const ForwardScratch<acc_t>& x) {
  const int64_t columns = padded_columns(p.shape.D);
  load_queries(dtype, p.q, tile, p.shape.D, x.q);
  if (tile.rows() > kFewQueries) put_along_lanes(x.q, tile.rows(), columns, x.q_lanes);
  for (const bool careful : {false, true}) {
    Softmax<acc_t> softmax;
    attend(p, dtype, tile, x, careful, softmax);
    if (!careful && !all_finite(tile.rows() * columns, x.sum.total)) continue;
    return finish_queries(p, dtype, tile, softmax, x.sum.total);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const CompressedAttentionForward& p, Dtype dtype, int64_t begin, int64_t end,
                                        const ForwardScratch<acc_t>& x) {
  for (int64_t index = begin; index < end; ++index) forward_task(p, dtype, query_tile(p.shape, index), x);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, forward_tasks,
                       (const CompressedAttentionForward& p, Dtype dtype, int64_t begin, int64_t end,
                        const ForwardScratch<acc_t>& x),
                       (p, dtype, begin, end, x))

}  // namespace

int64_t forward_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<ForwardScratch<decltype(acc)>>(shape); });
}

void forward(const CompressedAttentionForward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<ForwardScratch<acc_t>>(query_tasks(p.shape), p, [&](int64_t begin, int64_t end, const auto& x) {
      forward_tasks<acc_t>(p, dtype, begin, end, x);
    });
  });
}

}  // namespace memcheck::compressed_cpu
