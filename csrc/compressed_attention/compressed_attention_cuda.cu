#include <cmath>

#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// The forward in the accumulation type: of float32, float64, and 16-bit heads that are too wide for tensor cores.

namespace memcheck {
namespace compressed_cuda {

namespace {

template <typename Tiles, typename Parameters>
struct ForwardShared {
  typename Tiles::Tile q;
  typename Tiles::Tile kc;
  typename Tiles::Tile vc;
  typename Tiles::Kept weights;
  RowLimits<Tiles::kSize, Parameters> limits;
};

// The running maximum of the scores of a thread's rows, and the sums of exponentials relative to it. All threads of a
// row have the same values.
template <typename Tiles>
struct Softmax {
  using acc_t = acc_of<Tiles>;
  static constexpr int kRows = Tiles::kThreadRows;

  acc_t max[kRows];
  acc_t sum[kRows];         // of this chunk
  acc_t before[kRows];      // of the chunks before, relative to before_max
  acc_t before_max[kRows];  // the maximum at the end of the last chunk

  __device__ __forceinline__ Softmax() {
    unroll<kRows>([&](int i) {
      max[i] = before_max[i] = minus_infinity<acc_t>();
      sum[i] = before[i] = acc_t(0);
    });
  }

  // Replaces scores by exponentials. `rescale` gets the factors of sums that are relative to the maximum before.
  __device__ __forceinline__ void add(ThreadTile<Tiles>& scores, acc_t (&rescale)[kRows]) {
    unroll<kRows>([&](int i) {
      acc_t highest = max[i];
      unroll<Tiles::kThreadColumns>([&](int j) { highest = larger(highest, scores[i][j]); });
      highest = of_row<Tiles>(highest, [](acc_t x, acc_t y) { return larger(x, y); });
      const acc_t shift = softmax_shift(highest);
      rescale[i] = softmax_weight<CudaMaths<acc_t>>(max[i], shift);
      max[i] = highest;
      acc_t tile_sum = acc_t(0);
      unroll<Tiles::kThreadColumns>([&](int j) {
        scores[i][j] = softmax_weight<CudaMaths<acc_t>>(scores[i][j], shift);
        tile_sum += scores[i][j];
      });
      sum[i] = softmax_sum(sum[i], rescale[i], of_row<Tiles>(tile_sum, [](acc_t x, acc_t y) { return x + y; }));
    });
  }

  __device__ __forceinline__ void end_chunk(acc_t (&rescale)[kRows]) {
    unroll<kRows>([&](int i) {
      rescale[i] = softmax_weight<CudaMaths<acc_t>>(before_max[i], softmax_shift(max[i]));
      before[i] = softmax_sum(before[i], rescale[i], sum[i]);
      before_max[i] = max[i];
      sum[i] = acc_t(0);
    });
  }
};

// y = sum of weighted values / sum of weights, and 0 for a query that sees no block, or only scores of -inf.
template <typename scalar_t, typename Tiles>
__device__ __forceinline__ void finish_queries(const CompressedAttentionForward& p, const QueryWork& work,
                                               const ForwardParts<acc_of<Tiles>>& parts, const Softmax<Tiles>& softmax,
                                               ThreadTile<Tiles>& total) {
  using acc_t = acc_of<Tiles>;
  const CompressedAttentionShape& shape = p.shape;
  const auto y = queries_of<scalar_t>(shape, p.y, work.of);
  unroll<Tiles::kThreadRows>([&](int i) {
    const int64_t row = work.row + Tiles::row_of(i);
    if (row >= y.count) return;
    const bool sees = softmax.before[i] != acc_t(0);
    const acc_t divisor = sees ? softmax.before[i] : acc_t(1);
    acc_t lse = sees ? softmax.max[i] + log(divisor) : minus_infinity<acc_t>();
    const acc_t share = parts.count == 1 ? add_sink(p, query_head(work.of, row), lse) : acc_t(1);
    const bool writes_lse = is_first_of_row<Tiles>() && work.column == 0;
    unroll<Tiles::kThreadColumns>([&](int j) { total[i][j] /= divisor; });
    if (parts.count == 1) {
      store_row(total, i, share, [&](int column, const auto& x) { store_columns(y, row, work.column + column, x); });
      if (writes_lse && p.lse) number_of<acc_t>(p.lse, work.of, row) = lse;
      return;
    }
    const int64_t of_part = work.part * shape.B * shape.H * shape.S + query_index(shape, work.of, row);
    unroll<Tiles::kThreadColumns>([&](int j) {
      const int64_t column = work.column + Tiles::result_column(j);
      if (column < shape.D) parts.y[of_part * shape.D + column] = total[i][j];
    });
    if (writes_lse) parts.lse[of_part] = lse;
  });
}

template <typename scalar_t, typename Tiles, typename Parameters>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(Parameters p, ForwardParts<acc_of<Tiles>> parts, int64_t column_tiles) {
  using acc_t = acc_of<Tiles>;
  constexpr int kSize = Tiles::kSize;
  auto& memory = shared<ForwardShared<Tiles, Parameters>>();
  const auto work = query_work(p, blockIdx.x, kSize, kSize, column_tiles, kSize, parts.count);
  if (!work.exists()) return;
  const auto q = queries_of<scalar_t>(p.shape, p.q, work.of);
  if (threadIdx.x < kSize) memory.limits.fill(p, work);
  __syncthreads();
  const auto scale = static_cast<acc_t>(p.scale);
  Softmax<Tiles> softmax;
  ThreadTile<Tiles> chunk, y;
  acc_t rescale[Tiles::kThreadRows];
  for (int64_t tile = work.begin; tile < work.end; ++tile) {
    const ColumnTile at = column_tile(work, tile, kSize);
    const auto keys = columns_of<scalar_t>(p, work, at, false);
    const bool q_is_loaded = stays<Tiles>(p.shape.D) && tile > work.begin;
    auto scores = multiply_rows<Tiles>(q, work.row, q_is_loaded, keys, at.first, memory.q, memory.kc);
    // Waits for the products of the last tile. With one column or more, multiply_rows had a barrier.
    if (p.shape.D == 0) __syncthreads();
    load_tile<Tiles>(columns_of<scalar_t>(p, work, at, true), at.first, work.column, memory.vc);
    unroll<Tiles::kThreadRows>([&](int i) {
      const TileColumns seen = columns_seen<Tiles>(memory.limits, at, Tiles::row_of(i));
      unroll<Tiles::kThreadColumns>([&](int j) {
        scores[i][j] = seen.have(Tiles::column_of(j)) ? scaled(scores[i][j], scale) : minus_infinity<acc_t>();
      });
    });
    softmax.add(scores, rescale);
    Tiles::keep(scores, memory.weights);
    __syncthreads();
    for_each<Tiles>([&](int i, int j) { chunk[i][j] *= rescale[i]; });
    add_product_of_tile(scores, memory.weights, memory.vc, chunk);
    if ((tile - work.begin + 1) % kChunkTiles != 0 && tile + 1 < work.end) continue;
    softmax.end_chunk(rescale);
    for_each<Tiles>([&](int i, int j) { y[i][j] *= rescale[i]; });
    add_chunk(chunk, y);
  }
  finish_queries<scalar_t>(p, work, parts, softmax, y);
}

constexpr int kJoinThreads = 256;

// y = sum over parts of y_part exp(lse_part - lse), and the sink; a thread for each element of y.
template <typename scalar_t>
__global__ void __launch_bounds__(kJoinThreads)
    join_parts_kernel(CompressedAttentionForward p, ForwardParts<acc_type<scalar_t>> parts) {
  using acc_t = acc_type<scalar_t>;
  const CompressedAttentionShape& shape = p.shape;
  const int64_t queries = shape.B * shape.H * shape.S;
  const int64_t index = int64_t{blockIdx.x} * kJoinThreads + threadIdx.x;
  if (index >= queries * shape.D) return;
  const int64_t query = index / shape.D;
  acc_t highest = minus_infinity<acc_t>();
  for (int64_t part = 0; part < parts.count; ++part) highest = larger(highest, parts.lse[part * queries + query]);
  const acc_t shift = softmax_shift(highest);
  acc_t weights = acc_t(0);
  acc_t y = acc_t(0);
  for (int64_t part = 0; part < parts.count; ++part) {
    const acc_t weight = softmax_weight<CudaMaths<acc_t>>(parts.lse[part * queries + query], shift);
    weights += weight;
    y += weight * parts.y[part * queries * shape.D + index];
  }
  const int64_t s = query % shape.S;
  const bool sees = weights != acc_t(0);
  const int64_t head = query / shape.S % shape.H;
  const int64_t column = index % shape.D;
  acc_t lse = sees ? shift + log(weights) : minus_infinity<acc_t>();
  const acc_t share = add_sink(p, head, lse);
  *p.y.at<scalar_t>(query / shape.S / shape.H, head, s, column) =
      from_acc<scalar_t>(sees ? y / weights * share : acc_t(0));
  if (column == 0 && p.lse) *p.lse.at<acc_t>(query / shape.S / shape.H, head, s) = lse;
}

template <typename scalar_t, typename Tiles, typename Parameters>
void forward_by_tiles(const Parameters& p, const ForwardParts<acc_of<Tiles>>& parts, cudaStream_t stream) {
  const CompressedAttentionShape& shape = p.shape;
  const int64_t column_tiles = larger<int64_t>(1, ceil_div(shape.D, Tiles::kSize));
  const int64_t blocks = tile_count(shape, query_rows(shape), Tiles::kSize) * column_tiles * parts.count;
  launch({Tiles::kOnTensorCores ? "compressed_attention_forward_parts" : "compressed_attention_forward", blocks,
          dim3(kThreads), sizeof(ForwardShared<Tiles, Parameters>), stream},
         forward_kernel<scalar_t, Tiles, Parameters>, p, parts, column_tiles);
}

template <typename scalar_t, typename Parameters>
void forward_of_parts(const Parameters& p, const ForwardParts<acc_type<scalar_t>>& parts, cudaStream_t stream) {
  if constexpr (sizeof(scalar_t) == 2)
    if (forward_on_tensor_cores<scalar_t>(p, parts, stream)) return;
  with_tiles<scalar_t>([&](auto tiles) { forward_by_tiles<scalar_t, decltype(tiles)>(p, parts, stream); });
}

template <typename scalar_t>
void forward(const CompressedAttentionWindowForward& p, Dtype dtype, cudaStream_t stream) {
  const int64_t queries = sequence_count(p.shape) == 0 ? 0 : p.shape.B * p.shape.H * p.shape.S;
  if (queries == 0) return;
  const ForwardParts<acc_type<scalar_t>> parts(p, compressed_attention_query_parts_cuda(p.shape, p.window, dtype));
  if (p.window.size > 0)
    forward_of_parts<scalar_t>(p, parts, stream);
  else
    forward_of_parts<scalar_t, CompressedAttentionForward>(p, parts, stream);
  if (parts.count == 1) return;
  launch(
      {"compressed_attention_forward_join", ceil_div(queries * p.shape.D, kJoinThreads), dim3(kJoinThreads), 0, stream},
      join_parts_kernel<scalar_t>, p, parts);
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_forward_cuda(const CompressedAttentionWindowForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) { compressed_cuda::forward<decltype(type)>(p, dtype, stream); });
}

const CompressedAttentionKernels compressed_attention_cuda{compressed_attention_plan_cuda,
                                                           compressed_attention_pool_cuda,
                                                           compressed_attention_forward_cuda,
                                                           compressed_attention_backward_cuda,
                                                           compressed_attention_extend_cuda,
                                                           compressed_attention_extend_backward_cuda,
                                                           build_sequences_cuda};

}  // namespace memcheck
