#include <cmath>

#include "compressed_attention/compressed_attention_mma_cuda.cuh"

// The forward of 16-bit types on tensor cores. A block of threads has a tile of queries. Each warp has 16 or 32 of its
// rows, with y in registers. A tile of values is loaded while scores are formed, and the next tile of keys while these
// are weighed. Scores are in base 2: weights are 2^(s log2(e) - max), rounded to 16 bits for the product with the
// values.

namespace memcheck {
namespace compressed_cuda {

// kFew: of calls with few queries, as in decoding, which wait for memory.
template <typename scalar_t, int kD, bool kFew, typename Parameters>
struct MmaForwardShared {
  static constexpr int kTall = kD > 128 || kFew ? 1 : 2;  // tiles of 16 queries in a warp, by the registers they need
  static constexpr int kQueries = 16 * kTall * kWarps;
  static constexpr int kKeys = kD > 128 ? 32 : 64;
  // In a multiprocessor.
  static constexpr int kBlocks = kFew ? compressed_attention_few_blocks_cuda(kD) : kD == 64 ? 3 : 2;

  HalfTile<scalar_t, kQueries, kD> q;  // then y
  HalfTile<scalar_t, kKeys, kD> kc;
  HalfTile<scalar_t, kKeys, kD> vc;
  SeenByRows<kQueries, kHasWindow<Parameters>> rows;
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

  // Replaces products by weights; the scores are `scale`, above 0, times the products. Makes the sums relative to the
  // new maximum. What is relative to the one before is to be multiplied by `rescale`.
  template <int kWide>
  __device__ __forceinline__ void add(float scale, WarpTile<kTall, kWide>& scores, float (&rescale)[kTall][2]) {
    unroll<kTall, 2>([&](int m, int half) {
      float highest = scores[m][0][2 * half];
      unroll<kWide, 2>([&](int n, int i) { highest = fmaxf(highest, scores[m][n][2 * half + i]); });
      highest = fmaxf(max[m][half], scale * largest_of_row(highest));
      const float shift = softmax_shift(highest);
      rescale[m][half] = exp2_flushed(max[m][half] - shift);
      max[m][half] = highest;
      float total = 0;
      unroll<kWide, 2>([&](int n, int i) {
        float& score = scores[m][n][2 * half + i];
        score = exp2_flushed(score * scale - shift);
        total += score;
      });
      sum[m][half] = softmax_sum(sum[m][half], rescale[m][half], total);
    });
  }
};

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
  if (parts.count == 1)
    store_rows<kTall, kColumns>(y, first, tile, queries_of<scalar_t>(shape, p.y, work.of), work.row);
}

template <typename scalar_t, int kD, bool kFew, typename Parameters>
__global__ void __launch_bounds__(kThreads, MmaForwardShared<scalar_t, kD, kFew, Parameters>::kBlocks)
    mma_forward_kernel(Parameters p, ForwardParts<float> parts) {
  using Shared = MmaForwardShared<scalar_t, kD, kFew, Parameters>;
  constexpr int kTall = Shared::kTall, kKeys = Shared::kKeys;
  auto& memory = shared<Shared>();
  const auto work = query_work(p, blockIdx.x, Shared::kQueries, kKeys, 1, kD, parts.count);
  if (!work.exists()) return;
  if (threadIdx.x == 0) {
    memory.work = work;
    memory.matrices.find(p, work);
  }
  memory.rows.find(p, work);
  request_rows(queries_of<scalar_t>(p.shape, p.q, work.of), work.row, memory.q);
  __syncthreads();
  const float scale = static_cast<float>(p.scale) * kLog2e;
  const bool rises = scale > 0;  // then the largest product has the largest score
  const int first = warp() * 16 * kTall;
  const bool works = !kFew || work.row + first < work.of.rows();  // the warp has a query
  const int tiles = static_cast<int>(work.end - work.begin);
  MmaSoftmax<kTall> softmax;
  float y[kTall][kD / 8][4];
  set_zero<kTall, kD / 8>(y);
  if (tiles > 0) memory.matrices.request_keys(column_tile(memory.work, memory.work.begin, kKeys), memory.kc);
  cp_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const ColumnTile at = column_tile(memory.work, memory.work.begin + tile, kKeys);
    cp_async_wait<0>();
    __syncthreads();
    const auto turn = [&] {
      cp_async_wait<0>();
      __syncthreads();
      if (tile + 1 < tiles) memory.matrices.request_keys(next_tile(memory.work, at, kKeys), memory.kc);
    };
    memory.matrices.request_values(at, memory.vc);
    float scores[kTall][kKeys / 8][4];
    const RowsInTile<kTall, decltype(memory.q)> queries(memory.q, not_kept(warp()) * 16 * kTall);
    if (works) multiply_rows<scalar_t, kTall, kKeys / 8>(queries, memory.kc, 0, scores);
    if (kD > 128) turn();
    float rescale[kTall][2];
    uint32_t weights[kTall][kKeys / 16][4];
    if (works) {
      if (!rises) unroll<kTall, kKeys / 8, 4>([&](int m, int n, int i) { scores[m][n][i] *= scale; });
      memory.rows.template hide<kTall, kKeys / 8>(
          at, [&](int m, int half) { return first + fragment_row(m, half); }, scores);
      softmax.add(rises ? scale : 1, scores, rescale);
      round_factor<scalar_t, kTall, kKeys / 8>(scores, weights);
    }
    if (kD <= 128) turn();
    if (works)
      multiply<scalar_t, kTall, kKeys / 8, kD / 8>(weights, memory.vc, 0, [&](int m, int n, int i, float x) {
        y[m][n][i] = y[m][n][i] * rescale[m][i / 2] + x;
      });
  }
  cp_async_wait<0>();
  __syncthreads();
  finish_queries<scalar_t>(p, memory.work, parts, softmax, memory.q, y);
}

template <typename scalar_t, int kD, bool kFew, typename Parameters>
void forward_of_width(const Parameters& p, const ForwardParts<float>& parts, cudaStream_t stream) {
  using Shared = MmaForwardShared<scalar_t, kD, kFew, Parameters>;
  const int64_t blocks = tile_count(p.shape, query_rows(p.shape), Shared::kQueries) * parts.count;
  launch({"compressed_attention_forward_mma", blocks, dim3(kThreads), sizeof(Shared), stream},
         mma_forward_kernel<scalar_t, kD, kFew, Parameters>, p, parts);
}

template <typename scalar_t, typename Parameters>
bool forward_on_tensor_cores(const Parameters& p, const ForwardParts<float>& parts, cudaStream_t stream) {
  return with_tile_columns(p.shape.D, [&](auto columns) {
    if constexpr (columns <= 128)
      if (compressed_attention_has_few_queries_cuda(p.shape))
        return forward_of_width<scalar_t, columns, true>(p, parts, stream);
    forward_of_width<scalar_t, columns, false>(p, parts, stream);
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
