#include <cmath>
#include <type_traits>

#include "compressed_attention/compressed_attention_mma_cuda.cuh"
#include "compressed_attention/compressed_attention_rows_cuda.cuh"

// The backward of 16-bit types on tensor cores, by the formulas of compressed_attention_backward_cuda.cu. Weights and
// the gradients of scores are rounded to 16 bits for their products with queries, keys and grad_y.

namespace memcheck {
namespace compressed_cuda {

constexpr int kRows = 16 * kWarps;  // of a tile whose gradients are in registers, if each warp has 16

// The rows of the other tiles, and how many are in shared memory at a time. Chosen so that two blocks of threads fit
// in a multiprocessor: up to 128 columns in one of an A100, else in one of an H100.
template <int kD>
constexpr int kOtherRows = kD == 64 ? 64 : 32;
template <int kD>
constexpr int kStages = kD == 256 ? 1 : 2;

// How many rows or columns of a tile that begins at `first` are before `end`.
MEMCHECK_INLINE int half_tile_before(int64_t end, int64_t first) {
  return static_cast<int>(larger<int64_t>(0, smaller<int64_t>(end - first, kRows)));
}

// ---- tiles of queries: a warp has 16 queries, with grad_q in registers

template <typename scalar_t, int kD>
struct MmaQueryShared {
  static constexpr int kKeys = kOtherRows<kD>;
  static constexpr int kWide = kKeys / 8;

  HalfTile<scalar_t, kRows, kD> q;  // then grad_q
  HalfTile<scalar_t, kRows, kD> grad_y;
  HalfTile<scalar_t, kKeys, kD> kc[kStages<kD>];
  HalfTile<scalar_t, kKeys, kD> vc[kStages<kD>];
  // In shared memory, because sums take the registers.
  QueryWork work;
  KeyMatrix<scalar_t> keys, values;
};

// A thread's two queries.
struct MmaQueries {
  int64_t limit[2];  // how many blocks each sees
  float shift[2];    // of its scores, from its lse, in base 2
  float delta[2] = {};

  __device__ __forceinline__ MmaQueries(const CompressedAttentionBackward& p, const QueryWork& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = work.row + warp() * 16 + fragment_row(0, half);
      const bool exists = row < work.of.group * p.shape.S;
      limit[half] = exists ? p.shape.visible(row / work.of.group) : 0;
      shift[half] =
          exists ? softmax_shift(static_cast<const float*>(p.lse)[query_index(p.shape, work.of, row)]) * kLog2e : 0;
    }
  }
};

// Forms the weights of a tile of keys from `key` on, and their gradients; both are 0 where a query does not see the
// key.
template <typename scalar_t, int kD, int kWide>
__device__ __forceinline__ void weigh_keys(const MmaQueryShared<scalar_t, kD>& memory, int now, float scale,
                                           const MmaQueries& rows, int64_t key, float (&weights)[1][kWide][4],
                                           float (&grad_weights)[1][kWide][4]) {
  multiply_rows<scalar_t, 1, kWide>(memory.q, warp() * 16, memory.kc[now], 0, weights);
  multiply_rows<scalar_t, 1, kWide>(memory.grad_y, warp() * 16, memory.vc[now], 0, grad_weights);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int seen = half_tile_before(rows.limit[half], key);
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& weight = weights[0][n][2 * half + i];
        float& gradient = grad_weights[0][n][2 * half + i];
        const bool sees = fragment_column(n) + i < seen;
        weight = sees ? exp2_approximate(weight * scale - rows.shift[half]) : 0;
        gradient = sees ? gradient : 0;
      }
  }
}

// Loads the tiles of keys one after the other and calls visit(buffer, first key) for each.
template <typename scalar_t, int kD, typename Visit>
__device__ __forceinline__ void through_keys(MmaQueryShared<scalar_t, kD>& memory, const Visit& visit) {
  constexpr int kKeys = kOtherRows<kD>;
  constexpr int kBuffers = kStages<kD>;
  const int tiles = static_cast<int>(memory.work.end);
  const auto request_keys = [&](int64_t key, int buffer) {
    request_rows(memory.keys, key, memory.kc[buffer]);
    request_rows(memory.values, key, memory.vc[buffer]);
    cp_async_commit();
  };
  if (tiles > 0) request_keys(0, 0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int now = tile % kBuffers;
    const int64_t key = int64_t{tile} * kKeys;
    cp_async_wait<0>();
    __syncthreads();
    if (kBuffers > 1 && tile + 1 < tiles) request_keys(key + kKeys, kBuffers - 1 - now);
    visit(now, key);
    if (kBuffers > 1 || tile + 1 >= tiles) continue;
    __syncthreads();
    request_keys(key + kKeys, 0);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// delta = sum_j p_j dp_j takes a pass of its own, because y was rounded to 16 bits, and its error would be in the
// gradient of every score.
template <typename scalar_t, int kD>
__global__ void __launch_bounds__(kThreads, 2) mma_query_gradient_kernel(CompressedAttentionBackward p) {
  auto& memory = shared<MmaQueryShared<scalar_t, kD>>();
  constexpr int kWide = MmaQueryShared<scalar_t, kD>::kWide;
  const QueryWork work = query_work(p.shape, blockIdx.x, kRows, kOtherRows<kD>, 1, kD, 1);
  const int64_t count = work.of.group * p.shape.S;
  const float scale = static_cast<float>(p.scale);
  if (threadIdx.x == 0) {
    memory.work = work;
    memory.keys = keys_of<scalar_t>(p.shape, p.kc, p.shape.C, work.of);
    memory.values = keys_of<scalar_t>(p.shape, p.vc, p.shape.C, work.of);
  }
  __syncthreads();
  MmaQueries rows(p, work);
  request_rows(queries_of<scalar_t>(p.shape, p.q, work.of), work.row, memory.q);
  request_rows(queries_of<scalar_t>(p.shape, p.grad_y, work.of), work.row, memory.grad_y);
  through_keys(memory, [&](int now, int64_t key) {
    float weights[1][kWide][4], grad_weights[1][kWide][4];
    weigh_keys(memory, now, scale * kLog2e, rows, key, weights, grad_weights);
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.delta[i / 2] += weights[0][n][i] * grad_weights[0][n][i];
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.delta[half] = sum_of_row(rows.delta[half]);
    const int64_t row = memory.work.row + warp() * 16 + fragment_row(0, half);
    if (row >= count) continue;
    const int64_t index = query_index(p.shape, memory.work.of, row);
    if (p.grad_lse != nullptr) rows.delta[half] -= static_cast<const float*>(p.grad_lse)[index];
    if (p.delta != nullptr && lane() % 4 == 0) static_cast<float*>(p.delta)[index] = rows.delta[half];
  }
  unsigned not_finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (!is_finite(rows.delta[half])) not_finite |= 1u << half;
  const auto form_again = [&] {
    if (!__any_sync(~0u, not_finite != 0)) return;
    each_row_of_fragments<1>(not_finite, [&](int row) {
      const int64_t mine = memory.work.row + warp() * 16 + row;
      if (mine < count) differentiate_row<scalar_t>(p, memory.work.of, 0, kD, mine);
    });
  };
  if (!p.grad_q) return form_again();
  float grad_q[1][kD / 8][4];
  set_zero<1, kD / 8>(grad_q);
  through_keys(memory, [&](int now, int64_t key) {
    float weights[1][kWide][4], grad_weights[1][kWide][4];
    weigh_keys(memory, now, scale * kLog2e, rows, key, weights, grad_weights);
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gradient =
            softmax_gradient_of_seen(scale * weights[0][n][i], grad_weights[0][n][i], rows.delta[i / 2]);
        const bool sees = fragment_column(n) + i % 2 < half_tile_before(rows.limit[i / 2], key);
        weights[0][n][i] = sees ? gradient : 0;
      }
    uint32_t grad_scores[1][kWide / 2][4];
    round_factor<scalar_t, 1, kWide>(weights, grad_scores);
    add_product<scalar_t, 1, kWide, kD / 8>(grad_scores, memory.kc[now], 0, grad_q);
  });
  const auto to = queries_of<scalar_t>(p.shape, p.grad_q, memory.work.of);
  const int first = warp() * 16;
#pragma unroll
  for (int n = 0; n < kD / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!is_finite(grad_q[0][n][i])) not_finite |= 1u << (i / 2);
  keep_rows<scalar_t, 1, kD / 8>(grad_q, first, memory.q);
  for (int index = lane(); index < 2 * kD; index += 32) {
    const int row = first + index / (kD / 8);
    if (memory.work.row + row < count) store_row_pack(memory.q, row, index % (kD / 8), to, memory.work.row + row);
  }
  form_again();
}

template <typename scalar_t, int kD>
void query_gradients_of_width(const CompressedAttentionBackward& p, cudaStream_t stream) {
  const CompressedAttentionShape& shape = p.shape;
  const auto blocks = static_cast<unsigned>(shape.B * shape.Hkv * ceil_div(shape.group() * shape.S, kRows));
  launch({"compressed_attention_backward_queries_mma", dim3(blocks), dim3(kThreads),
          sizeof(MmaQueryShared<scalar_t, kD>), stream},
         mma_query_gradient_kernel<scalar_t, kD>, p);
}

template <typename scalar_t>
bool query_gradients_on_tensor_cores(const CompressedAttentionBackward& p, cudaStream_t stream) {
  if (p.shape.D > 256 || p.y) return false;
  if (p.shape.D <= 64) {
    query_gradients_of_width<scalar_t, 64>(p, stream);
  } else if (p.shape.D <= 128) {
    query_gradients_of_width<scalar_t, 128>(p, stream);
  } else {
    query_gradients_of_width<scalar_t, 256>(p, stream);
  }
  return true;
}

template bool query_gradients_on_tensor_cores<__half>(const CompressedAttentionBackward&, cudaStream_t);
template bool query_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionBackward&, cudaStream_t);

// ---- tiles of keys

// If no query gives a key much weight, its gradient is a sum of small weights, and in float16 weights below 2^-14 lose
// digits. So weights are multiplied by this power of two, which still leaves room for the rounding of a weight of 1.
template <typename scalar_t>
constexpr int kWeightBits = std::is_same_v<scalar_t, __half> ? 14 : 0;
template <typename scalar_t>
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits<scalar_t>);

// A warp has 16 keys, with their gradients in registers. If there are fewer keys than that, several warps have the same
// ones, and each of them has its own queries of every tile.
template <typename scalar_t, int kD, int kTileKeys>
struct MmaKeyShared {
  static constexpr int kKeys = kTileKeys;
  static constexpr int kKeyWarps = kKeys / 16;
  static constexpr int kQueries = kOtherRows<kD>;
  static constexpr int kQueriesOfWarp = kQueries * kKeyWarps / kWarps;

  HalfTile<scalar_t, kKeys, kD> kc;                      // then grad_k
  HalfTile<scalar_t, kKeys, kD> vc;                      // then grad_v
  HalfTile<scalar_t, kQueries, kD> q[kStages<kD>];       // then sums of grad_k
  HalfTile<scalar_t, kQueries, kD> grad_y[kStages<kD>];  // then sums of grad_v
  float shift[kStages<kD>][kQueries];                    // of scores, from the lse, in base 2, minus kWeightBits
  float delta[kStages<kD>][kQueries];
  // In shared memory, because sums take the registers.
  int64_t first_row[kKeys];  // the first row that sees each key
  KeyWork work;
  QueryMatrix<scalar_t> queries, gradients;
};

// Begins to load a tile of queries from `row` on into a buffer.
template <typename scalar_t, int kD, int kKeys>
__device__ __forceinline__ void request_queries(const CompressedAttentionBackward& p, int64_t row, int buffer,
                                                MmaKeyShared<scalar_t, kD, kKeys>& memory) {
  request_rows(memory.queries, row, memory.q[buffer]);
  request_rows(memory.gradients, row, memory.grad_y[buffer]);
  cp_async_commit();
  if (threadIdx.x >= kOtherRows<kD>) return;
  const int64_t mine = row + threadIdx.x;
  const bool exists = mine < memory.queries.count;
  const int64_t index = exists ? query_index(p.shape, memory.work.of, mine) : 0;
  const float shift = exists ? softmax_shift(static_cast<const float*>(p.lse)[index]) * kLog2e : 0;
  memory.shift[buffer][threadIdx.x] = shift - kWeightBits<scalar_t>;
  if (p.grad_k) memory.delta[buffer][threadIdx.x] = exists ? static_cast<const float*>(p.delta)[index] : 0;
}

// The queries [from, to) of a tile that see each of a thread's two keys.
struct MmaSeenBy {
  int from[2];
  int to;

  // `first_row` points to that of the warp's first key.
  __device__ __forceinline__ MmaSeenBy(const int64_t* first_row, int64_t row, int64_t rows)
      : from{half_tile_before(first_row[fragment_row(0, 0)], row),
             half_tile_before(first_row[fragment_row(0, 1)], row)},
        to(half_tile_before(rows, row)) {}
  __device__ __forceinline__ bool operator()(int half, int column) const { return column >= from[half] && column < to; }
};

// Adds the gradients of all warps that have the same keys, in their order, to those of the first. `tiles` holds the
// others.
template <int kKeyWarps, int kColumns, typename Tile>
__device__ __forceinline__ void add_warps(Tile* tiles, float (&gradient)[1][kColumns][4]) {
  constexpr int kOthers = kWarps / kKeyWarps - 1;
  if (kOthers == 0) return;
  static_assert(kOthers * kKeyWarps * 16 * 8 * kColumns * sizeof(float) <= kStages<8 * kColumns> * sizeof(Tile));
  constexpr int kNumbers = 4 * kColumns * 32;  // of a warp
  float* const sums = reinterpret_cast<float*>(tiles) + lane();
  if (warp() >= kKeyWarps) {
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) sums[(warp() - kKeyWarps) * kNumbers + 32 * i] = gradient[0][i / 4][i % 4];
  }
  __syncthreads();
  if (warp() >= kKeyWarps) return;
  for (int other = 0; other < kOthers; ++other)
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i)
      gradient[0][i / 4][i % 4] += sums[(other * kKeyWarps + warp()) * kNumbers + 32 * i];
}

// Stores the gradients in `tile`, one for each block, at all positions of the block.
template <typename scalar_t, typename Tile>
__device__ __forceinline__ void store_at_positions(const CompressedAttentionBackward& p, const KeyWork& work,
                                                   const Strided<4>& gradient, const Tile& tile) {
  const auto to = keys_of<scalar_t>(p.shape, gradient, p.gradient_length, work.of);
  constexpr int kPacks = Tile::kColumns / 8;
  for (int row = warp() * 16; row < warp() * 16 + 16; ++row) {
    const int64_t j = work.key + row;
    if (j >= p.shape.C) return;
    const BlockPositions positions = positions_of(p, j);
    for (int64_t index = lane(); index < positions.length * kPacks; index += 32)
      store_row_pack(tile, row, static_cast<int>(index % kPacks), to, positions.begin + index / kPacks);
  }
}

// Stores a part of the gradients, one word of every number after the other.
template <typename scalar_t, int kColumns, typename Tile>
__device__ __forceinline__ void store_part(const CompressedAttentionBackward& p, const KeyWork& work,
                                           const KeyParts<scalar_t>& parts, bool of_values,
                                           const float (&gradient)[1][kColumns][4], Tile& tile) {
  const int first = warp() * 16;
#pragma unroll 1
  for (int word = 0; word < parts.kWords; ++word) {
    keep_pairs<1, kColumns>(gradient, first, tile,
                            [&](float x, float y) { return pack_pair(parts.word(x, word), parts.word(y, word)); });
    for (int index = lane(); index < 16 * kColumns; index += 32) {
      const int64_t j = work.key + first + index / kColumns;
      if (j < p.shape.C)
        store_row_pack(tile, first + index / kColumns, index % kColumns, parts.of_block(p.shape, work.of, of_values, j),
                       work.part * parts.kWords + word);
    }
    __syncwarp();
  }
}

// Stores the gradients of keys or of values. Returns which of a thread's two rows are not finite.
template <typename scalar_t, int kColumns, typename Tile>
__device__ __forceinline__ unsigned finish_keys(const CompressedAttentionBackward& p, const KeyWork& work,
                                                const KeyParts<scalar_t>& parts, bool of_values,
                                                float (&gradient)[1][kColumns][4], Tile& tile) {
  const int first = warp() * 16;
  unsigned not_finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = work.key + first + fragment_row(0, half);
    const float unit = of_values ? kWeightUnit<scalar_t> : 1;
    const bool whole = j < p.shape.C && parts.count == 1;
    const float share = whole ? unit / static_cast<float>(positions_of(p, j).length) : unit;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        gradient[0][n][i] *= share;
        if (!is_finite(gradient[0][n][i])) not_finite |= 1u << half;
      }
  }
  if (parts.count == 1) {
    keep_rows<scalar_t, 1, kColumns>(gradient, first, tile);
    store_at_positions<scalar_t>(p, work, of_values ? p.grad_v : p.grad_k, tile);
  } else {
    store_part<scalar_t, kColumns>(p, work, parts, of_values, gradient, tile);
  }
  return not_finite;
}

// Forms rows that are not finite again. Called when no sums are left, which calls would have to save.
template <typename scalar_t, int kD>
__device__ __forceinline__ void form_keys_again(const CompressedAttentionBackward& p, const KeyWork& work,
                                                const KeyParts<scalar_t>& parts, bool of_values, unsigned not_finite) {
  if (!__any_sync(~0u, not_finite != 0)) return;
  each_row_of_fragments<1>(not_finite, [&](int row) {
    const int64_t j = work.key + warp() * 16 + row;
    if (j < p.shape.C) differentiate_key<scalar_t>(p, work, kOtherRows<kD>, kD, parts, of_values, j);
  });
}

// kOfKeys, kOfValues: which gradients have registers. One without is not formed.
template <typename scalar_t, int kD, int kKeys, bool kOfKeys, bool kOfValues>
__global__ void __launch_bounds__(kThreads, 2)
    mma_key_gradient_kernel(CompressedAttentionBackward p, KeyParts<scalar_t> parts) {
  using Shared = MmaKeyShared<scalar_t, kD, kKeys>;
  constexpr int kQueries = Shared::kQueries;
  constexpr int kWide = Shared::kQueriesOfWarp / 8;
  constexpr int kBuffers = kStages<kD>;
  auto& memory = shared<Shared>();
  const KeyWork work = key_work(p.shape, blockIdx.x, kKeys, kQueries, 1, kD, parts.count);
  const int first = warp() % Shared::kKeyWarps * 16;
  const int first_query = warp() / Shared::kKeyWarps * Shared::kQueriesOfWarp;
  const bool of_keys = kOfKeys && p.grad_k;
  const bool of_values = kOfValues && p.grad_v;
  const float scale = static_cast<float>(p.scale);
  if (threadIdx.x == 0) {
    memory.work = work;
    memory.queries = queries_of<scalar_t>(p.shape, p.q, work.of);
    memory.gradients = queries_of<scalar_t>(p.shape, p.grad_y, work.of);
  }
  if (threadIdx.x < kKeys) {
    const int64_t j = work.key + threadIdx.x;
    memory.first_row[threadIdx.x] =
        (j < p.shape.C ? smaller(p.shape.first_query(j), p.shape.S) : p.shape.S) * work.of.group;
  }
  __syncthreads();
  float grad_k[1][kD / 8][4], grad_v[1][kD / 8][4];
  set_zero<1, kD / 8>(grad_k);
  set_zero<1, kD / 8>(grad_v);
  const int tiles = static_cast<int>(work.end - work.begin);
  request_rows(keys_of<scalar_t>(p.shape, p.kc, p.shape.C, work.of), work.key, memory.kc);
  if (of_keys) request_rows(keys_of<scalar_t>(p.shape, p.vc, p.shape.C, work.of), work.key, memory.vc);
  if (tiles > 0) request_queries(p, work.first_row + work.begin * kQueries, 0, memory);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int now = tile % kBuffers;
    const int64_t row = memory.work.first_row + (memory.work.begin + tile) * kQueries;
    cp_async_wait<0>();
    __syncthreads();
    if (kBuffers > 1 && tile + 1 < tiles) request_queries(p, row + kQueries, kBuffers - 1 - now, memory);
    const MmaSeenBy seen_by(memory.first_row + first, row, memory.queries.count);
    float weights[1][kWide][4];
    uint32_t factor[1][kWide / 2][4];
    multiply_rows<scalar_t, 1, kWide>(memory.kc, first, memory.q[now], first_query, weights);
#pragma unroll
    for (int n = 0; n < kWide; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = first_query + fragment_column(n) + i % 2;
        const float weight = exp2_approximate(weights[0][n][i] * (scale * kLog2e) - memory.shift[now][query]);
        weights[0][n][i] = seen_by(i / 2, query) ? weight : 0;
      }
    if (of_values) {
      round_factor<scalar_t, 1, kWide>(weights, factor);
      add_product<scalar_t, 1, kWide, kD / 8>(factor, memory.grad_y[now], first_query, grad_v);
    }
    if (of_keys) {
      float grad_weights[1][kWide][4];
      multiply_rows<scalar_t, 1, kWide>(memory.vc, first, memory.grad_y[now], first_query, grad_weights);
#pragma unroll
      for (int n = 0; n < kWide; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = first_query + fragment_column(n) + i % 2;
          const float weight = scale * kWeightUnit<scalar_t> * weights[0][n][i];
          const float gradient = softmax_gradient_of_seen(weight, grad_weights[0][n][i], memory.delta[now][query]);
          weights[0][n][i] = seen_by(i / 2, query) ? gradient : 0;
        }
      round_factor<scalar_t, 1, kWide>(weights, factor);
      add_product<scalar_t, 1, kWide, kD / 8>(factor, memory.q[now], first_query, grad_k);
    }
    if (kBuffers > 1 || tile + 1 >= tiles) continue;
    __syncthreads();
    request_queries(p, row + kQueries, 0, memory);
  }
  cp_async_wait<0>();
  __syncthreads();
  if (of_keys) add_warps<Shared::kKeyWarps>(memory.q, grad_k);
  if (of_values) add_warps<Shared::kKeyWarps>(memory.grad_y, grad_v);
  if (warp() >= Shared::kKeyWarps) return;
  unsigned of_k = 0, of_v = 0;  // not finite
  if (of_keys) of_k = finish_keys<scalar_t, kD / 8>(p, memory.work, parts, false, grad_k, memory.kc);
  if (of_values) of_v = finish_keys<scalar_t, kD / 8>(p, memory.work, parts, true, grad_v, memory.vc);
  form_keys_again<scalar_t, kD>(p, memory.work, parts, false, of_k);
  form_keys_again<scalar_t, kD>(p, memory.work, parts, true, of_v);
}

template <typename scalar_t, int kD, int kKeys, bool kOfKeys = true, bool kOfValues = true>
void key_gradients_of_width(const CompressedAttentionBackward& p, const KeyParts<scalar_t>& parts,
                            cudaStream_t stream) {
  const CompressedAttentionShape& shape = p.shape;
  const auto blocks = static_cast<unsigned>(shape.B * shape.Hkv * ceil_div(shape.C, kKeys) * parts.count);
  launch({"compressed_attention_backward_keys_mma", dim3(blocks), dim3(kThreads),
          sizeof(MmaKeyShared<scalar_t, kD, kKeys>), stream},
         mma_key_gradient_kernel<scalar_t, kD, kKeys, kOfKeys, kOfValues>, p, parts);
}

template <typename scalar_t>
bool key_gradients_on_tensor_cores(const CompressedAttentionBackward& p, const KeyParts<scalar_t>& parts,
                                   int64_t key_tile, cudaStream_t stream) {
  if (p.shape.D > 256) return false;
  const bool small = key_tile == 32;
  if (p.shape.D <= 64) {
    small ? key_gradients_of_width<scalar_t, 64, 32>(p, parts, stream)
          : key_gradients_of_width<scalar_t, 64, 64>(p, parts, stream);
  } else if (p.shape.D <= 128) {
    small ? key_gradients_of_width<scalar_t, 128, 32>(p, parts, stream)
          : key_gradients_of_width<scalar_t, 128, 64>(p, parts, stream);
  } else {
    // Registers hold one gradient of 16 keys.
    if (p.grad_k) key_gradients_of_width<scalar_t, 256, 64, true, false>(p, parts, stream);
    if (p.grad_v) key_gradients_of_width<scalar_t, 256, 64, false, true>(p, parts, stream);
  }
  return true;
}

template bool key_gradients_on_tensor_cores<__half>(const CompressedAttentionBackward&, const KeyParts<__half>&,
                                                    int64_t, cudaStream_t);
template bool key_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionBackward&,
                                                           const KeyParts<__nv_bfloat16>&, int64_t, cudaStream_t);

}  // namespace compressed_cuda
}  // namespace memcheck
