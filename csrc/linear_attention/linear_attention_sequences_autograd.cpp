#include <array>
#include <string>
#include <string_view>

#include "common/torch/autograd.h"

namespace memcheck::linear_attention_sequences_autograd {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Forward {
  static constexpr const char* name = "linear_attention_sequences";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const MaybeTensor& decay, const MaybeTensor& initial_m,
                                                    const MaybeTensor& initial_z, const MaybeTensor& cu_seqlens_q,
                                                    const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                                    bool left_padded, bool causal, std::string_view feature_map,
                                                    bool normalize, double eps, bool return_state);
};

struct Backward {
  static constexpr const char* name = "linear_attention_sequences_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      const MaybeTensor& grad_y, const MaybeTensor& grad_m, const MaybeTensor& grad_z, const Tensor& q, const Tensor& k,
      const Tensor& v, const MaybeTensor& decay, const MaybeTensor& initial_m, const MaybeTensor& initial_z,
      const MaybeTensor& m, const MaybeTensor& z, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
      const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map, bool normalize,
      double eps, std::array<bool, 6> output_mask);
};

// Which of the inputs want a gradient. Autograd counts those that are given.
std::array<bool, 6> wanted_of_given(const AutogradContext* ctx, const variable_list& inputs) {
  std::array<bool, 6> wanted{};
  size_t given = 0;
  for (size_t i = 0; i < wanted.size(); ++i)
    if (inputs[i].defined()) wanted[i] = ctx->needs_input_grad(given++);
  return wanted;
}

struct LinearAttentionSequences : Function<LinearAttentionSequences> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& decay, const MaybeTensor& initial_m, const MaybeTensor& initial_z,
                               const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                               const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map,
                               bool normalize, double eps, bool return_state) {
    const auto [y, m, z] =
        call_below_autograd<Forward>(q, k, v, decay, initial_m, initial_z, cu_seqlens_q, cu_seqlens_k, lengths,
                                     left_padded, causal, feature_map, normalize, eps, return_state);
    // The inputs, as in linear_attention, and which positions belong to which sequence. The gradient of a decay also
    // needs the last state, if that has a gradient.
    const bool reads_last = return_state && decay && decay->requires_grad();
    variable_list saved = tensors_among(q, k, v, decay, initial_m, initial_z, cu_seqlens_q, cu_seqlens_k, lengths);
    saved.push_back(reads_last ? m : Tensor());
    saved.push_back(reads_last && normalize ? z : Tensor());
    ctx->save_for_backward(saved);
    ctx->saved_data["left_padded"] = left_padded;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["feature_map"] = std::string(feature_map);
    ctx->saved_data["normalize"] = normalize;
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    variable_list without_gradient;
    if (!return_state) without_gradient.push_back(m);
    if (!return_state || !normalize) without_gradient.push_back(z);
    ctx->mark_non_differentiable(without_gradient);
    return {y, m, z};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto [grad_q, grad_k, grad_v, grad_decay, grad_m, grad_z] = call_operator<Backward>(
        if_defined(grads[0]), if_defined(grads[1]), if_defined(grads[2]), saved[0], saved[1], saved[2],
        if_defined(saved[3]), if_defined(saved[4]), if_defined(saved[5]), if_defined(saved[9]), if_defined(saved[10]),
        if_defined(saved[6]), if_defined(saved[7]), if_defined(saved[8]), ctx->saved_data["left_padded"].toBool(),
        ctx->saved_data["causal"].toBool(), ctx->saved_data["feature_map"].toStringRef(),
        ctx->saved_data["normalize"].toBool(), ctx->saved_data["eps"].toDouble(), wanted_of_given(ctx, saved));
    return gradients_of<Forward>({grad_q, grad_k, grad_v, grad_decay, grad_m, grad_z});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, LinearAttentionSequences>(m);
  register_backward<Backward>(m);
}

}  // namespace
}  // namespace memcheck::linear_attention_sequences_autograd
