#include <array>

#include "common/torch/autograd.h"

namespace memcheck::combinator_autograd {
namespace {

struct Forward {
  static constexpr const char* name = "combinator";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& x, const Tensor& weight, bool low_memory,
                                            bool keep_preactivations);
};

struct Backward {
  static constexpr const char* name = "combinator_backward";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& grad_y, const std::optional<Tensor>& x,
                                            const std::optional<Tensor>& weight,
                                            const std::optional<Tensor>& preactivations,
                                            std::array<bool, 2> output_mask);
};

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

struct Combinator : Function<Combinator> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, bool low_memory,
                               bool /*keep_preactivations*/) {
    const auto [y, preactivations] = call_below_autograd<Forward>(x, weight, low_memory, !low_memory);
    // preactivations: the factors of grad_y; low memory forms them again, from x and weight. x: for grad_weight.
    // weight: for grad_x. Each also for its strides, if it is not contiguous.
    const bool reads_x = low_memory || weight.requires_grad() || !x.is_contiguous();
    const bool reads_weight = low_memory || x.requires_grad() || !weight.is_contiguous();
    ctx->save_for_backward(
        {reads_x ? x : Tensor(), reads_weight ? weight : Tensor(), low_memory ? Tensor() : preactivations});
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({preactivations});
    return {y, preactivations};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients<2>(ctx);
    const auto x = if_defined(saved[0]), weight = if_defined(saved[1]);
    auto kept = if_defined(saved[2]);
    if (kept && at::GradMode::is_enabled())
      kept = KeptProducts::apply(stands_for_input(0, *kept), stands_for_input(1, *kept), *kept, x, weight)[0];
    const auto [grad_x, grad_weight] = call_operator<Backward>(grads[0], x, weight, kept, wanted);
    return gradients_of<Forward>({grad_x, grad_weight});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, Combinator>(m);
  register_backward<Backward>(m);
}

}  // namespace
}  // namespace memcheck::combinator_autograd
