#pragma once

#include <ATen/ops/zeros.h>

#include "common/torch/autograd.h"
#include "compressed_attention/compressed_attention_operators.h"

// What the autograd functions of compressed attention share.

namespace memcheck::compressed_attention_autograd {

// The gradient of y, which is undefined if only lse was differentiated.
inline Tensor gradient_of_y(const variable_list& grads, const Tensor& q) {
  return grads[0].defined() ? grads[0] : at::zeros({}, q.options()).expand_symint(q.sym_sizes());
}

// The strides of the gradient of x: those of x if it is dense and does not overlap itself, else of a contiguous tensor.
inline std::vector<c10::SymInt> gradient_stride(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x.sym_strides().vec();
  std::vector<c10::SymInt> stride(x.dim(), 1);
  for (int64_t i = x.dim() - 1; i > 0; --i) stride[i - 1] = stride[i] * x.sym_size(i).max(1);
  return stride;
}

// y as a backward reads it. Its own gradient is that of the other tensors, from which it can be computed.
inline std::optional<Tensor> kept_y(const Tensor& y) {
  return y.defined() ? std::optional<Tensor>(y.detach()) : std::nullopt;
}

}  // namespace memcheck::compressed_attention_autograd
