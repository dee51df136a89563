#pragma once

#include <cmath>

#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// Rows of results that are formed again, each by one warp. In a product of tiles a query that does not see a
// block has a weight of 0, and 0 times NaN or infinity is NaN. So a row that is not finite is formed a second time:
// here a weight of 0 adds nothing, and a block whose key is -inf in every column has a score of -inf. All threads of a
// warp call these functions together. The functions are not inlined and take the kernel's parameters by value, because
// inlined they make the compiler spill registers of the loops before them.

namespace memcheck {
namespace compressed_cuda {

template <typename acc_t>
MEMCHECK_INLINE bool is_finite(acc_t x) {
  return x * acc_t(0) == acc_t(0);
}

// Whether any of `count` lanes from `first` on votes yes.
__device__ __forceinline__ bool any_of_lanes(unsigned yes, int first, int count) {
  return (yes >> first & (~0u >> (32 - count))) != 0;
}

// Calls run(row) for each row of a tile that a thread of this warp marks, with bit i for its row i. A warp has two rows
// at a time.
template <typename acc_t, typename Run>
__device__ __forceinline__ void each_row_of_warp(unsigned marked, const Run& run) {
  __syncwarp();
  for (int i = 0; i < TileSize<acc_t>::kThreadRows; ++i) {
    const unsigned yes = __ballot_sync(~0u, marked >> i & 1);
    for (int half = 0; half < 2; ++half)
      if (any_of_lanes(yes, kColumnLanes * half, kColumnLanes))
        run(static_cast<int>(threadIdx.x) / 32 * 2 + half + kRowLanes * i);
  }
}

// The columns of a warp's row, every 32nd of them in a lane. The sums have three levels, each from zero, like sums over
// tiles.
template <typename acc_t>
struct WarpRow {
  static constexpr int kColumns = 8;
  static constexpr int kTerms = 32;  // to a part
  static constexpr int kParts = 32;  // to a chunk

  acc_t part[kColumns] = {};
  acc_t chunk[kColumns] = {};
  acc_t total[kColumns] = {};
  int parts = 0;

  // part += weight row, for columns from `column` on.
  template <typename scalar_t, bool kGrouped>
  __device__ __forceinline__ void add(acc_t weight, const HeadMatrix<scalar_t, kGrouped>& of, int64_t row,
                                      int64_t column) {
    const scalar_t* const x = of.at(row);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t mine = column + static_cast<int64_t>(threadIdx.x % 32) + 32 * i;
      if (mine < of.columns) part[i] += weight * to_acc(x[mine * of.column_stride]);
    }
  }
  __device__ __forceinline__ void end_part(bool last) {
    ++parts;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      chunk[i] += part[i];
      part[i] = acc_t(0);
      if (!last && parts % kParts != 0) continue;
      total[i] += chunk[i];
      chunk[i] = acc_t(0);
    }
  }
  // Calls visit(column, sum) for this lane's columns from `column` on, before `end`.
  template <typename Visit>
  __device__ __forceinline__ void each(int64_t column, int64_t end, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t mine = column + static_cast<int64_t>(threadIdx.x % 32) + 32 * i;
      if (mine < end) visit(mine, total[i]);
    }
  }
};

// Forms the sum of weight(n) row(n) over n from begin to end, in which a weight of 0 adds nothing. One lane calls
// weight, and all call add.
template <typename acc_t, typename Weight, typename Add>
__device__ __forceinline__ void add_rows(int64_t begin, int64_t end, WarpRow<acc_t>& sum, const Weight& weight,
                                         const Add& add) {
  constexpr int kTerms = WarpRow<acc_t>::kTerms;
  for (int64_t first = begin; first < end; first += kTerms) {
    const int64_t mine = first + threadIdx.x % 32;
    const acc_t of_lane = mine < end ? weight(mine) : acc_t(0);
    for (int n = 0; n < kTerms; ++n) {
      const acc_t of_row = __shfl_sync(~0u, of_lane, n);
      if (of_row != acc_t(0)) add(of_row, first + n);
    }
    sum.end_part(first + kTerms >= end);
  }
}

template <typename scalar_t, bool kGroupedA, bool kGroupedB, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ acc_t dot(const HeadMatrix<scalar_t, kGroupedA>& a, int64_t row_of_a,
                                     const HeadMatrix<scalar_t, kGroupedB>& b, int64_t row_of_b) {
  const scalar_t* const x = a.at(row_of_a);
  const scalar_t* const y = b.at(row_of_b);
  acc_t sum = acc_t(0);
  for (int64_t d = 0; d < a.columns; ++d) sum += to_acc(x[d * a.column_stride]) * to_acc(y[d * b.column_stride]);
  return sum;
}

// Whether a key is -inf in every column. Then no query sees its block.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ bool is_absent(const KeyMatrix<scalar_t>& kc, int64_t j) {
  int64_t d = 0;
  while (d < kc.columns && to_acc(kc.at(j)[d * kc.column_stride]) == minus_infinity<acc_t>()) ++d;
  return d == kc.columns && d > 0;
}

template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ acc_t score_of(const QueryMatrix<scalar_t>& q, int64_t row, const KeyMatrix<scalar_t>& kc,
                                          int64_t j, acc_t scale) {
  return is_absent(kc, j) ? minus_infinity<acc_t>() : scaled(dot(q, row, kc, j), scale);
}

template <typename acc_t>
__device__ __forceinline__ acc_t largest_of_warp(acc_t x) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) x = larger(x, __shfl_xor_sync(~0u, x, bits));
  return x;
}

template <typename acc_t>
__device__ __forceinline__ acc_t sum_of_warp(acc_t x) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
  return x;
}

// Adds the sink of a query's head, if there is one, to the query's lse. Returns what y is to be multiplied by.
template <typename acc_t>
__device__ __forceinline__ acc_t add_sink(const CompressedAttentionForward& p, int64_t head, acc_t& lse) {
  if (p.sink == nullptr) return acc_t(1);
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  const acc_t shift = softmax_shift(larger(lse, sink));
  const acc_t weight = softmax_weight<CudaMaths<acc_t>>(lse, shift);
  const acc_t sum = weight + softmax_weight<CudaMaths<acc_t>>(sink, shift);
  if (sum == acc_t(0)) return acc_t(1);
  lse = shift + log(sum);
  return weight / sum;
}

// Forms `columns` columns of y, and lse, of a row over its part of the blocks.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __attribute__((noinline)) void attend_row(CompressedAttentionForward p, QueryWork work, int64_t tile_keys,
                                                     int64_t columns, ForwardParts<acc_t> parts, int64_t row) {
  const CompressedAttentionShape& shape = p.shape;
  const auto q = queries_of<scalar_t>(shape, p.q, work.of);
  const auto kc = keys_of<scalar_t>(shape, p.kc, shape.C, work.of);
  const auto vc = keys_of<scalar_t>(shape, p.vc, shape.C, work.of);
  const auto scale = static_cast<acc_t>(p.scale);
  const int64_t begin = work.begin * tile_keys;
  const int64_t end = smaller(work.end * tile_keys, shape.visible(row / work.of.group));
  acc_t highest = minus_infinity<acc_t>();
  for (int64_t j = begin + threadIdx.x % 32; j < end; j += 32)
    highest = larger(highest, score_of(q, row, kc, j, scale));
  highest = largest_of_warp(highest);
  const acc_t shift = softmax_shift(highest);
  WarpRow<acc_t> y;
  acc_t sum = acc_t(0);
  add_rows(
      begin, end, y,
      [&](int64_t j) {
        const acc_t weight = softmax_weight<CudaMaths<acc_t>>(score_of(q, row, kc, j, scale), shift);
        sum += weight;
        return weight;
      },
      [&](acc_t weight, int64_t j) { y.add(weight, vc, j, work.column); });
  sum = sum_of_warp(sum);
  const bool sees = sum != acc_t(0);
  const int64_t index = query_index(shape, work.of, row);
  const int64_t of_part = work.part * shape.B * shape.H * shape.S + index;
  acc_t lse = sees ? shift + log(sum) : minus_infinity<acc_t>();
  const acc_t share = parts.count == 1 ? add_sink(p, query_head(work.of, row), lse) : acc_t(1);
  const auto to = queries_of<scalar_t>(shape, p.y, work.of);
  y.each(work.column, smaller(shape.D, work.column + columns), [&](int64_t column, acc_t of_column) {
    const acc_t mean = sees ? of_column / sum * share : acc_t(0);
    if (parts.count > 1) {
      parts.y[of_part * shape.D + column] = mean;
    } else {
      to.at(row)[column * to.column_stride] = from_acc<scalar_t>(mean);
    }
  });
  if (threadIdx.x % 32 != 0 || work.column != 0) return;
  if (parts.count > 1) {
    parts.lse[of_part] = lse;
  } else if (p.lse) {
    number_of<acc_t>(p.lse, work.of, row) = lse;
  }
}

// Weights, and gradients of scores, of pairs of a query and a block.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
struct Pairs {
  QueryMatrix<scalar_t> q, grad_y;
  KeyMatrix<scalar_t> kc, vc;
  acc_t scale;

  __device__ __forceinline__ Pairs(const CompressedAttentionBackward& p, const KeyHead& of)
      : q(queries_of<scalar_t>(p.shape, p.q, of)),
        grad_y(queries_of<scalar_t>(p.shape, p.grad_y, of)),
        kc(keys_of<scalar_t>(p.shape, p.kc, p.shape.C, of)),
        vc(keys_of<scalar_t>(p.shape, p.vc, p.shape.C, of)),
        scale(static_cast<acc_t>(p.scale)) {}

  __device__ __forceinline__ acc_t weight(int64_t row, int64_t j, acc_t lse) const {
    return softmax_weight<CudaMaths<acc_t>>(score_of(q, row, kc, j, scale), softmax_shift(lse));
  }
  // The gradient of the score, without its scale.
  __device__ __forceinline__ acc_t gradient(int64_t row, int64_t j, acc_t lse, acc_t delta) const {
    const acc_t of_pair = weight(row, j, lse);
    return of_pair == acc_t(0) ? acc_t(0) : softmax_gradient_of_seen(of_pair, dot(grad_y, row, vc, j), delta);
  }
};

// Forms delta of a row, less the gradient of its lse, and `columns` columns of its grad_q from `column` on.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __attribute__((noinline)) void differentiate_row(CompressedAttentionBackward p, KeyHead of, int64_t column,
                                                            int64_t columns, int64_t row) {
  const Pairs<scalar_t> pairs(p, of);
  const int64_t end = p.shape.visible(row / of.group);
  const acc_t lse = number_of<acc_t>(p.lse, of, row);
  acc_t delta = acc_t(0);
  if (p.y) {
    delta = dot(pairs.grad_y, row, queries_of<scalar_t>(p.shape, p.y, of), row);
  } else {
    for (int64_t j = threadIdx.x % 32; j < end; j += 32) delta += pairs.gradient(row, j, lse, acc_t(0));
    delta = sum_of_warp(delta);
  }
  if (p.grad_lse) delta -= number_of<acc_t>(p.grad_lse, of, row);
  if (p.delta && column == 0 && threadIdx.x % 32 == 0) number_of<acc_t>(p.delta, of, row) = delta;
  if (!p.grad_q) return;
  WarpRow<acc_t> grad_q;
  add_rows(
      int64_t{0}, end, grad_q, [&](int64_t j) { return pairs.gradient(row, j, lse, delta); },
      [&](acc_t gradient, int64_t j) { grad_q.add(gradient, pairs.kc, j, column); });
  const auto to = queries_of<scalar_t>(p.shape, p.grad_q, of);
  grad_q.each(column, smaller(p.shape.D, column + columns),
              [&](int64_t d, acc_t sum) { to.at(row)[d * to.column_stride] = from_acc<scalar_t>(pairs.scale * sum); });
}

// Forms `columns` columns of the gradient of block j's key or value, over its part of the queries.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __attribute__((noinline)) void differentiate_key(CompressedAttentionBackward p, KeyWork work,
                                                            int64_t tile_rows, int64_t columns,
                                                            KeyParts<scalar_t> parts, bool of_values, int64_t j) {
  const CompressedAttentionShape& shape = p.shape;
  const Pairs<scalar_t> pairs(p, work.of);
  const int64_t begin = larger(work.first_row + work.begin * tile_rows, shape.first_query(j) * work.of.group);
  const int64_t end =
      is_absent(pairs.kc, j) ? begin : smaller(work.first_row + work.end * tile_rows, work.of.group * shape.S);
  WarpRow<acc_t> sum;
  add_rows(
      begin, end, sum,
      [&](int64_t row) {
        const acc_t lse = number_of<acc_t>(p.lse, work.of, row);
        if (of_values) return pairs.weight(row, j, lse);
        return pairs.gradient(row, j, lse, number_of<acc_t>(p.delta, work.of, row));
      },
      [&](acc_t weight, int64_t row) { sum.add(weight, of_values ? pairs.grad_y : pairs.q, row, work.column); });
  const auto to = keys_of<scalar_t>(shape, of_values ? p.grad_v : p.grad_k, p.gradient_length(), work.of);
  const BlockPositions positions = positions_of(p, j);
  sum.each(work.column, smaller(shape.D, work.column + columns), [&](int64_t column, acc_t x) {
    const acc_t gradient = of_values ? x : pairs.scale * x;
    if (parts.count > 1) {
      parts.template store<1>(parts.of_block(shape, work.of, of_values, j), work.part, column, {gradient});
      return;
    }
    const scalar_t share = from_acc<scalar_t>(gradient / static_cast<acc_t>(positions.length));
    for (int64_t t = 0; t < positions.length; ++t) to.at(positions.begin + t)[column * to.column_stride] = share;
  });
}

}  // namespace compressed_cuda
}  // namespace memcheck
