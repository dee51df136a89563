#include "common/torch/autograd.h"
#include "projection/projection_operators.h"

namespace memcheck::projection_autograd {
namespace {

using namespace operators;

template <typename Forward, typename Backward>
struct Projection : Differentiable<Projection<Forward, Backward>, Forward> {
  static variable_list run(AutogradContext* ctx, const ProjectionArguments& x) {
    const auto [y] = call_below<Forward>(x);
    // x: for grad_w. w: for grad_x. Each also for its strides, if it is not contiguous.
    const bool needs_x = x.w.requires_grad() || !x.x.is_contiguous();
    const bool needs_w = x.x.requires_grad() || !x.w.is_contiguous();
    ctx->save_for_backward({needs_x ? x.x : Tensor(), needs_w ? x.w : Tensor()});
    return {y};
  }

  template <typename Saved>
  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const auto [grad_x, grad_w] = call_backward<Backward>(
        {grads[0], if_defined(saved.tensors[0]), if_defined(saved.tensors[1]), saved.template wanted_of<2>()});
    return {grad_x, grad_w};
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<LinearR, Projection<LinearR, LinearRBackward>>(m);
  register_node<LinearL, Projection<LinearL, LinearLBackward>>(m);
}

}  // namespace
}  // namespace memcheck::projection_autograd
