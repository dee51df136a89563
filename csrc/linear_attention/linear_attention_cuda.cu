#include "common/compensated_sum.h"
#include "linear_attention/linear_attention_scan.cuh"

// Scans by fused multiply-adds, in the accumulation type: of float64 and float32, and of 16-bit types whose shape or
// place is not for tensor cores. A block has one tile of the width, and a thread 4 x 4 elements of a tile.

namespace memcheck {
namespace {

template <typename acc_t>
constexpr int kTile = sizeof(acc_t) == sizeof(double) ? 32 : 64;
template <typename acc_t>
constexpr int kSide = kTile<acc_t> / 4;  // threads along a tile
template <typename acc_t>
constexpr int kThreads = kSide<acc_t> * kSide<acc_t>;
template <typename acc_t>
constexpr int kStride = kTile<acc_t> + 4;  // rows of a tile begin in different banks
template <typename acc_t>
constexpr int kBlocksAtOnce = sizeof(acc_t) == sizeof(double) ? 1 : 2;  // of a multiprocessor
// Sums have levels, so that rounding errors do not grow with their length: so many terms, a tile, all.
constexpr int kLevel = 16;

template <typename acc_t>
struct alignas(16) Four {
  acc_t v[4];
};

// So many lines of a chunk, kTile columns each.
template <typename acc_t, int kLines>
struct Tile {
  Four<acc_t> fours[kLines * kStride<acc_t> / 4];

  __device__ __forceinline__ acc_t* row(int i) { return reinterpret_cast<acc_t*>(fours) + i * kStride<acc_t>; }
  __device__ __forceinline__ const acc_t* row(int i) const {
    return reinterpret_cast<const acc_t*>(fours) + i * kStride<acc_t>;
  }
};

// kLines: of a chunk. As many as a tile has columns, or half of them where a deep state leaves no room for more.
template <typename acc_t, int kLines>
struct alignas(16) ScanShared {
  Tile<acc_t, kLines> a, b, x;  // scores come into the place of a
  acc_t vector[kTile<acc_t>];   // with a bias: the sum of x_j, or of bias_j x_j
  acc_t bias[kLines];           // of rows or columns of the chunk
  ScanWork work;
  Walk walk;
};

// The state of a block: rows of kStride, and behind them the sum of b_j. And the vector of its shared memory.
template <typename acc_t>
struct BlockState {
  acc_t* matrix;
  acc_t* sums;
  acc_t* vector;

  __device__ __forceinline__ acc_t* row(int64_t i) const { return matrix + i * kStride<acc_t>; }
};

// Of a chunk's lines each thread has kRows.
template <typename acc_t, int kRows>
struct Accumulators {
  acc_t out[kRows][4];  // of rows y + kSide i, columns 4 x + j
  acc_t denominator[kRows];
};

template <typename acc_t>
__device__ __forceinline__ int thread_x() {
  return static_cast<int>(threadIdx.x) % kSide<acc_t>;
}

template <typename acc_t>
__device__ __forceinline__ int thread_y() {
  return static_cast<int>(threadIdx.x) / kSide<acc_t>;
}

template <typename acc_t>
__device__ __forceinline__ Four<acc_t> four_at(const acc_t* at) {
  return *reinterpret_cast<const Four<acc_t>*>(at);
}

// The sum over the threads of one y, the same order for all of them.
template <typename acc_t>
__device__ __forceinline__ acc_t sum_along_x(acc_t x) {
  for (int distance = kSide<acc_t> / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// ---- tiles

template <typename scalar_t, int kCount>
struct alignas(sizeof(scalar_t) * kCount) Pack {
  scalar_t v[kCount];
};

// A tile of the factor at `column`, kCount elements at a time; 0 where there is nothing.
template <int kCount, typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void load_packs(const ScanFactor& factor, const scalar_t* from, const acc_t* scale,
                                           const Lines& lines, int64_t column, int64_t columns,
                                           Tile<acc_t, kLines>& to) {
  constexpr int kPerLine = kTile<acc_t> / kCount;
  constexpr int kLoads = kLines * kPerLine / kThreads<acc_t>;
  constexpr int kAtOnce = kLoads < 4 ? kLoads : 4;
  constexpr int kLinesApart = kThreads<acc_t> / kPerLine;
  using Pack = Pack<scalar_t, kCount>;
  const int at = static_cast<int>(threadIdx.x) % kPerLine * kCount;
  const int first = static_cast<int>(threadIdx.x) / kPerLine;
  const bool in_line = from != nullptr && column + at < columns;
  if (from != nullptr) from += lines.first * factor.x.stride[2] + (column + at) * factor.x.stride[3];
#pragma unroll 1
  for (int batch = 0; batch < kLoads; batch += kAtOnce) {
    Pack packs[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = first + (batch + i) * kLinesApart;
      if (in_line && lines.has(line)) packs[i] = *reinterpret_cast<const Pack*>(from + line * factor.x.stride[2]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = first + (batch + i) * kLinesApart;
      const bool there = in_line && lines.has(line);
      const acc_t weight = there && scale != nullptr ? scale[lines.first + line] : acc_t(1);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const acc_t x = to_acc(packs[i].v[j]);
        const acc_t value = factor.mapped ? feature(x) : x;
        to.row(line)[at + j] = there ? value * weight : acc_t(0);
      }
    }
  }
}

template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void load_tile(const Scan& scan, const ScanFactor& factor, int64_t b, int64_t head,
                                          const Lines& lines, int64_t column, int64_t columns,
                                          Tile<acc_t, kLines>& to) {
  const scalar_t* from = factor.x ? factor.x.at<scalar_t>(b, head, 0, 0) : nullptr;
  const acc_t* scale =
      factor.scaled ? static_cast<const acc_t*>(scan.inverse) + query_row(scan.shape, b, head) : nullptr;
  constexpr int kVector = 16 / sizeof(scalar_t);
  if (factor.vectors)
    load_packs<kVector>(factor, from, scale, lines, column, columns, to);
  else
    load_packs<1>(factor, from, scale, lines, column, columns, to);
}

// The bias of the queries of a chunk, 0 where there is none: g.y, or with a scaled g its share of it, (g.y) / den.
template <typename acc_t, int kLines>
__device__ __forceinline__ void load_bias(const Scan& scan, int64_t b, int64_t head, const Lines& queries,
                                          acc_t (&bias)[kLines]) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t parts = max(int64_t{1}, ceil_div(n.Dv, kTile<acc_t>));
  const int line = static_cast<int>(threadIdx.x);
  if (line >= kLines) return;
  acc_t sum = 0;
  const acc_t* from = static_cast<const acc_t*>(scan.products) + query_row(n, b, head) + queries.first + line;
  if (queries.has(line))
    for (int64_t part = 0; part < parts; ++part) sum += from[part * n.B * n.H * n.S];
  if (scan.a.scaled && queries.has(line))
    sum *= static_cast<const acc_t*>(scan.inverse)[query_row(n, b, head) + queries.first + line];
  bias[line] = sum;
}

// ---- products

template <typename acc_t, int kRows, int kColumns>
__device__ __forceinline__ void add(const acc_t (&from)[kRows][kColumns], acc_t (&to)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) to[i][j] += from[i][j];
}

// sum[i][j] += a_row . b_row over `depth`, of rows y + kSide i of a and x + kSide j of b.
template <typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void add_scores(const Tile<acc_t, kLines>& a, const Tile<acc_t, kLines>& b, int depth,
                                           acc_t (&sum)[kRows][kRows]) {
#pragma unroll 1
  for (int level = 0; level < depth; level += kLevel) {
    acc_t part[kRows][kRows] = {};
#pragma unroll 1
    for (int k = level; k < min(level + kLevel, depth); k += 4) {
      Four<acc_t> of_a[kRows], of_b[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        of_a[i] = four_at(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + k);
        of_b[i] = four_at(b.row(thread_x<acc_t>() + kSide<acc_t> * i) + k);
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kRows; ++j) part[i][j] += of_a[i].v[kk] * of_b[j].v[kk];
    }
    add(part, sum);
  }
}

// out += a x, where x begins at `rows`, in rows of kStride.
template <typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void add_product(const Tile<acc_t, kLines>& a, const acc_t* rows, int depth,
                                            acc_t (&out)[kRows][4]) {
#pragma unroll 1
  for (int level = 0; level < depth; level += kLevel) {
    acc_t part[kRows][4] = {};
#pragma unroll 1
    for (int k = level; k < min(level + kLevel, depth); k += 4) {
      Four<acc_t> of_a[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_a[i] = four_at(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + k);
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        const Four<acc_t> of_x = four_at(rows + (k + kk) * kStride<acc_t> + 4 * thread_x<acc_t>());
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] += of_a[i].v[kk] * of_x.v[j];
      }
    }
    add(part, out);
  }
}

// state += b^T x over the lines of a chunk.
template <typename acc_t, int kLines>
__device__ __forceinline__ void add_outer(const Tile<acc_t, kLines>& b, const Tile<acc_t, kLines>& x, int lines,
                                          acc_t* state) {
  acc_t sum[4][4] = {};
#pragma unroll 1
  for (int level = 0; level < lines; level += kLevel) {
    acc_t part[4][4] = {};
#pragma unroll 4
    for (int line = level; line < min(level + kLevel, lines); ++line) {
      const Four<acc_t> of_b = four_at(b.row(line) + 4 * thread_y<acc_t>());
      const Four<acc_t> of_x = four_at(x.row(line) + 4 * thread_x<acc_t>());
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) part[i][j] += of_b.v[i] * of_x.v[j];
    }
    add(part, sum);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc_t* to = state + (4 * thread_y<acc_t>() + i) * kStride<acc_t> + 4 * thread_x<acc_t>();
    Four<acc_t> total = four_at(to);
#pragma unroll
    for (int j = 0; j < 4; ++j) total.v[j] += sum[i][j];
    *reinterpret_cast<Four<acc_t>*>(to) = total;
  }
}

// This thread's share of the product of a row's first columns with a vector; null is all 1.
template <typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void add_row_dots(const Tile<acc_t, kLines>& a, const acc_t* vector, int columns,
                                             acc_t (&sum)[kRows]) {
  const int column = 4 * thread_x<acc_t>();
  if (column >= columns) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Four<acc_t> x = four_at(a.row(thread_y<acc_t>() + kSide<acc_t> * i) + column);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i] += x.v[j] * (vector == nullptr ? acc_t(1) : vector[column + j]);
  }
}

// to[column] += the sum over a tile's rows, weighted unless weights are null.
template <typename acc_t, int kLines>
__device__ __forceinline__ void add_column_sums(const Tile<acc_t, kLines>& x, const acc_t* weights, acc_t* to) {
  Four<acc_t> sum = {};
#pragma unroll
  for (int i = 0; i < kLines / kSide<acc_t>; ++i) {
    const int line = thread_x<acc_t>() + kSide<acc_t> * i;
    const Four<acc_t> row = four_at(x.row(line) + 4 * thread_y<acc_t>());
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.v[j] += row.v[j] * (weights == nullptr ? acc_t(1) : weights[line]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const acc_t total = sum_along_x(sum.v[j]);
    if (thread_x<acc_t>() == 0) to[4 * thread_y<acc_t>() + j] += total;
  }
}

// ---- a chunk

// The scores of rows that see columns, 0 elsewhere, into the place of a.
template <typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void store_scores(const Scan& scan, const Chunk& chunk, const acc_t (&scores)[kRows][kRows],
                                             ScanShared<acc_t, kLines>& s) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int column = thread_x<acc_t>() + kSide<acc_t> * j;
      const bool sees = (scan.rows_are_queries() ? column <= row : column >= row) && chunk.columns.has(column);
      const acc_t bias = !scan.has_bias() ? acc_t(0) : s.bias[scan.rows_are_queries() ? row : column];
      s.a.row(row)[column] = sees ? scores[i][j] - bias : acc_t(0);
    }
  }
}

// Of one head of columns: what rows get of the chunk itself, and with the first head of the state; then the columns
// join the state.
template <typename scalar_t, typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void scan_head(const Scan& scan, const ScanWork& work, const Chunk& chunk, int64_t head,
                                          const BlockState<acc_t>& state, ScanShared<acc_t, kLines>& s,
                                          Accumulators<acc_t, kRows>& acc) {
  constexpr int kSize = kTile<acc_t>;
  const bool meet = chunk.has_rows && chunk.has_columns;
  const bool reads_state = chunk.has_rows && head == 0;
  const int64_t column_head = work.first_column_head + head;
  acc_t scores[kRows][kRows] = {};
  if (chunk.has_columns)
    load_tile<scalar_t>(scan, scan.x, work.b, column_head, chunk.columns, work.part * kSize, scan.width, s.x);
  if (scan.has_bias() && scan.kind == ScanKind::GradK && chunk.has_columns)
    load_bias(scan, work.b, column_head, chunk.columns, s.bias);
  for (int64_t k = 0; k < scan.depth; k += kSize) {
    const int depth = static_cast<int>(min(int64_t{kSize}, ceil_div(scan.depth - k, 4) * 4));
    if (reads_state || meet) load_tile<scalar_t>(scan, scan.a, work.b, work.row_head, chunk.rows, k, scan.depth, s.a);
    if (chunk.has_columns) load_tile<scalar_t>(scan, scan.b, work.b, column_head, chunk.columns, k, scan.depth, s.b);
    __syncthreads();
    if (meet) add_scores(s.a, s.b, depth, scores);
    if (reads_state) {
      add_product(s.a, state.row(k), depth, acc.out);
      if (scan.has_denominator()) add_row_dots(s.a, state.sums + k, kSize, acc.denominator);
      __syncthreads();
    }
    if (chunk.has_columns) {
      add_outer(s.b, s.x, chunk.columns.end, state.row(k));
      if (scan.has_denominator()) add_column_sums(s.b, static_cast<const acc_t*>(nullptr), state.sums + k);
    }
    __syncthreads();
  }
  if (meet) {
    __syncthreads();
    store_scores(scan, chunk, scores, s);
    __syncthreads();
    add_product(s.a, s.x.row(0), static_cast<int>(ceil_div(chunk.columns.end, 4) * 4), acc.out);
    if (scan.has_denominator()) add_row_dots(s.a, static_cast<const acc_t*>(nullptr), kLines, acc.denominator);
  }
  if (scan.has_bias() && chunk.has_columns) {
    __syncthreads();
    add_column_sums(s.x, scan.kind == ScanKind::GradK ? s.bias : nullptr, s.vector);
  }
  __syncthreads();
}

// out -= bias_i (sum of x_j), or the sum of bias_j x_j, of the columns before this chunk.
template <typename acc_t, int kLines, int kRows>
__device__ __forceinline__ void subtract_bias_of_state(const Scan& scan, const ScanShared<acc_t, kLines>& s,
                                                       acc_t (&out)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    const acc_t weight = scan.kind == ScanKind::GradQ ? s.bias[row] : acc_t(1);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i][j] -= weight * s.vector[4 * thread_x<acc_t>() + j];
  }
}

// ---- what becomes of the sums

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_four(const Scan& scan, const ScanWork& work, int64_t row, const acc_t (&x)[4]) {
  const int64_t column = work.part * kTile<acc_t> + 4 * thread_x<acc_t>();
  if (!scan.out || column >= scan.width) return;
  scalar_t* to = scan.out.at<scalar_t>(work.b, work.row_head, row, column);
  if (scan.out_vectors) {
    Pack<scalar_t, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.v[j] = from_acc<scalar_t>(x[j]);
    *reinterpret_cast<Pack<scalar_t, 4>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (column + j < scan.width) to[j * scan.out.stride[3]] = from_acc<scalar_t>(x[j]);
}

// Elements (row, column + j) of g, q or k; 0 where there are none.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void load_last(const Scan& scan, const ScanWork& work, int64_t row, acc_t (&x)[4]) {
  const int64_t column = work.part * kTile<acc_t> + 4 * thread_x<acc_t>();
  const scalar_t* from = scan.last.at<scalar_t>(work.b, work.row_head, row, column);
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = column + j < scan.width ? to_acc(from[j * scan.last.stride[3]]) : acc_t(0);
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void finish_row(const Scan& scan, const ScanWork& work, int64_t row, bool there,
                                           acc_t denominator, acc_t (&out)[4]) {
  const LinearAttentionShape& n = scan.shape;
  acc_t* inverses = static_cast<acc_t*>(scan.inverse) + query_row(n, work.b, work.row_head);
  if (scan.has_denominator()) {
    const acc_t inverse = acc_t(1) / (sum_along_x(denominator) + static_cast<acc_t>(scan.eps));
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= inverse;
    if (scan.kind == ScanKind::Rows) {
      acc_t g[4] = {};
      if (there) load_last<scalar_t>(scan, work, row, g);
      const acc_t product = sum_along_x(out[0] * g[0] + out[1] * g[1] + out[2] * g[2] + out[3] * g[3]);
      acc_t* products = static_cast<acc_t*>(scan.products) + query_row(n, work.b, work.row_head);
      if (there && thread_x<acc_t>() == 0) {
        products[work.part * n.B * n.H * n.S + row] = product;
        if (work.part == 0) inverses[row] = inverse;
      }
    }
  } else if (scan.kind != ScanKind::GradV && there && scan.out) {
    acc_t x[4];
    load_last<scalar_t>(scan, work, row, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= feature_slope(n.feature_map, x[j]);
  }
  if (there) store_four<scalar_t>(scan, work, row, out);
}

template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void scan_chunk(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                           const BlockState<acc_t>& state, ScanShared<acc_t, kLines>& s) {
  constexpr int kRows = kLines / kSide<acc_t>;
  Accumulators<acc_t, kRows> acc = {};
  if (chunk.has_rows && scan.has_bias()) {
    if (scan.kind == ScanKind::GradQ) {
      load_bias(scan, work.b, work.row_head, chunk.rows, s.bias);
      __syncthreads();
    }
    subtract_bias_of_state(scan, s, acc.out);
    __syncthreads();
  }
  const int64_t heads = chunk.has_columns ? work.column_heads : 0;
  for (int64_t head = 0; head < max(heads, int64_t{1}); ++head) {
    const Chunk of_head{chunk.rows, chunk.columns, chunk.has_rows, chunk.has_columns && head < heads};
    scan_head<scalar_t>(scan, work, of_head, head, state, s, acc);
  }
  if (!chunk.has_rows) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int line = thread_y<acc_t>() + kSide<acc_t> * i;
    finish_row<scalar_t>(scan, work, chunk.rows.first + line, chunk.rows.has(line), acc.denominator[i], acc.out[i]);
  }
}

// ---- states

// move(at, k, column) for all elements of the block's state, and sum(at, i) of its vectors; column -1 is padding.
template <typename acc_t, typename Move, typename MoveSum>
__device__ __forceinline__ void for_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state,
                                          const Move& move, const MoveSum& move_sum) {
  constexpr int kSize = kTile<acc_t>;
  const int64_t padded = ceil_div(scan.depth, kSize) * kSize;
  for (int64_t i = threadIdx.x; i < padded * kSize; i += kThreads<acc_t>) {
    const int64_t k = i / kSize;
    const int64_t column = work.part * kSize + i % kSize;
    move(state.row(k)[i % kSize], k, column, k < scan.depth && column < scan.width);
  }
  acc_t* vector = scan.has_denominator() ? state.sums : state.vector;
  const int64_t first = scan.has_denominator() ? 0 : work.part * kSize;
  const int64_t count = scan.has_denominator() ? padded : kSize;
  const int64_t length = scan.has_denominator() ? scan.depth : scan.width;
  for (int64_t i = threadIdx.x; i < count; i += kThreads<acc_t>) move_sum(vector[i], first + i, first + i < length);
  __syncthreads();
}

template <typename acc_t>
__device__ __forceinline__ acc_t* slot_of(const Scan& scan, const ScanWork& work, int64_t segment) {
  const int64_t head = work.b * scan.shape.Hkv + work.key_head;
  return static_cast<acc_t*>(scan.states) + (head * scan.segments.count + segment) * scan.slot();
}

template <typename acc_t>
__device__ __forceinline__ void start_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  const acc_t* slot =
      scan.phase == ScanPhase::Pieces ? slot_of<acc_t>(scan, work, scan.shape.causal ? work.piece : 0) : nullptr;
  const acc_t* slot_sums = slot + scan.depth * scan.width;
  for_state(
      scan, work, state,
      [&](acc_t& to, int64_t k, int64_t column, bool there) {
        acc_t x = 0;
        if (there && slot != nullptr) x = slot[k * scan.width + column];
        if (there && scan.m) x = *scan.m.at<acc_t>(work.b, work.key_head, k, column);
        to = x;
      },
      [&](acc_t& to, int64_t i, bool there) {
        acc_t x = 0;
        if (there && slot != nullptr) x = slot_sums[i];
        if (there && scan.z) x = *scan.z.at<acc_t>(work.b, work.key_head, 0, i);
        to = x;
      });
}

template <typename acc_t>
__device__ __forceinline__ void store_segment(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  acc_t* slot = slot_of<acc_t>(scan, work, work.piece);
  acc_t* sums = slot + scan.depth * scan.width;
  const bool stores_sums = !scan.has_denominator() || work.part == 0;
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool there) {
        if (there) slot[k * scan.width + column] = from;
      },
      [&](acc_t& from, int64_t i, bool there) {
        if (there && stores_sums) sums[i] = from;
      });
}

template <typename acc_t>
__device__ __forceinline__ void store_new_state(const Scan& scan, const ScanWork& work,
                                                const BlockState<acc_t>& state) {
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool there) {
        if (there) *scan.new_m.at<acc_t>(work.b, work.key_head, k, column) = from;
      },
      [&](acc_t& from, int64_t i, bool there) {
        if (there && work.part == 0) *scan.new_z.at<acc_t>(work.b, work.key_head, 0, i) = from;
      });
}

// ---- a block

template <typename scalar_t, int kLines>
__global__ void __launch_bounds__(kThreads<acc_type<scalar_t>>, kBlocksAtOnce<acc_type<scalar_t>>)
    scan_kernel(const Scan scan, int64_t parts) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTile<acc_t>;
  auto& s = shared<ScanShared<acc_t, kLines>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x, parts);
    s.walk = walk_of(scan, s.work);
  }
  __syncthreads();
  const ScanWork& work = s.work;
  const Walk& walk = s.walk;
  acc_t* memory = scan.depth > kLinearAttentionDeepest
                      ? static_cast<acc_t*>(scan.deep) + blockIdx.x * linear_attention_block_state(scan.depth, kSize)
                      : reinterpret_cast<acc_t*>(&s + 1);
  const BlockState<acc_t> state{memory, memory + ceil_div(scan.depth, kSize) * kSize * kStride<acc_t>, s.vector};
  const int sums = static_cast<int>(ceil_div(walk.sums.end - walk.sums.begin, kLines));
  const int steps = sums + static_cast<int>(ceil_div(walk.rows.end - walk.rows.begin, kLines));
  start_state(scan, work, state);
  for (int i = 0; i <= steps; ++i) {
    if (i == sums && scan.phase == ScanPhase::Sums) store_segment(scan, work, state);
    if (i == sums && scan.new_m && work.row_head % scan.shape.group() == 0) store_new_state(scan, work, state);
    if (i == steps) break;
    const Chunk chunk = chunk_of(scan, i < sums ? walk.sums : walk.rows, i < sums ? i : i - sums, i < sums, kLines);
    if (chunk.has_rows || chunk.has_columns) scan_chunk<scalar_t>(scan, work, chunk, state, s);
  }
}

// Each segment gets the sum of those before it in the direction of the scan; not causal, the first gets that of all.
template <typename acc_t>
__global__ void add_up_kernel(const Scan scan, int64_t heads) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t slot = scan.slot();
  if (index >= heads * slot) return;
  const int64_t count = scan.segments.count;
  acc_t* first = static_cast<acc_t*>(scan.states) + index / slot * count * slot + index % slot;
  acc_t sum = 0;
  acc_t rest = 0;
  for (int64_t i = 0; i < count; ++i) {
    acc_t* segment = first + (scan.backwards() ? count - 1 - i : i) * slot;
    const acc_t x = *segment;
    if (scan.shape.causal) *segment = sum;
    add_to_sum(x, sum, rest);
  }
  if (!scan.shape.causal) *first = sum;
}

}  // namespace

void add_up_segments(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  constexpr unsigned kBlock = 256;
  const int64_t heads = scan.shape.B * scan.shape.Hkv;
  const Launch with{"linear_attention_add_up", dim3(static_cast<unsigned>(ceil_div(heads * scan.slot(), kBlock))),
                    dim3(kBlock), 0, stream};
  if (dtype == Dtype::Float64)
    launch(with, add_up_kernel<double>, scan, heads);
  else
    launch(with, add_up_kernel<float>, scan, heads);
}

namespace {

template <typename scalar_t, int kLines>
void launch_chunks(const Scan& scan, int64_t blocks, size_t state_bytes, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const int64_t parts = std::max<int64_t>(1, ceil_div(scan.width, kTile<acc_t>));
  const Launch with{name_of(scan.kind, false), dim3(static_cast<unsigned>(blocks * parts)), dim3(kThreads<acc_t>),
                    sizeof(ScanShared<acc_t, kLines>) + state_bytes, stream};
  launch(with, scan_kernel<scalar_t, kLines>, scan, parts);
}

// In chunks of a tile's lines, or of half as many where the GPU has no room for more beside a deep state.
template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTile<acc_t>;
  const auto bytes_of_state = [](int64_t depth) { return linear_attention_block_state(depth, kSize) * sizeof(acc_t); };
  const size_t state_bytes = scan.depth > kLinearAttentionDeepest ? 0 : bytes_of_state(scan.depth);
  static_assert(sizeof(ScanShared<acc_t, kSize / 2>) + bytes_of_state(kLinearAttentionDeepest) <=
                kSharedBytesEverywhere);
  if (fits_in_a_block(sizeof(ScanShared<acc_t, kSize>) + state_bytes)) {
    launch_chunks<scalar_t, kSize>(scan, blocks, state_bytes, stream);
  } else {
    launch_chunks<scalar_t, kSize / 2>(scan, blocks, state_bytes, stream);
  }
}

bool in_vectors(const Strided<4>& x, int64_t columns, Dtype dtype, int64_t bytes) {
  const int64_t count = bytes / element_bytes(dtype);
  bool whole = x.stride[3] == 1 && columns % count == 0 && reinterpret_cast<uintptr_t>(x.data) % bytes == 0;
  for (int i = 0; i < 3; ++i) whole = whole && x.stride[i] % count == 0;
  return whole;
}

void run_scan(Scan scan, Dtype dtype, cudaStream_t stream) {
  constexpr int64_t kBytes = 16;
  const bool on_tensor_cores = suits_tensor_cores(scan.shape, dtype) && scan.kind != ScanKind::Rows && !scan.m;
  scan.a.vectors = in_vectors(scan.a.x, scan.depth, dtype, kBytes);
  scan.b.vectors = in_vectors(scan.b.x, scan.depth, dtype, kBytes);
  scan.x.vectors = in_vectors(scan.x.x, scan.width, dtype, kBytes);
  scan.last_vectors = in_vectors(scan.last, scan.width, dtype, kBytes);
  scan.out_vectors = in_vectors(scan.out, scan.width, dtype, on_tensor_cores ? kBytes : 4 * element_bytes(dtype));
  if (on_tensor_cores) return scan_on_tensor_cores(scan, dtype, stream);
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    with_device_type(dtype, [&](auto scalar) { launch_scan<decltype(scalar)>(phase, blocks, stream); });
  });
}

// ---- the operator

Scan scan_of(const LinearAttentionShape& n, double eps, Dtype dtype, ScanKind kind) {
  Scan scan = {};
  scan.shape = n;
  scan.eps = eps;
  scan.kind = kind;
  const auto rows = scan.rows_are_queries() ? LinearAttentionRows::Queries : LinearAttentionRows::Keys;
  scan.segments = linear_attention_segments(n, dtype, rows);
  scan.pieces = linear_attention_pieces(n, dtype, rows);
  const bool of_values = kind == ScanKind::Output || kind == ScanKind::Rows || kind == ScanKind::GradV;
  scan.depth = of_values ? n.D : n.Dv;
  scan.width = of_values ? n.Dv : n.D;
  return scan;
}

Scan backward_scan(const LinearAttentionBackward& p, Dtype dtype, ScanKind kind) {
  const LinearAttentionShape& n = p.shape;
  Scan scan = scan_of(n, p.eps, dtype, kind);
  scan.inverse = p.rows;
  scan.products = static_cast<char*>(p.rows) + n.B * n.H * n.S * acc_bytes(dtype);
  scan.states = p.states;
  scan.deep = p.scratch;
  const bool maps = n.feature_map == FeatureMap::EluPlusOne;
  const ScanFactor q{p.q, maps, false, false}, k{p.k, maps, false, false}, scaled_q{p.q, maps, true, false};
  const ScanFactor v{p.v, false, false, false}, g{p.grad_y, false, false, false};
  // On tensor cores the scan of grad q is what finds 1 / den.
  const ScanFactor scaled_g{p.grad_y, false, !suits_tensor_cores(n, dtype), false};
  switch (kind) {
    case ScanKind::Output:
    case ScanKind::Rows:
      scan.a = q, scan.b = k, scan.x = v, scan.last = p.grad_y;
      break;
    case ScanKind::GradQ:
      scan.a = scaled_g, scan.b = v, scan.x = k, scan.last = p.q, scan.out = p.grad_q;
      break;
    case ScanKind::GradK:
      scan.a = v, scan.b = g, scan.x = scaled_q, scan.last = p.k, scan.out = p.grad_k;
      break;
    case ScanKind::GradV:
      scan.a = k, scan.b = scaled_q, scan.x = g, scan.out = p.grad_v;
      break;
  }
  return scan;
}

}  // namespace

void linear_attention_forward_cuda(const LinearAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  Scan scan = scan_of(p.shape, p.eps, dtype, ScanKind::Output);
  const bool maps = p.shape.feature_map == FeatureMap::EluPlusOne;
  scan.a = {p.q, maps, false, false};
  scan.b = {p.k, maps, false, false};
  scan.x = {p.v, false, false, false};
  scan.out = p.y;
  scan.states = p.states;
  scan.deep = p.scratch;
  run_scan(scan, dtype, stream);
}

void linear_attention_backward_cuda(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  const bool leaves_rows = suits_tensor_cores(p.shape, dtype);
  if (!leaves_rows) run_scan(backward_scan(p, dtype, ScanKind::Rows), dtype, stream);
  if (p.grad_q || leaves_rows) run_scan(backward_scan(p, dtype, ScanKind::GradQ), dtype, stream);
  if (p.grad_k) run_scan(backward_scan(p, dtype, ScanKind::GradK), dtype, stream);
  if (p.grad_v) run_scan(backward_scan(p, dtype, ScanKind::GradV), dtype, stream);
}

void linear_attention_step_cuda(const LinearAttentionStep& p, Dtype dtype, cudaStream_t stream) {
  const bool maps = p.shape.feature_map == FeatureMap::EluPlusOne;
  Scan scan = scan_of(p.shape, p.eps, dtype, ScanKind::Output);
  scan.segments = scan.pieces = {1, std::max<int64_t>(1, p.shape.T)};
  scan.a = {p.q, maps, false, false};
  scan.b = {p.k, maps, false, false};
  scan.x = {p.v, false, false, false};
  scan.out = p.y;
  scan.m = p.m;
  scan.z = p.z;
  scan.new_m = p.new_m;
  scan.new_z = p.new_z;
  scan.deep = p.scratch;
  run_scan(scan, dtype, stream);
}

}  // namespace memcheck
