#pragma once

#include <ATen/core/Tensor.h>

namespace memcheck {

// sum (M,N) = a^T b, or += if it `adds`, for a (K,M) and b (K,N) in bfloat16, without a copy of them in float32: by
// oneDNN's products of small packed matrices, which torch holds as at::native::cpublas::brgemm. The same bits for any
// number of threads.
//
// sum: float32, contiguous. memory: float32 of one dimension, where rows are packed, as many at a time as fit.
// Returns false, and leaves sum as it is, if a is of another dtype, the CPU has no instructions for this
// (cpu_products.h), oneDNN is turned off or restricted, K is less than 64, or memory does not hold 64 packed rows.
bool multiply_packed(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds,
                     const at::Tensor& memory);

// to (M,N) = a (M,K) b (K,N) in float32, by the same products, where they are preferred to the library's
// (cpu_products.h). b is packed on the stack, some columns at a time, and nothing is allocated. An element is one chain
// over K, whatever M and the number of threads are.
// Returns false, and leaves `to` as it is, elsewhere, and where it has not the form or the size for this: the columns
// of a and `to`, and the rows or columns of b must lie side by side, and rows of a must not overlap.
bool multiply_packed_floats(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b);

}  // namespace memcheck
