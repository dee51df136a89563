#include <array>

#include "common/torch/autograd.h"

namespace memcheck::softplus_attention_autograd {
namespace {

struct Forward {
  static constexpr const char* name = "softplus_attention";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double eps,
                                            bool keep_carries);
};

struct Backward {
  static constexpr const char* name = "softplus_attention_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& grad_y, const Tensor& q, const Tensor& k,
                                                    const std::optional<Tensor>& v, const Tensor& carries, bool causal,
                                                    double eps, std::array<bool, 3> output_mask);
};

struct Step {
  static constexpr const char* name = "softplus_attention_step";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                                    const Tensor& a, double eps);
};

struct SoftplusAttention : Function<SoftplusAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               double eps, bool keep_carries) {
    const auto [y, carries] = call_below_autograd<Forward>(q, k, v, causal, eps, true);
    // q: for its softplus and sigmoid. k: the sums are formed again. v: the same, and for grad_k; grad_v needs v only
    // for its strides. carries: where each chunk of sums begins.
    const bool reads_v = q.requires_grad() || k.requires_grad() || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor(), carries});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    const Tensor returned = kept_output(carries, keep_carries, /*dimension=*/2);
    ctx->mark_non_differentiable({returned});
    return {y, returned};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto v = if_defined(saved[2]);
    const auto wanted = wanted_gradients<3>(ctx);
    const auto [grad_q, grad_k, grad_v] =
        call_operator<Backward>(grads[0], saved[0], saved[1], v, saved[3], ctx->saved_data["causal"].toBool(),
                                ctx->saved_data["eps"].toDouble(), wanted);
    return gradients_of<Forward>({grad_q, grad_k, grad_v});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, SoftplusAttention>(m);
  register_backward<Backward>(m);
  register_without_gradient<Step>(m);
}

}  // namespace
}  // namespace memcheck::softplus_attention_autograd
