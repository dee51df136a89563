#include "combinator/combinator_operators.h"
#include "common/torch/autograd.h"

namespace memcheck::combinator_autograd {
namespace {

struct Combinator : Differentiable<Combinator, operators::Combinator> {
  static variable_list run(AutogradContext* ctx, Arguments in) {
    in.keep_preactivations = !in.low_memory;
    const auto [y, preactivations] = call_below<operators::Combinator>(in);
    // preactivations: the factors of grad_y; low memory forms them again, from x and weight. x: for grad_weight.
    // weight: for grad_x. Each also for its strides, if it is not contiguous.
    const bool reads_x = in.low_memory || in.weight.requires_grad() || !in.x.is_contiguous();
    const bool reads_weight = in.low_memory || in.x.requires_grad() || !in.weight.is_contiguous();
    ctx->save_for_backward(
        {reads_x ? in.x : Tensor(), reads_weight ? in.weight : Tensor(), in.low_memory ? Tensor() : preactivations});
    if (in.low_memory) ctx->mark_non_differentiable({preactivations});
    return {y, preactivations};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const auto x = if_defined(saved.tensors[0]), weight = if_defined(saved.tensors[1]);
    const auto wanted = saved.wanted_of<2>();
    Tensor grad_x, grad_weight;
    if (grads[0].defined())
      std::tie(grad_x, grad_weight) =
          call_backward<operators::CombinatorBackward>({grads[0], x, weight, if_defined(saved.tensors[2]), wanted});
    // The gradient of a backward, in which x W^T were kept.
    if (grads[1].defined()) {
      if (wanted[0]) add_gradient(grad_x, grads[1].matmul(weight->flatten(0, 1)));
      if (wanted[1])
        add_gradient(grad_weight, grads[1].flatten(0, -2).t().matmul(x->flatten(0, -2)).unflatten(0, {2, -1}));
    }
    return {grad_x, grad_weight};
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<operators::Combinator, Combinator>(m);
}

}  // namespace
}  // namespace memcheck::combinator_autograd
