#include <cstdint>
#include <type_traits>

#include "combinator/combinator.h"
#include "common/integer.h"
#include "common/kernel.cuh"
#include "common/softplus.cuh"

// A block takes some rows, of which its threads take pieces: 16 bytes wherever all addresses allow it, else single
// elements, by the same code. These kernels read what a GEMM wrote, and wait for memory alone.

namespace memcheck {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int kRows = 2;  // of each thread, all of whose loads are on the way at once

// How a block of threads lies over rows of E elements.
struct Tiling {
  int log_across;  // 2^log_across threads along a row; the others take further rows

  __device__ int across() const { return 1 << log_across; }
  __device__ int column() const { return static_cast<int>(threadIdx.x) & (across() - 1); }
  // Row i of this thread's, in block `block`.
  __device__ int64_t row(int64_t block, int i) const {
    const int down = kThreads >> log_across;
    return (block * kRows + i) * down + (static_cast<int>(threadIdx.x) >> log_across);
  }
};

template <typename scalar_t, int kCount>
struct alignas(sizeof(scalar_t) * kCount) Piece {
  scalar_t value[kCount];
};

template <int kCount, typename scalar_t>
__device__ __forceinline__ Piece<scalar_t, kCount> load(const scalar_t* from) {
  Piece<scalar_t, kCount> piece;
  if constexpr (kCount == 1) {
    piece.value[0] = *from;
  } else {
    static_assert(sizeof(piece) == kVectorBytes);
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    __builtin_memcpy(&piece, &bits, kVectorBytes);
  }
  return piece;
}

template <typename scalar_t, int kCount>
__device__ __forceinline__ void store(const Piece<scalar_t, kCount>& piece, scalar_t* to) {
  if constexpr (kCount == 1) {
    *to = piece.value[0];
  } else {
    uint4 bits;
    __builtin_memcpy(&bits, &piece, kVectorBytes);
    *reinterpret_cast<uint4*>(to) = bits;
  }
}

template <int kCount, typename scalar_t>
__device__ __forceinline__ Piece<scalar_t, kCount> load_strided(const scalar_t* from, int64_t stride) {
  Piece<scalar_t, kCount> piece;
  if (stride == 0) {
    const scalar_t all = *from;
#pragma unroll
    for (int i = 0; i < kCount; ++i) piece.value[i] = all;
    return piece;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) piece.value[i] = from[i * stride];
  return piece;
}

// y = softplus(a) b.
template <typename scalar_t, int kCount>
__device__ __forceinline__ Piece<scalar_t, kCount> forward_piece(const Piece<scalar_t, kCount>& a,
                                                                 const Piece<scalar_t, kCount>& b) {
  Piece<scalar_t, kCount> y;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    y.value[i] = from_acc<scalar_t>(softplus_on_device<scalar_t>(to_acc(a.value[i])) * to_acc(b.value[i]));
  return y;
}

// y = softplus(a) b: da = g b sigmoid(a), db = g softplus(a), which take the places of a and b.
template <typename scalar_t, int kCount>
__device__ __forceinline__ void backward_piece(const Piece<scalar_t, kCount>& g, Piece<scalar_t, kCount>& a,
                                               Piece<scalar_t, kCount>& b) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto grad = to_acc(g.value[i]);
    const auto both = softplus_and_sigmoid_on_device<scalar_t>(to_acc(a.value[i]));
    a.value[i] = from_acc<scalar_t>(grad * to_acc(b.value[i]) * both.sigmoid);
    b.value[i] = from_acc<scalar_t>(grad * both.softplus);
  }
}

template <typename scalar_t, int kCount>
__global__ void __launch_bounds__(kThreads) forward_kernel(CombinatorForward p, Tiling tiling) {
  // The last rows first: GEMM wrote them last, and they are in the cache still.
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  for (int64_t column = tiling.column() * kCount; column < p.E; column += tiling.across() * kCount) {
    Piece<scalar_t, kCount> a[kRows], b[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) continue;
      const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E + column;
      a[i] = load<kCount>(pair);
      b[i] = load<kCount>(pair + p.E);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(block, i);
      if (row < p.rows) store(forward_piece(a[i], b[i]), static_cast<scalar_t*>(p.y) + row * p.E + column);
    }
  }
}

// grad_vectors: grad_y can be read as the pre-activations are.
template <typename scalar_t, int kCount>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ CombinatorBackward p, Tiling tiling, bool grad_vectors) {
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const int64_t stride = p.grad_y.column_stride;
  for (int64_t column = tiling.column() * kCount; column < p.E; column += tiling.across() * kCount) {
    // Before anything is loaded: with many leading dimensions that takes divisions.
    const scalar_t* grad_y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) grad_y[i] = p.grad_y.template at<scalar_t>(tiling.row(block, i)) + column * stride;
    Piece<scalar_t, kCount> a[kRows], b[kRows], g[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) continue;
      const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E + column;
      a[i] = load<kCount>(pair);
      b[i] = load<kCount>(pair + p.E);
      g[i] = grad_vectors ? load<kCount>(grad_y[i]) : load_strided<kCount>(grad_y[i], stride);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) continue;
      scalar_t* grad_pair = static_cast<scalar_t*>(p.grad_preactivations) + row * 2 * p.E + column;
      backward_piece(g[i], a[i], b[i]);
      store(a[i], grad_pair);
      store(b[i], grad_pair + p.E);
    }
  }
}

// Rows of words: elements, or as many of them as are 16 bytes.
template <typename word_t>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const __grid_constant__ CombinatorCopy p, Tiling tiling) {
  for (int64_t column = tiling.column(); column < p.E; column += tiling.across()) {
    word_t x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(blockIdx.x, i);
      if (row < p.rows) x[i] = p.from.template at<word_t>(row)[column];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = tiling.row(blockIdx.x, i);
      if (row < p.rows) p.to.template at<word_t>(row)[column] = x[i];
    }
  }
}

constexpr int kTile = 32;

template <typename word_t>
struct CopyTile {
  word_t value[kTile][kTile + 1];  // (rows,columns)
};

// run(row, column) within the tile for this thread's share, neighbours along rows or along columns.
template <typename Run>
__device__ __forceinline__ void for_tile(bool along_rows, int rows, int columns, const Run& run) {
  const int fast = static_cast<int>(threadIdx.x) % kTile;
  for (int slow = static_cast<int>(threadIdx.x) / kTile; slow < kTile; slow += kThreads / kTile) {
    const int row = along_rows ? fast : slow, column = along_rows ? slow : fast;
    if (row < rows && column < columns) run(row, column);
  }
}

// Where neighbours in memory are not neighbours along a row: through shared memory, so that both sides go along their
// own.
template <typename word_t>
__global__ void __launch_bounds__(kThreads)
    copy_tiles_kernel(const __grid_constant__ CombinatorCopy p, bool from_along_rows, bool to_along_rows) {
  auto& tile = shared<CopyTile<word_t>>();
  const int64_t across = (p.E + kTile - 1) / kTile;
  const int64_t first_row = blockIdx.x / across * kTile, first_column = blockIdx.x % across * kTile;
  const int rows = static_cast<int>(p.rows - first_row < kTile ? p.rows - first_row : kTile);
  const int columns = static_cast<int>(p.E - first_column < kTile ? p.E - first_column : kTile);
  for_tile(from_along_rows, rows, columns, [&](int row, int column) {
    const word_t* from = p.from.template at<word_t>(first_row + row);
    tile.value[row][column] = from[(first_column + column) * p.from.column_stride];
  });
  __syncthreads();
  for_tile(to_along_rows, rows, columns, [&](int row, int column) {
    word_t* to = p.to.template at<word_t>(first_row + row);
    to[(first_column + column) * p.to.column_stride] = tile.value[row][column];
  });
}

// ---- launches

bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// Whether every row begins at a multiple of 16 bytes, and its elements lie side by side.
bool has_vectors(const CombinatorRows& x, int64_t item) {
  bool all = is_aligned(x.data) && x.column_stride == 1;
  for (int64_t d = 0; d < x.dimensions; ++d) all = all && x.stride[d] * item % kVectorBytes == 0;
  return all;
}

bool along_rows(const CombinatorRows& x) {
  return x.dimensions > 0 && x.stride[x.dimensions - 1] < x.column_stride;
}

Tiling tiling_of(int64_t pieces) {
  Tiling tiling{0};
  while ((1 << tiling.log_across) < kThreads && (int64_t{1} << tiling.log_across) < pieces) ++tiling.log_across;
  return tiling;
}

dim3 grid_of(int64_t rows, Tiling tiling) {
  const int64_t of_block = (kThreads >> tiling.log_across) * kRows;
  return dim3(static_cast<unsigned>(ceil_div(rows, of_block)));
}

// run(elements of a piece, as a constant, tiling)
template <typename scalar_t, typename Run>
void with_pieces(bool vectors, int64_t E, const Run& run) {
  constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(scalar_t));
  if (vectors && E % kCount == 0) return run(std::integral_constant<int, kCount>{}, tiling_of(E / kCount));
  run(std::integral_constant<int, 1>{}, tiling_of(E));
}

CombinatorRows in_words(CombinatorRows x, int64_t elements) {
  for (int64_t d = 0; d < x.dimensions; ++d) x.stride[d] /= elements;
  return x;
}

template <typename word_t>
void copy_rows(const CombinatorCopy& p, cudaStream_t stream) {
  const Tiling tiling = tiling_of(p.E);
  launch({"combinator_copy", grid_of(p.rows, tiling), dim3(kThreads), 0, stream}, copy_rows_kernel<word_t>, p, tiling);
}

// element_t: any type of the size of an element.
template <typename element_t>
void copy_words(const CombinatorCopy& p, cudaStream_t stream) {
  constexpr int64_t kCount = kVectorBytes / sizeof(element_t);
  if (p.from.column_stride != 1 || p.to.column_stride != 1) {
    const dim3 tiles(static_cast<unsigned>(ceil_div(p.rows, kTile) * ceil_div(p.E, kTile)));
    launch({"combinator_copy", tiles, dim3(kThreads), sizeof(CopyTile<element_t>), stream},
           copy_tiles_kernel<element_t>, p, along_rows(p.from), along_rows(p.to));
    return;
  }
  if (p.E % kCount == 0 && has_vectors(p.from, sizeof(element_t)) && has_vectors(p.to, sizeof(element_t)))
    return copy_rows<uint4>({p.rows, p.E / kCount, in_words(p.from, kCount), in_words(p.to, kCount)}, stream);
  copy_rows<element_t>(p, stream);
}

}  // namespace

void combinator_forward_cuda(const CombinatorForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    with_pieces<scalar_t>(is_aligned(p.preactivations) && is_aligned(p.y), p.E, [&](auto count, Tiling tiling) {
      launch({"combinator_forward", grid_of(p.rows, tiling), dim3(kThreads), 0, stream},
             forward_kernel<scalar_t, count.value>, p, tiling);
    });
  });
}

void combinator_backward_cuda(const CombinatorBackward& p, Dtype dtype, cudaStream_t stream) {
  const bool vectors = is_aligned(p.preactivations) && is_aligned(p.grad_preactivations);
  const bool grad_vectors = has_vectors(p.grad_y, element_bytes(dtype));
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    with_pieces<scalar_t>(vectors, p.E, [&](auto count, Tiling tiling) {
      launch({"combinator_backward", grid_of(p.rows, tiling), dim3(kThreads), 0, stream},
             backward_kernel<scalar_t, count.value>, p, tiling, grad_vectors);
    });
  });
}

void combinator_copy_cuda(const CombinatorCopy& p, Dtype dtype, cudaStream_t stream) {
  switch (element_bytes(dtype)) {
    case 2:
      return copy_words<uint16_t>(p, stream);
    case 4:
      return copy_words<uint32_t>(p, stream);
    default:
      return copy_words<uint64_t>(p, stream);
  }
}

}  // namespace memcheck
