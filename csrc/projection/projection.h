#pragma once

#include <cstdint>

// Projections of tokens, whose products are the library's GEMM on every device:
//
//     linear_r: y[b,s,r] = sum over e of x[b,s,e] w[e,r]      y (B,S,R), token-major
//     linear_l: y[b,r,s] = the same                           y (B,R,S), channel-major, in place of a transpose
//
// The backward of both is one function of a (B,S,R) view of the gradient.

namespace memcheck {

// A gradient that no GEMM can read in place (expanded, say) is copied in pieces of rows this large: a sixteenth of it,
// or 1 MiB if that is more.
inline int64_t projection_piece_rows(int64_t B, int64_t S, int64_t R, int64_t element_bytes) {
  const int64_t row_bytes = R * element_bytes > 0 ? R * element_bytes : 1;
  const int64_t sixteenth = B * S * row_bytes / 16;
  const int64_t bytes = sixteenth > (int64_t{1} << 20) ? sixteenth : (int64_t{1} << 20);
  const int64_t rows = bytes / row_bytes;
  return rows < 1 ? 1 : rows < S ? rows : S;
}

}  // namespace memcheck
