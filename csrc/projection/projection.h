#pragma once

#include <cstdint>

// Projections of tokens. The library's GEMM forms their products on every device:
//
//     linear_r: y[b,s,r] = sum over e of x[b,s,e] w[e,r]      y (B,S,R), token-major
//     linear_l: y[b,r,s] = the same                           y (B,R,S), channel-major, in place of a transpose
//
// The backward of both is one function of a view (B,S,R) of the gradient.

namespace memcheck {

// What the GEMM of a device can do.
struct ProjectionProducts {
  bool batches;     // products of a batch of matrices in one call
  bool into_float;  // products of 16-bit matrices in float32
};
inline constexpr ProjectionProducts projection_cpu{false, false};
inline constexpr ProjectionProducts projection_cuda{true, true};

// The number of rows that are copied at a time, at most S. A copy takes a sixteenth of the bytes of a gradient (B,S,R),
// or 1 MiB if that is more, and row_bytes for each row.
inline int64_t projection_copied_rows(int64_t B, int64_t S, int64_t R, int64_t element_bytes, int64_t row_bytes) {
  const int64_t sixteenth = B * S * R * element_bytes / 16;
  const int64_t bytes = sixteenth > (int64_t{1} << 20) ? sixteenth : (int64_t{1} << 20);
  const int64_t rows = bytes / (row_bytes > 0 ? row_bytes : 1);
  return rows < 1 ? 1 : rows < S ? rows : S;
}

// For a gradient that GEMM cannot read in place, such as an expanded one.
inline int64_t projection_piece_rows(int64_t B, int64_t S, int64_t R, int64_t element_bytes) {
  return projection_copied_rows(B, S, R, element_bytes, R * element_bytes);
}

// For x (B,S,E) and a result or gradient (B,S,R) in 16 bits that are converted to float32: to sum their products, if
// GEMM has no float32 product of 16-bit matrices, and for all products, if the CPU has no instructions for them. Rows
// that are packed instead (torch/packed_product.h) take no more memory.
inline int64_t projection_wide_rows(int64_t B, int64_t S, int64_t E, int64_t R, int64_t element_bytes) {
  return projection_copied_rows(B, S, R, element_bytes, (E + R) * 4);
}

}  // namespace memcheck
