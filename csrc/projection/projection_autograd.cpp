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

using ForwardSchema = Tensor(const Tensor&, const Tensor&);
using BackwardSchema = std::tuple<Tensor, Tensor>(const Tensor&, const std::optional<Tensor>&,
                                                  const std::optional<Tensor>&, std::array<bool, 2>);

struct LinearR {
  static constexpr const char* name = "linear_r";
  static auto forward_op() {
    static const auto op = find_operator<ForwardSchema>("memcheck::linear_r");
    return op;
  }
  static auto backward_op() {
    static const auto op = find_operator<BackwardSchema>("memcheck::linear_r_backward");
    return op;
  }
};

struct LinearL {
  static constexpr const char* name = "linear_l";
  static auto forward_op() {
    static const auto op = find_operator<ForwardSchema>("memcheck::linear_l");
    return op;
  }
  static auto backward_op() {
    static const auto op = find_operator<BackwardSchema>("memcheck::linear_l_backward");
    return op;
  }
};

template <typename Op>
struct Projection : Function<Projection<Op>> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor y = Op::forward_op().call(x, w);
    // x: for grad_w, and for its strides where they are not the usual ones. w: for grad_x.
    const bool needs_x = w.requires_grad() || !x.is_contiguous();
    ctx->save_for_backward({needs_x ? x : Tensor(), x.requires_grad() ? w : Tensor()});
    ctx->set_materialize_grads(false);
    return {y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(2);
    const auto saved = ctx->get_saved_variables();
    const auto [grad_x, grad_w] = Op::backward_op().call(grads[0], if_defined(saved[0]), if_defined(saved[1]),
                                                         {ctx->needs_input_grad(0), ctx->needs_input_grad(1)});
    return {grad_x, grad_w};
  }
};

template <typename Op>
Tensor forward_autograd(const Tensor& x, const Tensor& w) {
  check_tensors(Op::name, {{"x", x}, {"w", w}});
  refuse_forward_mode(Op::name, {x, w});
  if (will_be_differentiated(Op::name, {x, w})) return Projection<Op>::apply(x, w)[0];
  const at::AutoDispatchBelowADInplaceOrView guard;
  return Op::forward_op().call(x, w);
}

template <typename Op>
std::tuple<Tensor, Tensor> backward_autograd(const Tensor& grad_y, const std::optional<Tensor>& x,
                                             const std::optional<Tensor>& w, std::array<bool, 2> output_mask) {
  refuse_forward_mode(Op::name, {grad_y, x.value_or(Tensor()), w.value_or(Tensor())});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Op::backward_op().call(grad_y, x, w, output_mask);
  };
  const auto [grad_x, grad_w] = run();
  const auto guarded =
      refuse_double_backward(Op::name, {grad_x, grad_w}, grad_y, x.value_or(Tensor()), w.value_or(Tensor()));
  return {guarded[0], guarded[1]};
}

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  m.impl("linear_r", forward_autograd<LinearR>);
  m.impl("linear_l", forward_autograd<LinearL>);
  m.impl("linear_r_backward", backward_autograd<LinearR>);
  m.impl("linear_l_backward", backward_autograd<LinearL>);
}

template <typename Op, c10::DeviceType device>
Tensor forward_autocast(const Tensor& x, const Tensor& w) {
  const Autocast<device> cast;
  return Op::forward_op().call(cast(x), cast(w));
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCPU, m) {
  m.impl("linear_r", forward_autocast<LinearR, c10::kCPU>);
  m.impl("linear_l", forward_autocast<LinearL, c10::kCPU>);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCUDA, m) {
  m.impl("linear_r", forward_autocast<LinearR, c10::kCUDA>);
  m.impl("linear_l", forward_autocast<LinearL, c10::kCUDA>);
}

}  // namespace
}  // namespace memcheck
