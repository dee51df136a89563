#include "combinator/combinator_operators.h"
#include "common/torch/autograd.h"

namespace memcheck::combinator_autograd {
namespace {

// The pre-activations x W^T that the forward kept, as a function of x and W, the weight as (2E,E).
struct KeptProducts : Function<KeptProducts> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*stands for x*/, const Tensor& /*for weight*/,
                               const Tensor& kept, const std::optional<Tensor>& x,
                               const std::optional<Tensor>& weight) {
    ctx->save_for_backward({x.value_or(Tensor()), weight.value_or(Tensor())});
    return {kept};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list gradients(5);
    if (ctx->needs_input_grad(0)) gradients[0] = grads[0].matmul(saved[1].flatten(0, 1));
    if (ctx->needs_input_grad(1))
      gradients[1] = grads[0].flatten(0, -2).t().matmul(saved[0].flatten(0, -2)).unflatten(0, {2, -1});
    return gradients;
  }
};

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
    ctx->mark_non_differentiable({preactivations});
    return {y, preactivations};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const auto x = if_defined(saved.tensors[0]), weight = if_defined(saved.tensors[1]);
    auto kept = if_defined(saved.tensors[2]);
    if (kept && at::GradMode::is_enabled())
      kept = KeptProducts::apply(stands_for_input(0, *kept), stands_for_input(1, *kept), *kept, x, weight)[0];
    const auto [grad_x, grad_weight] =
        call<operators::CombinatorBackward>({grads[0], x, weight, kept, saved.wanted_of<2>()});
    return {grad_x, grad_weight};
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<operators::Combinator, Combinator>(m);
  register_gradients<operators::CombinatorBackward>(m);
}

}  // namespace
}  // namespace memcheck::combinator_autograd
