// Prototype: a step of normalized linear attention.
//   S += phi(k) v^T   z += phi(k)   y = phi(q) S / (phi(q) z + eps)
// A block has a head and all of S, which it reads and writes once: a warp has 16 rows, each 16 bytes a lane, and 4 of
// them are on their way while 4 are used. Features are not rounded. The new state may be written over the old one.

#include "tiles.cuh"

namespace memcheck::trial {
namespace {

constexpr int kRowsOfWarp = kDepth / kWarps;
constexpr int kAhead = 4;

struct StepShared {
  float q[kDepth], k[kDepth];    // features
  float den[kDepth / 32];        // phi(q) z of 32 rows each
  float4 y[kWarps][kDepth / 4];  // phi(q) S of each warp's rows
};

__global__ void __launch_bounds__(kThreads)
    linear_step_kernel(const bfloat16* __restrict__ q, const bfloat16* __restrict__ k, const bfloat16* __restrict__ v,
                       const float* S, const float* z, float* new_S, float* new_z, bfloat16* __restrict__ y,
                       float eps) {
  StepShared& s = shared_tiles<StepShared>();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  constexpr int kRow = kDepth / 4;  // in float4
  const int64_t head = blockIdx.x, first = head * kDepth * kDepth + warp * kRowsOfWarp * kDepth + lane * 4;
  const float4* from = reinterpret_cast<const float4*>(S + first);
  float4* to = reinterpret_cast<float4*>(new_S + first);
  float4 rows[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) rows[i] = from[i * kRow];
  const uint2 bits = *reinterpret_cast<const uint2*>(v + head * kDepth + lane * 4);
  const float4 value = {first_of(bits.x), second_of(bits.x), first_of(bits.y), second_of(bits.y)};
  if (tid < kDepth) {
    const int64_t at = head * kDepth + tid;
    const float phi_q = feature(__bfloat162float(q[at])), phi_k = feature(__bfloat162float(k[at]));
    const float sum = z[at] + phi_k;
    new_z[at] = sum;
    s.q[tid] = phi_q, s.k[tid] = phi_k;
    float den = phi_q * sum;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) den += __shfl_xor_sync(~0u, den, i);
    if (lane == 0) s.den[warp] = den;
  }
  __syncthreads();
  float4 sums = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    float4 row = rows[i % kAhead];
    if (i + kAhead < kRowsOfWarp) rows[i % kAhead] = from[(i + kAhead) * kRow];
    const float phi_q = s.q[warp * kRowsOfWarp + i], phi_k = s.k[warp * kRowsOfWarp + i];
    row.x += phi_k * value.x, row.y += phi_k * value.y, row.z += phi_k * value.z, row.w += phi_k * value.w;
    to[i * kRow] = row;
    sums.x += phi_q * row.x, sums.y += phi_q * row.y, sums.z += phi_q * row.z, sums.w += phi_q * row.w;
  }
  s.y[warp][lane] = sums;
  __syncthreads();
  if (tid < kDepth) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += reinterpret_cast<const float*>(s.y[w])[tid];
    y[head * kDepth + tid] = __float2bfloat16_rn(total / (s.den[0] + s.den[1] + s.den[2] + s.den[3] + eps));
  }
}

}  // namespace
}  // namespace memcheck::trial

// q, k, v and y (heads,128) in bfloat16; S (heads,128,128) and z (heads,128) in float32.
extern "C" int trial_linear_step(const void* q, const void* k, const void* v, const void* S, const void* z, void* new_S,
                                 void* new_z, void* y, int heads, float eps, void* stream) {
  using namespace memcheck::trial;
  return run("trial_linear_step", heads, sizeof(StepShared), stream, linear_step_kernel, in(q), in(k), in(v),
             static_cast<const float*>(S), static_cast<const float*>(z), static_cast<float*>(new_S),
             static_cast<float*>(new_z), out(y), eps);
}
