#include <cmath>
#include <cstring>
#include <type_traits>

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

// For so few queries, putting blocks along the lanes costs less than empty lanes.
constexpr int64_t kFewQueries = kFewRowsOfProduct;
constexpr int64_t kFewLanes = 8;  // a vector of their scores

template <typename acc_t>
struct ForwardScratch {
  acc_t* kc;  // kBlocks x D, as the next
  acc_t* vc;
  acc_t* q;               // kQueries x D
  acc_t* q_lanes;         // D x kLanes for every kLanes queries. Few queries have blocks along the lanes there
  acc_t* product;         // kQueries x D
  SumOfTiles<acc_t> sum;  // kQueries x D
  acc_t* scores;          // kBlocks x kLanes, or kFewQueries x kBlocks

  ForwardScratch(Arena& arena, const CompressedAttentionShape& shape)
      : kc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        vc(arena.take<acc_t>(kBlocks * padded_columns(shape.D))),
        q(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        q_lanes(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        product(arena.take<acc_t>(kQueries * padded_columns(shape.D))),
        sum(arena, kQueries * padded_columns(shape.D)),
        scores(arena.take<acc_t>(kBlocks * kLanes)) {}
};

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

  // The same of scores (count,kBlocks). The sum over blocks is a chain, as it is there.
  MEMCHECK_INLINE void add_few(int64_t first, int64_t count, int64_t blocks, acc_t* __restrict scores) {
    for (int64_t row = first; row < first + count; ++row, scores += kBlocks) {
      alignas(64) acc_t highest[kFewLanes];
      for (int64_t lane = 0; lane < kFewLanes; ++lane) highest[lane] = max[row];
      const int64_t padded = ceil_div(blocks, kFewLanes) * kFewLanes;
      for (int64_t j = blocks; j < padded; ++j) scores[j] = minus_infinity<acc_t>();
      for (int64_t j = 0; j < padded; j += kFewLanes)
        for (int64_t lane = 0; lane < kFewLanes; ++lane)
          highest[lane] = scores[j + lane] > highest[lane] ? scores[j + lane] : highest[lane];
      acc_t now = highest[0];
      for (int64_t lane = 1; lane < kFewLanes; ++lane) now = highest[lane] > now ? highest[lane] : now;
      const acc_t shift = softmax_shift(now);
      rescale[row] = softmax_weight(max[row], shift);
      max[row] = now;
      for (int64_t j = 0; j < padded; j += kFewLanes)
        for (int64_t lane = 0; lane < kFewLanes; ++lane) scores[j + lane] = softmax_weight(scores[j + lane], shift);
      acc_t tile_sum = acc_t(0);
      for (int64_t j = 0; j < blocks; ++j) tile_sum += scores[j];
      sum[row] = softmax_sum(sum[row], rescale[row], tile_sum);
    }
  }

  MEMCHECK_INLINE void end_chunk(int64_t rows) {
    for (int64_t row = 0; row < rows; row += kFewLanes)
      for (int64_t i = row; i < row + kFewLanes; ++i) {
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
    before[row] = softmax_sum(before[row], of_sum, sink_weight(score, shift));
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
  softmax.end_chunk(rows);
  softmax.rescale_and_add(rows, columns, sum.chunk, sum.total);
  fill_zero(sum.chunk, rows * columns);
}

// ---- tasks

// Whether `count` queries of a tile of `rows` are few. Pairs of kc have one form for the whole tile.
template <typename Rows>
MEMCHECK_INLINE bool are_few(int64_t count, int64_t rows) {
  return (std::is_same_v<Rows, PairedRows> ? rows : count) <= kFewQueries && Rows::multiplies_few();
}

// Adds the weighted values of columns to the sum of a tile of queries, which are in scratch.
template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void attend(const CompressedAttentionWindowForward& p, Dtype dtype, const QueryTile& tile,
                            const Columns& of, const ForwardScratch<acc_t>& x, bool careful, Softmax<acc_t>& softmax) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t rows = tile.rows();
  const int64_t end = end_of_columns(of, tile);
  for (int64_t j = begin_of_columns(of, tile); j < end; j = end_of_tile(of, j)) {
    const Sight<acc_t> sight(of, tile, j);
    const Factor of_kc = are_few<Rows>(rows, rows) ? Factor::AlongLanes : Factor::Left;
    const Rows kc(dtype, rows_at(dtype, of.k, tile.b, tile.key_head, j), sight.count, D, of_kc, x.kc);
    const Rows vc(dtype, rows_at(dtype, of.v, tile.b, tile.key_head, j), sight.count, D, Factor::Right, x.vc);
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      const int64_t q_at = first * Rows::columns_of(D);
      acc_t* product = x.product + first * columns;
      if (are_few<Rows>(count, rows)) {
        kc.multiply_few(count, x.q + q_at, x.q_lanes + q_at, x.scores);
        sight.scale_and_hide_few(first, count, static_cast<acc_t>(p.scale), x.scores);
        if (careful) hide_absent(kc, count, 1, kBlocks, x.scores);
        softmax.add_few(first, count, sight.count, x.scores);
        vc.weigh_few(careful, count, x.scores, product);
      } else {
        kc.multiply(x.q_lanes + q_at, x.scores);
        sight.scale_and_hide(first, static_cast<acc_t>(p.scale), x.scores);
        if (careful) hide_absent(kc, kLanes, kLanes, 1, x.scores);
        softmax.add(first, sight.count, x.scores);
        vc.weigh(careful, count, x.scores, product);
      }
    }
    softmax.rescale_and_add(rows, columns, x.product, x.sum.chunk);
    if (ends_chunk(of, j)) end_chunk(rows, columns, softmax, x.sum);
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
    if (!p.lse) continue;
    number_of<acc_t>(p.lse, tile, row) = sees ? softmax.max[row] + std::log(divisor) : minus_infinity<acc_t>();
  }
  store_queries(dtype, p.y, tile, p.shape.D, y);
}

template <typename Rows, typename acc_t = typename Rows::acc_t>
MEMCHECK_INLINE void forward_task(const CompressedAttentionWindowForward& p, Dtype dtype, const QueryTile& tile,
                                  const ForwardScratch<acc_t>& x) {
  load_queries<Rows>(dtype, p.q, tile, p.shape.D, x.q);
  if (!are_few<Rows>(tile.rows(), tile.rows()))
    put_along_lanes(x.q, tile.rows(), Rows::columns_of(p.shape.D), x.q_lanes);
  for (const bool careful : {false, true}) {
    Softmax<acc_t> softmax;
    x.sum.start(tile.rows() * padded_columns(p.shape.D));
    for (const bool of_window : {false, true})
      if (!of_window || p.window.size > 0) attend<Rows>(p, dtype, tile, {p, of_window}, x, careful, softmax);
    if (!careful && !all_finite(tile.rows() * padded_columns(p.shape.D), x.sum.total)) continue;
    return finish_queries(p, dtype, tile, softmax, x.sum.total);
  }
}

template <typename acc_t>
MEMCHECK_INLINE void forward_tasks_body(const CompressedAttentionWindowForward& p, Dtype dtype, int64_t begin,
                                        int64_t end, const ForwardScratch<acc_t>& x) {
  const PairRegisters registers(dtype);
  for (int64_t index = begin; index < end; ++index) {
    const QueryTile tile = query_tile(p.shape, index);
    if constexpr (std::is_same_v<acc_t, float>)
      if (cpu_multiplies_pairs(dtype)) {
        forward_task<PairedRows>(p, dtype, tile, x);
        continue;
      }
    forward_task<WideRows<acc_t>>(p, dtype, tile, x);
  }
}

MEMCHECK_PER_CPU_LEVEL(acc_t, forward_tasks,
                       (const CompressedAttentionWindowForward& p, Dtype dtype, int64_t begin, int64_t end,
                        const ForwardScratch<acc_t>& x),
                       (p, dtype, begin, end, x))

}  // namespace

int64_t forward_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<ForwardScratch<decltype(acc)>>(shape); });
}

void forward(const CompressedAttentionWindowForward& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<ForwardScratch<acc_t>>(query_tasks(p.shape), p, [&](int64_t begin, int64_t end, const auto& x) {
      forward_tasks<acc_t>(p, dtype, begin, end, x);
    });
  });
}

}  // namespace memcheck::compressed_cpu
