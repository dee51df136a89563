#pragma once

#include <ATen/ops/zeros.h>

#include <array>

#include "common/torch/autograd.h"

// The operators of compressed attention as autograd calls them, and what its functions share.

namespace memcheck::compressed_attention_autograd {

using MaybeTensor = std::optional<Tensor>;
using Scale = std::optional<double>;
using Mask = std::array<bool, 4>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Forward {
  static constexpr const char* name = "compressed_attention";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                                                            const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                                            bool left_padded, int64_t factor, bool causal, bool strict,
                                                            Scale scale, bool keep, bool return_lse);
};

struct Backward {
  static constexpr const char* name = "compressed_attention_backward";
  using Schema = Gradients(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                           const MaybeTensor& y, const Tensor& lse, const MaybeTensor& grad_lse,
                           const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                           const MaybeTensor& lengths, bool left_padded, int64_t factor, c10::SymInt kv_len,
                           bool causal, bool strict, Scale scale, c10::SymIntArrayRef grad_k_stride,
                           c10::SymIntArrayRef grad_v_stride, Mask output_mask);
};

struct PooledForward {
  static constexpr const char* name = "compressed_attention_pooled";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& q, const Tensor& kc, const Tensor& vc,
                                            const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                                            const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                            bool left_padded, int64_t factor, c10::SymInt kv_len, bool causal,
                                            bool strict, Scale scale, bool keep, bool return_lse);
};

struct PooledBackward {
  static constexpr const char* name = "compressed_attention_pooled_backward";
  using Schema = Gradients(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                           const MaybeTensor& y, const Tensor& lse, const MaybeTensor& grad_lse,
                           const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                           const MaybeTensor& lengths, bool left_padded, int64_t factor, c10::SymInt kv_len,
                           bool causal, bool strict, Scale scale, Mask output_mask);
};

struct Step {
  static constexpr const char* name = "compressed_attention_step";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kc,
                                                    const Tensor& vc, const Tensor& k_sum, const Tensor& v_sum,
                                                    c10::SymInt positions, int64_t factor, bool strict, Scale scale);
};

struct LastStep {
  static constexpr const char* name = "compressed_attention_last_step";
  using Schema = Step::Schema;
};

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
