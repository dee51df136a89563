#pragma once

#include <algorithm>
#include <cstdint>

#include "common/types.h"

// Combinator: the parameters of its kernels, and the memory they need.
//
//     (a, b) = x W^T          y = softplus(a) b          x (N,E), W (2E,E), a and b (N,E) side by side in one (N,2E)
//     da = g b sigmoid(a)     db = g softplus(a)         dx = (da, db) W     dW = (da, db)^T x
//
// N is the product of all leading dimensions of x. The library's GEMM forms the products. The kernels here are
// elementwise, and run on a chunk of rows at a time, while it is still in the cache.

namespace memcheck {

struct CombinatorForward {
  int64_t rows, E;
  const void* preactivations;  // (rows,2E): a, then b
  void* y;                     // (rows,E)
};

struct CombinatorBackward {
  int64_t rows, E;
  const void* preactivations;  // (rows,2E)
  Strided<2> grad_y;           // (rows,E)
  void* grad_preactivations;   // (rows,2E): da, then db; may be the memory of preactivations
};

// The rows of chunks, and the memory they need. They depend on shape and dtype only, so that the products are the same
// for any number of threads and on any GPU.
struct CombinatorPlan {
  int64_t rows;                  // of a chunk whose pre-activations are in scratch
  int64_t kept_rows;             // of a chunk of the forward that keeps them
  int64_t preactivations_bytes;  // (N,2E), kept for the backward in performance mode
  int64_t chunk_bytes;           // (rows,2E), pre-activations that are not kept, and their gradients
  int64_t wide_bytes;            // (rows,3E) in float32, to form grad_weight if the weight is 16-bit and GEMM has no
                                 // float32 product of 16-bit matrices; with weight_bytes, for all products
  int64_t sums_bytes;            // (2,E,E) in float32: grad_weight before it is rounded to 16 bits
  int64_t weight_bytes = 0;      // (2,E,E) in float32: the weight, if products of 16-bit matrices are formed in float32
};

struct CombinatorKernels {
  CombinatorPlan (*plan)(int64_t N, int64_t E, Dtype dtype);
  Kernel<CombinatorForward> forward;
  Kernel<CombinatorBackward> backward;
};
extern const CombinatorKernels combinator_cpu;
extern const CombinatorKernels combinator_cuda;

constexpr int64_t kCombinatorChunkBytes = int64_t{4} << 20;

// The scratch of a chunk takes at most this share of the bytes of x, or 4 MiB if that is more.
// wide_bytes: of an element, beside the chunk.
inline CombinatorPlan combinator_chunks(int64_t N, int64_t E, Dtype dtype, int64_t share, int64_t wide_bytes) {
  const int64_t item = element_bytes(dtype);
  const int64_t row_bytes = E > 0 ? E * (2 * item + wide_bytes) : 1;
  const int64_t budget = std::max(N * E * item / share, kCombinatorChunkBytes);
  const int64_t fit = std::max<int64_t>(1, budget / row_bytes);
  const int64_t chunks = N > 0 ? (N + fit - 1) / fit : 1;
  CombinatorPlan plan;
  plan.rows = plan.kept_rows = (N + chunks - 1) / chunks;  // about as many in each
  plan.preactivations_bytes = 2 * N * E * item;
  plan.chunk_bytes = 2 * plan.rows * E * item;
  plan.wide_bytes = plan.rows * E * wide_bytes;
  plan.sums_bytes = item < 4 ? 2 * E * E * 4 : 0;
  return plan;
}

// multiplies: the library forms products of these matrices in their dtype.
inline CombinatorPlan combinator_plan_cpu(int64_t N, int64_t E, Dtype dtype, bool multiplies) {
  CombinatorPlan plan = combinator_chunks(N, E, dtype, /*share=*/16, element_bytes(dtype) < 4 ? 3 * 4 : 0);
  plan.weight_bytes = multiplies ? 0 : 2 * E * E * 4;
  return plan;
}

// A GEMM of few rows leaves most of a GPU idle, and each reads and writes all of grad_weight. So a chunk has about a
// quarter of all rows, and the forward that keeps all pre-activations forms them in one GEMM.
inline CombinatorPlan combinator_plan_cuda(int64_t N, int64_t E, Dtype dtype) {
  CombinatorPlan plan = combinator_chunks(N, E, dtype, /*share=*/2, /*wide_bytes=*/0);
  plan.kept_rows = N;
  return plan;
}

}  // namespace memcheck
