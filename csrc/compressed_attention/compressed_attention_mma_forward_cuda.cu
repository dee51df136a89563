#include <cmath>

#include "compressed_attention/compressed_attention_mma_cuda.cuh"

// The forward of 16-bit types on tensor cores. A block of threads has a tile of queries. Each warp has 16 or 32 of its
// rows, with y in registers. Keys and values are loaded in tiles; if there is room for two, the next tile is loaded
// while this one is computed. Scores are in base 2: weights are 2^(s log2(e) - max), rounded to 16 bits for the product
// with the values.

namespace memcheck {
namespace compressed_cuda {

constexpr int kKeys = 64;

// kStages: tiles of keys and values, 1 or 2.
template <typename scalar_t, int kD, typename Parameters, int kStages = 2>
struct MmaForwardShared {
  static constexpr int kTall = kD > 128 ? 1 : 2;  // tiles of 16 queries in a warp, by the registers they need
  static constexpr int kQueries = 16 * kTall * kWarps;

  HalfTile<scalar_t, kQueries, kD> q;  // then y
  HalfTile<scalar_t, kKeys, kD> kc[kStages];
  HalfTile<scalar_t, kKeys, kD> vc[kStages];
  SeenByRows<Parameters, kQueries> rows;
  // In shared memory, because sums take the registers.
  QueryWorkOf<Parameters> work;
  KeyMatrices<scalar_t, kHasWindow<Parameters>> matrices;
};

// The maxima of the scores of a thread's rows, and its part of the sums of weights relative to them.
template <int kTall>
struct MmaSoftmax {
  float max[kTall][2];
  float sum[kTall][2];

  __device__ __forceinline__ MmaSoftmax() {
    unroll<kTall, 2>([&](int m, int half) {
      max[m][half] = minus_infinity<float>();
      sum[m][half] = 0;
    });
  }

  // Replaces products by weights; the scores are `scale`, above 0, times the products. Makes y and the sums relative to
  // the new maximum.
  template <int kWide, int kColumns>
  __device__ __forceinline__ void add(float scale, WarpTile<kTall, kWide>& scores, WarpTile<kTall, kColumns>& y) {
    float rescale[kTall][2];
    bool rises = false;
    unroll<kTall, 2>([&](int m, int half) {
      float highest = scores[m][0][2 * half];
      unroll<kWide, 2>([&](int n, int i) { highest = fmaxf(highest, scores[m][n][2 * half + i]); });
      highest = fmaxf(max[m][half], scale * largest_of_row(highest));
      const float shift = softmax_shift(highest);
      rescale[m][half] = exp2_approximate(max[m][half] - shift);
      rises = rises || !(rescale[m][half] == 1);
      max[m][half] = highest;
      float total = 0;
      unroll<kWide, 2>([&](int n, int i) {
        float& score = scores[m][n][2 * half + i];
        score = exp2_approximate(score * scale - shift);
        total += score;
      });
      sum[m][half] = softmax_sum(sum[m][half], rescale[m][half], total);
    });
    // After the first tiles a maximum seldom rises.
    if (!__any_sync(~0u, rises)) return;
    unroll<kTall, kColumns, 4>([&](int m, int n, int i) { y[m][n][i] *= rescale[m][i / 2]; });
  }
};

// Sets scores to -inf where a query does not see the key. first: the warp's first row.
template <int kTall, int kWide, typename Rows>
__device__ __forceinline__ void hide_keys(const Rows& rows, const ColumnTile& tile, int first,
                                          WarpTile<kTall, kWide>& scores) {
  if (rows.template all_see<8 * kWide>(tile)) return;
  unroll<kTall, 2>([&](int m, int half) {
    const auto sees = rows.template seen_by<8 * kWide>(first + fragment_row(m, half), tile);
    unroll<kWide, 2>([&](int n, int i) {
      if (!sees(fragment_column(n) + i)) scores[m][n][2 * half + i] = minus_infinity<float>();
    });
  });
}

// y = sum of weighted values / sum of weights, and 0 for a query that sees no block, or only scores of -inf.
template <typename scalar_t, int kTall, int kColumns, typename Tile>
__device__ __forceinline__ void finish_queries(const CompressedAttentionForward& p, const QueryWork& work,
                                               const ForwardParts<float>& parts, const MmaSoftmax<kTall>& softmax,
                                               Tile& tile, WarpTile<kTall, kColumns>& y) {
  const CompressedAttentionShape& shape = p.shape;
  const int64_t rows = work.of.rows();
  const int first = warp() * 16 * kTall;
  unroll<kTall, 2>([&](int m, int half) {
    const float sum = sum_of_row(softmax.sum[m][half]);
    const int row_of_tile = first + fragment_row(m, half);
    const int64_t row = work.row + row_of_tile;
    const bool sees = sum != 0;
    float lse = sees ? (softmax_shift(softmax.max[m][half]) + log2f(sum)) * kLn2 : minus_infinity<float>();
    const float share = parts.count == 1 ? add_sink(p, query_head(work.of, row), lse) : 1;
    const float inverse = sees ? share / sum : 0;
    unroll<kColumns, 2>([&](int n, int i) { y[m][n][2 * half + i] *= inverse; });
    if (row >= rows) return;
    const bool writes_lse = lane() % 4 == 0;
    if (parts.count == 1) {
      if (writes_lse && p.lse) number_of<float>(p.lse, work.of, row) = lse;
      return;
    }
    const int64_t of_part = work.part * shape.B * shape.H * shape.S + query_index(shape, work.of, row);
    if (writes_lse) parts.lse[of_part] = lse;
    unroll<kColumns, 2>([&](int n, int i) {
      if (fragment_column(n) + i < shape.D) parts.y[of_part * shape.D + fragment_column(n) + i] = y[m][n][2 * half + i];
    });
  });
  if (parts.count > 1) return;
  const auto to = queries_of<scalar_t>(shape, p.y, work.of);
  keep_rows<scalar_t, kTall, kColumns>(y, first, tile);
  for (int index = lane(); index < 16 * kTall * kColumns; index += 32) {
    const int row = first + index / kColumns;
    if (work.row + row < rows) store_row_pack(tile, row, index % kColumns, to, work.row + row);
  }
}

template <typename scalar_t, int kD, typename Parameters, int kStages>
__global__ void __launch_bounds__(kThreads, 2) mma_forward_kernel(Parameters p, ForwardParts<float> parts) {
  using Shared = MmaForwardShared<scalar_t, kD, Parameters, kStages>;
  constexpr int kTall = Shared::kTall;
  auto& memory = shared<Shared>();
  const auto work = query_work(p, blockIdx.x, Shared::kQueries, kKeys, 1, kD, parts.count);
  if (!work.exists()) return;
  const auto q = queries_of<scalar_t>(p.shape, p.q, work.of);
  if (threadIdx.x == 0) {
    memory.work = work;
    memory.matrices.find(p, work);
  }
  memory.rows.find(p, work);
  __syncthreads();
  const float scale = static_cast<float>(p.scale) * kLog2e;
  const bool rises = scale > 0;  // then the largest product has the largest score
  const int first = warp() * 16 * kTall;
  const int tiles = static_cast<int>(work.end - work.begin);
  request_rows(q, work.row, memory.q);
  const auto request_keys = [&](const ColumnTile& at, int stage) {
    memory.matrices.request(at, memory.kc[stage], memory.vc[stage]);
  };
  MmaSoftmax<kTall> softmax;
  float y[kTall][kD / 8][4];
  set_zero<kTall, kD / 8>(y);
  if (tiles > 0) request_keys(column_tile(memory.work, memory.work.begin, kKeys), 0);
  cp_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int now = tile % kStages;
    const ColumnTile at = column_tile(memory.work, memory.work.begin + tile, kKeys);
    cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1 && tile + 1 < tiles) request_keys(next_tile(memory.work, at, kKeys), kStages - 1 - now);
    float scores[kTall][kKeys / 8][4];
    const RowsInTile<kTall, decltype(memory.q)> queries(memory.q, first);
    multiply_rows<scalar_t, kTall, kKeys / 8>(queries, memory.kc[now], 0, scores);
    if (!rises) unroll<kTall, kKeys / 8, 4>([&](int m, int n, int i) { scores[m][n][i] *= scale; });
    hide_keys<kTall, kKeys / 8>(memory.rows, at, first, scores);
    softmax.add(rises ? scale : 1, scores, y);
    uint32_t weights[kTall][kKeys / 16][4];
    round_factor<scalar_t, kTall, kKeys / 8>(scores, weights);
    add_product<scalar_t, kTall, kKeys / 8, kD / 8>(weights, memory.vc[now], 0, y);
    if (kStages == 1 && tile + 1 < tiles) {
      __syncthreads();
      request_keys(next_tile(memory.work, at, kKeys), 0);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  finish_queries<scalar_t>(p, memory.work, parts, softmax, memory.q, y);
}

template <typename scalar_t, int kD, int kStages = 2, typename Parameters>
void forward_of_width(const Parameters& p, const ForwardParts<float>& parts, cudaStream_t stream) {
  using Shared = MmaForwardShared<scalar_t, kD, Parameters, kStages>;
  const int64_t blocks = tile_count(p.shape, query_rows(p.shape), Shared::kQueries) * parts.count;
  launch({"compressed_attention_forward_mma", blocks, dim3(kThreads), sizeof(Shared), stream},
         mma_forward_kernel<scalar_t, kD, Parameters, kStages>, p, parts);
}

template <typename scalar_t, typename Parameters>
bool forward_on_tensor_cores(const Parameters& p, const ForwardParts<float>& parts, cudaStream_t stream) {
  return with_tile_columns(p.shape.D, [&](auto columns) {
    if constexpr (columns == 256)
      if (!fits_in_a_block(sizeof(MmaForwardShared<scalar_t, 256, Parameters>)))
        return forward_of_width<scalar_t, 256, 1>(p, parts, stream);
    forward_of_width<scalar_t, columns>(p, parts, stream);
  });
}

template bool forward_on_tensor_cores<__half>(const CompressedAttentionForward&, const ForwardParts<float>&,
                                              cudaStream_t);
template bool forward_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionForward&, const ForwardParts<float>&,
                                                     cudaStream_t);
template bool forward_on_tensor_cores<__half>(const CompressedAttentionWindowForward&, const ForwardParts<float>&,
                                              cudaStream_t);
template bool forward_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionWindowForward&,
                                                     const ForwardParts<float>&, cudaStream_t);

}  // namespace compressed_cuda
}  // namespace memcheck
