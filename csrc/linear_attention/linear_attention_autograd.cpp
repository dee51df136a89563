#include <array>
#include <string>
#include <string_view>

#include "common/torch/autograd.h"

namespace memcheck::linear_attention_autograd {
namespace {

struct Forward {
  static constexpr const char* name = "linear_attention";
  using Schema = Tensor(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::string_view feature_map,
                        double eps);
};

struct Backward {
  static constexpr const char* name = "linear_attention_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& grad_y, const Tensor& q, const Tensor& k,
                                                    const std::optional<Tensor>& v, bool causal,
                                                    std::string_view feature_map, double eps,
                                                    std::array<bool, 3> output_mask);
};

struct Step {
  static constexpr const char* name = "linear_attention_step";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& m,
                                                    const Tensor& z, std::string_view feature_map, double eps);
};

struct LinearAttention : Function<LinearAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               std::string_view feature_map, double eps) {
    const Tensor y = call_below_autograd<Forward>(q, k, v, causal, feature_map, eps);
    // q, k, v: the states are formed again; phi(q), phi(k) and y are not kept. grad_v needs v only for its strides.
    const bool reads_v = q.requires_grad() || k.requires_grad() || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor()});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["feature_map"] = std::string(feature_map);
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto v = if_defined(saved[2]);
    const auto wanted = wanted_gradients<3>(ctx);
    const auto [grad_q, grad_k, grad_v] = call_operator<Backward>(
        grads[0], saved[0], saved[1], v, ctx->saved_data["causal"].toBool(),
        ctx->saved_data["feature_map"].toStringRef(), ctx->saved_data["eps"].toDouble(), wanted);
    return gradients_of<Forward>({grad_q, grad_k, grad_v});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, LinearAttention>(m);
  register_backward<Backward>(m);
  register_without_gradient<Step>(m);
}

}  // namespace
}  // namespace memcheck::linear_attention_autograd
