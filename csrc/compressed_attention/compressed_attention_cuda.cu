#include <cmath>
#include <cstdint>

#include "compressed_attention/compressed_attention_rows.cuh"
#include "compressed_attention/compressed_attention_tiles.cuh"

// Pooling, and the forward in the accumulation type: of float32, float64, and 16-bit heads too wide for tensor cores.

namespace memcheck {
namespace compressed {

// ---- pooling

constexpr int kPoolThreads = 256;
constexpr int kPoolChain = 32;  // positions that are summed one after the other, before such sums are
constexpr int kPoolLoads = 8;   // under way at once

// How the threads of a block share pooling: `lanes` sum the positions of a block in turn, `chunks` the columns.
struct PoolThreads {
  int lanes, chunks;
  bool lanes_first;  // neighbouring threads are lanes: where positions are contiguous and columns are not

  MEMCHECK_INLINE int blocks() const { return kPoolThreads / (lanes * chunks); }
};

template <int kColumns, typename acc_t>
struct PoolShared {
  acc_t sums[kColumns][kPoolThreads];
};

// x (B,Hkv,N,D) of which a row is read or written: N positions or blocks.
template <typename scalar_t>
MEMCHECK_INLINE KeyMatrix<scalar_t> rows_of_head(const CompressedAttentionShape& shape, const Strided<4>& x,
                                                 int64_t count, int64_t head) {
  return keys_of<scalar_t>(shape, x, count, {head / shape.Hkv, head % shape.Hkv, 1});
}

// Sums of every lanes-th position from `lane` on: chains of kPoolChain, then of those.
template <typename scalar_t, int kColumns, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void sum_positions(const KeyMatrix<scalar_t>& from, int64_t begin, int64_t end, int lanes,
                                              int64_t column, acc_t (&total)[kColumns]) {
  for (int64_t first = begin; first < end; first += int64_t{kPoolChain} * lanes) {
    acc_t chain[kColumns] = {};
    for (int64_t t = first; t < end && t < first + int64_t{kPoolChain} * lanes; t += int64_t{kPoolLoads} * lanes) {
      Chunk<scalar_t> chunks[kPoolLoads];
#pragma unroll
      for (int n = 0; n < kPoolLoads; ++n)
        chunks[n] = chunk_at(from, from.at(t + n * lanes), t + n * lanes < end, column);
#pragma unroll
      for (int n = 0; n < kPoolLoads; ++n)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) chain[i] += to_acc(chunks[n].x[i]);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total[i] += chain[i];
  }
}

// Blocks of threads go through keys, then values; each through so many rows (b, key head, block).
template <typename scalar_t>
__global__ void __launch_bounds__(kPoolThreads, 2) pool_kernel(CompressedAttentionPooling p, PoolThreads threads) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kColumns = Chunk<scalar_t>::kCount;
  auto& memory = shared<PoolShared<kColumns, acc_t>>();
  const CompressedAttentionShape& shape = p.shape;
  const int64_t rows = shape.B * shape.Hkv * shape.C;
  const int64_t column_tiles = ceil_div(shape.D, int64_t{threads.chunks} * kColumns);
  const int64_t row_tiles = ceil_div(rows, threads.blocks());
  const int64_t tile = blockIdx.x / column_tiles;
  const bool of_values = tile >= row_tiles;
  const int thread = threadIdx.x;
  const int lane = threads.lanes_first ? thread % threads.lanes : thread / threads.chunks % threads.lanes;
  const int chunk = threads.lanes_first ? thread / threads.lanes % threads.chunks : thread % threads.chunks;
  const int64_t row =
      (of_values ? tile - row_tiles : tile) * threads.blocks() + thread / (threads.lanes * threads.chunks);
  const int64_t column = (blockIdx.x % column_tiles * threads.chunks + chunk) * kColumns;
  const bool mine = row < rows && column < shape.D;
  const int64_t head = mine ? row / shape.C : 0;
  const int64_t j = mine ? row % shape.C : 0;
  const int64_t begin = j * shape.factor;
  const int64_t end = smaller(shape.T, begin + shape.factor);
  acc_t total[kColumns] = {};
  if (mine) {
    const auto from = rows_of_head<scalar_t>(shape, of_values ? p.v : p.k, shape.T, head);
    sum_positions(from, begin + lane, end, threads.lanes, column, total);
  }
  for (int others = threads.lanes / 2; others > 0; others /= 2) {
    const int distance = threads.lanes_first ? others : others * threads.chunks;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) memory.sums[i][thread] = total[i];
    __syncthreads();
    if (lane < others)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) total[i] += memory.sums[i][thread + distance];
    __syncthreads();
  }
  if (!mine || lane > 0) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) total[i] /= static_cast<acc_t>(end - begin);
  const auto to = rows_of_head<scalar_t>(shape, of_values ? p.vc : p.kc, shape.C, head);
  store_columns<scalar_t, kColumns>(to, j, column, total);
}

int power_of_two_from(int64_t x, int most) {
  int power = 1;
  while (power < x && power < most) power *= 2;
  return power;
}

template <typename scalar_t>
PoolThreads pool_threads(const CompressedAttentionPooling& p) {
  constexpr int64_t kPositions = 16;  // for a lane, where there are enough blocks
  const int64_t chunks = ceil_div(p.shape.D, Chunk<scalar_t>::kCount);
  const bool lanes_first = p.k.stride[3] != 1 && p.v.stride[3] != 1;
  PoolThreads threads{1, power_of_two_from(chunks, lanes_first ? 8 : 32), lanes_first};
  const int64_t positions = smaller(p.shape.factor, p.shape.T);
  threads.lanes = power_of_two_from(ceil_div(positions, lanes_first ? 1 : kPositions), kPoolThreads / threads.chunks);
  return threads;
}

template <typename scalar_t>
void pool(const CompressedAttentionPooling& p, cudaStream_t stream) {
  const int64_t rows = p.shape.B * p.shape.Hkv * p.shape.C;
  if (rows == 0 || p.shape.D == 0) return;
  const PoolThreads threads = pool_threads<scalar_t>(p);
  constexpr int kColumns = Chunk<scalar_t>::kCount;
  const int64_t column_tiles = ceil_div(p.shape.D, int64_t{threads.chunks} * kColumns);
  const auto blocks = static_cast<unsigned>(2 * ceil_div(rows, threads.blocks()) * column_tiles);
  launch({"compressed_attention_pool", dim3(blocks), dim3(kPoolThreads),
          sizeof(PoolShared<kColumns, acc_type<scalar_t>>), stream},
         pool_kernel<scalar_t>, p, threads);
}

// ---- forward

template <typename acc_t>
struct ForwardShared {
  SharedTile<acc_t> q;
  SharedTile<acc_t> kc;
  SharedTile<acc_t> vc;
  SharedTile<acc_t> weights;
  Totals<acc_t> y;
  int64_t limit[TileSize<acc_t>::kSize];  // how many blocks each row sees
};

// The running maximum of the scores of a thread's rows, and the sums of exponentials that are relative to it. All
// threads of a row have the same.
template <typename acc_t>
struct Softmax {
  static constexpr int kRows = TileSize<acc_t>::kRows;

  acc_t max[kRows];
  acc_t sum[kRows];         // of this chunk
  acc_t before[kRows];      // of the chunks before,
  acc_t before_max[kRows];  // relative to the maximum as it was

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      max[i] = before_max[i] = minus_infinity<acc_t>();
      sum[i] = before[i] = acc_t(0);
    }
  }

  // Scores become exponentials. Returns what sums that were relative to the last maximum are multiplied with.
  __device__ __forceinline__ void add(ThreadTile<acc_t>& scores, acc_t (&rescale)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      acc_t highest = max[i];
#pragma unroll
      for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) highest = larger(highest, scores[i][j]);
#pragma unroll
      for (int bits = kColumnLanes / 2; bits > 0; bits /= 2)
        highest = larger(highest, __shfl_xor_sync(~0u, highest, bits));
      const acc_t shift = shift_of(highest);
      rescale[i] = exp(max[i] - shift);
      max[i] = highest;
      acc_t tile_sum = acc_t(0);
#pragma unroll
      for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) {
        scores[i][j] = exp(scores[i][j] - shift);
        tile_sum += scores[i][j];
      }
#pragma unroll
      for (int bits = kColumnLanes / 2; bits > 0; bits /= 2) tile_sum += __shfl_xor_sync(~0u, tile_sum, bits);
      sum[i] = sum[i] * rescale[i] + tile_sum;
    }
  }

  __device__ __forceinline__ void end_chunk(acc_t (&rescale)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rescale[i] = exp(before_max[i] - shift_of(max[i]));
      before[i] = before[i] * rescale[i] + sum[i];
      before_max[i] = max[i];
      sum[i] = acc_t(0);
    }
  }
};

// to = to factor[row]
template <typename acc_t>
__device__ __forceinline__ void rescale_tile(const acc_t (&factor)[TileSize<acc_t>::kRows], ThreadTile<acc_t>& to) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) to[i][j] *= factor[i];
}

template <typename acc_t>
__device__ __forceinline__ void rescale_totals(const acc_t (&factor)[TileSize<acc_t>::kRows], Totals<acc_t>& to) {
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i)
#pragma unroll
    for (int j = 0; j < TileSize<acc_t>::kColumns; ++j) to.of(i, j) *= factor[i];
}

template <typename acc_t>
__device__ __forceinline__ void describe_rows(const CompressedAttentionShape& shape, const QueryWork& work,
                                              ForwardShared<acc_t>& memory) {
  if (threadIdx.x < TileSize<acc_t>::kSize) {
    const int64_t row = work.row + threadIdx.x;
    memory.limit[threadIdx.x] = row < work.of.group * shape.S ? shape.visible(row / work.of.group) : 0;
  }
  __syncthreads();
}

// y = sum of weighted values / sum of weights, and 0 where nothing was seen, or only scores of -inf.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void finish_queries(const CompressedAttentionForward& p, const QueryWork& work,
                                               const ForwardParts<acc_t>& parts, const Softmax<acc_t>& softmax,
                                               ForwardShared<acc_t>& memory) {
  constexpr int kColumns = TileSize<acc_t>::kColumns;
  const CompressedAttentionShape& shape = p.shape;
  const auto y = queries_of<scalar_t>(shape, p.y, work.of);
  const int64_t column = work.column + joint_column<acc_t>(0);
  unsigned not_finite = 0;
#pragma unroll
  for (int i = 0; i < TileSize<acc_t>::kRows; ++i) {
    const int64_t row = work.row + row_of(i);
    if (row >= y.count) continue;
    const bool sees = softmax.before[i] != acc_t(0);
    const acc_t divisor = sees ? softmax.before[i] : acc_t(1);
    const acc_t lse = sees ? softmax.max[i] + log(divisor) : minus_infinity<acc_t>();
    acc_t of_row[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      of_row[j] = memory.y.of(i, j) / divisor;
      if (!is_finite(of_row[j])) not_finite |= 1u << i;
    }
    const int64_t index = query_index(shape, work.of, row);
    const bool writes_lse = column_lane() == 0 && work.column == 0;
    if (parts.count == 1) {
      store_columns<scalar_t, kColumns>(y, row, column, of_row);
      if (writes_lse && p.lse != nullptr) static_cast<acc_t*>(p.lse)[index] = lse;
      continue;
    }
    const int64_t of_part = work.part * shape.B * shape.H * shape.S + index;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if (column + j < shape.D) parts.y[of_part * shape.D + column + j] = of_row[j];
    if (writes_lse) parts.lse[of_part] = lse;
  }
  if (!__any_sync(~0u, not_finite != 0)) return;
  each_row_of_warp<acc_t>(not_finite, [&](int row) {
    attend_row<scalar_t>(p, work, TileSize<acc_t>::kSize, TileSize<acc_t>::kSize, parts, work.row + row);
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(CompressedAttentionForward p, ForwardParts<acc_type<scalar_t>> parts, int64_t column_tiles) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = TileSize<acc_t>::kSize;
  auto& memory = shared<ForwardShared<acc_t>>();
  const QueryWork work = query_work(p.shape, blockIdx.x, kSize, kSize, column_tiles, kSize, parts.count);
  const auto q = queries_of<scalar_t>(p.shape, p.q, work.of);
  const auto kc = keys_of<scalar_t>(p.shape, p.kc, p.shape.C, work.of);
  const auto vc = keys_of<scalar_t>(p.shape, p.vc, p.shape.C, work.of);
  describe_rows(p.shape, work, memory);
  const auto scale = static_cast<acc_t>(p.scale);
  Softmax<acc_t> softmax;
  ThreadTile<acc_t> chunk;
  set_zero<acc_t>(chunk);
  start(memory.y);
  acc_t rescale[TileSize<acc_t>::kRows];
  for (int64_t tile = work.begin; tile < work.end; ++tile) {
    const int64_t key = tile * kSize;
    ThreadTile<acc_t> scores;
    const bool q_is_there = stays<acc_t>(p.shape.D) && tile > work.begin;
    multiply_rows(q, work.row, q_is_there, kc, key, memory.q, memory.kc, scores);
    // The last tile's products are done: of one column or more, there was a barrier since.
    if (p.shape.D == 0) __syncthreads();
    load_tile(vc, key, work.column, memory.vc);
#pragma unroll
    for (int i = 0; i < TileSize<acc_t>::kRows; ++i) {
      const int seen = of_tile_before<acc_t>(memory.limit[row_of(i)], key);
#pragma unroll
      for (int j = 0; j < TileSize<acc_t>::kColumns; ++j)
        scores[i][j] = spread_column(j) < seen ? scaled(scores[i][j], scale) : minus_infinity<acc_t>();
    }
    softmax.add(scores, rescale);
    keep_tile(scores, memory.weights);
    __syncthreads();
    rescale_tile(rescale, chunk);
    add_product_of_tile(memory.weights, memory.vc, chunk);
    if ((tile - work.begin + 1) % kChunkTiles != 0 && tile + 1 < work.end) continue;
    softmax.end_chunk(rescale);
    rescale_totals(rescale, memory.y);
    add_chunk(chunk, memory.y);
  }
  finish_queries<scalar_t>(p, work, parts, softmax, memory);
}

// y = sum over parts of y_part exp(lse_part - lse)
template <typename scalar_t>
__global__ void __launch_bounds__(kPoolThreads)
    join_parts_kernel(CompressedAttentionForward p, ForwardParts<acc_type<scalar_t>> parts) {
  using acc_t = acc_type<scalar_t>;
  const CompressedAttentionShape& shape = p.shape;
  const int64_t queries = shape.B * shape.H * shape.S;
  const int64_t index = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  if (index >= queries * shape.D) return;
  const int64_t query = index / shape.D;
  acc_t highest = minus_infinity<acc_t>();
  for (int64_t part = 0; part < parts.count; ++part) highest = larger(highest, parts.lse[part * queries + query]);
  const acc_t shift = shift_of(highest);
  acc_t weights = acc_t(0);
  acc_t y = acc_t(0);
  for (int64_t part = 0; part < parts.count; ++part) {
    const acc_t weight = exp(parts.lse[part * queries + query] - shift);
    weights += weight;
    y += weight * parts.y[part * queries * shape.D + index];
  }
  const int64_t s = query % shape.S;
  const bool sees = weights != acc_t(0);
  const int64_t head = query / shape.S % shape.H;
  const int64_t column = index % shape.D;
  *p.y.at<scalar_t>(query / shape.S / shape.H, head, s, column) = from_acc<scalar_t>(sees ? y / weights : acc_t(0));
  if (column == 0 && p.lse != nullptr)
    static_cast<acc_t*>(p.lse)[query] = sees ? shift + log(weights) : minus_infinity<acc_t>();
}

template <typename scalar_t>
void forward_of_parts(const CompressedAttentionForward& p, const ForwardParts<acc_type<scalar_t>>& parts,
                      cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = TileSize<acc_t>::kSize;
  const CompressedAttentionShape& shape = p.shape;
  const int64_t column_tiles = larger<int64_t>(1, ceil_div(shape.D, kSize));
  const int64_t row_tiles = ceil_div(shape.group() * shape.S, kSize);
  const auto blocks = static_cast<unsigned>(shape.B * shape.Hkv * row_tiles * column_tiles * parts.count);
  launch({"compressed_attention_forward", dim3(blocks), dim3(kThreads), sizeof(ForwardShared<acc_t>), stream},
         forward_kernel<scalar_t>, p, parts, column_tiles);
}

template <typename scalar_t>
void forward(const CompressedAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  const int64_t queries = p.shape.B * p.shape.H * p.shape.S;
  if (queries == 0) return;
  const ForwardParts<acc_type<scalar_t>> parts(p, compressed_attention_splits_cuda(p.shape, dtype).forward);
  bool done = false;
  if constexpr (sizeof(scalar_t) == 2) done = forward_on_tensor_cores<scalar_t>(p, parts, stream);
  if (!done) forward_of_parts<scalar_t>(p, parts, stream);
  if (parts.count == 1) return;
  const auto blocks = static_cast<unsigned>(ceil_div(queries * p.shape.D, kPoolThreads));
  launch({"compressed_attention_forward_join", dim3(blocks), dim3(kPoolThreads), 0, stream},
         join_parts_kernel<scalar_t>, p, parts);
}

}  // namespace compressed

void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) { compressed::pool<decltype(type)>(p, stream); });
}

void compressed_attention_forward_cuda(const CompressedAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) { compressed::forward<decltype(type)>(p, dtype, stream); });
}

}  // namespace memcheck
