#include <array>

#include "common/torch/autograd.h"

namespace memcheck {
namespace {

struct Forward {
  static constexpr const char* name = "gated_sum";
  using Schema = Tensor(const Tensor& g, const Tensor& x);
};

struct Backward {
  static constexpr const char* name = "gated_sum_backward";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& grad_y, const Tensor& g, const std::optional<Tensor>& x,
                                            std::array<bool, 2> output_mask);
};

struct GatedSum : Function<GatedSum> {
  static variable_list forward(AutogradContext* ctx, const Tensor& g, const Tensor& x) {
    const Tensor y = call_below_autograd<Forward>(g, x);
    // g: the gates are formed again. x: for grad_g; grad_x needs x only for its strides.
    ctx->save_for_backward({g, g.requires_grad() || !x.is_contiguous() ? x : Tensor()});
    ctx->set_materialize_grads(false);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients<2>(ctx);
    const auto [grad_g, grad_x] = call_operator<Backward>(grads[0], saved[0], if_defined(saved[1]), wanted);
    return gradients_of<Forward>({grad_g, grad_x});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, GatedSum>(m);
  register_backward<Backward>(m);
}

}  // namespace
}  // namespace memcheck
