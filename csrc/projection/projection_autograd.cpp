#include <array>

#include "common/torch/autograd.h"

namespace memcheck::projection_autograd {
namespace {

using ForwardSchema = Tensor(const Tensor& x, const Tensor& w);
using BackwardSchema = std::tuple<Tensor, Tensor>(const Tensor& grad_y, const std::optional<Tensor>& x,
                                                  const std::optional<Tensor>& w, std::array<bool, 2> output_mask);

struct LinearR {
  static constexpr const char* name = "linear_r";
  using Schema = ForwardSchema;
};
struct LinearRBackward {
  static constexpr const char* name = "linear_r_backward";
  using Schema = BackwardSchema;
};
struct LinearL {
  static constexpr const char* name = "linear_l";
  using Schema = ForwardSchema;
};
struct LinearLBackward {
  static constexpr const char* name = "linear_l_backward";
  using Schema = BackwardSchema;
};

template <typename Forward, typename Backward>
struct Projection : Function<Projection<Forward, Backward>> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    const Tensor y = call_below_autograd<Forward>(x, w);
    // x: for grad_w. w: for grad_x. Each also for its strides, if it is not contiguous.
    const bool needs_x = w.requires_grad() || !x.is_contiguous();
    const bool needs_w = x.requires_grad() || !w.is_contiguous();
    ctx->save_for_backward({needs_x ? x : Tensor(), needs_w ? w : Tensor()});
    ctx->set_materialize_grads(false);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients<2>(ctx);
    const auto [grad_x, grad_w] = call_operator<Backward>(grads[0], if_defined(saved[0]), if_defined(saved[1]), wanted);
    return gradients_of<Forward>({grad_x, grad_w});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<LinearR, Projection<LinearR, LinearRBackward>>(m);
  register_differentiable<LinearL, Projection<LinearL, LinearLBackward>>(m);
  register_backward<LinearRBackward>(m);
  register_backward<LinearLBackward>(m);
}

}  // namespace
}  // namespace memcheck::projection_autograd
