// Prototype: the forward of causal normalized linear attention, in chunks of 32 or 64 positions.
// Of the state S = sum phi(k) v^T a warp has 16 columns, in float32 registers; of z = sum phi(k) it has 16 numbers.
// Features have one part, which is rounded to bfloat16; scores have two.

#include "tiles.cuh"

namespace memcheck::trial {
namespace {

template <int kChunk>
struct alignas(1024) ForwardShared {
  bfloat16 q[2][kChunk * kDepth], k[2][kChunk * kDepth], v[2][kChunk * kDepth];
  bfloat16 scores[2][kChunk * kChunk];  // in two parts
  float sums_of_scores[2][kChunk];      // of each half of the columns
  float den_of_state[kWarps][kChunk];   // phi(q) z, of each warp's 16 of the depth
  float inverse[kChunk];
};

template <int kChunk, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    linear_forward_kernel(const bfloat16* __restrict__ q, const bfloat16* __restrict__ k,
                          const bfloat16* __restrict__ v, bfloat16* __restrict__ y, int T, float eps) {
  constexpr int kHigh = kChunk / 16;
  auto& s = shared_tiles<ForwardShared<kChunk>>();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int64_t own = int64_t{blockIdx.x} * T * kDepth + own_element();
  const auto request = [&](int chunk, int stage) {
    const int64_t at = own + int64_t{chunk} * kChunk * kDepth;
    request_tile<kChunk>(s.q[stage], q + at);
    request_tile<kChunk>(s.k[stage], k + at);
    request_tile<kChunk>(s.v[stage], v + at);
    cp_async_commit();
  };
  float state[1][8][2][4] = {};  // transposed: rows are the warp's columns of v, columns the depth
  float z[2][2] = {};            // of depth 16 warp + 8 t + lane % 4 * 2 + i
  request(0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < T / kChunk; ++chunk) {
    const int now = chunk % 2;
    cp_async_wait<0>();
    map_tile<kChunk>(s.q[now]);
    map_tile<kChunk>(s.k[now]);
    __syncthreads();
    if (chunk + 1 < T / kChunk) request(chunk + 1, 1 - now);
    const Address tile_q = address_of(s.q[now]), tile_k = address_of(s.k[now]), tile_v = address_of(s.v[now]);

    // Scores: a warp has 16 rows and half of the columns.
    for (int job = warp; job < 2 * kHigh; job += kWarps) {
      const int row = job % kHigh, half = job / kHigh;
      float sums[2] = {};
#pragma unroll
      for (int n = 0; n < kHigh / 2; ++n) {
        const int column = half * (kHigh / 2) + n;
        if (column > row) continue;
        form_scores<kChunk, false>(
            s.scores, tile_q, tile_k, row, column, [](int) { return make_float2(0, 0); },
            [&](int h, float x, float y) { sums[h] += x + y; });
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[h] += __shfl_xor_sync(~0u, sums[h], 1);
        sums[h] += __shfl_xor_sync(~0u, sums[h], 2);
        if (lane % 4 == 0) s.sums_of_scores[half][16 * row + 8 * h + lane / 4] = sums[h];
      }
    }

    // result = phi(q) S, and this warp's part of phi(q) z.
    float result[kHigh][2][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d) {
      uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = rounded(state[0][d][i % 2][i / 2 * 2], state[0][d][i % 2][i / 2 * 2 + 1]);
#pragma unroll
      for (int m = 0; m < kHigh; ++m) {
        uint32_t a[4];
        load(a, square<kDepth>(tile_q + wide<kDepth>(), m, d));
        multiply(result[m], a, b);
      }
    }
#pragma unroll
    for (int m = 0; m < kHigh; ++m) {
      uint32_t a[4];
      float den[4] = {};  // in every column
      load(a, square<kDepth>(tile_q + wide<kDepth>(), m, warp));
      multiply(den, a, rounded(z[0][0], z[0][1]), rounded(z[1][0], z[1][1]));
      if (lane % 4 == 0) {
        s.den_of_state[warp][16 * m + lane / 4] = den[0];
        s.den_of_state[warp][16 * m + 8 + lane / 4] = den[2];
      }
    }
    __syncthreads();
    if (tid < kChunk) {
      float den = eps + s.sums_of_scores[0][tid] + s.sums_of_scores[1][tid];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) den += s.den_of_state[w][tid];
      s.inverse[tid] = 1.0f / den;
    }

    // result += scores v
#pragma unroll
    for (int n = 0; n < kHigh; ++n) {
      uint32_t b[4];
      load_transposed(b, square<kDepth>(tile_v + wide<kDepth>(), n, warp));
#pragma unroll
      for (int m = n; m < kHigh; ++m)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t a[4];
          load(a, square<kChunk>(address_of(s.scores[part]) + wide<kChunk>(), m, n));
          multiply(result[m], a, b);
        }
    }

    // The chunk joins the state.
    join<kChunk>(state, tile_v, warp, tile_k, 0);
    const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
    float sums[2][4] = {};
#pragma unroll
    for (int n = 0; n < kHigh; ++n) {
      uint32_t b[4];
      load_transposed(b, square<kDepth>(tile_k + wide<kDepth>(), n, warp));
      multiply(sums, ones, b);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) z[t][0] += sums[t][0], z[t][1] += sums[t][1];
    __syncthreads();

    // y, by way of q's tile, so that rows are stored 16 bytes at a time.
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float inverse = s.inverse[16 * m + 8 * h + lane / 4];
#pragma unroll
        for (int t = 0; t < 2; ++t)
          word(s.q[now], place_of_sums<kDepth>(m, h, warp, t)) =
              rounded(result[m][t][2 * h] * inverse, result[m][t][2 * h + 1] * inverse);
      }
    __syncthreads();
    store_tile<kChunk>(y + own + int64_t{chunk} * kChunk * kDepth, s.q[now]);
  }
}

template <int kChunk, int kBlocks>
int run_forward(const void* q, const void* k, const void* v, void* y, int heads, int T, float eps, void* stream) {
  return run("trial_linear_forward", heads, sizeof(ForwardShared<kChunk>), stream,
             linear_forward_kernel<kChunk, kBlocks>, in(q), in(k), in(v), out(y), T, eps);
}

}  // namespace
}  // namespace memcheck::trial

// q, k, v and y (heads,T,128), contiguous. T is a multiple of `chunk`, which is 32 or 64; registers are for `blocks`
// blocks on a multiprocessor, 1 or 2.
extern "C" int trial_linear_forward(const void* q, const void* k, const void* v, void* y, int heads, int T, float eps,
                                    int chunk, int blocks, void* stream) {
  using namespace memcheck::trial;
  const auto variant = chunk == 32 ? (blocks == 1 ? run_forward<32, 1> : run_forward<32, 2>)
                                   : (blocks == 1 ? run_forward<64, 1> : run_forward<64, 2>);
  return variant(q, k, v, y, heads, T, eps, stream);
}
