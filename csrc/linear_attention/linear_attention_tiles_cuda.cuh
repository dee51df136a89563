#pragma once

#include "common/mma.cuh"
#include "linear_attention/linear_attention_scan_cuda.cuh"

// Tiles of the scans on tensor cores, and their products.
//
// Numbers in tiles are bfloat16, or sums of such parts, x = high + low + ...: bfloat16 has the range of float32, which
// states and scores need. Values and features have one part in bfloat16, two in float16 and three in float32. Sums are
// float32. In 16 bits scores have one part more, because a row may have a single one; so has the state that grad_q
// reads, of which a difference may leave little.

namespace memcheck {
namespace linear_cuda {

// The sizes of a kernel's tiles, and the parts of its numbers.
template <typename scalar_t, int kDepth_, int kChunk_, bool kDecayed_>
struct Traits {
  using scalar = scalar_t;
  static constexpr int kDepth = kDepth_;  // of D and of Dv, with padding
  static constexpr int kChunk = kChunk_;  // positions
  static constexpr bool kDecayed = kDecayed_;
  static constexpr int kParts = std::is_same_v<scalar_t, bf16> ? 1 : std::is_same_v<scalar_t, float> ? 3 : 2;
  static constexpr int kMoreParts = kParts < 3 ? kParts + 1 : 3;        // three have the bits of float32
  static constexpr int kJoiningParts = kDecayed ? kMoreParts : kParts;  // where weights multiply what joins the state
  static constexpr int kPackElements = kPackSize<scalar_t>;
  static constexpr int kPacks = 8 / kPackElements;  // of eight columns
  static constexpr int kWarps = kDepth / 16;        // each has a square's columns of a result
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSteps = kDepth / 16;  // squares along the depth
  static constexpr int kHigh = kChunk / 16;   // squares along a chunk
};

// ---- parts

// Values as they are in memory lie in the place of the first part, those of float32 in that of the first two: of eight
// columns, four in each.

// The eight values of a pack's columns.
template <typename T, typename Of>
__device__ __forceinline__ void load_values(Of& tile, uint32_t place, float (&to)[8]) {
  unroll<T::kPacks>([&](int part) {
    const uint4 pack = tile.pack(part, place);
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
    unroll<T::kPackElements>([&](int i) {
      float& x = to[part * T::kPackElements + i];
      if constexpr (std::is_same_v<typename T::scalar, float>) {
        x = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<typename T::scalar, bf16>) {
        x = i % 2 == 0 ? low_half(words[i / 2]) : high_half(words[i / 2]);
      } else {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        typename T::scalar value;
        __builtin_memcpy(static_cast<void*>(&value), &bits, sizeof(bits));
        x = to_acc(value);
      }
    });
  });
}

// Two neighbours of a product's sums, as values in memory. For float32 the lanes of a row have read what they need of
// its parts.
template <typename T, typename Of>
__device__ __forceinline__ void store_pair(Of& tile, uint32_t place, float x, float y) {
  if constexpr (std::is_same_v<typename T::scalar, float>) {
    const uint32_t pack = place - lane() % 4 * 4;
    *reinterpret_cast<float2*>(tile.bytes + lane() % 4 / 2 * Of::kPartBytes + pack + lane() % 2 * 8) =
        make_float2(x, y);
  } else {
    tile.word(0, place) = rounded_pair(typename T::scalar(), x, y);
  }
}

template <typename T, typename Of>
__device__ __forceinline__ float2 load_pair(Of& tile, uint32_t place) {
  if constexpr (std::is_same_v<typename T::scalar, float>) {
    const uint32_t pack = place - lane() % 4 * 4;
    return *reinterpret_cast<const float2*>(tile.bytes + lane() % 4 / 2 * Of::kPartBytes + pack + lane() % 2 * 8);
  } else if constexpr (std::is_same_v<typename T::scalar, bf16>) {
    return make_float2(low_half(tile.word(0, place)), high_half(tile.word(0, place)));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&tile.word(0, place)));
  }
}

// Replaces numbers by phi of them, and phi'(x) from phi(x). There is one branch for all numbers.
template <typename T, int kCount>
__device__ __forceinline__ void form_features(FeatureMap map, float (&x)[kCount]) {
  if (map == FeatureMap::Identity) return;
  unroll<kCount>([&](int i) {
    if constexpr (std::is_same_v<typename T::scalar, float>)
      x[i] = elu_plus_one(x[i], exp_minus_abs(x[i]));
    else
      x[i] = x[i] > 0 ? x[i] + 1 : exp2_flushed(x[i] * kLog2e);
  });
}
__device__ __forceinline__ float derivative_of(FeatureMap map, float feature) {
  return map == FeatureMap::Identity ? 1.0f : fminf(feature, 1.0f);
}

// ---- products

// The number of squares on and below the diagonal of the scores.
template <typename T>
constexpr int kCorners = T::kHigh * (T::kHigh + 1) / 2;

// The job-th of these squares: its place along the chunk, and one that is not further.
struct Corner {
  int far, near;
};
__device__ __forceinline__ Corner corner_of(int job) {
  const int far = (job >= 1) + (job >= 3) + (job >= 6);
  return {far, job - far * (far + 1) / 2};
}

// Scores of a chunk, which have a row for each row.
template <typename T>
using ScoreTile = Tile<T::kChunk, (T::kChunk < 64 ? 64 : T::kChunk), T::kMoreParts>;

// Forms the square at (row, column) of a b^T. Of each two neighbours, store(low, right, i, j, x, y) gets the row i and
// the column j of the first.
template <typename T, typename Of, typename Store>
__device__ __forceinline__ void form_scores(const Of& a, const Of& b, int row, int column, const Store& store) {
  const Wide<Of> rows(a);
  const Tall<Of> columns(b);
  float sums[2][4] = {};
  unroll<T::kSteps>([&](int step) {
    uint32_t x[T::kParts][4], y[T::kParts][4];
    rows.template load<false>(row, step, x);
    columns.template load<false>(column, step, y);
    multiply_square(x, y, sums);
  });
  unroll<2, 2>([&](int low, int right) {
    store(low, right, 16 * row + 8 * low + lane() / 4, 16 * column + 8 * right + lane() % 4 * 2, sums[right][2 * low],
          sums[right][2 * low + 1]);
  });
}

// Multiplies the columns of a left factor by their weights.
template <int kParts, int kTo>
__device__ __forceinline__ void weigh(const float* weights, const uint32_t (&a)[kParts][4], uint32_t (&to)[kTo][4]) {
  unroll<4>([&](int i) {
    uint32_t parts[kParts], weighed[kTo];
    unroll<kParts>([&](int part) { parts[part] = a[part][i]; });
    const float2 x = sum_of_parts(parts);
    const float2 w = *reinterpret_cast<const float2*>(weights + fragment_column(i / 2));
    split(x.x * w.x, x.y * w.y, weighed);
    unroll<kTo>([&](int part) { to[part][i] = weighed[part]; });
  });
}

// state += a^T b over the positions of a chunk, for kTall squares of a's columns from square `row` on and kWide of b's
// from `column` on. The sum over the chunk is formed first, because tensor cores round sums towards 0. weights: of the
// positions, where they decay.
template <typename T, int kTall, int kWide, typename Of>
__device__ __forceinline__ void join(const Of& a, int row, const Of& b, int column, const float* weights,
                                     float (&state)[kTall][kWide][2][4]) {
  const Tall<Of> of_rows(a);
  const Wide<Of> of_columns(b);
  uint32_t x[kTall][T::kHigh][T::kJoiningParts][4];
  unroll<kTall, T::kHigh>([&](int r, int n) {
    if constexpr (T::kDecayed) {
      uint32_t stored[T::kParts][4];
      of_rows.template load<true>(n, row + r, stored);
      weigh(weights + 16 * n, stored, x[r][n]);
    } else {
      of_rows.template load<true>(n, row + r, x[r][n]);
    }
  });
  unroll<kWide>([&](int c) {
    float sums[kTall][2][4] = {};
    unroll<T::kHigh>([&](int n) {
      uint32_t y[T::kParts][4];
      of_columns.template load<true>(n, column + c, y);
      unroll<kTall>([&](int r) { multiply_square(x[r][n], y, sums[r]); });
    });
    unroll<kTall, 2, 4>([&](int r, int h, int i) { state[r][c][h][i] += sums[r][h][i]; });
  });
}

// Left factors that sum rows with weights of 16 positions. Rows 0 to 7 have a part of the weights, and the others the
// next one.
template <typename T>
struct RowSums {
  static constexpr int kFactors = T::kParts > 2 ? 2 : 1;
  uint32_t a[kFactors][4];

  __device__ __forceinline__ static RowSums of_weights(const float* weights) {
    RowSums factor = {};
    unroll<2>([&](int i) {
      const float2 w = *reinterpret_cast<const float2*>(weights + fragment_column(i));
      uint32_t parts[kFactors + 1];
      split(w.x, w.y, parts);
      unroll<kFactors + 1>([&](int part) { factor.a[part / 2][2 * i + part % 2] = parts[part]; });
    });
    return factor;
  }
  __device__ __forceinline__ static RowSums of_ones() {
    constexpr uint32_t kOnes = 0x3f803f80u;
    RowSums factor = {};
    factor.a[0][0] = factor.a[0][2] = kOnes;
    return factor;
  }
  // Adds the sums of eight columns: half of the right factor b. Those of a column are in sums[i] and sums[2 + i].
  __device__ __forceinline__ void add(const uint32_t (&b)[T::kParts][4], int half, float (&sums)[4]) const {
    unroll<kFactors, T::kParts>([&](int i, int part) {
      const uint32_t of_half[2] = {b[part][2 * half], b[part][2 * half + 1]};
      if (i == 0 || part == 0) mma_m16n8k16<bf16>(sums, a[i], of_half);
    });
  }
};

}  // namespace linear_cuda
}  // namespace memcheck
