#pragma once

#include "linear_attention/linear_attention_tensor_tiles_cuda.cuh"

// Products of a scan on tensor cores: with the state, of the rows and columns of a chunk, and those that are added to
// the state.

namespace memcheck {
namespace linear_cuda {

// ---- fragments

// Loads rows [row, row + 16) and columns [column, column + 16) as operand a of mma; transposed: as two operands b of
// the columns.
template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_along_rows(uint32_t (&r)[4], const bf16 (&tile)[kChunk][kStride], int row,
                                                int column, int lane) {
  const bf16* from = &tile[row + lane % 16][column + lane / 16 * 8];
  if constexpr (kTransposed)
    ldmatrix_x4_transposed(r, from);
  else
    ldmatrix_x4(r, from);
}

// The same with the quarters in the other order: as two operands b of the rows; transposed: as operand a of the
// columns.
template <bool kTransposed, int kStride>
__device__ __forceinline__ void load_along_columns(uint32_t (&r)[4], const bf16 (&tile)[kChunk][kStride], int row,
                                                   int column, int lane) {
  const bf16* from = &tile[row + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * 8];
  if constexpr (kTransposed)
    ldmatrix_x4_transposed(r, from);
  else
    ldmatrix_x4(r, from);
}

// d += a b for split factors, without the products that are as small as the splitting error. `half` tells which half of
// the loaded values is b.
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

// ---- products
//
// Loops over the depth leave out its padding. They are unrolled, because registers have no addresses; the jump out of
// them also keeps a compiler from loading what later rounds need, for which there are no registers.

// The sum over the four lanes that share a row of a fragment.
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// out += a times the state.
template <typename T>
__device__ __forceinline__ void read_state(const Scan& scan, const SharedTiles<T>& s, const State<T>& state,
                                           Out<T>& out) {
  const Place at;
#pragma unroll
  for (int k = 0; k < T::kDepth / 16; ++k) {
    if (16 * k >= scan.depth) break;
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
  for (int k = 0; k < scan.depth && may_see; k += 16) {
    uint32_t a[T::kFactorParts][4], b[T::kFactorParts][4];
#pragma unroll
    for (int part = 0; part < T::kFactorParts; ++part) {
      load_along_rows<false>(a[part], s.a.part[part], first_row, k, at.lane);
      load_along_columns<false>(b[part], s.b.part[part], first_column, k, at.lane);
    }
    multiply(scores[0], a, b, 0);
    multiply(scores[1], a, b, 1);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + at.group + 8 * half;
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = first_column + 8 * tile + at.pair + j;
        const bool sees = (forwards ? column <= row : column >= row) && s.step.chunk.columns.has(column);
        const float bias = scan.kind == ScanKind::GradK ? s.bias[column] : 0.0f;
        pair[j] = sees ? scores[tile][2 * half + j] - bias : 0.0f;
        if constexpr (T::kDecayed)
          if (sees) pair[j] *= forwards ? weight_between(s, row, column) : weight_between(s, column, row);
        sum += pair[j];
      }
      store_pack(Pack<float, 2>{pair[0], pair[1]}, &s.scores[row][first_column + 8 * tile + at.pair]);
    }
    if (!scan.has_denominator()) continue;
    sum = sum_of_four(sum);
    if (at.pair == 0) s.score_sums[at.warp % kRowTiles][row] = sum;
  }
}

// Loads 16 rows and columns of scores as operand a of mma, in three parts: a row may have a single score, so they keep
// the precision of float.
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

// out += scores x, over the columns that a row of a tile sees.
template <typename T>
__device__ __forceinline__ void read_chunk(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const bool forwards = scan.rows_are_queries();
#pragma unroll 1
  for (int k = 0; k < kRowTiles; ++k) {
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

// z += the sum of x over the columns that a row sees, weighted, if the rows are queries.
template <typename T>
__device__ __forceinline__ void sum_chunk(const SharedTiles<T>& s, Out<T>& z) {
  const Place at;
#pragma unroll 1
  for (int k = 0; k < kRowTiles; ++k) {
    uint32_t b[T::kSlabTiles][T::kValueParts][4];
#pragma unroll
    for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
      for (int part = 0; part < T::kValueParts; ++part)
        load_along_rows<true>(b[tile][part], s.x.part[part], 16 * k, T::kSlab * at.warp + 16 * tile, at.lane);
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
      if (k > row) continue;
      constexpr int kParts = T::kDecayed ? 3 : 1;
      uint32_t seen[kParts][4];  // the weight where a row sees a column: 1 without decays
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int line = 16 * row + at.group + i % 2 * 8;
        const int column = 16 * k + at.pair + i / 2 * 8;
        float weights[2] = {1.0f, 1.0f};
        if constexpr (T::kDecayed) {
          weights[0] = weight_between(s, line, column);
          weights[1] = weight_between(s, line, column + 1);
        }
        uint32_t parts[kParts];
        split(line >= column ? weights[0] : 0.0f, line > column ? weights[1] : 0.0f, parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) seen[part][i] = parts[part];
      }
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) multiply(z.part[row][tile], seen, b[tile / 2], tile % 2);
    }
  }
}

// Loads 16 columns of x and 16 lines from `line` on as operand a of mma, as they join the state: weighted.
template <typename T>
__device__ __forceinline__ void load_joining(uint32_t (&x)[T::kJoiningParts][4], const SharedTiles<T>& s, int line,
                                             int column) {
  const Place at;
#pragma unroll
  for (int part = 0; part < T::kValueParts; ++part)
    load_along_columns<true>(x[part], s.x.part[part], line, column, at.lane);
  if constexpr (T::kDecayed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2] = {};
#pragma unroll
      for (int part = T::kValueParts - 1; part >= 0; --part) {
        pair[0] += low_half(x[part][i]);
        pair[1] += high_half(x[part][i]);
      }
      const float* weights = &s.decays.of_column[line + at.pair + i / 2 * 8];
      uint32_t parts[T::kJoiningParts];
      split(pair[0] * weights[0], pair[1] * weights[1], parts);
#pragma unroll
      for (int part = 0; part < T::kJoiningParts; ++part) x[part][i] = parts[part];
    }
  }
}

// state += b^T x. The sum over the chunk is formed first, because tensor cores round sums towards 0. x
// stays in registers: shared memory is what a chunk waits for most.
template <typename T>
__device__ __forceinline__ void add_to_state(const Scan& scan, const SharedTiles<T>& s, State<T>& state) {
  constexpr int kSteps = kRowTiles;
  const Place at;
  uint32_t x[kSteps][T::kSlabTiles][T::kJoiningParts][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int tile = 0; tile < T::kSlabTiles; ++tile)
      load_joining(x[k][tile], s, 16 * k, T::kSlab * at.warp + 16 * tile);
#pragma unroll
  for (int depth = 0; depth < T::kDepth / 16; ++depth) {
    if (16 * depth >= scan.depth) break;
    float sum[T::kSlabTiles][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[T::kFactorParts][4];
#pragma unroll
      for (int part = 0; part < T::kFactorParts; ++part)
        load_along_rows<true>(b[part], s.b.part[part], 16 * k, 16 * depth, at.lane);
#pragma unroll
      for (int tile = 0; tile < T::kSlabTiles; ++tile) {
        multiply(sum[tile][0], x[k][tile], b, 0);
        multiply(sum[tile][1], x[k][tile], b, 1);
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

}  // namespace linear_cuda
}  // namespace memcheck
