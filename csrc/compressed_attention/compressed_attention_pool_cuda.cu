#include "compressed_attention/compressed_attention_matrices_cuda.cuh"

// Pooling: the means of the keys and values of each block.

namespace memcheck {
namespace compressed_cuda {

namespace {

constexpr int kPoolThreads = 256;
constexpr int kPoolChain = 32;  // positions in the first level of a sum
constexpr int kPoolLoads = 8;   // at a time

// How the threads of a block share pooling: `lanes` threads take turns along the positions of a block, and `packs` have
// its columns.
struct PoolThreads {
  int lanes, packs;
  bool lanes_first;  // neighbouring threads are lanes, because positions are contiguous and columns are not

  MEMCHECK_INLINE int blocks() const { return kPoolThreads / (lanes * packs); }
};

template <int kColumns, typename acc_t>
struct PoolShared {
  acc_t sums[kColumns][kPoolThreads];
};

// A place for a block: the head of a sequence, and a block of it, which may lie behind the sequence's end.
struct BlockPlace {
  KeyHead of;
  int64_t j;
};

// index: of (b, key head, place).
MEMCHECK_INLINE BlockPlace block_place(const CompressedAttentionShape& shape, int64_t index) {
  const int64_t head = index / shape.C, place = index % shape.C;
  if (!shape.sequences.packed) return {key_head(shape, head / shape.Hkv, head % shape.Hkv), place};
  const SequenceTile at = tile_at(shape, place, shape.T, shape.factor, FirstKey());
  return {key_head(shape, at.sequence, head), at.tile};
}

// Adds every lanes-th position from begin to end to the total, in chains of kPoolChain.
template <typename scalar_t, int kColumns, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void sum_positions(const KeyMatrix<scalar_t>& from, int64_t begin, int64_t end, int lanes,
                                              int64_t column, acc_t (&total)[kColumns]) {
  for (int64_t first = begin; first < end; first += int64_t{kPoolChain} * lanes) {
    acc_t chain[kColumns] = {};
    for (int64_t t = first; t < end && t < first + int64_t{kPoolChain} * lanes; t += int64_t{kPoolLoads} * lanes) {
      Pack<scalar_t> packs[kPoolLoads];
#pragma unroll
      for (int n = 0; n < kPoolLoads; ++n) packs[n] = from.read(from.at(t + n * lanes), t + n * lanes < end, column);
#pragma unroll
      for (int n = 0; n < kPoolLoads; ++n)
#pragma unroll
        for (int i = 0; i < kColumns; ++i) chain[i] += to_acc(packs[n].values[i]);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total[i] += chain[i];
  }
}

// The first half of the grid pools keys, the second half values. A block of threads has threads.blocks() rows
// (b, key head, block).
template <typename scalar_t>
__global__ void __launch_bounds__(kPoolThreads, 2) pool_kernel(CompressedAttentionPooling p, PoolThreads threads) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kColumns = kPackSize<scalar_t>;
  auto& memory = shared<PoolShared<kColumns, acc_t>>();
  const CompressedAttentionShape& shape = p.shape;
  const int64_t rows = shape.B * shape.Hkv * shape.C;
  const int64_t column_tiles = ceil_div(shape.D, int64_t{threads.packs} * kColumns);
  const int64_t row_tiles = ceil_div(rows, threads.blocks());
  const int64_t tile = blockIdx.x / column_tiles;
  const bool of_values = tile >= row_tiles;
  const int thread = threadIdx.x;
  const int lane = threads.lanes_first ? thread % threads.lanes : thread / threads.packs % threads.lanes;
  const int pack = threads.lanes_first ? thread / threads.lanes % threads.packs : thread % threads.packs;
  const int64_t row =
      (of_values ? tile - row_tiles : tile) * threads.blocks() + thread / (threads.lanes * threads.packs);
  const int64_t column = (blockIdx.x % column_tiles * threads.packs + pack) * kColumns;
  const auto [of, j] = block_place(shape, row < rows ? row : 0);
  const bool mine = row < rows && column < shape.D && j < of.blocks;
  const int64_t begin = j * shape.factor;
  const int64_t end = smaller(of.keys, begin + shape.factor);
  acc_t total[kColumns] = {};
  if (mine) {
    const auto from = keys_of<scalar_t>(shape, of_values ? p.v : p.k, of);
    sum_positions(from, begin + lane, end, threads.lanes, column, total);
  }
  for (int others = threads.lanes / 2; others > 0; others /= 2) {
    const int distance = threads.lanes_first ? others : others * threads.packs;
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
  const auto to = blocks_of<scalar_t>(shape, of_values ? p.vc : p.kc, of);
  store_columns<scalar_t, kColumns>(to, j, column, total);
}

int power_of_two_from(int64_t x, int most) {
  int power = 1;
  while (power < x && power < most) power *= 2;
  return power;
}

template <typename scalar_t>
PoolThreads pool_threads(const CompressedAttentionPooling& p) {
  constexpr int64_t kPositions = 16;  // for a lane, if there are enough blocks
  const int64_t packs = ceil_div(p.shape.D, kPackSize<scalar_t>);
  const bool lanes_first = p.k.stride[3] != 1 && p.v.stride[3] != 1;
  PoolThreads threads{1, power_of_two_from(packs, lanes_first ? 8 : 32), lanes_first};
  // It does not depend on T, so that a sequence has the same sums in any batch.
  threads.lanes =
      power_of_two_from(ceil_div(p.shape.factor, lanes_first ? 1 : kPositions), kPoolThreads / threads.packs);
  return threads;
}

template <typename scalar_t>
void pool(const CompressedAttentionPooling& p, cudaStream_t stream) {
  const int64_t rows = p.shape.B * p.shape.Hkv * p.shape.C;
  if (rows * sequence_count(p.shape) * p.shape.D == 0) return;
  const PoolThreads threads = pool_threads<scalar_t>(p);
  constexpr int kColumns = kPackSize<scalar_t>;
  const int64_t column_tiles = ceil_div(p.shape.D, int64_t{threads.packs} * kColumns);
  const int64_t blocks = 2 * ceil_div(rows, threads.blocks()) * column_tiles;
  launch({"compressed_attention_pool", blocks, dim3(kPoolThreads), sizeof(PoolShared<kColumns, acc_type<scalar_t>>),
          stream},
         pool_kernel<scalar_t>, p, threads);
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) { compressed_cuda::pool<decltype(type)>(p, stream); });
}

}  // namespace memcheck
