#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/kernel.h"
#include "common/macros.h"

// Combinator: the parameters of its kernels, and the memory they need.
//
//     (a, b) = x W^T          y = softplus(a) b          x (N,E), W (2E,E), a and b (N,E) side by side in one (N,2E)
//     da = g b sigmoid(a)     db = g softplus(a)         dx = (da, db) W     dW = (da, db)^T x
//
// N is the product of all leading dimensions of x. The library's GEMM forms the products. The kernels here are
// elementwise, and run on a chunk of rows at a time, while it is still in the cache.

namespace memcheck {

// Rows of E elements to read, of any strides. Row r has index r in the leading dimensions, counted in their order.
struct CombinatorRows {
  static constexpr int64_t kLeading = 16;

  const void* data = nullptr;
  int64_t first = 0;  // the row that at(0) means
  int64_t dimensions = 0;
  int64_t size[kLeading] = {};
  int64_t stride[kLeading] = {};  // in elements
  int64_t column_stride = 1;

  template <typename scalar_t>
  MEMCHECK_INLINE const scalar_t* at(int64_t row) const {
    int64_t index = first + row;
    int64_t offset = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int64_t d = dimensions - 1; d > 0; --d) {
      offset += index % size[d] * stride[d];
      index /= size[d];
    }
    return static_cast<const scalar_t*>(data) + offset + (dimensions > 0 ? index * stride[0] : 0);
  }
};

struct CombinatorForward {
  int64_t rows, E;
  const void* preactivations;  // (rows,2E): a, then b
  void* y;                     // (rows,E)
};

struct CombinatorBackward {
  int64_t rows, E;
  const void* preactivations;  // (rows,2E)
  CombinatorRows grad_y;       // (rows,E)
  void* grad_preactivations;   // (rows,2E): da, then db; may be the memory of preactivations
};

// The rows of chunks, and the memory they need. They depend on shape and dtype only, so that the products are the same
// for any number of threads and on any GPU.
struct CombinatorPlan {
  int64_t rows;                  // of a chunk whose pre-activations are in scratch
  int64_t kept_rows;             // of a chunk of the forward that keeps them
  int64_t lent_rows;             // of a chunk of the forward whose pre-activations are in memory of y, or 0
  int64_t preactivations_bytes;  // (N,2E), kept for the backward in performance mode
  int64_t chunk_bytes;           // (rows,2E), pre-activations that are not kept, and their gradients
  int64_t copy_bytes;            // (rows,E), if GEMM cannot read x or write grad_x in place
  int64_t wide_bytes;            // (rows,3E) in float32, to form grad_weight if the weight is 16-bit and GEMM has no
                                 // float32 product of 16-bit matrices; rows that are packed instead take no more
                                 // (torch/packed_product.h); with weight_bytes, for all products
  int64_t sums_bytes;            // (2,E,E) in float32: grad_weight before it is rounded to 16 bits
  int64_t weight_bytes;          // (2,E,E) in float32: the weight, if products of 16-bit matrices are formed in float32
};

struct CombinatorKernels {
  CombinatorPlan (*plan)(int64_t N, int64_t E, Dtype dtype, bool copies);
  Kernel<CombinatorForward> forward;
  Kernel<CombinatorBackward> backward;
};
extern const CombinatorKernels combinator_cpu;
extern const CombinatorKernels combinator_cuda;

constexpr int64_t kCombinatorChunkBytes = int64_t{4} << 20;

// The scratch of a chunk takes at most a sixteenth of the bytes of x, or 4 MiB if that is more.
// copies: GEMM cannot read x and write its gradient in place. wide_bytes: of an element, beside the chunk.
inline CombinatorPlan combinator_chunks(int64_t N, int64_t E, Dtype dtype, bool copies, int64_t wide_bytes) {
  const int64_t item = element_bytes(dtype);
  const int64_t copied = copies ? item : 0;
  const int64_t row_bytes = E > 0 ? E * (2 * item + copied + wide_bytes) : 1;
  const int64_t sixteenth = N * E * item / 16;
  const int64_t budget = sixteenth > kCombinatorChunkBytes ? sixteenth : kCombinatorChunkBytes;
  const int64_t fit = row_bytes > budget ? 1 : budget / row_bytes;
  const int64_t chunks = N > 0 ? (N + fit - 1) / fit : 1;
  const int64_t rows = (N + chunks - 1) / chunks;  // about as many in each
  return {rows,
          rows,
          0,
          2 * N * E * item,
          2 * rows * E * item,
          rows * E * copied,
          rows * E * wide_bytes,
          item < 4 ? 2 * E * E * 4 : 0,
          0};
}

// multiplies: the library forms products of these matrices in their dtype.
inline CombinatorPlan combinator_plan_cpu(int64_t N, int64_t E, Dtype dtype, bool copies, bool multiplies) {
  CombinatorPlan plan = combinator_chunks(N, E, dtype, copies, element_bytes(dtype) < 4 ? 3 * 4 : 0);
  plan.weight_bytes = multiplies ? 0 : 2 * E * E * 4;
  return plan;
}

// What a GEMM writes and the next kernel reads should fit in the L2 cache, of 40 MB or more.
constexpr int64_t kCombinatorCacheBytes = int64_t{32} << 20;

// A GEMM of few rows leaves most of a GPU idle. So the forward that keeps all pre-activations forms them in one GEMM.
// Else a part of the result (N,E) that is not written yet serves as scratch: of its last n rows, a third is a chunk,
// whose pre-activations (n/3,2E) lie in the other two thirds.
inline CombinatorPlan combinator_plan_cuda(int64_t N, int64_t E, Dtype dtype, bool copies) {
  CombinatorPlan plan = combinator_chunks(N, E, dtype, copies, 0);
  if (copies) return plan;
  const int64_t cached = kCombinatorCacheBytes / (E > 0 ? 2 * E * element_bytes(dtype) : 1);
  plan.kept_rows = N;
  plan.lent_rows = cached > plan.rows ? cached : plan.rows;
  return plan;
}

// GEMMs work on tiles of 64 to 256 rows.
constexpr int64_t kCombinatorLentMultiple = 256;

// The rows of the next chunk, if `left` rows are left. Pre-activations of up to `lent` rows may be in memory of y.
inline int64_t combinator_next_rows(int64_t left, int64_t rows, int64_t lent) {
  const int64_t third = left / 3 < lent ? left / 3 : lent;
  const int64_t whole_tiles = third / kCombinatorLentMultiple * kCombinatorLentMultiple;
  if (whole_tiles > rows) return whole_tiles;
  return rows < left ? rows : left;
}

}  // namespace memcheck
