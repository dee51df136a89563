#include <array>

#include "common/torch/autograd.h"

namespace memcheck {
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
    const auto [grad_x, grad_weight] =
        call_operator<Backward>(grads[0], if_defined(saved[0]), if_defined(saved[1]), if_defined(saved[2]), wanted);
    // In performance mode the gradients may depend on x or weight through the pre-activations alone.
    return gradients_of<Forward>(refuse_double_backward_through_kept("combinator", {grad_x, grad_weight}, grads[0]));
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, Combinator>(m);
  register_backward<Backward>(m);
}

}  // namespace
}  // namespace memcheck
