#pragma once

#include "linear_attention/linear_attention_tensor_tiles_cuda.cuh"

// Products of a scan on tensor cores: with the state, of the rows and columns of a chunk, and those that are added to
// the state.

namespace memcheck {
namespace linear_cuda {

// ---- fragments

// Loads 16 rows and columns [16 step, 16 step + 16) of all parts: along rows, as operand a of mma; along columns, as
// two operands b. Transposed, it is the other way round.
template <bool kAlongRows, bool kTransposed, int kParts, int kColumns>
__device__ __forceinline__ void load_parts(uint32_t (&r)[kParts][4], const SplitTile<kParts, kColumns>& tile, int row,
                                           int step, int lane) {
  using Source = Operand<HalfTile<bf16, kChunk, kColumns>>;
  unroll<kParts>([&](int part) {
    const void* from =
        (kAlongRows ? Source::down(tile.part[part], row, lane) : Source::across(tile.part[part], row, lane))
            .row(0, step);
    if constexpr (kTransposed)
      ldmatrix_x4_transposed(r[part], from);
    else
      ldmatrix_x4(r[part], from);
  });
}

// c[0] and c[1] += a times the two operands in b, for split factors: without the products that are as small as the
// splitting error.
template <int kA, int kB>
__device__ __forceinline__ void multiply_split(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4], float (*c)[4]) {
  unroll<kA, kB>([&](int i, int j) {
    if (i + j < (kA > kB ? kA : kB)) multiply_two<bf16>(a[i], b[j], c);
  });
}

// ---- products
//
// Loops over the depth leave out its padding. They are unrolled, because registers have no addresses; the jump out of
// them also keeps a compiler from loading what later rounds need, for which there are no registers.

// out += a times the state.
template <typename T>
__device__ __forceinline__ void read_state(const Scan& scan, const SharedTiles<T>& s, const State<T>& state,
                                           Out<T>& out) {
  const Place at;
#pragma unroll
  for (int k = 0; k < T::kDepth / 16; ++k) {
    if (16 * k >= scan.depth) break;
    uint32_t b[T::kSlabTiles][T::kStateParts][4];  // [column tile of 16][part][two b]
    unroll<T::kSlabTiles, 4>([&](int tile, int r) {
      const float(&from)[4] = state[tile][2 * k + r % 2];
      uint32_t parts[T::kStateParts];
      split(from[r / 2 * 2], from[r / 2 * 2 + 1], parts);
      unroll<T::kStateParts>([&](int part) { b[tile][part][r] = parts[part]; });
    });
    unroll<kRowTiles>([&](int row) {
      uint32_t a[T::kFactorParts][4];
      load_parts<true, false>(a, s.a, 16 * row, k, at.lane);
      unroll<T::kSlabTiles>([&](int tile) { multiply_split(a, b[tile], &out[row][2 * tile]); });
    });
  }
}

// Stores the scores of 16 rows and 16 columns, which are a warp's, if a row may see a column, with the weights of their
// decays; 0 where it does not.
template <typename T>
__device__ __forceinline__ void form_scores(const Scan& scan, SharedTiles<T>& s) {
  static_assert(kWarps == kRowTiles * kRowTiles);
  const Place at;
  const int first_row = at.warp / kRowTiles * 16;
  const int first_column = at.warp % kRowTiles * 16;
  const bool forwards = scan.rows_are_queries();
  const bool may_see = forwards ? first_column <= first_row : first_column >= first_row;
  float scores[2][4] = {};
#pragma unroll 1
  for (int k = 0; 16 * k < scan.depth && may_see; ++k) {
    uint32_t a[T::kFactorParts][4], b[T::kFactorParts][4];
    load_parts<true, false>(a, s.a, first_row, k, at.lane);
    load_parts<false, false>(b, s.b, first_column, k, at.lane);
    multiply_split(a, b, scores);
  }
  unroll<2>([&](int half) {
    const int row = first_row + fragment_row(0, half, at.lane);
    float sum = 0.0f;
    unroll<2>([&](int tile) {
      float pair[2];
      unroll<2>([&](int j) {
        const int column = first_column + fragment_column(tile, at.lane) + j;
        const bool sees = (forwards ? column <= row : column >= row) && s.step.chunk.columns.has(column);
        const float bias = scan.kind == ScanKind::GradK ? s.bias[column] : 0.0f;
        pair[j] = sees ? scores[tile][2 * half + j] - bias : 0.0f;
        if constexpr (T::kDecayed)
          if (sees) pair[j] *= forwards ? weight_between(s, row, column) : weight_between(s, column, row);
        sum += pair[j];
      });
      store_pack(Pack<float, 2>{pair[0], pair[1]}, &s.scores[row][first_column + fragment_column(tile, at.lane)]);
    });
    if (!scan.has_denominator()) return;
    sum = sum_of_row(sum);
    if (at.lane % 4 == 0) s.score_sums[at.warp % kRowTiles][row] = sum;
  });
}

// Splits 16 rows and columns of numbers into operands a of mma: pair_at(row, column) has two neighbours.
template <int kParts, typename PairAt>
__device__ __forceinline__ void split_operand(uint32_t (&a)[kParts][4], const PairAt& pair_at) {
  const Place at;
  unroll<4>([&](int i) {
    const float2 pair = pair_at(fragment_row(0, i % 2, at.lane), fragment_column(i / 2, at.lane));
    uint32_t parts[kParts];
    split(pair.x, pair.y, parts);
    unroll<kParts>([&](int part) { a[part][i] = parts[part]; });
  });
}

// out += weights x over the columns that a row may see, where load(weights, row, column) has 16 rows and columns of the
// weights as operand a.
template <int kParts, typename T, typename Load>
__device__ __forceinline__ void add_seen(bool forwards, const SharedTiles<T>& s, Out<T>& out, const Load& load) {
  const Place at;
#pragma unroll 1
  for (int k = 0; k < kRowTiles; ++k) {
    uint32_t b[T::kSlabTiles][T::kValueParts][4];
    unroll<T::kSlabTiles>(
        [&](int tile) { load_parts<true, true>(b[tile], s.x, 16 * k, T::kSlabTiles * at.warp + tile, at.lane); });
    unroll<kRowTiles>([&](int row) {
      if (forwards ? k > row : k < row) return;
      uint32_t a[kParts][4];
      load(a, 16 * row, 16 * k);
      unroll<T::kSlabTiles>([&](int tile) { multiply_split(a, b[tile], &out[row][2 * tile]); });
    });
  }
}

// out += scores x. A row may have a single score, so they keep the precision of float in three parts.
template <typename T>
__device__ __forceinline__ void read_chunk(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  add_seen<3>(scan.rows_are_queries(), s, out, [&](uint32_t(&a)[3][4], int row, int column) {
    split_operand(a, [&](int i, int j) { return *reinterpret_cast<const float2*>(&s.scores[row + i][column + j]); });
  });
}

// z += the sum of x over the columns that a row sees, weighted, if the rows are queries.
template <typename T>
__device__ __forceinline__ void sum_chunk(const SharedTiles<T>& s, Out<T>& z) {
  constexpr int kParts = T::kDecayed ? 3 : 1;
  add_seen<kParts>(true, s, z, [&](uint32_t(&seen)[kParts][4], int row, int column) {
    split_operand(seen, [&](int i, int j) {
      const int line = row + i, first = column + j;
      float2 weights = make_float2(1.0f, 1.0f);
      if constexpr (T::kDecayed)
        weights = make_float2(weight_between(s, line, first), weight_between(s, line, first + 1));
      return make_float2(line >= first ? weights.x : 0.0f, line > first ? weights.y : 0.0f);
    });
  });
}

// Loads 16 columns of x and 16 lines from `line` on as operand a of mma, as they join the state: weighted.
template <typename T>
__device__ __forceinline__ void load_joining(uint32_t (&x)[T::kJoiningParts][4], const SharedTiles<T>& s, int line,
                                             int step) {
  const Place at;
  uint32_t stored[T::kValueParts][4];
  load_parts<false, true>(stored, s.x, line, step, at.lane);
  unroll<4>([&](int i) {
    if constexpr (T::kDecayed) {
      float pair[2] = {};
#pragma unroll
      for (int part = T::kValueParts - 1; part >= 0; --part) {
        pair[0] += low_half(stored[part][i]);
        pair[1] += high_half(stored[part][i]);
      }
      const float* weights = &s.decays.of_column[line + fragment_column(i / 2, at.lane)];
      uint32_t parts[T::kJoiningParts];
      split(pair[0] * weights[0], pair[1] * weights[1], parts);
      unroll<T::kJoiningParts>([&](int part) { x[part][i] = parts[part]; });
    } else {
      unroll<T::kJoiningParts>([&](int part) { x[part][i] = stored[part][i]; });
    }
  });
}

// state += b^T x. The sum over the chunk is formed first, because tensor cores round sums towards 0. x
// stays in registers: shared memory is what a chunk waits for most.
template <typename T>
__device__ __forceinline__ void add_to_state(const Scan& scan, const SharedTiles<T>& s, State<T>& state) {
  constexpr int kSteps = kRowTiles;
  const Place at;
  uint32_t x[kSteps][T::kSlabTiles][T::kJoiningParts][4];
  unroll<kSteps, T::kSlabTiles>(
      [&](int k, int tile) { load_joining(x[k][tile], s, 16 * k, T::kSlabTiles * at.warp + tile); });
#pragma unroll
  for (int depth = 0; depth < T::kDepth / 16; ++depth) {
    if (16 * depth >= scan.depth) break;
    float sum[T::kSlabTiles][2][4] = {};
    unroll<kSteps>([&](int k) {
      uint32_t b[T::kFactorParts][4];
      load_parts<true, true>(b, s.b, 16 * k, depth, at.lane);
      unroll<T::kSlabTiles>([&](int tile) { multiply_split(x[k][tile], b, sum[tile]); });
    });
    unroll<T::kSlabTiles, 2, 4>(
        [&](int tile, int half, int i) { state[tile][2 * depth + half][i] += sum[tile][half][i]; });
  }
}

}  // namespace linear_cuda
}  // namespace memcheck
