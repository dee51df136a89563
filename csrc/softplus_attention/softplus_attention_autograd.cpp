#include <ATen/ops/zeros.h>

#include "common/torch/autograd.h"
#include "softplus_attention/softplus_attention_operators.h"

namespace memcheck::softplus_attention_autograd {
namespace {

using Op = operators::SoftplusAttention;
using BackwardOp = operators::SoftplusAttentionBackward;

// The rests are constants: the gradient of a state is that of the sum of a state and its rest.
struct SoftplusAttention : Differentiable<SoftplusAttention, Op> {
  static variable_list run(AutogradContext* ctx, Arguments in) {
    const bool keep_carries = std::exchange(in.keep_carries, true);
    const auto [y, carries, new_state, new_rest] = call_below<Op>(in);
    // q: for its softplus and sigmoid. k: the sums are formed again. v: the same, and for grad_k; grad_v needs v only
    // for its strides. carries: where each chunk of sums begins. state: where the first one begins. Lengths: which
    // positions belong to which sequence.
    const bool reads_v =
        in.q.requires_grad() || in.k.requires_grad() || requires_gradient(in.state) || !in.v.is_contiguous();
    ctx->save_for_backward(tensors_among(in.q, in.k, reads_v ? in.v : Tensor(), carries, in.state, in.cu_seqlens_q,
                                         in.cu_seqlens_k, in.lengths));
    if (!in.return_state && !keep_carries) return {y};
    const Tensor returned = kept_output(carries, keep_carries, /*dimension=*/1);
    ctx->mark_non_differentiable(in.return_state ? variable_list{returned, new_rest} : variable_list{returned});
    return in.return_state ? variable_list{y, returned, new_state, new_rest} : variable_list{y, returned};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    const Tensor& q = saved.tensors[0];
    const Tensor grad_y = grads[0].defined() ? grads[0] : at::zeros({}, q.options()).expand_symint(q.sym_sizes());
    auto wanted = saved.wanted_of<5>();
    wanted[4] = false;
    const Arguments& of = saved.options;
    return list_of(call_backward<BackwardOp>({.grad_y = grad_y,
                                              .q = q,
                                              .k = saved.tensors[1],
                                              .v = saved.given(2),
                                              .carries = saved.tensors[3],
                                              .state = saved.given(4),
                                              .grad_state = grads.size() > 2 ? if_defined(grads[2]) : std::nullopt,
                                              .cu_seqlens_q = saved.given(5),
                                              .cu_seqlens_k = saved.given(6),
                                              .lengths = saved.given(7),
                                              .left_padded = of.left_padded,
                                              .causal = of.causal,
                                              .eps = of.eps,
                                              .output_mask = wanted}));
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<Op, SoftplusAttention>(m);
  register_no_gradient<operators::SoftplusAttentionStep>(m);
}

}  // namespace
}  // namespace memcheck::softplus_attention_autograd
