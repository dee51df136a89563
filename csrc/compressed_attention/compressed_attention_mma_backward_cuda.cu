#include <cmath>
#include <type_traits>

#include "compressed_attention/compressed_attention_mma_cuda.cuh"

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

// Tiles that are in shared memory one after the other, or together.
template <typename Queries, typename Keys>
union InTurns {
  Queries queries;
  Keys keys;
};
template <typename Queries, typename Keys>
struct Together {
  Queries queries;
  Keys keys;
};

// ---- tiles of queries
//
// The fragments of q and grad_y stay in registers while the keys pass by, and every fragment of keys and values is
// multiplied with all queries of a warp. First with 32 of them, which find delta; then with as many as leave room
// for their grad_q, a slab after the other. Above 128 columns there is no room for fragments beside grad_q.

template <typename scalar_t, int kD, typename Parameters>
struct MmaQueryShared {
  static constexpr bool kWindow = kHasWindow<Parameters>;
  static constexpr bool kInRegisters = kD <= 128;
  static constexpr int kTall = kD <= 128 ? 2 : 1;     // tiles of 16 queries in a warp
  static constexpr int kSlabTall = kD <= 64 ? 2 : 1;  // of a slab
  static constexpr int kSlabs = kTall / kSlabTall;
  static constexpr int kSlab = kRows * kSlabTall;  // queries
  static constexpr int kQueries = kSlab * kSlabs;
  static constexpr int kKeys = kOtherRows<kD>;

  using Slab = HalfTile<scalar_t, kSlab, kD>;
  struct Queries {
    Slab q;  // then grad_q
    Slab grad_y;
  };
  struct Keys {
    HalfTile<scalar_t, kKeys, kD> kc[kStages<kD>];
    HalfTile<scalar_t, kKeys, kD> vc[kStages<kD>];
  };
  std::conditional_t<kInRegisters, InTurns<Queries, Keys>, Together<Queries, Keys>> tiles;
  float delta[kQueries];
  // In shared memory, because sums take the registers.
  QueryWorkOf<Parameters> work;
  KeyMatrices<scalar_t, kWindow> matrices;
  SeenByRows<kQueries, kWindow> rows;

  // The warp's first row of a slab.
  static __device__ __forceinline__ int first_of_warp() { return warp() * 16 * kSlabTall; }
  // The row of the block's queries that is `row` of tile m of the warp, and the one that a thread has.
  static __device__ __forceinline__ int row_of_tile(int m, int row) {
    return m / kSlabTall * kSlab + first_of_warp() + m % kSlabTall * 16 + row;
  }
  static __device__ __forceinline__ int row_of(int m, int half) { return row_of_tile(m, fragment_row(0, half)); }
};

// Loads a slab of queries. Their place may be that of keys.
template <typename scalar_t, int kD, typename Parameters>
__device__ __forceinline__ void load_slab(const Parameters& p, int slab,
                                          MmaQueryShared<scalar_t, kD, Parameters>& memory) {
  const QueryWork& work = memory.work;
  const int64_t row = work.row + slab * MmaQueryShared<scalar_t, kD, Parameters>::kSlab;
  request_rows(queries_of<scalar_t>(p.shape, p.q, work.of), row, memory.tiles.queries.q);
  request_rows(queries_of<scalar_t>(p.shape, p.grad_y, work.of), row, memory.tiles.queries.grad_y);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// A thread's queries. Rows: of q and grad_y.
template <typename Shared, typename Rows, int kTall>
struct MmaQueries {
  static constexpr int kWide = 4 / kTall;  // tiles of 8 keys that are weighed at a time

  Rows q, grad_y;
  int first;              // row of the block's queries
  float shift[kTall][2];  // of its scores, from its lse, in base 2

  template <typename Parameters>
  __device__ __forceinline__ void find(const Parameters& p, const QueryWork& work) {
    // Plain loops, out of which the host's compiler, too, takes what they read of `work`.
#pragma unroll
    for (int m = 0; m < kTall; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = work.row + (first + Shared::row_of(m, half));
        shift[m][half] = row < work.of.rows() ? softmax_shift(number_of<float>(p.lse, work.of, row)) * kLog2e : 0;
      }
  }

  // Forms the weights of keys from row `row` of a buffer on, which are the columns of `tile`, and the gradients of
  // weights. A weight is 0 where a query does not see the key.
  template <typename scalar_t>
  __device__ __forceinline__ void weigh(const Shared& memory, int buffer, int row, const ColumnTile& tile, float scale,
                                        WarpTile<kTall, kWide>& weights, WarpTile<kTall, kWide>& grad_weights) const {
    multiply_rows<scalar_t, kTall, kWide>(q, memory.tiles.keys.kc[buffer], row, weights);
    multiply_rows<scalar_t, kTall, kWide>(grad_y, memory.tiles.keys.vc[buffer], row, grad_weights);
    unroll<kTall, kWide, 4>(
        [&](int m, int n, int i) { weights[m][n][i] = weights[m][n][i] * scale - shift[m][i / 2]; });
    memory.rows.template hide<kTall, kWide>(
        tile, [&](int m, int half) { return first + Shared::row_of(m, half); }, weights);
    unroll<kTall, kWide, 4>([&](int m, int n, int i) { weights[m][n][i] = exp2_flushed(weights[m][n][i]); });
  }
};

// Loads the tiles of keys one after the other and calls visit(buffer, row of the tile, keys from there on) for every
// 8 kWide keys.
template <int kWide, typename scalar_t, int kD, typename Parameters, typename Visit>
__device__ __forceinline__ void through_keys(MmaQueryShared<scalar_t, kD, Parameters>& memory, const Visit& visit) {
  using Shared = MmaQueryShared<scalar_t, kD, Parameters>;
  constexpr int kBuffers = kStages<kD>;
  const int tiles = static_cast<int>(memory.work.end);
  const auto request_keys = [&](const ColumnTile& tile, int buffer) {
    memory.matrices.request_keys(tile, memory.tiles.keys.kc[buffer]);
    memory.matrices.request_values(tile, memory.tiles.keys.vc[buffer]);
  };
  if (tiles > 0) request_keys(column_tile(memory.work, 0, Shared::kKeys), 0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int now = tile % kBuffers;
    const ColumnTile at = column_tile(memory.work, tile, Shared::kKeys);
    cp_async_wait<0>();
    __syncthreads();
    if (kBuffers > 1 && tile + 1 < tiles) request_keys(next_tile(memory.work, at, Shared::kKeys), kBuffers - 1 - now);
#pragma unroll 1
    for (int row = 0; row < Shared::kKeys && at.first + row < end_of_columns(memory.work, at); row += 8 * kWide)
      visit(now, row, ColumnTile{at.of_window, at.first + row});
    if (kBuffers > 1 || tile + 1 >= tiles) continue;
    __syncthreads();
    request_keys(next_tile(memory.work, at, Shared::kKeys), 0);
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Forms delta = sum_j p_j dp_j, less the gradient of lse. It takes a pass of its own, because y was rounded to 16 bits,
// and its error would be in the gradient of every score.
template <typename scalar_t, int kD, typename Parameters>
__device__ __forceinline__ void form_delta(const Parameters& p, MmaQueryShared<scalar_t, kD, Parameters>& memory) {
  using Shared = MmaQueryShared<scalar_t, kD, Parameters>;
  constexpr int kTall = Shared::kTall;
  MmaQueries<Shared, RowsInRegisters<kTall, kD>, kTall> rows;
  constexpr int kWide = rows.kWide;
  rows.first = 0;
  rows.find(p, memory.work);
  unroll<kTall>([&](int m) {
    const int of_slab = m % Shared::kSlabTall;
    if (m > 0 && of_slab == 0) __syncthreads();
    if (of_slab == 0) load_slab(p, m / Shared::kSlabTall, memory);
    rows.q.load(m, memory.tiles.queries.q, Shared::first_of_warp() + 16 * of_slab);
    rows.grad_y.load(m, memory.tiles.queries.grad_y, Shared::first_of_warp() + 16 * of_slab);
  });
  const float scale = static_cast<float>(p.scale) * kLog2e;
  float delta[kTall][2] = {};
  __syncthreads();
  through_keys<kWide>(memory, [&](int now, int row, const ColumnTile& tile) {
    float weights[kTall][kWide][4], grad_weights[kTall][kWide][4];
    rows.template weigh<scalar_t>(memory, now, row, tile, scale, weights, grad_weights);
    unroll<kTall, kWide, 4>([&](int m, int n, int i) { delta[m][i / 2] += weights[m][n][i] * grad_weights[m][n][i]; });
  });
  unroll<kTall, 2>([&](int m, int half) {
    float of_row = sum_of_row(delta[m][half]);
    const int64_t row = memory.work.row + Shared::row_of(m, half);
    if (lane() % 4 != 0) return;
    if (row < memory.work.of.rows()) {
      if (p.grad_lse) of_row -= number_of<float>(p.grad_lse, memory.work.of, row);
      if (p.delta) number_of<float>(p.delta, memory.work.of, row) = of_row;
      if (number_of<float>(p.lse, memory.work.of, row) == minus_infinity<float>()) of_row = 0;
    }
    memory.delta[Shared::row_of(m, half)] = of_row;
  });
  __syncwarp();
}

// Forms and stores grad_q of a slab.
template <typename scalar_t, int kD, typename Parameters>
__device__ __forceinline__ void form_grad_q(const Parameters& p, int slab,
                                            MmaQueryShared<scalar_t, kD, Parameters>& memory) {
  using Shared = MmaQueryShared<scalar_t, kD, Parameters>;
  constexpr int kTall = Shared::kSlabTall;
  using Rows =
      std::conditional_t<Shared::kInRegisters, RowsInRegisters<kTall, kD>, RowsInTile<kTall, typename Shared::Slab>>;
  const int first = Shared::first_of_warp();
  auto& tiles = memory.tiles;
  if (slab > 0) __syncthreads();
  if (Shared::kInRegisters) load_slab(p, slab, memory);
  MmaQueries<Shared, Rows, kTall> rows{Rows(tiles.queries.q, first), Rows(tiles.queries.grad_y, first),
                                       slab * Shared::kSlab};
  constexpr int kWide = rows.kWide;
  rows.find(p, memory.work);
  const float scale = static_cast<float>(p.scale);
  float delta[kTall][2];  // times the scale
  unroll<kTall, 2>(
      [&](int m, int half) { delta[m][half] = scale * memory.delta[slab * Shared::kSlab + Shared::row_of(m, half)]; });
  float grad_q[kTall][kD / 8][4];
  set_zero<kTall, kD / 8>(grad_q);
  __syncthreads();
  through_keys<kWide>(memory, [&](int now, int row, const ColumnTile& tile) {
    float weights[kTall][kWide][4], grad_weights[kTall][kWide][4];
    rows.template weigh<scalar_t>(memory, now, row, tile, scale * kLog2e, weights, grad_weights);
    unroll<kTall, kWide, 4>(
        [&](int m, int n, int i) { weights[m][n][i] *= grad_weights[m][n][i] * scale - delta[m][i / 2]; });
    uint32_t grad_scores[kTall][kWide / 2][4];
    round_factor<scalar_t, kTall, kWide>(weights, grad_scores);
    add_product<scalar_t, kTall, kWide, kD / 8>(grad_scores, tiles.keys.kc[now], row, grad_q);
  });
  store_rows<kTall, kD / 8>(grad_q, first, tiles.queries.q, queries_of<scalar_t>(p.shape, p.grad_q, memory.work.of),
                            memory.work.row + slab * Shared::kSlab);
}

template <typename scalar_t, int kD, typename Parameters>
__global__ void __launch_bounds__(kThreads, 2) mma_query_gradient_kernel(Parameters p) {
  using Shared = MmaQueryShared<scalar_t, kD, Parameters>;
  auto& memory = shared<Shared>();
  if (threadIdx.x == 0) {
    memory.work = query_work(p, blockIdx.x, Shared::kQueries, Shared::kKeys, 1, kD, 1);
    memory.matrices.find(p, memory.work);
  }
  __syncthreads();
  if (!memory.work.exists()) return;
  memory.rows.find(p, memory.work);
  form_delta(p, memory);
#pragma unroll 1
  for (int slab = 0; p.grad_q && slab < Shared::kSlabs; ++slab) form_grad_q(p, slab, memory);
}

template <typename scalar_t, typename Parameters>
bool query_gradients_on_tensor_cores(const Parameters& p, cudaStream_t stream) {
  if (p.y) return false;
  return with_tile_columns(p.shape.D, [&](auto columns) {
    using Shared = MmaQueryShared<scalar_t, columns, Parameters>;
    const int64_t blocks = tile_count(p.shape, query_rows(p.shape), Shared::kQueries);
    launch({"compressed_attention_backward_queries_mma", blocks, dim3(kThreads), sizeof(Shared), stream},
           mma_query_gradient_kernel<scalar_t, columns, Parameters>, p);
  });
}

template bool query_gradients_on_tensor_cores<__half>(const CompressedAttentionBackward&, cudaStream_t);
template bool query_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionBackward&, cudaStream_t);
template bool query_gradients_on_tensor_cores<__half>(const CompressedAttentionWindowBackward&, cudaStream_t);
template bool query_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionWindowBackward&, cudaStream_t);

// ---- tiles of keys

// If no query gives a key much weight, its gradient is a sum of small weights, and in float16 weights below 2^-14 lose
// digits. So weights are multiplied by this power of two, which still leaves room for the rounding of a weight of 1.
template <typename scalar_t>
constexpr int kWeightBits = std::is_same_v<scalar_t, __half> ? 14 : 0;
template <typename scalar_t>
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits<scalar_t>);

// A warp has 16 keys, with their gradients in registers, and fragments of keys and values too if there is room.
template <typename scalar_t, int kD, typename Parameters>
struct MmaKeyShared {
  static constexpr bool kInRegisters = kD <= 128;
  static constexpr int kQueries = kOtherRows<kD>;
  static constexpr int kWide = kD == 128 ? 2 : 4;  // tiles of 8 queries that are weighed at a time

  struct Keys {
    HalfTile<scalar_t, kRows, kD> kc;  // then grad_k
    HalfTile<scalar_t, kRows, kD> vc;  // then grad_v
  };
  struct Queries {
    HalfTile<scalar_t, kQueries, kD> q[kStages<kD>];
    HalfTile<scalar_t, kQueries, kD> grad_y[kStages<kD>];
  };
  std::conditional_t<kInRegisters, InTurns<Queries, Keys>, Together<Queries, Keys>> tiles;
  float shift[kStages<kD>][kQueries];  // of scores, from the lse, in base 2, minus kWeightBits
  float delta[kStages<kD>][kQueries];  // times scale kWeightUnit
  // In shared memory, because sums take the registers.
  KeyLimits<kRows, Parameters> limits;
  KeyWork work;
  QueryMatrix<scalar_t> queries, gradients;
};

// Loads a tile of keys, and what a block of threads knows of its work.
template <bool kOfKeys, typename scalar_t, int kD, typename Parameters>
__device__ __forceinline__ void load_keys(const Parameters& p, const KeyWork& work,
                                          MmaKeyShared<scalar_t, kD, Parameters>& memory) {
  if (threadIdx.x == 0) {
    memory.work = work;
    memory.queries = queries_of<scalar_t>(p.shape, p.q, work.of);
    memory.gradients = queries_of<scalar_t>(p.shape, p.grad_y, work.of);
  }
  if (threadIdx.x < kRows) memory.limits.fill(p, work.of, work.key);
  request_rows(blocks_of<scalar_t>(p.shape, p.kc, work.of), work.key, memory.tiles.keys.kc);
  // Without values nothing uses the products with them.
  const Strided<4>& values = p.vc ? p.vc : p.kc;
  if (kOfKeys) request_rows(blocks_of<scalar_t>(p.shape, values, work.of), work.key, memory.tiles.keys.vc);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// The lse and delta of a thread's query of a tile, on their way to shared memory.
struct QueryNumbers {
  float lse = minus_infinity<float>(), delta = 0;

  // scale: of delta.
  template <typename scalar_t, typename Shared>
  __device__ __forceinline__ void keep(float scale, int buffer, Shared& memory) const {
    if (threadIdx.x >= Shared::kQueries) return;
    memory.shift[buffer][threadIdx.x] = softmax_shift(lse) * kLog2e - kWeightBits<scalar_t>;
    memory.delta[buffer][threadIdx.x] = lse == minus_infinity<float>() ? 0 : scale * delta;
  }
};

// Begins to load a tile of queries from `row` on into a buffer.
template <typename scalar_t, int kD, typename Parameters>
__device__ __forceinline__ QueryNumbers request_queries(const Parameters& p, int64_t row, int buffer,
                                                        MmaKeyShared<scalar_t, kD, Parameters>& memory) {
  request_rows(memory.queries, row, memory.tiles.queries.q[buffer]);
  request_rows(memory.gradients, row, memory.tiles.queries.grad_y[buffer]);
  cp_async_commit();
  QueryNumbers numbers;
  const int64_t mine = row + threadIdx.x;
  if (threadIdx.x < kOtherRows<kD> && mine < memory.queries.count) {
    numbers.lse = number_of<float>(p.lse, memory.work.of, mine);
    if (p.grad_k) numbers.delta = number_of<float>(p.delta, memory.work.of, mine);
  }
  return numbers;
}

// A warp's 16 keys and their values, and the gradients that are wanted.
template <int kD, typename Rows>
struct WarpKeys {
  Rows k, v;
  bool of_keys, of_values;
  WarpTile<1, kD / 8> grad_k, grad_v;
};

// Adds what queries from `query` of a buffer on add to the gradients of a warp's keys, the first of which is `first`.
// row: the first of the buffer. all_see: no query is hidden from a key.
template <bool kOfKeys, typename scalar_t, int kD, typename Parameters, typename Rows>
__device__ __forceinline__ void add_queries(const MmaKeyShared<scalar_t, kD, Parameters>& memory, int buffer, int query,
                                            int first, int64_t row, bool all_see, float scale,
                                            WarpKeys<kD, Rows>& keys) {
  constexpr int kWide = MmaKeyShared<scalar_t, kD, Parameters>::kWide;
  const auto& q = memory.tiles.queries.q[buffer];
  const auto& grad_y = memory.tiles.queries.grad_y[buffer];
  float weights[1][kWide][4], grad_weights[1][kWide][4];
  // Side by side, so that neither waits for its last sum.
  multiply_rows<scalar_t, 1, kWide>(keys.k, q, query, weights);
  if (kOfKeys) multiply_rows<scalar_t, 1, kWide>(keys.v, grad_y, query, grad_weights);
  unroll<kWide, 4>([&](int n, int i) {
    const int column = query + fragment_column(n) + i % 2;
    weights[0][n][i] = exp2_flushed(weights[0][n][i] * (scale * kLog2e) - memory.shift[buffer][column]);
  });
  if (!all_see)
    unroll<2>([&](int half) {
      const Span rows = memory.limits.rows_seeing(first + fragment_row(0, half), memory.queries.count);
      const int from = columns_before<kRows>(rows.begin, row), to = columns_before<kRows>(rows.end, row);
      unroll<kWide, 2>([&](int n, int i) {
        const int column = query + fragment_column(n) + i;
        if (column < from || column >= to) weights[0][n][2 * half + i] = 0;
      });
    });
  uint32_t factor[1][kWide / 2][4];
  if (keys.of_values) {
    round_factor<scalar_t, 1, kWide>(weights, factor);
    add_product<scalar_t, 1, kWide, kD / 8>(factor, grad_y, query, keys.grad_v);
  }
  if (!keys.of_keys) return;
  const float unit = scale * kWeightUnit<scalar_t>;
  unroll<kWide, 4>([&](int n, int i) {
    const int column = query + fragment_column(n) + i % 2;
    weights[0][n][i] *= grad_weights[0][n][i] * unit - memory.delta[buffer][column];
  });
  round_factor<scalar_t, 1, kWide>(weights, factor);
  add_product<scalar_t, 1, kWide, kD / 8>(factor, q, query, keys.grad_k);
}

// Stores the gradients in `tile`, one for each block, at all positions of the block.
template <typename scalar_t, typename Tile>
__device__ __forceinline__ void store_at_positions(const CompressedAttentionBackward& p, const KeyWork& work,
                                                   const Strided<4>& gradient, const Tile& tile) {
  const auto to = gradient_of<scalar_t>(p, gradient, work.of);
  constexpr int kPacks = Tile::kColumns / 8;
  for (int row = warp() * 16; row < warp() * 16 + 16; ++row) {
    const int64_t j = work.key + row;
    if (j >= work.of.blocks) return;
    const BlockPositions positions = positions_of(p, work.of, j);
    for (int64_t index = lane(); index < positions.length * kPacks; index += 32)
      store_row_pack(tile, row, static_cast<int>(index % kPacks), to, positions.begin + index / kPacks);
  }
}

// Stores a part of the gradients.
template <int kColumns>
__device__ __forceinline__ void store_part(const KeyWork& work, const KeyMatrix<float>& to,
                                           const float (&gradient)[1][kColumns][4]) {
  unroll<2>([&](int half) {
    const int64_t j = work.key + warp() * 16 + fragment_row(0, half);
    if (j >= work.of.blocks) return;
    float* const row = to.at(j);
    unroll<kColumns, 2>([&](int n, int i) {
      const int column = fragment_column(n) + i;
      if (column < to.columns) row[column] = gradient[0][n][2 * half + i];
    });
  });
}

// Stores the gradients of positions of a window. Unless pooled, each one's share of its block's gradient is there
// already.
template <typename scalar_t, int kColumns, typename Tile>
__device__ __forceinline__ void store_positions(const CompressedAttentionBackward& p, const KeyWork& work,
                                                const Strided<4>& x, float (&gradient)[1][kColumns][4], Tile& tile) {
  const int first = warp() * 16;
  const auto to = blocks_of<scalar_t>(p.shape, x, work.of);
  for (int index = lane(); !p.pooled && index < 16 * kColumns; index += 32) {
    const int row = first + index / kColumns, pack = index % kColumns;
    store_pack(to.read(to.at(work.key + row), work.key + row < to.count, 8 * pack), tile.pack(row, pack));
  }
  __syncwarp();
  unroll<2, kColumns, 2>([&](int half, int n, int i) {
    const scalar_t share = tile.pack(first + fragment_row(0, half), n)[lane() % 4 * 2 + i];
    if (!p.pooled) gradient[0][n][2 * half + i] += to_acc(share);
  });
  store_rows<1, kColumns>(gradient, first, tile, to, work.key);
}

// Stores the gradients of keys or of values.
template <typename scalar_t, int kColumns, typename Parameters, typename Tile>
__device__ __forceinline__ void finish_keys(const Parameters& p, const KeyWork& work, const KeyParts<float>& parts,
                                            bool of_values, float (&gradient)[1][kColumns][4], Tile& tile) {
  const int first = warp() * 16;
  unroll<2>([&](int half) {
    const int64_t j = work.key + first + fragment_row(0, half);
    const float unit = of_values ? kWeightUnit<scalar_t> : 1;
    const bool whole = !kHasWindow<Parameters> && j < work.of.blocks && parts.count == 1;
    const float share = whole ? unit / static_cast<float>(positions_of(p, work.of, j).length) : unit;
    unroll<kColumns, 2>([&](int n, int i) { gradient[0][n][2 * half + i] *= share; });
  });
  const Strided<4>& to = of_values ? p.grad_v : p.grad_k;
  if constexpr (kHasWindow<Parameters>) {
    store_positions<scalar_t, kColumns>(p, work, to, gradient, tile);
  } else if (parts.count == 1) {
    keep_rows<scalar_t, 1, kColumns>(gradient, first, tile);
    store_at_positions<scalar_t>(p, work, to, tile);
  } else {
    store_part<kColumns>(work, parts.matrix(p.shape, work.of, of_values, work.part), gradient);
  }
}

// kOfKeys, kOfValues: which gradients have registers. One without is not formed. p: those of of_positions, or without a
// window.
template <typename scalar_t, int kD, bool kOfKeys, bool kOfValues, typename Parameters>
__global__ void __launch_bounds__(kThreads, kD == 64 ? 3 : 2)
    mma_key_gradient_kernel(Parameters p, KeyParts<float> parts) {
  using Shared = MmaKeyShared<scalar_t, kD, Parameters>;
  constexpr int kQueries = Shared::kQueries;
  constexpr int kBuffers = kStages<kD>;
  auto& memory = shared<Shared>();
  const KeyWork work = key_work(p, blockIdx.x, kRows, kQueries, 1, kD, parts.count);
  if (!work.exists()) return;
  load_keys<kOfKeys>(p, work, memory);
  auto& tiles_of_keys = memory.tiles.keys;
  using Rows =
      std::conditional_t<Shared::kInRegisters, RowsInRegisters<1, kD>, RowsInTile<1, decltype(tiles_of_keys.kc)>>;
  WarpKeys<kD, Rows> keys{Rows(tiles_of_keys.kc, warp() * 16), Rows(tiles_of_keys.vc, warp() * 16), kOfKeys && p.grad_k,
                          kOfValues && p.grad_v};
  __syncthreads();
  set_zero<1, kD / 8>(keys.grad_k);
  set_zero<1, kD / 8>(keys.grad_v);
  const int tiles = static_cast<int>(work.end - work.begin);
  const float unit = static_cast<float>(p.scale) * kWeightUnit<scalar_t>;
  QueryNumbers numbers;
  if (tiles > 0) numbers = request_queries(p, memory.work.first_row + memory.work.begin * kQueries, 0, memory);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int now = tile % kBuffers;
    const int64_t row = memory.work.first_row + (memory.work.begin + tile) * kQueries;
    numbers.template keep<scalar_t>(unit, now, memory);
    cp_async_wait<0>();
    __syncthreads();
    const bool more = tile + 1 < tiles;
    if (kBuffers > 1 && more) numbers = request_queries(p, row + kQueries, kBuffers - 1 - now, memory);
    const int first = not_kept(warp()) * 16;
    // Later rows see later keys.
    const Span of_first = memory.limits.rows_seeing(first, memory.queries.count);
    const Span of_last = memory.limits.rows_seeing(first + 15, memory.queries.count);
    const bool all_see = row >= of_last.begin && row + kQueries <= of_first.end;
    const bool some_see = row + kQueries > of_first.begin && row < of_last.end;
#pragma unroll 1
    for (int query = 0; some_see && query < kQueries; query += 8 * Shared::kWide)
      add_queries<kOfKeys>(memory, now, query, first, row, all_see, static_cast<float>(p.scale), keys);
    if (kBuffers > 1 || !more) continue;
    __syncthreads();
    numbers = request_queries(p, row + kQueries, 0, memory);
  }
  cp_async_wait<0>();
  __syncthreads();
  if (keys.of_keys) finish_keys<scalar_t, kD / 8>(p, memory.work, parts, false, keys.grad_k, tiles_of_keys.kc);
  if (keys.of_values) finish_keys<scalar_t, kD / 8>(p, memory.work, parts, true, keys.grad_v, tiles_of_keys.vc);
}

template <typename scalar_t, int kD, bool kOfKeys = true, bool kOfValues = true, typename Parameters>
void key_gradients_of_width(const Parameters& p, const KeyParts<float>& parts, cudaStream_t stream) {
  launch({"compressed_attention_backward_keys_mma", key_tile_count(p, kRows) * parts.count, dim3(kThreads),
          sizeof(MmaKeyShared<scalar_t, kD, Parameters>), stream},
         mma_key_gradient_kernel<scalar_t, kD, kOfKeys, kOfValues, Parameters>, p, parts);
}

template <typename scalar_t, typename Parameters>
bool key_gradients_on_tensor_cores(const Parameters& p, const KeyParts<float>& parts, cudaStream_t stream) {
  return with_tile_columns(p.shape.D, [&](auto columns) {
    if constexpr (columns == 256) {
      // Registers hold one gradient of 16 keys.
      if (p.grad_k) key_gradients_of_width<scalar_t, 256, true, false>(p, parts, stream);
      if (p.grad_v) key_gradients_of_width<scalar_t, 256, false, true>(p, parts, stream);
    } else {
      key_gradients_of_width<scalar_t, columns>(p, parts, stream);
    }
  });
}

using Parts = KeyParts<float>;
template bool key_gradients_on_tensor_cores<__half>(const CompressedAttentionBackward&, const Parts&, cudaStream_t);
template bool key_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionBackward&, const Parts&,
                                                           cudaStream_t);
template bool key_gradients_on_tensor_cores<__half>(const CompressedAttentionWindowBackward&, const Parts&,
                                                    cudaStream_t);
template bool key_gradients_on_tensor_cores<__nv_bfloat16>(const CompressedAttentionWindowBackward&, const Parts&,
                                                           cudaStream_t);

}  // namespace compressed_cuda
}  // namespace memcheck
