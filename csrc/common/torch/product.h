#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/TensorUtils.h>

#include <algorithm>
#include <cstdint>
#include <utility>

// Matrix products by the library's GEMM.

namespace memcheck {

// Whether GEMM reads a matrix without a copy: one stride is 1, and the other is at least as large as a row or column.
inline bool is_matrix(const at::Tensor& x) {
  return (x.stride(1) == 1 && x.stride(0) >= std::max<int64_t>(1, x.size(1))) ||
         (x.stride(0) == 1 && x.stride(1) >= std::max<int64_t>(1, x.size(0)));
}

// x (...,E) as a matrix (N,E), undefined if its strides do not allow that.
inline at::Tensor rows_in_place(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  const at::DimVector sizes{c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)};
  const auto strides = at::detail::computeStride(x.sizes(), x.strides(), sizes);
  return strides ? x.as_strided(sizes, *strides) : at::Tensor();
}

// The same; a copy if its strides do not allow that.
inline at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = rows_in_place(x);
  return rows.defined() ? rows : rows_in_place(x.contiguous());
}

// Whether oneDNN's products of AMX read what lies between rows of K numbers along a dimension of x: they read K up to a
// multiple of 32, and multiply the rest by 0, which makes NaN of NaN.
inline bool reads_gaps(const at::Tensor& x, int64_t dimension) {
  const int64_t K = x.size(dimension);
  return x.is_cpu() && K % 32 != 0 && x.stride(dimension) == 1 && x.stride(1 - dimension) > K &&
         at::native::cpublas::could_pack(x.scalar_type());
}

// sum (M,N) = a (M,K) b (K,N), or += if it `adds`, all of one dtype.
inline void multiply_same(at::Tensor sum, at::Tensor a, at::Tensor b, bool adds) {
  const bool transposed = sum.stride(1) != 1;  // then the library forms the transposed product
  if (!transposed && reads_gaps(a, 1)) a = a.contiguous();
  if (transposed && reads_gaps(b, 0)) b = b.t().contiguous().t();
  adds ? sum.addmm_(a, b) : at::mm_out(sum, a, b);
}

#ifndef MEMCHECK_HOST_CUDA

// The same of 16-bit matrices whose product is formed in float32. torch has it for CUDA only.
inline void multiply_into_float(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  if (adds) {
    at::addmm_out(sum, sum, a, b, at::kFloat);
  } else {
    at::mm_out(sum, a, b, at::kFloat);
  }
}

#else

// On the host a and b are converted to float32, a part of K at a time: so little that it does not show in measurements.
inline void multiply_into_float(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  constexpr int64_t kBytes = 256 << 10;
  const int64_t K = a.size(1), row_bytes = 4 * std::max<int64_t>(1, a.size(0) + b.size(1));
  const int64_t step = std::max<int64_t>(1, kBytes / row_bytes);
  if (K == 0 && !adds) sum.zero_();
  for (int64_t k = 0; k < K; k += step) {
    const int64_t count = std::min(step, K - k);
    multiply_same(sum, a.narrow(1, k, count).to(at::kFloat), b.narrow(0, k, count).to(at::kFloat), adds || k > 0);
  }
}

#endif

// sum (M,N) = a (M,K) b (K,N), or += if it `adds`. The product of 16-bit matrices may be in float32, where the device
// has that.
inline void multiply(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  sum.scalar_type() == a.scalar_type() ? multiply_same(sum, a, b, adds) : multiply_into_float(sum, a, b, adds);
}

// The first elements of memory as a matrix of the sizes of x. It keeps the order that x has in memory: a copy that
// transposes takes longer than a product.
inline at::Tensor matrix_like(const at::Tensor& x, const at::Tensor& memory) {
  const at::Tensor dense = memory.narrow(0, 0, x.numel());
  const bool transposed = x.stride(0) == 1 && x.stride(1) != 1;
  return transposed ? dense.view({x.size(1), x.size(0)}).t() : dense.view(x.sizes());
}

// x in the dtype of memory, where it is copied to; or x, if there is no memory.
inline at::Tensor converted(const at::Tensor& x, const at::Tensor& memory) {
  return memory.defined() ? matrix_like(x, memory).copy_(x) : x;
}

// sum (M,N) = a^T b, or += if it `adds`, for a (K,M) and b (K,N). memory: undefined where the library has products of
// this dtype in that of sum. Else float32, one row of a and b or more: rows are converted there, some at a time.
inline void multiply_transposed(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds,
                                const at::Tensor& memory) {
  if (!memory.defined()) return multiply(sum, a.t(), b, adds);
  if (sum.numel() == 0) return;
  const int64_t rows = memory.numel() / (a.size(1) + b.size(1));
  for (int64_t row = 0; row < a.size(0); row += rows) {
    const int64_t count = std::min(rows, a.size(0) - row);
    const at::Tensor wide_a = converted(a.narrow(0, row, count), memory);
    const at::Tensor wide_b = converted(b.narrow(0, row, count), memory.narrow(0, wide_a.numel(), count * b.size(1)));
    multiply_same(sum, wide_a.t(), wide_b, adds || row > 0);
  }
}

// The gradient of a weight as a sum of products.
class WeightGradient {
 public:
  // sum: memory in which the products are added up, and from which the gradient is rounded once; or the gradient
  // itself. Both are undefined if it is not wanted.
  WeightGradient(at::Tensor gradient, at::Tensor sum) : gradient_(std::move(gradient)), sum_(std::move(sum)) {}

  // Adds a^T b, as multiply_transposed does.
  void add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& memory) {
    if (!sum_.defined()) return;
    multiply_transposed(sum_, a, b, adds_, memory);
    adds_ = true;
  }

  void finish() {
    if (!sum_.defined()) return;
    if (!adds_) sum_.zero_();
    if (!sum_.is_alias_of(gradient_)) gradient_.copy_(sum_.view(gradient_.sizes()));
  }

 private:
  at::Tensor gradient_;
  at::Tensor sum_;
  bool adds_ = false;
};

// to (M,N) = a (M,K) b (K,N). If `to` is in 16 bits and the others in float32, their product is formed in memory of
// M N elements or more and rounded once.
inline void multiply_rounded(at::Tensor to, const at::Tensor& a, const at::Tensor& b, const at::Tensor& memory) {
  if (to.scalar_type() == a.scalar_type()) return multiply_same(to, a, b, /*adds=*/false);
  const at::Tensor product = matrix_like(to, memory);
  multiply_same(product, a, b, /*adds=*/false);
  to.copy_(product);
}

}  // namespace memcheck
