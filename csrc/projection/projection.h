#pragma once

#include <cstdint>

// Projections of tokens, whose products are the library's GEMM on every device:
//
//     linear_r: y[b,s,r] = sum over e of x[b,s,e] w[e,r]      y (B,S,R), token-major
//     linear_l: y[b,r,s] = the same                           y (B,R,S), channel-major, in place of a transpose
//
// The backward of both is one function of a (B,S,R) view of the gradient.

namespace memcheck {

// Rows, of B entries of S, that are copied at a time: a sixteenth of a gradient (B,S,R), or 1 MiB if that is more, at
// so many bytes for a row of the copy.
inline int64_t projection_copied_rows(int64_t B, int64_t S, int64_t R, int64_t element_bytes, int64_t row_bytes) {
  const int64_t sixteenth = B * S * R * element_bytes / 16;
  const int64_t bytes = sixteenth > (int64_t{1} << 20) ? sixteenth : (int64_t{1} << 20);
  const int64_t rows = bytes / (row_bytes > 0 ? row_bytes : 1);
  return rows < 1 ? 1 : rows < S ? rows : S;
}

// Of a gradient that no GEMM can read in place (expanded, say).
inline int64_t projection_piece_rows(int64_t B, int64_t S, int64_t R, int64_t element_bytes) {
  return projection_copied_rows(B, S, R, element_bytes, R * element_bytes);
}

// Of x (B,S,E) and a gradient (B,S,R) of 16 bits that become float32 together, where their products are summed and GEMM
// has none of 16 bits in float32.
inline int64_t projection_wide_rows(int64_t B, int64_t S, int64_t E, int64_t R, int64_t element_bytes) {
  return projection_copied_rows(B, S, R, element_bytes, (E + R) * 4);
}

}  // namespace memcheck
