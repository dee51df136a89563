#pragma once

#include "linear_attention/linear_attention_scan_cuda.cuh"

// Tiles in the accumulation type in shared memory, how they are loaded, and their products by fused multiply-adds. A
// thread has 4 x 4 elements of a tile.

namespace memcheck {
namespace linear_cuda {

template <typename acc_t>
constexpr int kTileSize = sizeof(acc_t) == sizeof(double) ? 32 : 64;
template <typename acc_t>
constexpr int kSide = kTileSize<acc_t> / 4;  // threads along a tile
template <typename acc_t>
constexpr int kThreads = kSide<acc_t> * kSide<acc_t>;
template <typename acc_t>
constexpr int kTileStride = kTileSize<acc_t> + 4;  // rows of a tile begin in different banks
template <typename acc_t>
constexpr int kBlocksAtOnce = sizeof(acc_t) == sizeof(double) ? 1 : 2;  // on a multiprocessor
// Terms of a sum's first level. The next levels are a tile, and all tiles.
constexpr int kLevel = 16;

template <typename acc_t>
using Four = Pack<acc_t, 4>;

// Lines of a chunk, with kTileSize columns each.
template <typename acc_t, int kLines>
struct ChunkTile {
  Four<acc_t> fours[kLines * kTileStride<acc_t> / 4];

  __device__ __forceinline__ acc_t* row(int i) { return reinterpret_cast<acc_t*>(fours) + i * kTileStride<acc_t>; }
  __device__ __forceinline__ const acc_t* row(int i) const {
    return reinterpret_cast<const acc_t*>(fours) + i * kTileStride<acc_t>;
  }
};

template <typename acc_t>
__device__ __forceinline__ int thread_x() {
  return static_cast<int>(threadIdx.x) % kSide<acc_t>;
}

template <typename acc_t>
__device__ __forceinline__ int thread_y() {
  return static_cast<int>(threadIdx.x) / kSide<acc_t>;
}

// The sum over the threads of one y, formed in the same order by all of them.
template <typename acc_t>
__device__ __forceinline__ acc_t sum_along_x(acc_t x) {
  for (int distance = kSide<acc_t> / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// ---- from memory to tiles

// Loads a tile of the factor from `column` on, kCount elements at a time; zeros where nothing exists. `from` is the
// head's first element or null, and `scale` its 1 / den or null.
template <int kCount, typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void load_packs(const ScanTensor& factor, const scalar_t* from, const acc_t* scale,
                                           const Lines& lines, int64_t column, int64_t columns,
                                           ChunkTile<acc_t, kLines>& to) {
  using Packs = TilePacks<scalar_t, kLines, kTileSize<acc_t>, kThreads<acc_t>, kCount>;
  constexpr int kAtOnce = Packs::kCount < 4 ? Packs::kCount : 4;
  constexpr int kStored = kCount < kPackSize<acc_t> ? kCount : kPackSize<acc_t>;
  const Packs mine;
  const int at = mine.column;
  const bool in_line = from != nullptr && column + at < columns;
  if (from != nullptr) from += lines.first * factor.x.stride[2] + (column + at) * factor.x.stride[3];
  // In any other form of these loops scans in float32 spill more.
#pragma unroll 1
  for (int batch = 0; batch < Packs::kCount; batch += kAtOnce) {
    Pack<scalar_t, kCount> packs[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = mine.row + (batch + i) * Packs::kStep;
      if (in_line && lines.has(line)) packs[i] = load_pack<kCount>(from + line * factor.x.stride[2]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = mine.row + (batch + i) * Packs::kStep;
      const bool exists = in_line && lines.has(line);
      const acc_t weight = exists && scale != nullptr ? scale[lines.first + line] : acc_t(1);
#pragma unroll
      for (int first = 0; first < kCount; first += kStored) {
        Pack<acc_t, kStored> stored;
#pragma unroll
        for (int j = 0; j < kStored; ++j) {
          const acc_t x = to_acc(packs[i].values[first + j]);
          const acc_t value = factor.mapped ? feature(FeatureMap::EluPlusOne, x) : x;
          stored.values[j] = exists ? value * weight : acc_t(0);
        }
        store_pack(stored, to.row(line) + at + first);
      }
    }
  }
}

template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void load_chunk(const Scan& scan, const ScanTensor& factor, int64_t b, int64_t head,
                                           const Lines& lines, int64_t column, int64_t columns,
                                           ChunkTile<acc_t, kLines>& to) {
  const scalar_t* from = factor.x ? factor.x.at<scalar_t>(b, head, 0, 0) : nullptr;
  const acc_t* scale = factor.scaled ? &scan.inverse_at<acc_t>(query_row(scan.shape, b, head)) : nullptr;
  if (factor.in_packs)
    load_packs<kPackSize<scalar_t>>(factor, from, scale, lines, column, columns, to);
  else
    load_packs<1>(factor, from, scale, lines, column, columns, to);
}

// ---- products

template <typename acc_t, int kThreadRows, int kColumns>
__device__ __forceinline__ void add(const acc_t (&from)[kThreadRows][kColumns], acc_t (&to)[kThreadRows][kColumns]) {
  unroll<kThreadRows, kColumns>([&](int i, int j) { to[i][j] += from[i][j]; });
}

template <typename acc_t>
__device__ __forceinline__ void add_four(const Four<acc_t>& from, Four<acc_t>& to) {
  unroll<4>([&](int j) { to.values[j] += from.values[j]; });
}

// sum[i][j] += the product, over `depth` columns, of rows y + kSide i of a and x + kSide j of b.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void add_scores(const ChunkTile<acc_t, kLines>& a, const ChunkTile<acc_t, kLines>& b,
                                           int depth, acc_t (&sum)[kThreadRows][kThreadRows]) {
#pragma unroll 1
  for (int level = 0; level < depth; level += kLevel) {
    acc_t part[kThreadRows][kThreadRows] = {};
#pragma unroll 1
    for (int k = level; k < min(level + kLevel, depth); k += 4) {
      Four<acc_t> of_a[kThreadRows], of_b[kThreadRows];
      unroll<kThreadRows>([&](int i) {
        of_a[i] = load_pack<4>(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + k);
        of_b[i] = load_pack<4>(b.row(thread_x<acc_t>() + kSide<acc_t> * i) + k);
      });
      unroll<4, kThreadRows, kThreadRows>(
          [&](int kk, int i, int j) { part[i][j] += of_a[i].values[kk] * of_b[j].values[kk]; });
    }
    add(part, sum);
  }
}

// out += a x, where the rows of x begin at `rows` and are kTileStride apart.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void add_product(const ChunkTile<acc_t, kLines>& a, const acc_t* rows, int depth,
                                            acc_t (&out)[kThreadRows][4]) {
#pragma unroll 1
  for (int level = 0; level < depth; level += kLevel) {
    acc_t part[kThreadRows][4] = {};
#pragma unroll 1
    for (int k = level; k < min(level + kLevel, depth); k += 4) {
      Four<acc_t> of_a[kThreadRows];
      unroll<kThreadRows>([&](int i) { of_a[i] = load_pack<4>(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + k); });
      unroll<4>([&](int kk) {
        const Four<acc_t> of_x = load_pack<4>(rows + (k + kk) * kTileStride<acc_t> + 4 * thread_x<acc_t>());
        unroll<kThreadRows, 4>([&](int i, int j) { part[i][j] += of_a[i].values[kk] * of_x.values[j]; });
      });
    }
    add(part, out);
  }
}

// state = fade state + b^T x over the lines of a chunk, weighted unless `weights` is null.
template <typename acc_t, int kLines>
__device__ __forceinline__ void add_outer(const ChunkTile<acc_t, kLines>& b, const ChunkTile<acc_t, kLines>& x,
                                          int lines, const acc_t* weights, acc_t fade, acc_t* state) {
  acc_t sum[4][4] = {};
#pragma unroll 1
  for (int level = 0; level < lines; level += kLevel) {
    acc_t part[4][4] = {};
#pragma unroll 4
    for (int line = level; line < min(level + kLevel, lines); ++line) {
      Four<acc_t> of_b = load_pack<4>(b.row(line) + 4 * thread_y<acc_t>());
      const Four<acc_t> of_x = load_pack<4>(x.row(line) + 4 * thread_x<acc_t>());
      if (weights != nullptr) unroll<4>([&](int i) { of_b.values[i] *= weights[line]; });
      unroll<4, 4>([&](int i, int j) { part[i][j] += of_b.values[i] * of_x.values[j]; });
    }
    add(part, sum);
  }
  unroll<4>([&](int i) {
    acc_t* to = state + (4 * thread_y<acc_t>() + i) * kTileStride<acc_t> + 4 * thread_x<acc_t>();
    Four<acc_t> total = load_pack<4>(to);
    unroll<4>([&](int j) { total.values[j] = total.values[j] * fade + sum[i][j]; });
    store_pack(total, to);
  });
}

// Adds this thread's share of the product of a row's first columns and a vector; a null vector means ones.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void add_row_dots(const ChunkTile<acc_t, kLines>& a, const acc_t* vector, int columns,
                                             acc_t (&sum)[kThreadRows]) {
  const int column = 4 * thread_x<acc_t>();
  if (column >= columns) return;
  unroll<kThreadRows>([&](int i) {
    const Four<acc_t> x = load_pack<4>(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + column);
    unroll<4>([&](int j) { sum[i] += x.values[j] * (vector == nullptr ? acc_t(1) : vector[column + j]); });
  });
}

// Each line of `to` is the sum of the lines of x up to it, of the same kSide lines.
template <typename acc_t, int kLines>
__device__ __forceinline__ void sum_lines(const ChunkTile<acc_t, kLines>& x, ChunkTile<acc_t, kLines>& to) {
  constexpr int kSums = kTileSize<acc_t> * kLines / kSide<acc_t>;
  for (int i = static_cast<int>(threadIdx.x); i < kSums; i += kThreads<acc_t>) {
    const int column = i % kTileSize<acc_t>;
    const int first = i / kTileSize<acc_t> * kSide<acc_t>;
    acc_t sum = 0;
#pragma unroll 4
    for (int line = first; line < first + kSide<acc_t>; ++line) {
      sum += x.row(line)[column];
      to.row(line)[column] = sum;
    }
  }
}

// to[column] = fade to[column] + the sum over a tile's lines, weighted unless `weights` is null, and so for
// `more_weights`.
template <typename acc_t, int kLines>
__device__ __forceinline__ void add_column_sums(const ChunkTile<acc_t, kLines>& x, int lines, const acc_t* weights,
                                                const acc_t* more_weights, acc_t fade, acc_t* to) {
  Four<acc_t> sum = {};
  if (lines > 0)
    unroll<kLines / kSide<acc_t>>([&](int i) {
      const int line = thread_x<acc_t>() + kSide<acc_t> * i;
      Four<acc_t> row = load_pack<4>(x.row(line) + 4 * thread_y<acc_t>());
      if (more_weights != nullptr) unroll<4>([&](int j) { row.values[j] *= more_weights[line]; });
      unroll<4>([&](int j) { sum.values[j] += row.values[j] * (weights == nullptr ? acc_t(1) : weights[line]); });
    });
  unroll<4>([&](int j) {
    const acc_t total = sum_along_x(sum.values[j]);
    acc_t& of_column = to[4 * thread_y<acc_t>() + j];
    if (thread_x<acc_t>() == 0) of_column = of_column * fade + total;
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
