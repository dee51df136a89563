#include "common/torch/autograd.h"
#include "linear_attention/linear_attention_operators.h"

namespace memcheck::linear_attention_autograd {
namespace {

using Op = operators::LinearAttention;
using BackwardOp = operators::LinearAttentionBackward;

struct LinearAttention : Differentiable<LinearAttention, Op> {
  static variable_list run(AutogradContext* ctx, const Arguments& in) {
    const auto [y, m, z] = call_below<Op>(in);
    // The inputs: the states are formed again; phi(q), phi(k) and y are not kept. grad_v needs v only for its strides.
    // On CUDA the gradient of a decay also needs the last state, if that has a gradient.
    const bool reads_v = in.q.requires_grad() || in.k.requires_grad() || requires_gradient(in.decay) ||
                         requires_gradient(in.initial_m) || requires_gradient(in.initial_z) || in.return_state ||
                         !in.v.is_contiguous();
    const bool reads_last = in.return_state && requires_gradient(in.decay);
    ctx->save_for_backward(tensors_among(in.q, in.k, reads_v ? in.v : Tensor(), in.decay, in.initial_m, in.initial_z,
                                         reads_last ? m : Tensor(), reads_last ? z : Tensor(), in.cu_seqlens_q,
                                         in.cu_seqlens_k, in.lengths));
    return !in.return_state ? variable_list{y} : in.normalize ? variable_list{y, m, z} : variable_list{y, m};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const auto grad = [&grads](size_t i) { return i < grads.size() ? if_defined(grads[i]) : std::nullopt; };
    const Arguments& of = saved.options;
    return list_of(call_backward<BackwardOp>({.grad_y = grad(0),
                                              .grad_m = grad(1),
                                              .grad_z = grad(2),
                                              .q = saved.tensors[0],
                                              .k = saved.tensors[1],
                                              .v = saved.given(2),
                                              .decay = saved.given(3),
                                              .initial_m = saved.given(4),
                                              .initial_z = saved.given(5),
                                              .m = saved.given(6),
                                              .z = saved.given(7),
                                              .cu_seqlens_q = saved.given(8),
                                              .cu_seqlens_k = saved.given(9),
                                              .lengths = saved.given(10),
                                              .left_padded = of.left_padded,
                                              .causal = of.causal,
                                              .feature_map = of.feature_map,
                                              .normalize = of.normalize,
                                              .log_decay = of.log_decay,
                                              .eps = of.eps,
                                              .output_mask = saved.wanted_of<6>()}));
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<Op, LinearAttention>(m);
  register_no_gradient<operators::LinearAttentionStep>(m);
}

}  // namespace
}  // namespace memcheck::linear_attention_autograd
