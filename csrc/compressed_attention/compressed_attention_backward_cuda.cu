#include <cmath>

#include "common/compensated_sum.h"
#include "compressed_attention/compressed_attention_tiles_cuda.cuh"

// The backward in the accumulation type. With p = softmax(scale q . kc), dp = grad_y . vc and delta = grad_y . y =
// sum_j p_j dp_j the gradient of a score is ds = p (dp - delta), and so
//     grad_q = scale sum_j ds_j kc_j     grad_kc = scale sum_i ds_i q_i     grad_vc = sum_i p_i grad_y_i
// lse has the gradient p_j in score j, so its own gradient is subtracted from delta. A block of threads for delta and
// grad_q has a tile of queries and goes through the keys. One for grad_kc or grad_vc has a tile of keys and goes
// through the queries.

namespace memcheck {
namespace compressed_cuda {
namespace {

// ---- tiles of queries

template <typename Tiles, typename Parameters>
struct QueryGradientShared {
  typename Tiles::Tile q;
  typename Tiles::Tile grad_y;
  typename Tiles::Tile kc;
  typename Tiles::Tile vc;  // then the gradients of scores
  RowLimits<Tiles::kSize, Parameters> limits;
  acc_of<Tiles> shift[Tiles::kSize];  // of the scores of each row, from its lse
  acc_of<Tiles> delta[Tiles::kSize];
};

template <typename scalar_t>
struct Matrices {
  QueryMatrix<scalar_t> q, grad_y;
  KeyMatrix<scalar_t> kc, vc;

  __device__ __forceinline__ Matrices(const CompressedAttentionBackward& p, const KeyHead& of)
      : q(queries_of<scalar_t>(p.shape, p.q, of)),
        grad_y(queries_of<scalar_t>(p.shape, p.grad_y, of)),
        kc(blocks_of<scalar_t>(p.shape, p.kc, of)),
        vc(blocks_of<scalar_t>(p.shape, p.vc, of)) {}
};

// Forms the weights of a tile of columns, and their gradients.
template <typename Tiles, typename scalar_t, typename Parameters, typename Work>
__device__ __forceinline__ void weigh_keys(const Parameters& p, const Matrices<scalar_t>& of, const Work& work,
                                           int64_t tile, QueryGradientShared<Tiles, Parameters>& memory,
                                           ThreadTile<Tiles>& weights, ThreadTile<Tiles>& grad_weights) {
  using acc_t = acc_of<Tiles>;
  const auto scale = static_cast<acc_t>(p.scale);
  const ColumnTile at = column_tile(work, tile, Tiles::kSize);
  const auto keys = columns_of<scalar_t>(p, work, at, false), values = columns_of<scalar_t>(p, work, at, true);
  const bool is_loaded = stays<Tiles>(p.shape.D) && tile > work.begin;
  weights = multiply_rows<Tiles>(of.q, work.row, is_loaded, keys, at.first, memory.q, memory.kc);
  grad_weights = multiply_rows<Tiles>(of.grad_y, work.row, is_loaded, values, at.first, memory.grad_y, memory.vc);
  unroll<Tiles::kThreadRows>([&](int i) {
    const acc_t shift = memory.shift[Tiles::row_of(i)];
    const TileColumns seen = columns_seen<Tiles>(memory.limits, at, Tiles::row_of(i));
    unroll<Tiles::kThreadColumns>([&](int j) {
      const acc_t score = scaled(weights[i][j], scale);
      weights[i][j] = seen.have(Tiles::column_of(j)) ? softmax_weight<CudaMaths<acc_t>>(score, shift) : acc_t(0);
    });
  });
}

// delta = grad_y . y: the diagonal of a product, whose numbers are summed like the gradients of weights. If a query
// sees one block, both are the same number, and the gradient of the score is exactly 0.
template <typename Tiles, typename scalar_t, typename Parameters>
__device__ __forceinline__ void delta_from_y(const Parameters& p, const Matrices<scalar_t>& of, const QueryWork& work,
                                             QueryGradientShared<Tiles, Parameters>& memory) {
  const auto y = queries_of<scalar_t>(p.shape, p.y, work.of);
  const auto products = multiply_rows<Tiles>(of.grad_y, work.row, false, y, work.row, memory.grad_y, memory.vc);
  for_each<Tiles>([&](int i, int j) {
    if (Tiles::row_of(i) == Tiles::column_of(j)) memory.delta[Tiles::row_of(i)] = products[i][j];
  });
  __syncthreads();
}

// delta = sum_j p_j dp_j, because y was rounded to 16 bits, and its error would be in the gradient of every score.
template <typename Tiles, typename scalar_t, typename Parameters, typename Work>
__device__ __forceinline__ void delta_from_weights(const Parameters& p, const Matrices<scalar_t>& of, const Work& work,
                                                   QueryGradientShared<Tiles, Parameters>& memory) {
  using acc_t = acc_of<Tiles>;
  acc_t delta[Tiles::kThreadRows] = {};
  for (int64_t tile = work.begin; tile < work.end; ++tile) {
    ThreadTile<Tiles> weights, grad_weights;
    weigh_keys(p, of, work, tile, memory, weights, grad_weights);
    unroll<Tiles::kThreadRows>([&](int i) {
      acc_t sum = acc_t(0);
      unroll<Tiles::kThreadColumns>([&](int j) { sum += weighted(weights[i][j], grad_weights[i][j]); });
      delta[i] += sum;
    });
  }
  unroll<Tiles::kThreadRows>([&](int i) {
    delta[i] = of_row<Tiles>(delta[i], [](acc_t x, acc_t y) { return x + y; });
    if (is_first_of_row<Tiles>()) memory.delta[Tiles::row_of(i)] = delta[i];
  });
  __syncthreads();
}

// Forms a tile of columns of grad_q of the same queries.
template <typename Tiles, typename scalar_t, typename Parameters, typename Work>
__device__ __forceinline__ void query_gradient(const Parameters& p, const Matrices<scalar_t>& of, const Work& work,
                                               QueryGradientShared<Tiles, Parameters>& memory) {
  const bool all_columns = stays<Tiles>(p.shape.D);
  ThreadTile<Tiles> chunk, grad_q;
  for (int64_t tile = work.begin; tile < work.end; ++tile) {
    ThreadTile<Tiles> weights, grad_weights;
    weigh_keys(p, of, work, tile, memory, weights, grad_weights);
    unroll<Tiles::kThreadRows>([&](int i) {
      const auto delta = memory.delta[Tiles::row_of(i)];
      unroll<Tiles::kThreadColumns>(
          [&](int j) { weights[i][j] = softmax_gradient(weights[i][j], grad_weights[i][j], delta); });
    });
    __syncthreads();
    Tiles::keep(weights, memory.vc);
    if (!all_columns) {
      const ColumnTile at = column_tile(work, tile, Tiles::kSize);
      load_tile<Tiles>(columns_of<scalar_t>(p, work, at, false), at.first, work.column, memory.kc);
    }
    __syncthreads();
    add_product_of_tile(weights, memory.vc, memory.kc, chunk);
    if ((tile - work.begin + 1) % kChunkTiles == 0 || tile + 1 == work.end) add_chunk(chunk, grad_q);
  }
  const auto to = queries_of<scalar_t>(p.shape, p.grad_q, work.of);
  unroll<Tiles::kThreadRows>([&](int i) {
    const int64_t row = work.row + Tiles::row_of(i);
    if (row >= to.count) return;
    store_row(grad_q, i, static_cast<acc_of<Tiles>>(p.scale),
              [&](int column, const auto& x) { store_columns(to, row, work.column + column, x); });
  });
}

template <typename scalar_t, typename Tiles, typename Parameters>
__global__ void __launch_bounds__(kThreads, 2) query_gradient_kernel(Parameters p, int64_t column_tiles) {
  using acc_t = acc_of<Tiles>;
  constexpr int kSize = Tiles::kSize;
  auto& memory = shared<QueryGradientShared<Tiles, Parameters>>();
  const auto work = query_work(p, blockIdx.x, kSize, kSize, column_tiles, kSize, 1);
  if (!work.exists()) return;
  const Matrices<scalar_t> of(p, work.of);
  if (threadIdx.x < kSize) {
    const int64_t row = work.row + threadIdx.x;
    const bool exists = row < work.of.rows();
    memory.limits.fill(p, work);
    memory.shift[threadIdx.x] = exists ? softmax_shift(number_of<acc_t>(p.lse, work.of, row)) : acc_t(0);
  }
  __syncthreads();
  if (p.y) {
    delta_from_y(p, of, work, memory);
  } else {
    delta_from_weights(p, of, work, memory);
  }
  const int64_t row = work.row + threadIdx.x;
  const bool exists = threadIdx.x < kSize && row < work.of.rows();
  if (exists && p.grad_lse) memory.delta[threadIdx.x] -= number_of<acc_t>(p.grad_lse, work.of, row);
  if (exists && p.delta && work.column == 0) number_of<acc_t>(p.delta, work.of, row) = memory.delta[threadIdx.x];
  __syncthreads();
  if (p.grad_q) query_gradient(p, of, work, memory);
}

template <typename scalar_t, typename Parameters>
void query_gradients(const Parameters& p, cudaStream_t stream) {
  const CompressedAttentionShape& shape = p.shape;
  if constexpr (sizeof(scalar_t) == 2)
    if (query_gradients_on_tensor_cores<scalar_t>(p, stream)) return;
  with_tiles<scalar_t>([&](auto tiles) {
    using Tiles = decltype(tiles);
    const int64_t column_tiles = p.grad_q ? larger<int64_t>(1, ceil_div(shape.D, Tiles::kSize)) : 1;
    const int64_t blocks = tile_count(shape, query_rows(shape), Tiles::kSize) * column_tiles;
    launch({Tiles::kOnTensorCores ? "compressed_attention_backward_queries_parts"
                                  : "compressed_attention_backward_queries",
            blocks, dim3(kThreads), sizeof(QueryGradientShared<Tiles, Parameters>), stream},
           query_gradient_kernel<scalar_t, Tiles, Parameters>, p, column_tiles);
  });
}

// ---- tiles of keys

template <typename Tiles, typename Parameters>
struct KeyGradientShared {
  typename Tiles::Tile kc;
  typename Tiles::Tile vc;
  typename Tiles::Tile q;       // then the weights, for grad_v
  typename Tiles::Tile grad_y;  // then the gradients of scores, for grad_k
  KeyLimits<Tiles::kSize, Parameters> limits;
  // Of the queries.
  acc_of<Tiles> shift[Tiles::kSize];
  acc_of<Tiles> delta[Tiles::kSize];
};

// Stores the gradient of block j, divided by its length, at each of its positions.
template <typename scalar_t, int kCount, typename acc_t>
__device__ __forceinline__ void store_at_positions(const CompressedAttentionBackward& p, const Strided<4>& gradient,
                                                   const KeyHead& of, int64_t j, int64_t column, acc_t (&x)[kCount]) {
  const auto to = gradient_of<scalar_t>(p, gradient, of);
  const BlockPositions positions = positions_of(p, of, j);
  unroll<kCount>([&](int i) { x[i] /= static_cast<acc_t>(positions.length); });
  for (int64_t t = 0; t < positions.length; ++t) store_columns(to, positions.begin + t, column, x);
}

// Stores the gradient of position j of a window. Unless pooled, its share of its block's gradient is there already.
template <typename scalar_t, int kCount, typename acc_t>
__device__ __forceinline__ void store_position(const CompressedAttentionBackward& p, const Strided<4>& gradient,
                                               const KeyHead& of, int64_t j, int64_t column, acc_t (&x)[kCount]) {
  const auto to = blocks_of<scalar_t>(p.shape, gradient, of);
  unroll<kCount>([&](int i) {
    if (!p.pooled && column + i < p.shape.D) x[i] += to_acc(to.at(j)[(column + i) * to.column_stride]);
  });
  store_columns(to, j, column, x);
}

template <typename scalar_t, typename Tiles, typename Parameters>
__device__ __forceinline__ void finish_keys(const Parameters& p, const KeyWork& work,
                                            const KeyParts<acc_of<Tiles>>& parts, bool of_values,
                                            const ThreadTile<Tiles>& total) {
  using acc_t = acc_of<Tiles>;
  const Strided<4>& gradient = of_values ? p.grad_v : p.grad_k;
  unroll<Tiles::kThreadRows>([&](int i) {
    const int64_t j = work.key + Tiles::row_of(i);
    if (j >= work.of.blocks) return;
    store_row(total, i, of_values ? acc_t(1) : static_cast<acc_t>(p.scale), [&](int of_tile, auto& x) {
      const int64_t column = work.column + of_tile;
      if constexpr (kHasWindow<Parameters>)
        store_position<scalar_t>(p, gradient, work.of, j, column, x);
      else if (parts.count == 1)
        store_at_positions<scalar_t>(p, gradient, work.of, j, column, x);
      else
        store_columns(parts.matrix(p.shape, work.of, of_values, work.part), j, column, x);
    });
  });
}

// The gradient of keys or of values. If both are wanted, the thread blocks alternate. p: those of of_positions, or
// without a window.
template <typename scalar_t, typename Tiles, typename Parameters>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradient_kernel(Parameters p, KeyParts<acc_of<Tiles>> parts, int64_t column_tiles) {
  using acc_t = acc_of<Tiles>;
  constexpr int kSize = Tiles::kSize;
  auto& memory = shared<KeyGradientShared<Tiles, Parameters>>();
  const bool both = p.grad_k && p.grad_v;
  const bool of_values = both ? blockIdx.x % 2 == 1 : static_cast<bool>(p.grad_v);
  const int64_t index = both ? blockIdx.x / 2 : blockIdx.x;
  const KeyWork work = key_work(p, index, kSize, kSize, column_tiles, kSize, parts.count);
  if (!work.exists()) return;
  const Matrices<scalar_t> of(p, work.of);
  if (threadIdx.x < kSize) memory.limits.fill(p, work.of, work.key);
  __syncthreads();
  const bool all_columns = stays<Tiles>(p.shape.D);
  ThreadTile<Tiles> chunk, gradient;
  for (int64_t tile = work.begin; tile < work.end; ++tile) {
    const int64_t row = work.first_row + tile * kSize;
    const bool is_loaded = all_columns && tile > work.begin;
    const int queries = of_tile_before<Tiles>(work.of.rows(), row);
    if (threadIdx.x < kSize) {
      const bool exists = static_cast<int>(threadIdx.x) < queries;
      const int64_t mine = row + threadIdx.x;
      memory.shift[threadIdx.x] = exists ? softmax_shift(number_of<acc_t>(p.lse, work.of, mine)) : acc_t(0);
      memory.delta[threadIdx.x] = exists && !of_values ? number_of<acc_t>(p.delta, work.of, mine) : acc_t(0);
    }
    auto weights = multiply_rows<Tiles>(of.kc, work.key, is_loaded, of.q, row, memory.kc, memory.q);
    unroll<Tiles::kThreadRows>([&](int i) {
      const int unseen = of_tile_before<Tiles>(memory.limits.first_row[Tiles::row_of(i)], row);
      int end = queries;
      if constexpr (kHasWindow<Parameters>) end = of_tile_before<Tiles>(memory.limits.end[Tiles::row_of(i)], row);
      unroll<Tiles::kThreadColumns>([&](int j) {
        const acc_t score = scaled(weights[i][j], static_cast<acc_t>(p.scale));
        const bool seen = Tiles::column_of(j) >= unseen && Tiles::column_of(j) < end;
        weights[i][j] = seen ? softmax_weight<CudaMaths<acc_t>>(score, memory.shift[Tiles::column_of(j)]) : acc_t(0);
      });
    });
    if (!of_values) {
      const auto grad_weights =
          multiply_rows<Tiles>(of.vc, work.key, is_loaded, of.grad_y, row, memory.vc, memory.grad_y);
      for_each<Tiles>([&](int i, int j) {
        weights[i][j] = softmax_gradient(weights[i][j], grad_weights[i][j], memory.delta[Tiles::column_of(j)]);
      });
    }
    auto& kept = of_values ? memory.q : memory.grad_y;
    auto& factor = of_values ? memory.grad_y : memory.q;
    __syncthreads();
    Tiles::keep(weights, kept);
    if (of_values) {
      load_tile<Tiles>(of.grad_y, row, work.column, factor);
    } else if (!all_columns) {
      load_tile<Tiles>(of.q, row, work.column, factor);
    }
    __syncthreads();
    add_product_of_tile(weights, kept, factor, chunk);
    if ((tile - work.begin + 1) % kChunkTiles == 0 || tile + 1 == work.end) add_chunk(chunk, gradient);
  }
  finish_keys<scalar_t>(p, work, parts, of_values, gradient);
}

constexpr int kJoinThreads = 256;

// Adds the parts of a gradient in their order and stores it at the positions of the block. A thread has a few columns
// of a block.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__global__ void __launch_bounds__(kJoinThreads) join_keys_kernel(CompressedAttentionBackward p, KeyParts<acc_t> parts) {
  constexpr int kCount = kPackSize<acc_t>;
  const CompressedAttentionShape& shape = p.shape;
  const int64_t packs = ceil_div(shape.D, kCount);
  const int64_t blocks = shape.B * shape.Hkv * shape.C;
  const bool both = p.grad_k && p.grad_v;
  int64_t index = int64_t{blockIdx.x} * kJoinThreads + threadIdx.x;
  const int64_t column = index % packs * kCount;
  index /= packs;
  if (index >= blocks * (both ? 2 : 1)) return;
  const bool of_values = both ? index >= blocks : static_cast<bool>(p.grad_v);
  const int64_t head = index % blocks / shape.C;
  const KeyHead of = key_head(shape, head / shape.Hkv, head % shape.Hkv);
  const int64_t j = index % shape.C;
  acc_t sum[kCount] = {};
  for (int64_t part = 0; part < parts.count; ++part) {
    const KeyMatrix<acc_t> from = parts.matrix(shape, of, of_values, part);
    const Pack<acc_t> pack = from.read(from.at(j), true, column);
    unroll<kCount>([&](int i) { sum[i] += pack.values[i]; });
  }
  store_at_positions<scalar_t>(p, of_values ? p.grad_v : p.grad_k, of, j, column, sum);
}

template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
void join_keys(const CompressedAttentionBackward& p, const KeyParts<acc_t>& parts, cudaStream_t stream) {
  const int64_t gradients = p.grad_k && p.grad_v ? 2 : 1;
  const int64_t packs = ceil_div(p.shape.D, int64_t{kPackSize<acc_t>});
  const int64_t threads = gradients * p.shape.B * p.shape.Hkv * p.shape.C * packs;
  launch({"compressed_attention_backward_join", ceil_div(threads, kJoinThreads), dim3(kJoinThreads), 0, stream},
         join_keys_kernel<scalar_t>, p, parts);
}

template <typename scalar_t, typename Parameters>
void key_gradients_of_parts(const Parameters& p, const KeyParts<acc_type<scalar_t>>& parts, cudaStream_t stream) {
  if constexpr (sizeof(scalar_t) == 2)
    if (key_gradients_on_tensor_cores<scalar_t>(p, parts, stream)) return;
  with_tiles<scalar_t>([&](auto tile_type) {
    using Tiles = decltype(tile_type);
    const int64_t column_tiles = ceil_div(p.shape.D, Tiles::kSize);
    const int64_t tiles = key_tile_count(p, Tiles::kSize) * column_tiles * parts.count;
    const int64_t blocks = p.grad_k && p.grad_v ? 2 * tiles : tiles;
    launch({Tiles::kOnTensorCores ? "compressed_attention_backward_keys_parts" : "compressed_attention_backward_keys",
            blocks, dim3(kThreads), sizeof(KeyGradientShared<Tiles, Parameters>), stream},
           key_gradient_kernel<scalar_t, Tiles, Parameters>, p, parts, column_tiles);
  });
}

template <typename scalar_t>
void key_gradients(const CompressedAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const CompressedAttentionShape& shape = p.shape;
  if (sequence_count(shape) * shape.Hkv * shape.C * shape.D == 0) return;
  const KeyParts<acc_t> parts{static_cast<acc_t*>(p.scratch), compressed_attention_key_parts_cuda(shape, dtype)};
  key_gradients_of_parts<scalar_t>(p, parts, stream);
  if (parts.count > 1) join_keys<scalar_t>(p, parts, stream);
}

// Of the positions of a window, after those of blocks.
template <typename scalar_t>
void position_gradients(const CompressedAttentionWindowBackward& window, cudaStream_t stream) {
  const CompressedAttentionWindowBackward p = of_positions(window);
  if ((!p.grad_k && !p.grad_v) || sequence_count(p.shape) * p.shape.Hkv * p.shape.C * p.shape.D == 0) return;
  key_gradients_of_parts<scalar_t>(p, KeyParts<acc_type<scalar_t>>{nullptr, 1}, stream);
}

// ---- sinks

constexpr int kSinkThreads = 512;

// A sink is a score with a value of 0, so that its gradient is the sum over queries of -exp(sink - lse) delta. A block
// of threads for each head.
template <typename acc_t>
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(CompressedAttentionBackward p) {
  acc_t* sums = shared<acc_t[kSinkThreads]>();
  const CompressedAttentionShape& shape = p.shape;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t head = blockIdx.x;
  const acc_t sink = static_cast<const acc_t*>(p.sink)[head];
  acc_t sum = acc_t(0), rest = acc_t(0);
  for (int64_t query = thread; query < shape.B * shape.S; query += kSinkThreads) {
    const int64_t b = query / shape.S, s = query % shape.S;
    // A packed row has no padding.
    const Sequence x = shape.sequences.packed ? Sequence{0, 0, shape.S, 0, 0} : sequence_of(shape, b);
    if (s < x.first_query || s >= x.first_query + x.queries) continue;
    const acc_t weight = sink_gradient_weight<CudaMaths<acc_t>>(sink, *p.lse.at<acc_t>(b, head, s));
    add_to_sum(-weighted(weight, *p.delta.at<acc_t>(b, head, s)), sum, rest);
  }
  sums[thread] = sum + rest;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) static_cast<acc_t*>(p.grad_sink)[head] = sums[0];
}

template <typename acc_t>
void sink_gradients(const CompressedAttentionBackward& p, cudaStream_t stream) {
  launch({"compressed_attention_backward_sinks", p.shape.H, dim3(kSinkThreads), kSinkThreads * sizeof(acc_t), stream},
         sink_gradient_kernel<acc_t>, p);
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_backward_cuda(const CompressedAttentionWindowBackward& p, Dtype dtype, cudaStream_t stream) {
  const bool has_queries = sequence_count(p.shape) * p.shape.H * p.shape.S > 0;
  with_device_type(dtype, [&](auto type) {
    using scalar_t = decltype(type);
    if (has_queries && (p.grad_q || p.delta)) {
      if (p.window.size > 0)
        compressed_cuda::query_gradients<scalar_t>(p, stream);
      else
        compressed_cuda::query_gradients<scalar_t, CompressedAttentionBackward>(p, stream);
    }
    if (p.grad_k || p.grad_v) compressed_cuda::key_gradients<scalar_t>(p, dtype, stream);
    if (p.window.size > 0) compressed_cuda::position_gradients<scalar_t>(p, stream);
    if (p.grad_sink != nullptr) compressed_cuda::sink_gradients<acc_type<scalar_t>>(p, stream);
  });
}

}  // namespace memcheck
