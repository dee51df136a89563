// Prototype: the backward of causal normalized linear attention, in two scans of chunks of 64 positions.
//   query_scan, first to last:  S = sum phi(k) v^T and z = sum phi(k) give grad_q, 1 / den and g.y
//   key_scan, last to first:    R = sum phi(q) / den g^T and r = sum phi(q) / den (g.y) give grad_k and grad_v
// States are spread over the warps, in float32 registers. Features have one part, which is rounded to bfloat16, scores
// have two, S has kParts, because S g - (g.y) z cancels where values have a mean, and R has one.

#include "tiles.cuh"

namespace memcheck::trial {
namespace {

constexpr int kChunk = 64;
constexpr int kHigh = kChunk / 16;

// ---- grad_q

struct alignas(1024) QueryShared {
  bfloat16 q[2][kChunk * kDepth], k[2][kChunk * kDepth], v[2][kChunk * kDepth], g[2][kChunk * kDepth];
  bfloat16 scores[2][kChunk * kChunk];  // g v^T, in two parts
  float2 parts[kWarps][kChunk];         // phi(q) z and phi(q) S g, of each warp's 16 of the depth
  float2 rows[kChunk];                  // 1 / den and g.y
};

template <int kParts>
__global__ void __launch_bounds__(kThreads, 1)
    query_scan_kernel(const bfloat16* __restrict__ q, const bfloat16* __restrict__ k, const bfloat16* __restrict__ v,
                      const bfloat16* __restrict__ g, bfloat16* __restrict__ grad_q, float2* __restrict__ rows, int T,
                      float eps) {
  auto& s = shared_tiles<QueryShared>();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int64_t own = int64_t{blockIdx.x} * T * kDepth + own_element();
  rows += int64_t{blockIdx.x} * T;
  const auto request = [&](int chunk, int stage) {
    const int64_t at = own + int64_t{chunk} * kChunk * kDepth;
    request_tile<kChunk>(s.q[stage], q + at);
    request_tile<kChunk>(s.k[stage], k + at);
    request_tile<kChunk>(s.v[stage], v + at);
    request_tile<kChunk>(s.g[stage], g + at);
    cp_async_commit();
  };
  // Factors of products that sum the rows of a square: all of them, and those up to each row.
  const uint32_t corner = lane % 4 * 2 + 1 <= lane / 4 ? kOnes : lane % 4 * 2 <= lane / 4 ? kOnes & 0xffffu : 0u;
  const uint32_t all[4] = {kOnes, kOnes, kOnes, kOnes}, until[4] = {corner, kOnes, 0, corner};
  float state[1][8][2][4] = {};  // S: rows are the warp's 16 of the depth
  float z[2][2] = {};            // of depth 16 warp + 8 t + lane % 4 * 2 + i
  request(0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < T / kChunk; ++chunk) {
    const int now = chunk % 2;
    cp_async_wait<0>();
    map_tile<kChunk>(s.k[now]);
    __syncthreads();
    if (chunk + 1 < T / kChunk) request(chunk + 1, 1 - now);
    const Address tile_k = address_of(s.k[now]), tile_v = address_of(s.v[now]), tile_g = address_of(s.g[now]);
    for (int job = warp; job < kSquares<kChunk>; job += kWarps) {
      const Corner at = corner_of(job);
      form_scores<kChunk, false>(
          s.scores, tile_g, tile_v, at.far, at.near, [](int) { return make_float2(0, 0); }, [](int, float, float) {});
    }

    // result = g S^T
    float result[kHigh][2][4] = {};
#pragma unroll
    for (int e = 0; e < kDepth / 16; ++e) {
      uint32_t b[kParts][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = state[0][e][i % 2][i / 2 * 2], y = state[0][e][i % 2][i / 2 * 2 + 1];
        b[0][i] = rounded(x, y);
        if constexpr (kParts == 2) b[1][i] = rest_of(b[0][i], x, y);
      }
#pragma unroll
      for (int m = 0; m < kHigh; ++m) {
        uint32_t a[4];
        load(a, square<kDepth>(tile_g + wide<kDepth>(), m, e));
#pragma unroll
        for (int part = 0; part < kParts; ++part) multiply(result[m], a, b[part]);
      }
    }
    __syncthreads();

    // result += scores phi(k), and the sums of phi(k) up to each position.
    float sums[kHigh][2][4], before[2][4] = {};
#pragma unroll
    for (int n = 0; n < kHigh; ++n) {
      uint32_t b[4];
      load_transposed(b, square<kDepth>(tile_k + wide<kDepth>(), n, warp));
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][t][i] = z[t][i % 2] + before[t][i % 2];
      multiply(sums[n], until, b);
      multiply(before, all, b);
#pragma unroll
      for (int m = n; m < kHigh; ++m)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t a[4];
          load(a, square<kChunk>(address_of(s.scores[part]) + wide<kChunk>(), m, n));
          multiply(result[m], a, b);
        }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) z[t][0] += before[t][0], z[t][1] += before[t][1];
    join<kChunk>(state, tile_k, warp, tile_v, 0);

    // den = phi(q) sums and den (g.y) = phi(q) result, of this warp's depth.
    float phi_q[kHigh][2][4];
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 part = {0, 0};
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint32_t pair = word(s.q[now], place_of_sums<kDepth>(m, h, warp, t));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 2 * h + i;
            phi_q[m][t][at] = feature(i == 0 ? first_of(pair) : second_of(pair));
            part.x += phi_q[m][t][at] * sums[m][t][at];
            part.y += phi_q[m][t][at] * result[m][t][at];
          }
        }
#pragma unroll
        for (int x = 1; x < 4; x *= 2) {
          part.x += __shfl_xor_sync(~0u, part.x, x);
          part.y += __shfl_xor_sync(~0u, part.y, x);
        }
        if (lane % 4 == 0) s.parts[warp][16 * m + 8 * h + lane / 4] = part;
      }
    __syncthreads();
    if (tid < kChunk) {
      float den = eps, total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) den += s.parts[w][tid].x, total += s.parts[w][tid].y;
      const float inverse = 1.0f / den;
      s.rows[tid] = rows[chunk * kChunk + tid] = make_float2(inverse, total * inverse);
    }
    __syncthreads();

    // grad_q, by way of q's tile: every thread writes where it alone has read.
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 row = s.rows[16 * m + 8 * h + lane / 4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          float gradient[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 2 * h + i;
            gradient[i] = (result[m][t][at] - row.y * sums[m][t][at]) * row.x * fminf(phi_q[m][t][at], 1.0f);
          }
          word(s.q[now], place_of_sums<kDepth>(m, h, warp, t)) = rounded(gradient[0], gradient[1]);
        }
      }
    __syncthreads();
    store_tile<kChunk>(grad_q + own + int64_t{chunk} * kChunk * kDepth, s.q[now]);
  }
}

// ---- grad_k and grad_v

struct alignas(1024) KeyShared {
  bfloat16 q[2][kChunk * kDepth], k[2][kChunk * kDepth], v[2][kChunk * kDepth], g[2][kChunk * kDepth];
  bfloat16 scores[2][2][kChunk * kChunk];  // v g^T - g.y and phi(k) (phi(q) / den)^T, each in two parts
  bfloat16 R[kDepth * kDepth];             // rows are v's columns
  float2 rows[2][kChunk];                  // 1 / den and g.y
};

__global__ void __launch_bounds__(kThreads, 1)
    key_scan_kernel(const bfloat16* __restrict__ q, const bfloat16* __restrict__ k, const bfloat16* __restrict__ v,
                    const bfloat16* __restrict__ g, const float2* __restrict__ rows, bfloat16* __restrict__ grad_k,
                    bfloat16* __restrict__ grad_v, int T) {
  auto& s = shared_tiles<KeyShared>();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int64_t own = int64_t{blockIdx.x} * T * kDepth + own_element();
  rows += int64_t{blockIdx.x} * T;
  const auto request = [&](int chunk, int stage) {
    const int64_t at = own + int64_t{chunk} * kChunk * kDepth;
    request_tile<kChunk>(s.q[stage], q + at);
    request_tile<kChunk>(s.k[stage], k + at);
    request_tile<kChunk>(s.v[stage], v + at);
    request_tile<kChunk>(s.g[stage], g + at);
    if (tid < kChunk / 2) cp_async_16(s.rows[stage] + 2 * tid, rows + chunk * kChunk + 2 * tid);
    cp_async_commit();
  };
  // A warp has 32 columns of both results, and 32 rows: squares `half` and 3 - half, which have five squares of scores.
  // Of R it has 32 rows and 64 columns, and of r its 32 columns.
  const int group = warp % 4, half = warp / 4;
  const auto row_of = [&](int m) { return m == 0 ? half : kHigh - 1 - half; };
  float state[2][4][2][4] = {};
  float r[4][2] = {};  // of depth 32 group + 8 t + lane % 4 * 2 + i
  const int last = T / kChunk - 1;
  request(last, last % 2);
#pragma unroll 1
  for (int chunk = last; chunk >= 0; --chunk) {
    const int now = chunk % 2;
    float inverse[kHigh];  // 1 / den of the rows that this thread copies, on its way while R is written
#pragma unroll
    for (int i = 0; i < kHigh; ++i) inverse[i] = rows[chunk * kChunk + tid / 16 + 16 * i].x;
    // R of the later chunks, for all warps.
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int d = 0; d < 4; ++d)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int t = 0; t < 2; ++t)
            word(s.R, place_of_sums<kDepth>(2 * group + a, t, 4 * half + d, h)) =
                rounded(state[a][d][h][2 * t], state[a][d][h][2 * t + 1]);
    cp_async_wait<0>();
    map_tile<kChunk>(s.k[now]);
    map_tile<kChunk>(s.q[now], [&](int i) { return inverse[i]; });
    __syncthreads();
    if (chunk > 0) request(chunk - 1, 1 - now);
    const Address tile_q = address_of(s.q[now]), tile_k = address_of(s.k[now]);
    const Address tile_v = address_of(s.v[now]), tile_g = address_of(s.g[now]), tile_R = address_of(s.R);
    for (int job = warp; job < 2 * kSquares<kChunk>; job += kWarps) {
      const bool of_features = job >= kSquares<kChunk>;
      const Corner at = corner_of(of_features ? job - kSquares<kChunk> : job);
      form_scores<kChunk, true>(
          s.scores[of_features], of_features ? tile_k : tile_v, of_features ? tile_q : tile_g, at.near, at.far,
          [&](int column) {
            const float4 two = *reinterpret_cast<const float4*>(&s.rows[now][column]);
            return of_features ? make_float2(0, 0) : make_float2(two.y, two.w);
          },
          [](int, float, float) {});
    }

    // of_k = v R^T - r and of_v = phi(k) R
    float of_k[2][4][4], of_v[2][4][4] = {};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) of_k[m][t][i] = -r[t][i % 2];
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d) {
      uint32_t x[2][4], y[2][4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        load_transposed(x[c], square<kDepth>(tile_R + wide<kDepth>(), d, 2 * group + c));
        load(y[c], square<kDepth>(tile_R + tall<kDepth>(), 2 * group + c, d));
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t a[4], b[4];
        load(a, square<kDepth>(tile_v + wide<kDepth>(), row_of(m), d));
        load(b, square<kDepth>(tile_k + wide<kDepth>(), row_of(m), d));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          multiply(of_k[m][t], a, x[t / 2][t % 2 * 2], x[t / 2][t % 2 * 2 + 1]);
          multiply(of_v[m][t], b, y[t / 2][t % 2 * 2], y[t / 2][t % 2 * 2 + 1]);
        }
      }
    }
    __syncthreads();

    // of_k += scores phi(q) / den, of_v += scores g, and r += (g.y) phi(q) / den.
    float sums[4][4] = {};
#pragma unroll
    for (int n = 0; n < kHigh; ++n) {
      uint32_t x[2][4], y[2][4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        load_transposed(x[c], square<kDepth>(tile_q + wide<kDepth>(), n, 2 * group + c));
        load_transposed(y[c], square<kDepth>(tile_g + wide<kDepth>(), n, 2 * group + c));
      }
      // g.y of 16 positions in eight rows, and its second part in the other eight.
      const float4* two = reinterpret_cast<const float4*>(s.rows[now] + 16 * n) + lane % 4;
      const float4 u = two[0], w = two[4];
      const uint32_t first = rounded(u.y, u.w), second = rounded(w.y, w.w);
      const uint32_t rows_of_g_y[4] = {first, rest_of(first, u.y, u.w), second, rest_of(second, w.y, w.w)};
#pragma unroll
      for (int t = 0; t < 4; ++t) multiply(sums[t], rows_of_g_y, x[t / 2][t % 2 * 2], x[t / 2][t % 2 * 2 + 1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (n < row_of(m)) continue;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t a[4], b[4];
          load(a, square<kChunk>(address_of(s.scores[0][part]) + wide<kChunk>(), row_of(m), n));
          load(b, square<kChunk>(address_of(s.scores[1][part]) + wide<kChunk>(), row_of(m), n));
#pragma unroll
          for (int t = 0; t < 4; ++t) {
            multiply(of_k[m][t], a, x[t / 2][t % 2 * 2], x[t / 2][t % 2 * 2 + 1]);
            multiply(of_v[m][t], b, y[t / 2][t % 2 * 2], y[t / 2][t % 2 * 2 + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) r[t][0] += sums[t][0] + sums[t][2], r[t][1] += sums[t][1] + sums[t][3];
    join<kChunk>(state, tile_g, 2 * group, tile_q, 4 * half);

    // grad_k and grad_v, by way of the tiles of phi(k) and v, which others read before the last barrier.
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint32_t at = place_of_sums<kDepth>(row_of(m), h, 2 * group + t / 2, t % 2);
          const uint32_t phi_k = word(s.k[now], at);
          word(s.k[now], at) = rounded(of_k[m][t][2 * h] * fminf(first_of(phi_k), 1.0f),
                                       of_k[m][t][2 * h + 1] * fminf(second_of(phi_k), 1.0f));
          word(s.v[now], at) = rounded(of_v[m][t][2 * h], of_v[m][t][2 * h + 1]);
        }
    __syncthreads();
    store_tile<kChunk>(grad_k + own + int64_t{chunk} * kChunk * kDepth, s.k[now]);
    store_tile<kChunk>(grad_v + own + int64_t{chunk} * kChunk * kDepth, s.v[now]);
  }
}

}  // namespace
}  // namespace memcheck::trial

// Tensors are (heads,T,128) and contiguous; T is a multiple of 64. rows (heads,T,2) in float32 is scratch. parts: of S,
// 1 or 2.
extern "C" int trial_linear_backward(const void* q, const void* k, const void* v, const void* g, void* grad_q,
                                     void* grad_k, void* grad_v, void* rows, int heads, int T, float eps, int parts,
                                     void* stream) {
  using namespace memcheck::trial;
  const auto query_scan = parts == 1 ? query_scan_kernel<1> : query_scan_kernel<2>;
  const int failed = run("trial_linear_backward_query_scan", heads, sizeof(QueryShared), stream, query_scan, in(q),
                         in(k), in(v), in(g), out(grad_q), static_cast<float2*>(rows), T, eps);
  return failed ? failed
                : run("trial_linear_backward_key_scan", heads, sizeof(KeyShared), stream, key_scan_kernel, in(q), in(k),
                      in(v), in(g), static_cast<const float2*>(rows), out(grad_k), out(grad_v), T);
}
