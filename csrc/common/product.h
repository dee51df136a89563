#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstdint>

// sum (M,N) = a (M,K) b (K,N), or += where it `adds`, by the library's GEMM.

namespace memcheck {

inline void multiply(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  at::Tensor to = sum;
  if (adds) {
    to.addmm_(a, b);
  } else {
    at::mm_out(to, a, b);
  }
}

#ifndef MEMCHECK_HOST_CUDA

// The same of 16-bit matrices whose product is in float32. torch has it for tensors of CUDA alone.
inline void multiply_into_float(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  at::Tensor to = sum;
  if (adds) {
    at::addmm_out(to, to, a, b, at::kFloat);
  } else {
    at::mm_out(to, a, b, at::kFloat);
  }
}

#else

// A and b become float32, so much of K at a time that it does not show in what is
// measured.
inline void multiply_into_float(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, bool adds) {
  constexpr int64_t kBytes = 256 << 10;
  const int64_t K = a.size(1), row_bytes = 4 * std::max<int64_t>(1, a.size(0) + b.size(1));
  const int64_t step = std::max<int64_t>(1, kBytes / row_bytes);
  if (K == 0 && !adds) at::Tensor(sum).zero_();
  for (int64_t k = 0; k < K; k += step) {
    const int64_t count = std::min(step, K - k);
    multiply(sum, a.narrow(1, k, count).to(at::kFloat), b.narrow(0, k, count).to(at::kFloat), adds || k > 0);
  }
}

#endif

}  // namespace memcheck
