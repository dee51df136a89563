#pragma once

#include "common/mma.cuh"
#include "linear_attention/linear_attention_scan_cuda.cuh"

// Tiles of scans on tensor cores, and how they are loaded. A chunk is 32 positions. A block of 4 warps has all of the
// depth and a tile of the width, which is all of it up to 128 columns. Each warp keeps a quarter of the tile's columns
// of the state in registers.
//
// Only values in memory may have the precision of 16 bits. Features and states are split: x = high + low, both
// bfloat16, 16 bits together. The product of two such sums is formed as high high + high low + low high. The errors
// average out over the depth. They may not average out in scores, and little may be left of the states of GradQ and
// GradK: those are split in three. bfloat16 has the range of float32, which float16 does not have: values of float16
// are also split, which is exact.
//
// With decays, a weight is a power of two whose exponent is a difference of sums of logarithms over the chunk, never
// above 0. The product of a whole chunk's decays multiplies the state once for each chunk, so its errors add up: it is
// formed in float64.

namespace memcheck {
namespace linear_cuda {

using bf16 = __nv_bfloat16;

constexpr int kChunk = 32;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowTiles = kChunk / 16;

// kFeatures: a and b are features and x is not (Output, GradV); otherwise x is (GradQ, GradK). kDecayed: with decays.
template <typename scalar_t, int kDepth_, int kWidth_, bool kFeatures_, bool kDecayed_>
struct Traits {
  using scalar = scalar_t;
  static constexpr int kDepth = kDepth_;  // with padding
  static constexpr int kWidth = kWidth_;  // of a block's tile
  static constexpr bool kFeatures = kFeatures_;
  static constexpr bool kDecayed = kDecayed_;
  // Whether blocks have all of the width. Then GradQ computes 1 / den, else Denominators do.
  static constexpr bool kWhole = kDepth == kWidth;
  static constexpr int kPlainParts = std::is_same_v<scalar_t, bf16> ? 1 : 2;
  static constexpr int kFactorParts = kFeatures ? 2 : kPlainParts;  // of a and b
  static constexpr int kValueParts = kFeatures ? kPlainParts : 2;   // of x
  // Of x as it joins the state. A weight takes all bits of float32.
  static constexpr int kJoiningParts = kDecayed ? 3 : kValueParts;
  // Of the state. Gradients of queries and keys are differences, which may cancel.
  static constexpr int kStateParts = kFeatures ? 2 : 3;
  static constexpr int kSlab = kWidth / kWarps;  // a warp's columns
  static constexpr int kOutTiles = kSlab / 8;
  static constexpr int kSlabTiles = kSlab / 16;
  static constexpr int kDepthTiles = kDepth / 8;
};

// Numbers as sums of so many parts, the high ones first.
template <int kParts, int kColumns>
struct SplitTile {
  HalfTile<bf16, kChunk, kColumns> part[kParts];
};

// The state on its way between registers and memory.
template <typename T>
struct StagedState {
  float matrix[T::kDepth][T::kWidth + 4];
};

// What a block does at once: rows and columns of a chunk, of one head. Query heads of a group follow one another: their
// rows see the same columns, or as columns they are seen by the same rows.
struct Step {
  Chunk chunk;
  int number;  // of the chunk
  int head, heads;
  int64_t row_head, column_head;
  bool takes_rows, takes_columns;     // in the first step of their head
  bool finishes_rows, joins_columns;  // in the last one
  bool fades;                         // where columns of the chunk first join: the state is multiplied by its decays
};

// Rows of which results are in shared memory.
struct UnstoredRows {
  int64_t head;
  Lines lines;
};

// The weights that decays give to the positions of a chunk.
template <bool kDecayed>
struct ChunkDecays {};
template <>
struct alignas(16) ChunkDecays<true> {
  float2 logs[kChunk];   // the sum of the logarithms to base 2 up to a position: a number, and what rounding left out
  float of_row[kChunk];  // between a row and the state before the chunk
  float of_column[kChunk];  // between a column and the state behind it
  float all;                // the product of all decays
  double kept;              // that of the chunks so far
};

template <typename T>
struct SharedTiles {
  using Rows = HalfTile<typename T::scalar, kChunk, T::kWidth>;
  struct Nothing {};

  union {
    struct {
      SplitTile<T::kFactorParts, T::kDepth> b;
      SplitTile<T::kValueParts, T::kWidth> x;
      union {
        SplitTile<T::kFactorParts, T::kDepth> a;
        Rows after_a;
      };
      float scores[kChunk][kChunk + 8];
    };
    StagedState<T> state;  // before and after the scan
  };
  std::conditional_t<T::kFeatures, Nothing, Rows> own_rows;
  alignas(16) float vector[T::kDepth];  // of the state: with a denominator: sum of b_j; with a bias: of (bias) x_j
  alignas(16) float sums[kWarps][T::kDepth];  // what each warp's lines of the chunk add to it
  float scale[kChunk];                        // 1 / den of queries
  float bias[kChunk];                         // their g.y
  float denominator[kChunk];
  float score_sums[kRowTiles][kChunk];  // of each 16 columns
  float row_sums[kWarps][kChunk][2];
  ChunkDecays<T::kDecayed> decays;
  // What the block computes. The state needs the registers.
  ScanWork work;
  ScanRanges ranges;
  Step step;
  UnstoredRows unstored;          // without features they are stored while the next ones are loaded
  int64_t first_column, columns;  // of the width
  int summed_chunks, chunks;      // chunks of columns alone, and all

  // g, q or k of the chunk's rows, then results before they are stored. With features, when a has been read.
  __device__ __forceinline__ Rows& rows() {
    if constexpr (T::kFeatures) return after_a;
    if constexpr (!T::kFeatures) return own_rows;
  }
};

// The thread's number, read where it is asked for: what is formed from it takes no registers of the whole scan.
__device__ __forceinline__ int thread_number() {
#if defined(MEMCHECK_HOST_CUDA)
  return static_cast<int>(threadIdx.x);
#else
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
#endif
}

// The packs of a thread in a tile of a chunk.
template <typename scalar_t, int kColumns>
struct ColumnPacks : TilePacks<scalar_t, kChunk, kColumns, kThreads> {
  __device__ __forceinline__ ColumnPacks() : ColumnPacks(thread_number()) {}
  __device__ __forceinline__ explicit ColumnPacks(int thread)
      : TilePacks<scalar_t, kChunk, kColumns, kThreads>{thread / ColumnPacks::kPerRow,
                                                        thread % ColumnPacks::kPerRow * ColumnPacks::kSize} {}
};

struct Place {
  int warp, lane;

  __device__ __forceinline__ Place() : Place(thread_number()) {}
  __device__ __forceinline__ explicit Place(int thread) : warp(thread / 32), lane(thread % 32) {}
};

// The state, transposed: [column][depth].
template <typename T>
using State = WarpTile<T::kSlabTiles, T::kDepthTiles>;

// The results of a chunk.
template <typename T>
using Out = WarpTile<kRowTiles, T::kOutTiles>;

// Two values of this thread's results in a tile of rows: those of tile n of its warp's columns.
template <typename T>
__device__ __forceinline__ typename T::scalar* pair_at(typename SharedTiles<T>::Rows& rows, const Place& at, int row,
                                                       int n) {
  return rows.pack(row, T::kOutTiles * at.warp + n) + fragment_column(0, at.lane);
}

__device__ __forceinline__ float low_half(uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Splits two numbers into sums of bfloat16, the high parts first.
template <int kParts>
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = rounded_pair(bf16(), x, y);
    if (part == kParts - 1) break;
    x -= low_half(parts[part]);
    y -= high_half(parts[part]);
  }
}

// ---- from memory to tiles. Lines are passed by value: s.step would be read again after every store.

// Begins to load columns [first_column, first_column + columns) of a chunk of x; zeros where nothing exists. They have
// arrived for this thread after cp_async_wait.
template <typename scalar_t, int kColumns>
__device__ __forceinline__ void request_lines(const Strided<4>& x, bool in_packs, int64_t b, int64_t head, Lines lines,
                                              int64_t first_column, int64_t columns,
                                              HalfTile<scalar_t, kChunk, kColumns>& tile) {
  const ColumnPacks<scalar_t, kColumns> packs;
  const scalar_t* from = x ? x.at<scalar_t>(b, head, lines.first, first_column + packs.column) : nullptr;
  // The loop of request_tile, written out: with D = 128 the kernels use every register, and in any other form they
  // spill more of them.
#pragma unroll 1
  for (int i = 0; i < packs.kCount; ++i) {
    const int line = packs.row + i * packs.kStep;
    scalar_t* to = tile.pack(line, packs.column / 8);
    if (in_packs) {
      const bool exists = x && lines.has(line) && packs.column < columns;
      cp_async_16(to, exists ? from + line * x.stride[2] : static_cast<const scalar_t*>(x.data), exists);
    } else {
      unroll<8>([&](int j) {
        const bool exists = x && lines.has(line) && packs.column + j < columns;
        to[j] = exists ? from[line * x.stride[2] + j * x.stride[3]] : from_acc<scalar_t>(0.0f);
      });
    }
  }
}

// Begins to load a chunk of a factor into the place of its high parts.
template <typename T, int kParts, int kColumns>
__device__ __forceinline__ void request_lines(const ScanFactor& factor, int64_t b, int64_t head, Lines lines,
                                              int64_t first_column, int64_t columns,
                                              SplitTile<kParts, kColumns>& tile) {
  request_lines(factor.x, factor.in_packs, b, head, lines, first_column, columns,
                reinterpret_cast<HalfTile<typename T::scalar, kChunk, kColumns>&>(tile.part[0]));
}

constexpr double kLog2e = 1.44269504088896341;
__device__ __forceinline__ float fast_exp(float x) {
  return exp2_approximate(x * static_cast<float>(kLog2e));
}

// phi(x) and phi'(x)
__device__ __forceinline__ float fast_feature(FeatureMap map, float x) {
  return map == FeatureMap::Identity ? x : elu_plus_one(x, fast_exp(x));
}
__device__ __forceinline__ float fast_derivative(FeatureMap map, float x) {
  return map == FeatureMap::Identity ? 1.0f : elu_plus_one_derivative(x, fast_exp(x));
}

// ---- decays

// Two to this power is 0 in float32. In place of a logarithm of -inf, whose difference with another is no number.
constexpr double kLowestExponent = -1024;

// One warp forms the weights of a chunk.
template <typename T>
__device__ __forceinline__ void weigh_chunk(const Scan& scan, SharedTiles<T>& s) {
  const Place at;
  ChunkDecays<true>& to = s.decays;
  const int64_t t = s.step.chunk.time + at.lane;
  const Range& keys = s.work.sequence.keys;
  const bool exists = t < keys.end - keys.begin;
  double sum = 0;
  double product = 1;
  if (exists) {
    const float given = *scan.decay.given.at<float>(s.work.b(), s.work.key_head, keys.begin + t);
    product = scan.decay.decay_of(given);
    sum = scan.decay.logarithms ? fmax(given * kLog2e, kLowestExponent) : log2f(given);
  }
#pragma unroll
  for (int distance = 1; distance < kChunk; distance *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, sum, distance);
    if (at.lane >= distance) sum += before;
    product *= __shfl_xor_sync(0xffffffffu, product, distance);
  }
  const double all = __shfl_sync(0xffffffffu, sum, kChunk - 1);
  const float high = static_cast<float>(sum);
  to.logs[at.lane] = make_float2(high, static_cast<float>(sum - high));
  const float from_begin = exp2_approximate(high);
  const float to_end = exp2_approximate(static_cast<float>(all - sum));
  to.of_row[at.lane] = scan.rows_are_queries() ? from_begin : to_end;
  to.of_column[at.lane] = scan.rows_are_queries() ? to_end : from_begin;
  if (at.lane > 0) return;
  to.all = static_cast<float>(product);
  to.kept *= product;
}

// The product of the decays between two positions of a chunk.
template <typename T>
__device__ __forceinline__ float weight_between(const SharedTiles<T>& s, int query, int key) {
  const float2 up_to_query = s.decays.logs[query], up_to_key = s.decays.logs[key];
  return exp2_approximate((up_to_query.x - up_to_key.x) + (up_to_query.y - up_to_key.y));
}

// x as a row reads it from the state, and as a column adds it: times their weight.
template <typename T>
__device__ __forceinline__ float weighted_by_row(const SharedTiles<T>& s, int row, float x) {
  if constexpr (T::kDecayed) return x * s.decays.of_row[row];
  return x;
}

template <typename T>
__device__ __forceinline__ float weighted_by_column(const SharedTiles<T>& s, int column, float x) {
  if constexpr (T::kDecayed) return x * s.decays.of_column[column];
  return x;
}

// ---- splitting

// Replaces what this thread loaded by phi of it, times its scale, in parts. Calls add(line, values) for each pack.
template <typename T, int kParts, int kColumns, typename Add>
__device__ __forceinline__ void split_factor(const ScanFactor& factor, Lines lines, int64_t columns, const float* scale,
                                             SplitTile<kParts, kColumns>& tile, const Add& add) {
  using scalar_t = typename T::scalar;
  const ColumnPacks<scalar_t, kColumns> packs;
  const int column = packs.column;
#pragma unroll 1
  for (int i = 0; i < packs.kCount; ++i) {
    const int line = packs.row + i * packs.kStep;
    const auto pack = load_pack(reinterpret_cast<const scalar_t*>(tile.part[0].pack(line, column / 8)));
    const float weight = factor.scaled ? scale[line] : 1.0f;
    float values[8];
    Pack<uint32_t> parts[kParts];
    unroll<8>([&](int j) {
      const float x = to_acc(pack.values[j]);
      const bool exists = lines.has(line) && column + j < columns && factor.x;
      values[j] = exists ? (factor.mapped ? fast_feature(FeatureMap::EluPlusOne, x) : x) * weight : 0.0f;
    });
    unroll<4>([&](int j) {
      uint32_t pair[kParts];
      split(values[2 * j], values[2 * j + 1], pair);
      unroll<kParts>([&](int part) { parts[part].values[j] = pair[part]; });
      // Sums are formed from the values that tensor cores read, so that equal terms cancel in the end.
      static_assert(kParts == 2, "one part needs no splitting");
      values[2 * j] = low_half(pair[0]) + low_half(pair[1]);
      values[2 * j + 1] = high_half(pair[0]) + high_half(pair[1]);
    });
    unroll<kParts>([&](int part) {
      store_pack(parts[part], reinterpret_cast<uint32_t*>(tile.part[part].pack(line, column / 8)));
    });
    add(line, values);
  }
}

// Stores the sums of a thread's 8 columns over all lines of its warp; one of the lanes with the same columns stores
// them.
template <typename Packs, int kColumns>
__device__ __forceinline__ void store_column_sums(float (&sums)[8], float (&to)[kWarps][kColumns]) {
  const Packs packs;
  const Place at;
  unroll<8>([&](int j) {
#pragma unroll
    for (int distance = packs.kPerRow; distance < 32; distance *= 2)
      sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
  });
  if (at.lane >= packs.kPerRow) return;
#pragma unroll
  for (int j = 0; j < 8; j += 4)
    store_pack(Pack<float, 4>{sums[j], sums[j + 1], sums[j + 2], sums[j + 3]}, &to[at.warp][packs.column + j]);
}

// Splits a. With a denominator also forms each row's product with the sum of b_j so far. One part alone stays as it was
// loaded.
template <typename T>
__device__ __forceinline__ void split_a(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kFactorParts == 2) {
    const ColumnPacks<typename T::scalar, T::kDepth> packs;
    Pack<float, 4> so_far[2] = {};
    if (scan.has_denominator()) {
      so_far[0] = load_pack<4>(s.vector + packs.column);
      so_far[1] = load_pack<4>(s.vector + packs.column + 4);
    }
    split_factor<T>(scan.a, chunk.rows, scan.depth, nullptr, s.a, [&](int line, const float(&values)[8]) {
      if (!scan.has_denominator()) return;
      float sum = 0.0f;
      unroll<8>([&](int j) { sum += values[j] * so_far[j / 4].values[j % 4]; });
#pragma unroll
      for (int distance = packs.kPerRow / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (packs.column == 0) s.denominator[line] = sum;
    });
  }
}

template <typename T>
__device__ __forceinline__ void split_b(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kFactorParts == 2) {
    float sums[8] = {};
    split_factor<T>(scan.b, chunk.columns, scan.depth, s.scale, s.b, [&](int line, const float(&values)[8]) {
      unroll<8>([&](int j) { sums[j] += weighted_by_column(s, line, values[j]); });
    });
    if (scan.has_denominator()) store_column_sums<ColumnPacks<typename T::scalar, T::kDepth>>(sums, s.sums);
  }
}

template <typename T>
__device__ __forceinline__ void split_x(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kValueParts == 2) {
    float sums[8] = {};
    split_factor<T>(scan.x, chunk.columns, s.columns, s.scale, s.x, [&](int line, const float(&values)[8]) {
      const float weight = weighted_by_column(s, line, scan.kind == ScanKind::GradK ? s.bias[line] : 1.0f);
      unroll<8>([&](int j) { sums[j] += values[j] * weight; });
    });
    if (scan.has_bias()) store_column_sums<ColumnPacks<typename T::scalar, T::kWidth>>(sums, s.sums);
  }
}

// Loads 1 / den and g.y of queries; 0 where none exist. Not normalized: den is 1, and there is no bias.
template <typename T>
__device__ __forceinline__ void load_query_rows(const Scan& scan, int64_t b, int64_t head, Lines queries,
                                                SharedTiles<T>& s) {
  const LinearAttentionShape& n = scan.shape;
  const int line = thread_number();
  if (line >= kChunk) return;
  if (!n.normalize) {
    s.scale[line] = 1.0f;
    s.bias[line] = 0.0f;
    return;
  }
  const int64_t row = query_row(n, b, head) + queries.first + line;
  float product = 0.0f;
  if (queries.has(line))
    for (int64_t part = 0; part < scan.query_parts; ++part) product += scan.product_at<float>(part, row);
  s.scale[line] = queries.has(line) ? scan.inverse_at<float>(row) : 0.0f;
  s.bias[line] = product;
}

}  // namespace linear_cuda
}  // namespace memcheck
