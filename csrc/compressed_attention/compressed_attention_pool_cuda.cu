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

// Positions to add, and where the result belongs: a mean in a row of `to`, or a sum.
template <typename scalar_t>
struct PooledRow {
  bool exists;
  KeyMatrix<scalar_t> from;
  int64_t begin, end;
  KeyMatrix<scalar_t> to;
  int64_t place, length;
  bool is_sum = false;
  Strided<1> before = {}, sum = {};  // (D,) in the accumulation type: added to the positions, and the result
};

// index: of (b, key head, place). The place may lie behind the end of a sequence.
template <typename scalar_t>
MEMCHECK_INLINE PooledRow<scalar_t> pooled_row(const CompressedAttentionPooling& p, bool of_values, int64_t index) {
  const CompressedAttentionShape& shape = p.shape;
  const int64_t head = index / shape.C, place = index % shape.C;
  const bool packed = shape.sequences.packed;
  const SequenceTile at =
      packed ? tile_at(shape, place, shape.T, shape.factor, FirstKey()) : SequenceTile{head / shape.Hkv, place};
  const KeyHead of = key_head(shape, at.sequence, packed ? head : head % shape.Hkv);
  const int64_t begin = at.tile * shape.factor, end = smaller(of.keys, begin + shape.factor);
  return {at.tile < of.blocks,
          keys_of<scalar_t>(shape, of_values ? p.v : p.k, of),
          begin,
          end,
          blocks_of<scalar_t>(shape, of_values ? p.vc : p.kc, of),
          at.tile,
          end - begin};
}

// Some sequences of an extension, and their rows of results, which begin at 0. Their table is a parameter of the
// kernel, which may have 4 KiB: a copy from the CPU's memory would wait, and a stream that is captured may not wait.
constexpr int kPartSequences = 60;
struct ExtensionPart : CompressedAttentionExtension {
  CompressedAttentionNew table[kPartSequences];
};
static_assert(sizeof(ExtensionPart) + sizeof(PoolThreads) <= 4096);

// index: of (key head, row of results)
template <typename scalar_t>
MEMCHECK_INLINE PooledRow<scalar_t> pooled_row(const ExtensionPart& p, bool of_values, int64_t index) {
  const int64_t rows = p.shape.B * p.shape.C, head = index / rows;
  const CompressedAttentionNewRow at = p.row(p.table, index % rows);
  const auto matrix = [&](const Strided<4>& x, int64_t row) {
    return rows_of<scalar_t>(p.shape, x, KeyHead{row, head}, 0, std::numeric_limits<int64_t>::max());
  };
  const auto numbers = [&](const Strided<4>& x) {
    return Strided<1>{x ? x.at<acc_type<scalar_t>>(at.sequence, head, 0, 0) : nullptr, {x.stride[3]}};
  };
  return {true,
          matrix(of_values ? p.v : p.k, at.of.row),
          at.begin,
          at.end,
          matrix(of_values ? p.vc : p.kc, at.of.to),
          at.of.place + at.j,
          p.shape.factor,
          !at.complete,
          at.j == 0 ? numbers(of_values ? p.v_sum : p.k_sum) : Strided<1>(),
          numbers(of_values ? p.new_v_sum : p.new_k_sum)};
}

// Adds every lanes-th position from begin to end to the total, in chains of kPoolChain.
template <typename scalar_t, int kColumns, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ void sum_positions(const KeyMatrix<scalar_t>& from, int64_t begin, int64_t end, int lanes,
                                              int64_t column, acc_t (&total)[kColumns]) {
  for (int64_t first = begin; first < end; first += int64_t{kPoolChain} * lanes) {
    acc_t chain[kColumns] = {};
    for (int64_t t = first; t < end && t < first + int64_t{kPoolChain} * lanes; t += int64_t{kPoolLoads} * lanes) {
      Pack<scalar_t> packs[kPoolLoads];
      unroll<kPoolLoads>([&](int n) { packs[n] = from.read(from.at(t + n * lanes), t + n * lanes < end, column); });
      unroll<kPoolLoads, kColumns>([&](int n, int i) { chain[i] += to_acc(packs[n].values[i]); });
    }
    unroll<kColumns>([&](int i) { total[i] += chain[i]; });
  }
}

// The columns of a row from `column` on, as far as they exist: x += row, or row = x.
template <typename acc_t, int kColumns>
__device__ __forceinline__ void add_row(const Strided<1>& row, int64_t column, int64_t D, acc_t (&x)[kColumns]) {
  unroll<kColumns>([&](int i) {
    if (column + i < D) x[i] += *row.at<acc_t>(column + i);
  });
}
template <typename acc_t, int kColumns>
__device__ __forceinline__ void store_row(const Strided<1>& row, int64_t column, int64_t D,
                                          const acc_t (&x)[kColumns]) {
  unroll<kColumns>([&](int i) {
    if (column + i < D) *row.at<acc_t>(column + i) = x[i];
  });
}

// The first half of the grid pools keys, the second half values. A block of threads has threads.blocks() rows.
template <typename scalar_t, typename Parameters>
__global__ void __launch_bounds__(kPoolThreads, 2)
    pool_kernel(const __grid_constant__ Parameters p, PoolThreads threads) {
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
  const PooledRow<scalar_t> at = pooled_row<scalar_t>(p, of_values, row < rows ? row : 0);
  const bool mine = row < rows && column < shape.D && at.exists;
  acc_t total[kColumns] = {};
  if (mine) sum_positions(at.from, at.begin + lane, at.end, threads.lanes, column, total);
  for (int others = threads.lanes / 2; others > 0; others /= 2) {
    const int distance = threads.lanes_first ? others : others * threads.packs;
    unroll<kColumns>([&](int i) { memory.sums[i][thread] = total[i]; });
    __syncthreads();
    if (lane < others) unroll<kColumns>([&](int i) { total[i] += memory.sums[i][thread + distance]; });
    __syncthreads();
  }
  if (!mine || lane > 0) return;
  if (at.before) add_row(at.before, column, shape.D, total);
  if (at.is_sum) return store_row(at.sum, column, shape.D, total);
  unroll<kColumns>([&](int i) { total[i] /= static_cast<acc_t>(at.length); });
  store_columns<scalar_t, kColumns>(at.to, at.place, column, total);
}

// Backward of an extension: each position, and the sum before the first row, gets its share of the gradient of the row.
// A thread has a pack of columns of a row.
template <typename scalar_t>
__global__ void __launch_bounds__(kPoolThreads) spread_kernel(const __grid_constant__ ExtensionPart p) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kColumns = kPackSize<scalar_t>;
  const int64_t packs = ceil_div(p.shape.D, kColumns), rows = p.shape.B * p.shape.Hkv * p.shape.C;
  const int64_t index = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  const int64_t column = index % packs * kColumns;
  if (index / packs >= 2 * rows) return;
  const bool of_values = index / packs >= rows;
  const PooledRow<scalar_t> at = pooled_row<scalar_t>(p, of_values, index / packs % rows);
  acc_t share[kColumns] = {};
  if (at.is_sum) {
    if (at.sum) add_row(at.sum, column, p.shape.D, share);
  } else if (at.to.data != nullptr) {
    const Pack<scalar_t> gradient = at.to.read(at.to.at(at.place), true, column);
    unroll<kColumns>([&](int i) { share[i] = to_acc(gradient.values[i]) / static_cast<acc_t>(at.length); });
  }
  if (at.before) store_row(at.before, column, p.shape.D, share);
  if (of_values ? p.v : p.k)
    for (int64_t t = at.begin; t < at.end; ++t) store_columns<scalar_t, kColumns>(at.from, t, column, share);
}

int power_of_two_from(int64_t x, int most) {
  int power = 1;
  while (power < x && power < most) power *= 2;
  return power;
}

template <typename scalar_t, typename Parameters>
PoolThreads pool_threads(const Parameters& p) {
  constexpr int64_t kPositions = 16;  // for a lane, if there are enough blocks
  const int64_t packs = ceil_div(p.shape.D, kPackSize<scalar_t>);
  const bool lanes_first = p.k.stride[3] != 1 && p.v.stride[3] != 1;
  PoolThreads threads{1, power_of_two_from(packs, lanes_first ? 8 : 32), lanes_first};
  // It does not depend on T, so that a sequence has the same sums in any batch.
  threads.lanes =
      power_of_two_from(ceil_div(p.shape.factor, lanes_first ? 1 : kPositions), kPoolThreads / threads.packs);
  return threads;
}

template <typename scalar_t, typename Parameters>
void pool(const char* name, const Parameters& p, cudaStream_t stream) {
  const int64_t rows = p.shape.B * p.shape.Hkv * p.shape.C;
  if (rows * sequence_count(p.shape) * p.shape.D == 0) return;
  const PoolThreads threads = pool_threads<scalar_t>(p);
  constexpr int kColumns = kPackSize<scalar_t>;
  const int64_t column_tiles = ceil_div(p.shape.D, int64_t{threads.packs} * kColumns);
  const int64_t blocks = 2 * ceil_div(rows, threads.blocks()) * column_tiles;
  launch({name, blocks, dim3(kPoolThreads), sizeof(PoolShared<kColumns, acc_type<scalar_t>>), stream},
         pool_kernel<scalar_t, Parameters>, p, threads);
}

template <typename acc_t, typename Run>
void each_part(const CompressedAttentionExtension& p, const Run& run) {
  for (int64_t first = 0; first < p.count; first += kPartSequences) {
    ExtensionPart part{p};
    part.count = smaller(int64_t{kPartSequences}, p.count - first);
    std::copy_n(p.sequences + first, part.count, part.table);
    const CompressedAttentionNew &begin = p.sequences[first], &last = p.sequences[first + part.count - 1];
    for (CompressedAttentionNew& sequence : part.table) sequence.first_result -= begin.first_result;
    part.shape.B = 1;
    part.shape.C = last.first_result + last.blocks(p.shape.factor) + 1 - begin.first_result;
    for (Strided<4>* sums : {&part.k_sum, &part.v_sum, &part.new_k_sum, &part.new_v_sum})
      if (*sums) sums->data = sums->at<acc_t>(first, 0, 0, 0);
    run(part);
  }
}

}  // namespace
}  // namespace compressed_cuda

void compressed_attention_pool_cuda(const CompressedAttentionPooling& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype,
                   [&](auto type) { compressed_cuda::pool<decltype(type)>("compressed_attention_pool", p, stream); });
}

void compressed_attention_extend_cuda(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) {
    using scalar_t = decltype(type);
    compressed_cuda::each_part<acc_type<scalar_t>>(
        p, [&](const auto& part) { compressed_cuda::pool<scalar_t>("compressed_attention_extend", part, stream); });
  });
}

void compressed_attention_extend_backward_cuda(const CompressedAttentionExtension& p, Dtype dtype,
                                               cudaStream_t stream) {
  with_device_type(dtype, [&](auto type) {
    using scalar_t = decltype(type);
    using compressed_cuda::kPoolThreads;
    const int64_t packs = ceil_div(p.shape.D, int64_t{kPackSize<scalar_t>});
    compressed_cuda::each_part<acc_type<scalar_t>>(p, [&](const auto& part) {
      const int64_t threads = 2 * part.shape.Hkv * part.shape.C * packs;
      launch({"compressed_attention_extend_backward", ceil_div(threads, int64_t{kPoolThreads}), dim3(kPoolThreads), 0,
              stream},
             compressed_cuda::spread_kernel<scalar_t>, part);
    });
  });
}

}  // namespace memcheck
