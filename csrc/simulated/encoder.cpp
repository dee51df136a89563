// The layer of a transformer's encoder in one call, as torch.nn.TransformerEncoderLayer runs it for inference.
//
// Mirrors native_multi_head_attention_cuda of ATen/native/transformers/cuda/attention.cu, for tensors that are not
// nested.

#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_transform_bias_rescale_qkv.h>
#include <ATen/ops/_transformer_encoder_layer_fwd_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

namespace memcheck::simulated {
namespace {

enum Backend : int64_t { kFlash = 1, kEfficient = 2 };  // As at::SDPBackend.

// q, k and v (B,H,T,E) in one storage, of qkv (B,T,3HE).
std::tuple<at::Tensor, at::Tensor, at::Tensor> heads_of(const at::Tensor& qkv, const at::Tensor& bias, int64_t heads) {
  const int64_t batch = qkv.size(0), length = qkv.size(1), size = bias.size(0) / 3 / heads;
  const at::Tensor parts = at::empty({3, batch, heads, length, size}, bias.options());
  return {parts.select(0, 0), parts.select(0, 1), parts.select(0, 2)};
}

// x (B,T,HE) as (B,H,T,E).
at::Tensor by_head(const at::Tensor& x, int64_t heads) {
  return x.view({x.size(0), -1, heads, x.size(2) / heads}).transpose(1, 2);
}

bool is_fused(const at::Tensor& x, int64_t heads) {
  const at::Tensor q = by_head(x, heads);
  const int64_t backend = at::_fused_sdp_choice(q, q, q);
  return backend == kFlash || backend == kEfficient;
}

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                          int64_t width, int64_t heads, const at::Tensor& qkv_weight,
                                          const at::Tensor& qkv_bias, const at::Tensor& weight, const at::Tensor& bias,
                                          const std::optional<at::Tensor>& mask, bool needs_weights,
                                          bool averages_weights, std::optional<int64_t> mask_type) {
  using namespace at::native;
  const bool is_self = query.is_same(key) && key.is_same(value);
  if (is_self && width / heads % 8 == 0 && !needs_weights && !mask.has_value() && is_fused(query, heads)) {
    const auto parts = at::linear(query, qkv_weight, qkv_bias).chunk(3, -1);
    const at::Tensor y =
        at::scaled_dot_product_attention(by_head(parts[0], heads), by_head(parts[1], heads), by_head(parts[2], heads));
    return {at::linear(y.transpose(1, 2).reshape({query.size(0), -1, width}), weight, bias), at::Tensor()};
  }
  at::Tensor qkv = qkv_projection(query, key, value, width, qkv_weight);
  auto [q, k, v] = at::_transform_bias_rescale_qkv(qkv, qkv_bias, heads);
  qkv = at::Tensor();
  at::Tensor scores = bmm_nt(q, k);
  scores = masked_softmax(scores, mask, query, mask_type);
  const at::Tensor y = bmm_nn(q, scores, v);
  if (!needs_weights) scores = at::Tensor();
  at::Tensor projected = transform0213_gemm_nt_bias(y, weight, bias, query);
  if (needs_weights && averages_weights) {
    scores = scores.sum(1);
    scores /= heads;
  }
  return {projected, scores};
}

}  // namespace
}  // namespace memcheck::simulated

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_transform_bias_rescale_qkv", memcheck::simulated::heads_of);
  m.impl("_native_multi_head_attention", memcheck::simulated::attend);
  m.impl("_transformer_encoder_layer_fwd", at::native::transformer_encoder_layer_forward);
}
