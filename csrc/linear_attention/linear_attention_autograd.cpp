#include <array>
#include <string>
#include <string_view>

#include "common/torch/autograd.h"

namespace memcheck::linear_attention_autograd {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Forward {
  static constexpr const char* name = "linear_attention";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const MaybeTensor& decay, const MaybeTensor& initial_m,
                                                    const MaybeTensor& initial_z, const MaybeTensor& cu_seqlens_q,
                                                    const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                                    bool left_padded, bool causal, std::string_view feature_map,
                                                    bool normalize, double eps, bool return_state);
};

struct Backward {
  static constexpr const char* name = "linear_attention_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      const MaybeTensor& grad_y, const MaybeTensor& grad_m, const MaybeTensor& grad_z, const Tensor& q, const Tensor& k,
      const MaybeTensor& v, const MaybeTensor& decay, const MaybeTensor& initial_m, const MaybeTensor& initial_z,
      const MaybeTensor& m, const MaybeTensor& z, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
      const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map, bool normalize,
      double eps, std::array<bool, 6> output_mask);
};

struct Step {
  static constexpr const char* name = "linear_attention_step";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& m,
                                                    const Tensor& z, std::string_view feature_map, double eps);
};

bool wants(const MaybeTensor& x) {
  return x && x->requires_grad();
}

struct LinearAttention : Function<LinearAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& decay, const MaybeTensor& initial_m, const MaybeTensor& initial_z,
                               const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                               const MaybeTensor& lengths, bool left_padded, bool causal, std::string_view feature_map,
                               bool normalize, double eps, bool return_state) {
    const auto [y, m, z] =
        call_below_autograd<Forward>(q, k, v, decay, initial_m, initial_z, cu_seqlens_q, cu_seqlens_k, lengths,
                                     left_padded, causal, feature_map, normalize, eps, return_state);
    // The inputs: the states are formed again; phi(q), phi(k) and y are not kept. grad_v needs v only for its strides.
    // The gradient of a decay also needs the last state, if that has a gradient.
    const bool reads_v = q.requires_grad() || k.requires_grad() || wants(decay) || wants(initial_m) ||
                         wants(initial_z) || return_state || !v.is_contiguous();
    const bool reads_last = return_state && wants(decay);
    ctx->save_for_backward(tensors_among(q, k, reads_v ? v : Tensor(), decay, initial_m, initial_z,
                                         reads_last ? m : Tensor(), reads_last ? z : Tensor(), cu_seqlens_q,
                                         cu_seqlens_k, lengths));
    ctx->saved_data["left_padded"] = left_padded;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["feature_map"] = std::string(feature_map);
    ctx->saved_data["normalize"] = normalize;
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return !return_state ? variable_list{y} : normalize ? variable_list{y, m, z} : variable_list{y, m};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto grad = [&grads](size_t i) { return i < grads.size() ? if_defined(grads[i]) : std::nullopt; };
    if (!grad(0) && !grad(1) && !grad(2)) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto given = [&saved](size_t i) { return if_defined(saved[i]); };
    const auto [grad_q, grad_k, grad_v, grad_decay, grad_m, grad_z] = call_operator<Backward>(
        grad(0), grad(1), grad(2), saved[0], saved[1], given(2), given(3), given(4), given(5), given(6), given(7),
        given(8), given(9), given(10), ctx->saved_data["left_padded"].toBool(), ctx->saved_data["causal"].toBool(),
        ctx->saved_data["feature_map"].toStringRef(), ctx->saved_data["normalize"].toBool(),
        ctx->saved_data["eps"].toDouble(), wanted_inputs(ctx, saved));
    return gradients_of<Forward>({grad_q, grad_k, grad_v, grad_decay, grad_m, grad_z});
  }

 private:
  // Which of q, k, v, decay and the initial state want a gradient. Autograd counts those that are given.
  static std::array<bool, 6> wanted_inputs(const AutogradContext* ctx, const variable_list& saved) {
    std::array<bool, 6> wanted{};
    size_t given = 0;
    for (size_t i = 0; i < wanted.size(); ++i)
      if (i < 3 || saved[i].defined()) wanted[i] = ctx->needs_input_grad(given++);
    return wanted;
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, LinearAttention>(m);
  register_backward<Backward>(m);
  register_without_gradient<Step>(m);
}

}  // namespace
}  // namespace memcheck::linear_attention_autograd
