// Kernels whose counts are known, for a build that counts (tests/host_cuda/counters.h), and kernels with races.
//     counted NAME
// runs one and prints its counts.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "common/tile.cuh"
#include "host_cuda/counters.h"

namespace {

using namespace memcheck;

constexpr int kThreads = 256;
constexpr int kCount = 1024;

__global__ void copy_kernel(float* to, const float* from, int stride) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  to[i] = from[i * stride];
}

__global__ void copy_packs_kernel(float* to, const float* from) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  store_pack(load_pack(from + 4 * i), to + 4 * i);
}

// As the kernels use packs: values are taken out one by one, which a GPU still loads by one instruction.
__global__ void scale_packs_kernel(float* to, const float* from) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const Pack<float> pack = load_pack(from + 4 * i);
  Pack<float> scaled;
  scaled.values[0] = 2 * pack.values[0];
  scaled.values[1] = 3 * pack.values[1];
  scaled.values[2] = 4 * pack.values[2];
  scaled.values[3] = 5 * pack.values[3];
  store_pack(scaled, to + 4 * i);
}

// A tile of 32 by 32 numbers. A row of kWidth numbers in shared memory.
template <int kWidth>
__global__ void transpose_kernel(float* to, const float* from) {
  struct Tile {
    float values[32][kWidth];
  };
  auto& tile = shared<Tile>().values;
  for (unsigned row = threadIdx.y; row < 32; row += blockDim.y) tile[row][threadIdx.x] = from[row * 32 + threadIdx.x];
  __syncthreads();
  for (unsigned row = threadIdx.y; row < 32; row += blockDim.y) to[row * 32 + threadIdx.x] = tile[threadIdx.x][row];
}

struct Numbers {
  float values[kThreads];
};

__global__ void shared_race_kernel(float* to, const float* from) {
  float* values = shared<Numbers>().values;
  values[threadIdx.x] = from[threadIdx.x];
  to[threadIdx.x] = values[(threadIdx.x + 1) % kThreads];
}

// Every warp keeps to itself, so that __syncwarp is enough.
__global__ void warp_kernel(float* to, const float* from, bool waits) {
  float* values = shared<Numbers>().values;
  values[threadIdx.x] = from[threadIdx.x];
  if (waits) __syncwarp();
  to[threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void global_race_kernel(float* to) {
  to[threadIdx.x] = static_cast<float>(blockIdx.x);
}

__global__ void global_read_race_kernel(float* to) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  to[i] = to[(i + kThreads) % kCount];
}

// The two stores of a thread and its neighbour touch the same number. With a barrier between them they have an order.
__global__ void block_race_kernel(float* to, bool barrier) {
  to[threadIdx.x] = 1;
  if (barrier) __syncthreads();
  to[(threadIdx.x + 1) % kThreads] = 2;
}

__global__ void block_read_race_kernel(float* to, bool barrier) {
  const float next = to[(threadIdx.x + 1) % kThreads];
  if (barrier) __syncthreads();
  to[threadIdx.x] = next;
}

// The pack that a copy reads is written before the copy arrives.
__global__ void copy_race_kernel(float* to) {
  auto* values = shared<Numbers>().values;
  if (threadIdx.x == 0) cp_async_16(values, to);
  cp_async_commit();
  __syncthreads();
  if (threadIdx.x == 32) to[1] = 1;
  cp_async_wait<0>();
}

// n multiply-adds a thread; in every second one a difference, a product, an exponential and a division.
__global__ void arithmetic_kernel(float* to, const float* from, int n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = from[i];
  for (int j = 0; j < n; ++j) sum = fmaf(sum, from[i + static_cast<unsigned>(j)], 1.0f);
  if (threadIdx.x % 2 == 0) sum = exp2_approximate((sum - from[i + 1]) * from[i + 2]) / from[i + 3];
  to[i] = sum;
}

// n products and sums, which compilers make one instruction; one of them is in float64.
__global__ void contracted_kernel(float* to, const float* from, int n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = from[i];
  for (int j = 0; j < n; ++j) sum += from[i + static_cast<unsigned>(j)] * from[j];
  to[i] = static_cast<float>(static_cast<double>(sum) * 0.1);
}

__global__ void reduction_kernel(float* to, const float* from) {
  float sum = from[blockIdx.x * blockDim.x + threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) to[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = sum;
}

// Copies tiles of kThreads packs. Tile i + 1 is asked for before tile i is read (`early`), or after that.
constexpr int kTiles = 4;
struct Stages {
  float values[2][4 * kThreads];
};
__global__ void pipeline_kernel(float* to, const float* from, bool early, bool barrier) {
  auto& stages = shared<Stages>();
  const unsigned at = 4 * threadIdx.x;
  const auto request = [&](int tile) {
    cp_async_16(&stages.values[tile % 2][at], from + tile * 4 * kThreads + at);
    cp_async_commit();
  };
  request(0);
  for (int tile = 0; tile < kTiles; ++tile) {
    if (early && tile + 1 < kTiles) {
      request(tile + 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    store_pack(load_pack(&stages.values[tile % 2][(at + 4) % (4 * kThreads)]), to + tile * 4 * kThreads + at);
    if (barrier) __syncthreads();
    if (!early && tile + 1 < kTiles) request(tile + 1);
  }
}

struct Matrix {
  __nv_bfloat16 values[16][16];
};
__global__ void product_kernel(float* to) {
  auto& matrix = shared<Matrix>();
  for (unsigned i = threadIdx.x; i < 256; i += 32) matrix.values[i / 16][i % 16] = __float2bfloat16_rn(1.0f);
  __syncwarp();
  uint32_t a[4];
  ldmatrix_x4(a, &matrix.values[threadIdx.x % 16][threadIdx.x / 16 * 8]);
  const uint32_t b[2] = {a[0], a[1]};
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < 3; ++i) mma_m16n8k16<__nv_bfloat16>(d, a, b);
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + static_cast<unsigned>(i)] = d[i];
}

// Block b copies b + 1 rows of kThreads numbers, so that blocks differ as those of a causal kernel.
__global__ void triangle_kernel(float* to, const float* from) {
  for (unsigned row = 0; row <= blockIdx.x; ++row) {
    const unsigned i = (blockIdx.x * (blockIdx.x + 1) / 2 + row) * kThreads + threadIdx.x;
    to[i] = from[i];
  }
}

// d plus 16 products of 1 and `b`, in every element.
__global__ void rounding_kernel(float* to, float d0, float b0) {
  uint32_t a[4], b[2];
  for (uint32_t& pair : a) pair = pack_pair(__float2bfloat16_rn(1.0f), __float2bfloat16_rn(1.0f));
  for (uint32_t& pair : b) pair = pack_pair(__float2bfloat16_rn(b0), __float2bfloat16_rn(b0));
  float d[4] = {d0, d0, d0, d0};
  mma_m16n8k16<__nv_bfloat16>(d, a, b);
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + static_cast<unsigned>(i)] = d[i];
}

template <typename... Params, typename... Args>
void run(void (*kernel)(Params...), int64_t blocks, dim3 block, size_t bytes, Args... args) {
  launch({"counted", blocks, block, bytes, nullptr}, kernel, args...);
}

}  // namespace

int main(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "";
  constexpr size_t kBytes = 32 * kCount * sizeof(float);
  auto* from = static_cast<float*>(std::aligned_alloc(128, kBytes));
  auto* to = static_cast<float*>(std::aligned_alloc(128, kBytes));
  std::memset(from, 0, kBytes);
  const dim3 block(kThreads), square(32, 8);
  constexpr int64_t kBlocks = kCount / kThreads;
  try {
    if (name == "copy") run(copy_kernel, kBlocks, block, 0, to, from, 1);
    if (name == "strided copy") run(copy_kernel, kBlocks, block, 0, to, from, 8);
    if (name == "copy one number") run(copy_kernel, kBlocks, block, 0, to, from, 0);
    if (name == "copy packs") run(copy_packs_kernel, kBlocks, block, 0, to, from);
    if (name == "scale packs") run(scale_packs_kernel, kBlocks, block, 0, to, from);
    if (name == "shifted copy") run(copy_kernel, kBlocks, block, 0, to, from + 1, 1);
    if (name == "transpose") run(transpose_kernel<32>, 1, square, 32 * 32 * 4, to, from);
    if (name == "padded transpose") run(transpose_kernel<33>, 1, square, 32 * 33 * 4, to, from);
    if (name == "shared race") run(shared_race_kernel, 1, block, sizeof(Numbers), to, from);
    if (name == "warp race") run(warp_kernel, 1, block, sizeof(Numbers), to, from, false);
    if (name == "warp") run(warp_kernel, 1, block, sizeof(Numbers), to, from, true);
    if (name == "global race") run(global_race_kernel, 2, block, 0, to);
    if (name == "block race") run(block_race_kernel, 1, block, 0, to, false);
    if (name == "block barrier") run(block_race_kernel, 1, block, 0, to, true);
    if (name == "block read race") run(block_read_race_kernel, 1, block, 0, to, false);
    if (name == "block read barrier") run(block_read_race_kernel, 1, block, 0, to, true);
    if (name == "copy race") run(copy_race_kernel, 1, block, sizeof(Numbers), to);
    if (name == "arithmetic") run(arithmetic_kernel, kBlocks, block, 0, to, from, 5);
    if (name == "contracted") run(contracted_kernel, kBlocks, block, 0, to, from, 7);
    if (name == "global read race") run(global_read_race_kernel, kBlocks, block, 0, to);
    if (name == "triangle") run(triangle_kernel, 12, block, 0, to, from);
    if (name == "sampled triangle") {
      host_cuda::sample_blocks(3);
      run(triangle_kernel, 12, block, 0, to, from);
    }
    if (name == "reduction") run(reduction_kernel, kBlocks, block, 0, to, from);
    if (name == "late pipeline") run(pipeline_kernel, 1, block, sizeof(Stages), to, from, false, true);
    if (name == "pipeline") run(pipeline_kernel, 1, block, sizeof(Stages), to, from, true, true);
    if (name == "pipeline race") run(pipeline_kernel, 1, block, sizeof(Stages), to, from, true, false);
    if (name == "product") run(product_kernel, 1, dim3(32), sizeof(Matrix), to);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  if (name == "rounding") {
    constexpr std::pair<float, float> kSums[] = {{3.0f, 0.5f},     {1.0f, 0x1p-20f},  {1.0f, 0x1.8p-23f},
                                                 {1.0f, 0x1p-24f}, {1.0f, -0x1p-24f}, {-1.0f, 0x1.8p-23f},
                                                 {0.0f, 0x1p-130f}};
    for (const auto& [d, b] : kSums) {
      run(rounding_kernel, 1, dim3(32), 0, to, d, b);
      std::printf("%a %a\n", static_cast<double>(to[0]), static_cast<double>(to[127]));
    }
    return 0;
  }
  std::fputs(host_cuda::written_counts().c_str(), stdout);
}
