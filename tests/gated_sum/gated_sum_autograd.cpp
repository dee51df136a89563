#include "common/torch/autograd.h"
#include "gated_sum/gated_sum_operators.h"

namespace memcheck {
namespace {

struct GatedSum : Differentiable<GatedSum, operators::GatedSum> {
  static variable_list run(AutogradContext* ctx, const Arguments& in) {
    const auto [y] = call_below<operators::GatedSum>(in);
    // g: the gates are formed again. x: for grad_g; grad_x needs x only for its strides.
    ctx->save_for_backward({in.g, in.g.requires_grad() || !in.x.is_contiguous() ? in.x : Tensor()});
    return {y};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const auto [grad_g, grad_x] = call_backward<operators::GatedSumBackward>(
        {grads[0], saved.tensors[0], if_defined(saved.tensors[1]), saved.wanted_of<2>()});
    return {grad_g, grad_x};
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<operators::GatedSum, GatedSum>(m);
}

}  // namespace
}  // namespace memcheck
