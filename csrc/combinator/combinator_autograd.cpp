#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "common/autocast.h"
#include "common/autograd.h"
#include "common/checks.h"

namespace memcheck {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using ForwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, bool, bool);
using BackwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const std::optional<Tensor>&,
                                                  const std::optional<Tensor>&, const std::optional<Tensor>&,
                                                  std::array<bool, 2>);

auto forward_op() {
  static const auto op = find_operator<ForwardSchema>("memcheck::combinator");
  return op;
}

auto backward_op() {
  static const auto op = find_operator<BackwardSchema>("memcheck::combinator_backward");
  return op;
}

struct Combinator : Function<Combinator> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, bool low_memory) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, preactivations] = forward_op().call(x, weight, low_memory, !low_memory);
    // preactivations: what grad_y is multiplied with; low memory forms them again, from x and weight. x: for
    // grad_weight. weight: for grad_x. Either also for its strides where they are not the usual ones.
    const bool reads_x = low_memory || weight.requires_grad() || !x.is_contiguous();
    const bool reads_weight = low_memory || x.requires_grad() || !weight.is_contiguous();
    ctx->save_for_backward(
        {reads_x ? x : Tensor(), reads_weight ? weight : Tensor(), low_memory ? Tensor() : preactivations});
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({preactivations});
    return {y, preactivations};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto [grad_x, grad_weight] =
        backward_op().call(grads[0], if_defined(saved[0]), if_defined(saved[1]), if_defined(saved[2]),
                           {ctx->needs_input_grad(0), ctx->needs_input_grad(1)});
    // In performance mode x or weight may be known by the pre-activations alone.
    const auto guarded = refuse_double_backward_through_kept("combinator", {grad_x, grad_weight}, grads[0]);
    return {guarded[0], guarded[1], Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& x, const Tensor& weight, bool low_memory,
                                            bool keep_preactivations) {
  check_tensors("combinator", {{"x", x}, {"weight", weight}});
  refuse_forward_mode("combinator", {x, weight});
  if (will_be_differentiated("combinator", {x, weight})) {
    const auto outputs = Combinator::apply(x, weight, low_memory);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return forward_op().call(x, weight, low_memory, keep_preactivations);
}

std::tuple<Tensor, Tensor> backward_autograd(const Tensor& grad_y, const std::optional<Tensor>& x,
                                             const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& preactivations,
                                             std::array<bool, 2> output_mask) {
  const Tensor some_x = x.value_or(Tensor());
  const Tensor some_weight = weight.value_or(Tensor());
  const Tensor some_preactivations = preactivations.value_or(Tensor());
  refuse_forward_mode("combinator", {grad_y, some_x, some_weight, some_preactivations});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(grad_y, x, weight, preactivations, output_mask);
  };
  const auto [grad_x, grad_weight] = run();
  const auto guarded =
      refuse_double_backward("combinator", {grad_x, grad_weight}, grad_y, some_x, some_weight, some_preactivations);
  return {guarded[0], guarded[1]};
}

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  m.impl("combinator", forward_autograd);
  m.impl("combinator_backward", backward_autograd);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> forward_autocast(const Tensor& x, const Tensor& weight, bool low_memory,
                                            bool keep_preactivations) {
  const Autocast<device> cast;
  return forward_op().call(cast(x), cast(weight), low_memory, keep_preactivations);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCPU, m) {
  m.impl("combinator", forward_autocast<c10::kCPU>);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCUDA, m) {
  m.impl("combinator", forward_autocast<c10::kCUDA>);
}

}  // namespace
}  // namespace memcheck
