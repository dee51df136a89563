#include "common/ptx.cuh"
#include "linear_attention/linear_attention_scan.cuh"

// Scans of 16-bit types on tensor cores. A chunk is 64 positions, and a block of 4 warps has all of the width, a
// quarter for each warp, whose part of the state stays in its registers.
//
// Only what is in memory may have the precision of 16 bits. Features and states are split: x = high + low, both
// bfloat16, 16 bits together, and of a product of two such sums high high + high low + low high is formed. The errors
// average out over the depth. Where little may average out, scores, or be left, states of GradQ and GradK, they are
// split in three. bfloat16 has the range of float32, which float16 has not: values of float16 are split too, and that
// is exact.

namespace memcheck {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kChunk = 64;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowTiles = kChunk / 16;

// kFeatures: a and b are features and x is not, of Output and GradV; else x is, of GradQ and GradK.
template <typename scalar_t, int kSize_, bool kFeatures_>
struct Traits {
  using scalar = scalar_t;
  static constexpr int kSize = kSize_;  // depth and width, with padding
  static constexpr bool kFeatures = kFeatures_;
  static constexpr int kPlainParts = std::is_same_v<scalar_t, bf16> ? 1 : 2;
  static constexpr int kFactorParts = kFeatures ? 2 : kPlainParts;  // of a and b
  static constexpr int kValueParts = kFeatures ? kPlainParts : 2;   // of x
  // Of the state. Gradients of queries and keys are differences, of which little may be left.
  static constexpr int kStateParts = kFeatures ? 2 : 3;
  static constexpr int kStride = kSize + 8;     // rows of a tile begin in different banks
  static constexpr int kSlab = kSize / kWarps;  // a warp's columns
  static constexpr int kOutTiles = kSlab / 8;
  static constexpr int kSlabTiles = kSlab / 16;
  static constexpr int kDepthTiles = kSize / 8;
  static constexpr int kPacksAlong = kSize / 8;  // 8 elements each
  static constexpr int kLinesApart = kThreads / kPacksAlong;
  static constexpr int kPacks = kChunk / kLinesApart;  // of a thread, all in the same columns
};

template <int kParts, int kStride>
struct alignas(16) SplitTile {
  bf16 part[kParts][kChunk][kStride];
};

template <typename T>
struct SharedTiles {
  static constexpr int kScoresStride = kChunk + 8;
  static constexpr int kRunningStride = T::kSize + 8;
  using Line = typename T::scalar[T::kStride];

  SplitTile<T::kFactorParts, T::kStride> b;
  SplitTile<T::kValueParts, T::kStride> x;
  union {
    struct {
      SplitTile<T::kFactorParts, T::kStride> a;
      union {
        float scores[kChunk][kScoresStride];
        Line staged[kChunk];  // with features: results before they are stored
      };
    };
    float running[kChunk][kRunningStride];  // GradQ: z of every row, when scores are of no more use
  };
  alignas(16) Line last[T::kFeatures ? 1 : kChunk];  // without features: q or k, then results before they are stored
  float vector[T::kSize];                            // of the state: Output: sum of b_j; GradQ, GradK: of (bias) x_j
  float sums[kWarps][T::kSize];                      // what the chunk adds to it
  float scale[kChunk];                               // 1 / den of the queries that are columns
  float bias[kChunk];                                // their g.y
  float denominator[kChunk];
  float row_sums[kWarps][kChunk][2];
  // What the block is at. In registers it would be in the way of the state.
  ScanWork work;
  Walk walk;
  Chunk chunk;

  __device__ __forceinline__ Line* results() { return T::kFeatures ? staged : last; }
};

struct Place {
  int warp, lane;
  int group;  // lane / 4: the row of a fragment
  int pair;   // 2 (lane % 4): its columns

  __device__ __forceinline__ Place()
      : warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        group(lane / 4),
        pair(lane % 4 * 2) {}
};

template <typename T>
struct State {
  float part[T::kSlabTiles][T::kDepthTiles][4];  // transposed: [column][depth] as mma's d
};

template <typename T>
struct Out {
  float part[kRowTiles][T::kOutTiles][4];
};

__device__ __forceinline__ uint32_t packed(float low_half, float high_half) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low_half, high_half);
  uint32_t bits;
  __builtin_memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ __forceinline__ float low_half(uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Two numbers, each as a sum of bfloat16, the high parts first.
template <int kParts>
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = packed(x, y);
    x -= low_half(parts[part]);
    y -= high_half(parts[part]);
  }
}

// ---- fragments

// Rows [row, row + 16) and columns [column, column + 16): as a of mma; transposed, two b of the columns.
template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_along_rows(uint32_t (&r)[4], const bf16 (&tile)[kChunk][kStride], int row,
                                                int column, int lane) {
  const bf16* from = &tile[row + lane % 16][column + lane / 16 * 8];
  if constexpr (kTransposed)
    ldmatrix_x4_transposed(r, from);
  else
    ldmatrix_x4(r, from);
}

// The same with its quarters in the other order: as two b of the rows; transposed, a of the columns.
template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_along_columns(uint32_t (&r)[4], const bf16 (&tile)[kChunk][kStride], int row,
                                                   int column, int lane) {
  const bf16* from = &tile[row + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * 8];
  if constexpr (kTransposed)
    ldmatrix_x4_transposed(r, from);
  else
    ldmatrix_x4(r, from);
}

// d += a b of split factors, but for products as small as what they lack; b is half of what was loaded.
template <int kA, int kB>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4],
                                         int half) {
#pragma unroll
  for (int i = 0; i < kA; ++i)
#pragma unroll
    for (int j = 0; j < kB; ++j) {
      if (i + j >= (kA > kB ? kA : kB)) continue;
      const uint32_t of_b[2] = {b[j][2 * half], b[j][2 * half + 1]};
      mma_m16n8k16<bf16>(d, a[i], of_b);
    }
}

// ---- from memory to tiles

template <typename scalar_t>
struct alignas(16) Pack {
  scalar_t v[8];
};

struct alignas(16) Words {
  uint32_t v[4];
};

template <typename T>
__device__ __forceinline__ int first_line() {
  return static_cast<int>(threadIdx.x) / T::kPacksAlong;
}

template <typename T>
__device__ __forceinline__ int first_column() {
  return static_cast<int>(threadIdx.x) % T::kPacksAlong * 8;
}

// A chunk of x as it is, 0 where there is nothing, into the tile: there for this thread once it has waited.
template <typename T>
__device__ __forceinline__ void ask_for(const Strided<4>& x, bool vectors, int64_t b, int64_t head, const Lines& lines,
                                        int64_t columns, typename T::scalar (*tile)[T::kStride]) {
  using scalar_t = typename T::scalar;
  const int column = first_column<T>();
  const scalar_t* from = x ? x.at<scalar_t>(b, head, lines.first, column) : nullptr;
#pragma unroll 2
  for (int i = 0; i < T::kPacks; ++i) {
    const int line = first_line<T>() + i * T::kLinesApart;
    scalar_t* to = &tile[line][column];
    if (vectors) {
      const bool there = x && lines.has(line) && column < columns;
      cp_async_16(to, there ? from + line * x.stride[2] : static_cast<const scalar_t*>(x.data), there);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool there = x && lines.has(line) && column + j < columns;
        to[j] = there ? from[line * x.stride[2] + j * x.stride[3]] : from_acc<scalar_t>(0.0f);
      }
    }
  }
}

// Into the place of its high parts.
template <typename T, int kParts>
__device__ __forceinline__ void ask_for(const ScanFactor& factor, int64_t b, int64_t head, const Lines& lines,
                                        int64_t columns, SplitTile<kParts, T::kStride>& tile) {
  ask_for<T>(factor.x, factor.vectors, b, head, lines, columns,
             reinterpret_cast<typename T::scalar(*)[T::kStride]>(tile.part[0]));
}

__device__ __forceinline__ float fast_exp(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  return exp2_approximate(x * kLog2e);
}

__device__ __forceinline__ float fast_feature(float x) {
  return x > 0.0f ? x + 1.0f : fast_exp(x);
}

__device__ __forceinline__ float fast_slope(FeatureMap map, float x) {
  return map == FeatureMap::Identity || x > 0.0f ? 1.0f : fast_exp(x);
}

// What a thread asked for becomes phi of it, times its scale, in parts. add(line, values) sees each pack of 8.
template <typename T, int kParts, typename Add>
__device__ __forceinline__ void place(const ScanFactor& factor, const Lines& lines, int64_t columns, const float* scale,
                                      SplitTile<kParts, T::kStride>& tile, const Add& add) {
  using scalar_t = typename T::scalar;
  const int column = first_column<T>();
#pragma unroll 1
  for (int i = 0; i < T::kPacks; ++i) {
    const int line = first_line<T>() + i * T::kLinesApart;
    const Pack<scalar_t> pack = *reinterpret_cast<const Pack<scalar_t>*>(&tile.part[0][line][column]);
    const float weight = factor.scaled ? scale[line] : 1.0f;
    float values[8];
    Words parts[kParts];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = to_acc(pack.v[j]);
      const bool there = lines.has(line) && column + j < columns && factor.x;
      values[j] = there ? (factor.mapped ? fast_feature(x) : x) * weight : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pair[kParts];
      split(values[2 * j], values[2 * j + 1], pair);
#pragma unroll
      for (int part = 0; part < kParts; ++part) parts[part].v[j] = pair[part];
      // Sums are of what tensor cores see, so that what cancels in the end does so.
      static_assert(kParts == 2, "one part is as it came");
      values[2 * j] = low_half(pair[0]) + low_half(pair[1]);
      values[2 * j + 1] = high_half(pair[0]) + high_half(pair[1]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) *reinterpret_cast<Words*>(&tile.part[part][line][column]) = parts[part];
    add(line, values);
  }
}

// The sums of a thread's 8 columns over all lines of its warp, of which one lane of those with the same columns tells.
template <typename T>
__device__ __forceinline__ void tell_column_sums(float (&sums)[8], float (&to)[kWarps][T::kSize]) {
  const Place at;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int distance = T::kPacksAlong; distance < 32; distance *= 2)
      sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
    if (at.lane < T::kPacksAlong) to[at.warp][first_column<T>() + j] = sums[j];
  }
}

// a, and of Output each row's product with the sum of b_j so far. One part alone is as it came.
template <typename T>
__device__ __forceinline__ void place_a(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kFactorParts == 2) {
    const int column = first_column<T>();
    place<T>(scan.a, chunk.rows, scan.depth, nullptr, s.a, [&](int line, const float(&values)[8]) {
      if (scan.kind != ScanKind::Output) return;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += values[j] * s.vector[column + j];
#pragma unroll
      for (int distance = T::kPacksAlong / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (column == 0) s.denominator[line] = sum;
    });
  }
}

template <typename T>
__device__ __forceinline__ void place_b(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kFactorParts == 2) {
    float sums[8] = {};
    place<T>(scan.b, chunk.columns, scan.depth, s.scale, s.b, [&](int, const float(&values)[8]) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += values[j];
    });
    if (scan.kind == ScanKind::Output) tell_column_sums<T>(sums, s.sums);
  }
}

template <typename T>
__device__ __forceinline__ void place_x(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  if constexpr (T::kValueParts == 2) {
    float sums[8] = {};
    place<T>(scan.x, chunk.columns, scan.width, s.scale, s.x, [&](int line, const float(&values)[8]) {
      const float weight = scan.kind == ScanKind::GradK ? s.bias[line] : 1.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += values[j] * weight;
    });
    if (scan.has_bias()) tell_column_sums<T>(sums, s.sums);
  }
}

// 1 / den and g.y of the queries that are columns, 0 where there is none.
template <typename T>
__device__ __forceinline__ void load_query_rows(const Scan& scan, int64_t b, int64_t head, const Lines& queries,
                                                SharedTiles<T>& s) {
  const int line = static_cast<int>(threadIdx.x);
  if (scan.rows_are_queries() || line >= kChunk) return;
  const int64_t at = query_row(scan.shape, b, head) + queries.first + line;
  s.scale[line] = queries.has(line) ? static_cast<const float*>(scan.inverse)[at] : 0.0f;
  s.bias[line] = queries.has(line) ? static_cast<const float*>(scan.products)[at] : 0.0f;
}

// ---- products

// out += a times the state.
template <typename T>
__device__ __forceinline__ void read_state(const SharedTiles<T>& s, const State<T>& state, Out<T>& out) {
  const Place at;
#pragma unroll
  for (int k = 0; k < T::kSize / 16; ++k) {
    uint32_t b[T::kSlabTiles][T::kStateParts][4];  // [column tile of 16][part][two b]
#pragma unroll
    for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&from)[4] = state.part[tile][2 * k + r % 2];
        uint32_t parts[T::kStateParts];
        split(from[r / 2 * 2], from[r / 2 * 2 + 1], parts);
#pragma unroll
        for (int part = 0; part < T::kStateParts; ++part) b[tile][part][r] = parts[part];
      }
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
      uint32_t a[T::kFactorParts][4];
#pragma unroll
      for (int part = 0; part < T::kFactorParts; ++part)
        load_along_rows<false>(a[part], s.a.part[part], 16 * row, 16 * k, at.lane);
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) multiply(out.part[row][tile], a, b[tile / 2], tile % 2);
    }
  }
}

// Scores of a warp's 16 rows, 0 where a row does not see a column, into their tile.
template <typename T>
__device__ __forceinline__ void form_scores(const Scan& scan, const Chunk& chunk, SharedTiles<T>& s) {
  const Place at;
  const bool forwards = scan.rows_are_queries();
  float scores[kChunk / 8][4] = {};
#pragma unroll 1
  for (int k = 0; k < T::kSize / 16; ++k) {
    uint32_t a[T::kFactorParts][4];
#pragma unroll
    for (int part = 0; part < T::kFactorParts; ++part)
      load_along_rows<false>(a[part], s.a.part[part], 16 * at.warp, 16 * k, at.lane);
#pragma unroll
    for (int tile = 0; tile < kChunk / 16; ++tile) {
      if (forwards ? tile > at.warp : tile < at.warp) continue;
      uint32_t b[T::kFactorParts][4];
#pragma unroll
      for (int part = 0; part < T::kFactorParts; ++part)
        load_along_columns<false>(b[part], s.b.part[part], 16 * tile, 16 * k, at.lane);
      multiply(scores[2 * tile], a, b, 0);
      multiply(scores[2 * tile + 1], a, b, 1);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * at.warp + at.group + 8 * half;
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kChunk / 8; ++tile) {
      float2 pair;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = 8 * tile + at.pair + j;
        const bool sees = (forwards ? column <= row : column >= row) && chunk.columns.has(column);
        const float bias = scan.kind == ScanKind::GradK ? s.bias[column] : 0.0f;
        const float value = sees ? scores[tile][2 * half + j] - bias : 0.0f;
        (j == 0 ? pair.x : pair.y) = value;
        sum += value;
      }
      *reinterpret_cast<float2*>(&s.scores[row][8 * tile + at.pair]) = pair;
    }
    if (scan.kind != ScanKind::Output) continue;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (at.pair == 0) s.denominator[row] += sum;
  }
}

// 16 rows and columns of scores as a of mma. One score may be all that a row has, so these keep the precision of float.
template <typename T>
__device__ __forceinline__ void load_scores(uint32_t (&a)[3][4], const SharedTiles<T>& s, int row, int column) {
  const Place at;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair =
        *reinterpret_cast<const float2*>(&s.scores[row + at.group + i % 2 * 8][column + at.pair + i / 2 * 8]);
    uint32_t parts[3];
    split(pair.x, pair.y, parts);
#pragma unroll
    for (int part = 0; part < 3; ++part) a[part][i] = parts[part];
  }
}

// out += scores x, of the columns that some row of a tile sees.
template <typename T>
__device__ __forceinline__ void read_chunk(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const bool forwards = scan.rows_are_queries();
#pragma unroll 1
  for (int k = 0; k < kChunk / 16; ++k) {
    uint32_t b[T::kSlabTiles][T::kValueParts][4];
#pragma unroll
    for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
      for (int part = 0; part < T::kValueParts; ++part)
        load_along_rows<true>(b[tile][part], s.x.part[part], 16 * k, T::kSlab * at.warp + 16 * tile, at.lane);
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
      if (forwards ? k > row : k < row) continue;
      uint32_t a[3][4];
      load_scores(a, s, 16 * row, 16 * k);
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) multiply(out.part[row][tile], a, b[tile / 2], tile % 2);
    }
  }
}

// The state += b^T x, the sum over the chunk formed first: tensor cores round sums towards 0.
template <typename T>
__device__ __forceinline__ void add_to_state(const SharedTiles<T>& s, State<T>& state) {
  const Place at;
#pragma unroll
  for (int depth = 0; depth < T::kSize / 16; ++depth) {
    float sum[T::kSlabTiles][2][4] = {};
#pragma unroll 1
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t b[T::kFactorParts][4];
#pragma unroll
      for (int part = 0; part < T::kFactorParts; ++part)
        load_along_rows<true>(b[part], s.b.part[part], 16 * k, 16 * depth, at.lane);
#pragma unroll
      for (int tile = 0; tile < T::kSlabTiles; ++tile) {
        uint32_t a[T::kValueParts][4];
#pragma unroll
        for (int part = 0; part < T::kValueParts; ++part)
          load_along_columns<true>(a[part], s.x.part[part], 16 * k, T::kSlab * at.warp + 16 * tile, at.lane);
        multiply(sum[tile][0], a, b, 0);
        multiply(sum[tile][1], a, b, 1);
      }
    }
#pragma unroll
    for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.part[tile][2 * depth + half][i] += sum[tile][half][i];
  }
}

// ---- what becomes of the sums

// change(of_row, row, column, x, y) of the pairs of results that this thread has, where of_row = start(row).
template <typename T, typename Start, typename Change>
__device__ __forceinline__ void for_pairs(Out<T>& out, const Start& start, const Change& change) {
  const Place at;
#pragma unroll
  for (int tile_row = 0; tile_row < kRowTiles; ++tile_row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * tile_row + at.group + 8 * half;
      const float of_row = start(row);
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile)
        change(of_row, row, T::kSlab * at.warp + 8 * tile + at.pair, out.part[tile_row][tile][2 * half],
               out.part[tile_row][tile][2 * half + 1]);
    }
}

template <typename scalar_t>
__device__ __forceinline__ void store_pair(scalar_t* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = pack_pair(from_acc<scalar_t>(x), from_acc<scalar_t>(y));
}

// z of every row: of the state, and of the columns of the chunk that it sees.
template <typename T>
__device__ __forceinline__ void run_sums(const Chunk& chunk, SharedTiles<T>& s) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= T::kSize) return;
  float sum = s.vector[column];
#pragma unroll 8
  for (int line = 0; line < kChunk; ++line) {
    float x = 0.0f;
    if (chunk.has_columns)
      x = __bfloat162float(s.x.part[0][line][column]) + __bfloat162float(s.x.part[1][line][column]);
    sum += x;
    s.running[line][column] = sum;
  }
}

// The sum over the four lanes that have a row of a fragment.
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Finite, so that nothing times 1 / den stays nothing where den is infinite.
__device__ __forceinline__ float share_scale(float denominator) {
  return fminf(fmaxf(1.0f, fabsf(denominator)), 0x1p126f);
}

// GradQ: 1 / den = phi(q).z + eps and g.y = phi(q).(sum so far) / den, from which the gradient follows. phi(q).(sum so
// far) may overflow where g.y does not: a warp forms its share of it over its share of den, where that is above 1.
template <typename T>
__device__ __forceinline__ void finish_queries(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                               SharedTiles<T>& s, Out<T>& out) {
  using scalar_t = typename T::scalar;
  const Place at;
  const FeatureMap map = scan.shape.feature_map;
  const auto phi = [&](float x) { return map == FeatureMap::Identity ? x : fast_feature(x); };
#pragma unroll
  for (int row = 0; row < kRowTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * row + at.group + 8 * half;
      float q[T::kOutTiles][2];
      float denominator = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = T::kSlab * at.warp + 8 * tile + at.pair + j;
          q[tile][j] = column < scan.width ? phi(to_acc(s.last[line][column])) : 0.0f;
          denominator += q[tile][j] * s.running[line][column];
        }
      denominator = sum_of_four(denominator);
      const float scale = 1.0f / share_scale(denominator);
      float product = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) product += q[tile][j] * (out.part[row][tile][2 * half + j] * scale);
      product = sum_of_four(product);
      if (at.pair == 0) {
        s.row_sums[at.warp][line][0] = denominator;
        s.row_sums[at.warp][line][1] = product;
      }
    }
  __syncthreads();
  const int64_t first = query_row(scan.shape, work.b, work.row_head) + chunk.rows.first;
#pragma unroll
  for (int row = 0; row < kRowTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * row + at.group + 8 * half;
      float denominator = static_cast<float>(scan.eps);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) denominator += s.row_sums[warp][line][0];
      const float inverse = 1.0f / denominator;
      float product = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp)
        product += s.row_sums[warp][line][1] * (share_scale(s.row_sums[warp][line][0]) * inverse);
      if (at.warp == 0 && at.pair == 0 && chunk.rows.has(line)) {
        static_cast<float*>(scan.inverse)[first + line] = inverse;
        static_cast<float*>(scan.products)[first + line] = product;
      }
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const int column = T::kSlab * at.warp + 8 * tile + at.pair;
        scalar_t* to = &s.last[line][column];
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          value[j] = (out.part[row][tile][2 * half + j] - product * s.running[line][column + j]) * inverse *
                     fast_slope(map, to_acc(to[j]));
        store_pair(to, value[0], value[1]);
      }
    }
}

template <typename T>
__device__ __forceinline__ void finish(const Scan& scan, const ScanWork& work, const Chunk& chunk, SharedTiles<T>& s,
                                       Out<T>& out) {
  const auto scale = [&](int row) {
    return scan.kind == ScanKind::Output ? 1.0f / (s.denominator[row] + static_cast<float>(scan.eps)) : 1.0f;
  };
  if constexpr (T::kFeatures) {
    for_pairs<T>(out, scale, [&](float scale, int row, int column, float x, float y) {
      store_pair(&s.results()[row][column], x * scale, y * scale);
    });
  } else if (scan.kind == ScanKind::GradQ) {
    run_sums(chunk, s);
    __syncthreads();
    finish_queries(scan, work, chunk, s, out);
  } else {
    for_pairs<T>(out, scale, [&](float, int row, int column, float x, float y) {
      auto* to = &s.last[row][column];
      const FeatureMap map = scan.shape.feature_map;
      store_pair(to, x * fast_slope(map, to_acc(to[0])), y * fast_slope(map, to_acc(to[1])));
    });
  }
  __syncthreads();
}

// The results of rows that exist, to where they belong.
template <typename T>
__device__ __forceinline__ void store_results(const Scan& scan, const ScanWork& work, const Lines& rows,
                                              SharedTiles<T>& s) {
  using scalar_t = typename T::scalar;
  const int column = first_column<T>();
  if (!scan.out || column >= scan.width) return;
  scalar_t* to = scan.out.at<scalar_t>(work.b, work.row_head, rows.first, column);
#pragma unroll 2
  for (int i = 0; i < T::kPacks; ++i) {
    const int line = first_line<T>() + i * T::kLinesApart;
    if (!rows.has(line)) continue;
    const scalar_t* from = &s.results()[line][column];
    if (scan.out_vectors) {
      *reinterpret_cast<uint4*>(to + line * scan.out.stride[2]) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < scan.width) to[line * scan.out.stride[2] + j * scan.out.stride[3]] = from[j];
    }
  }
}

// ---- a chunk

// GradK: the sum of bias_j x_j, which is the same for all rows.
template <typename T>
__device__ __forceinline__ void start_out(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  const bool biased = scan.kind == ScanKind::GradK;
  const auto nothing = [](int) { return 0.0f; };
  for_pairs<T>(out, nothing, [&](float, int, int column, float& x, float& y) {
    x = biased ? -s.vector[column] : 0.0f;
    y = biased ? -s.vector[column + 1] : 0.0f;
  });
}

// The tiles of a head of columns; with the first head those of rows, if they are asked for.
template <typename T>
__device__ __forceinline__ void load_head(const Scan& scan, int head, bool with_rows, SharedTiles<T>& s) {
  const ScanWork& work = s.work;
  const Chunk& chunk = s.chunk;
  const int64_t column_head = work.first_column_head + head;
  if (with_rows) ask_for<T>(scan.a, work.b, work.row_head, chunk.rows, scan.depth, s.a);
  if (chunk.has_columns) {
    ask_for<T>(scan.b, work.b, column_head, chunk.columns, scan.depth, s.b);
    ask_for<T>(scan.x, work.b, column_head, chunk.columns, scan.width, s.x);
    load_query_rows(scan, work.b, column_head, chunk.columns, s);
  }
  if constexpr (!T::kFeatures)
    if (with_rows) ask_for<T>(scan.last, scan.last_vectors, work.b, work.row_head, chunk.rows, scan.width, s.last);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (with_rows) place_a(scan, chunk, s);
  if (chunk.has_columns) {
    place_b(scan, chunk, s);
    place_x(scan, chunk, s);
  }
  __syncthreads();
}

// Of the columns of one head what rows get of the chunk; the first head brings what they get of the state.
template <typename T>
__device__ __forceinline__ void attend(const Scan& scan, bool first, const State<T>& state, Out<T>& out,
                                       SharedTiles<T>& s) {
  if (s.chunk.has_columns) form_scores(scan, s.chunk, s);
  if (first) {
    start_out(scan, s, out);
    read_state(s, state, out);
  }
  __syncthreads();
  if (s.chunk.has_columns) read_chunk(scan, s, out);
  __syncthreads();
}

// The columns of a head that has been read join the state.
template <typename T>
__device__ __forceinline__ void join_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  add_to_state(s, state);
  const int column = static_cast<int>(threadIdx.x);
  if (column < T::kSize && (scan.has_bias() || scan.kind == ScanKind::Output)) {
    float sum = s.sums[0][column];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += s.sums[warp][column];
    s.vector[column] += sum;
  }
}

// What rows get of all heads comes first: results and what joins the state need not both be in registers.
template <typename T>
__device__ __forceinline__ void scan_chunk(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  const int heads = s.chunk.has_columns ? static_cast<int>(s.work.column_heads) : 0;
  if (s.chunk.has_rows) {
    Out<T> out;
    for (int head = 0; head == 0 || head < heads; ++head) {
      load_head(scan, head, head == 0, s);
      attend(scan, head == 0, state, out, s);
    }
    finish(scan, s.work, s.chunk, s, out);
    store_results(scan, s.work, s.chunk.rows, s);
  }
  // The last head's columns are still there.
  for (int head = heads - 1; head >= 0; --head) {
    if (head < heads - 1 || !s.chunk.has_rows) load_head(scan, head, false, s);
    join_state(scan, state, s);
    __syncthreads();
  }
}

// ---- states

// move(element, depth, column) for each of the thread's part of the state, and move_sum(element, i) of its vector.
template <typename T, typename Move, typename MoveSum>
__device__ __forceinline__ void for_state(const Scan& scan, State<T>& state, SharedTiles<T>& s, const Move& move,
                                          const MoveSum& move_sum) {
  const Place at;
#pragma unroll
  for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
    for (int depth = 0; depth < T::kDepthTiles; ++depth)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = T::kSlab * at.warp + 16 * tile + at.group + i / 2 * 8;
        const int k = 8 * depth + at.pair + i % 2;
        move(state.part[tile][depth][i], k, column, k < scan.depth && column < scan.width);
      }
  const int i = static_cast<int>(threadIdx.x);
  if (i < T::kSize) move_sum(s.vector[i], i, i < (scan.kind == ScanKind::Output ? scan.depth : scan.width));
}

__device__ __forceinline__ float* slot_of(const Scan& scan, const ScanWork& work, int64_t segment) {
  const int64_t head = work.b * scan.shape.Hkv + work.key_head;
  return static_cast<float*>(scan.states) + (head * scan.segments.count + segment) * scan.slot();
}

template <typename T>
__device__ __forceinline__ void start_state(const Scan& scan, const ScanWork& work, State<T>& state,
                                            SharedTiles<T>& s) {
  const bool from_slot = scan.phase == ScanPhase::Pieces;
  const float* slot = from_slot ? slot_of(scan, work, scan.shape.causal ? work.piece : 0) : nullptr;
  const float* sums = from_slot ? slot + scan.depth * scan.width : nullptr;
  for_state(
      scan, state, s,
      [&](float& to, int k, int column, bool there) { to = there && from_slot ? slot[k * scan.width + column] : 0.0f; },
      [&](float& to, int i, bool there) { to = there && from_slot ? sums[i] : 0.0f; });
}

template <typename T>
__device__ __forceinline__ void store_segment(const Scan& scan, const ScanWork& work, State<T>& state,
                                              SharedTiles<T>& s) {
  float* slot = slot_of(scan, work, work.piece);
  float* sums = slot + scan.depth * scan.width;
  for_state(
      scan, state, s,
      [&](float& from, int k, int column, bool there) {
        if (there) slot[k * scan.width + column] = from;
      },
      [&](float& from, int i, bool there) {
        if (there) sums[i] = from;
      });
}

template <typename scalar_t, int kSize, bool kFeatures>
__global__ void __launch_bounds__(kThreads, kSize == 64 ? 3 : 2) tensor_scan_kernel(const Scan scan) {
  using T = Traits<scalar_t, kSize, kFeatures>;
  SharedTiles<T>& s = shared<SharedTiles<T>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x, 1);
    s.walk = walk_of(scan, s.work);
  }
  __syncthreads();
  State<T> state;
  start_state(scan, s.work, state, s);
  const int sums = static_cast<int>(ceil_div(s.walk.sums.end - s.walk.sums.begin, kChunk));
  const int steps = sums + static_cast<int>(ceil_div(s.walk.rows.end - s.walk.rows.begin, kChunk));
  for (int i = 0; i < steps; ++i) {
    const bool summing = i < sums;
    if (threadIdx.x == 0)
      s.chunk = chunk_of(scan, summing ? s.walk.sums : s.walk.rows, summing ? i : i - sums, summing, kChunk);
    __syncthreads();
    if (s.chunk.has_rows || s.chunk.has_columns) scan_chunk<T>(scan, state, s);
    __syncthreads();
  }
  if (scan.phase == ScanPhase::Sums) store_segment(scan, s.work, state, s);
}

template <typename scalar_t, int kSize, bool kFeatures>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using T = Traits<scalar_t, kSize, kFeatures>;
  const Launch with{name_of(scan.kind, true), dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                    sizeof(SharedTiles<T>), stream};
  launch(with, tensor_scan_kernel<scalar_t, kSize, kFeatures>, scan);
}

template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  const bool features = scan.kind == ScanKind::Output || scan.kind == ScanKind::GradV;
  const bool small = std::max(scan.depth, scan.width) <= 64;
  if (features)
    return small ? launch_scan<scalar_t, 64, true>(scan, blocks, stream)
                 : launch_scan<scalar_t, 128, true>(scan, blocks, stream);
  small ? launch_scan<scalar_t, 64, false>(scan, blocks, stream)
        : launch_scan<scalar_t, 128, false>(scan, blocks, stream);
}

}  // namespace

bool suits_tensor_cores(const LinearAttentionShape& n, Dtype dtype) {
  constexpr int64_t kFewest = 32;
  constexpr int64_t kMost = 128;
  const int64_t larger = std::max(n.D, n.Dv);
  if (dtype != Dtype::Float16 && dtype != Dtype::BFloat16) return false;
  if (std::min(n.D, n.Dv) < kFewest || larger > kMost) return false;
  // Of all kernels for the depth and width, as forward and backward go one way.
  static_assert(sizeof(SharedTiles<Traits<__half, 64, false>>) <= kSharedBytesEverywhere);
  return larger <= 64 || fits_in_a_block(sizeof(SharedTiles<Traits<__half, 128, false>>));
}

void scan_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    dtype == Dtype::Float16 ? launch_scan<__half>(phase, blocks, stream) : launch_scan<bf16>(phase, blocks, stream);
  });
}

}  // namespace memcheck
