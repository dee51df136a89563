#include <ATen/ops/zeros.h>

#include <array>

#include "common/torch/autograd.h"

namespace memcheck::softplus_attention_autograd {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Forward {
  static constexpr const char* name = "softplus_attention";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const MaybeTensor& state, const MaybeTensor& rest,
                                                            const MaybeTensor& cu_seqlens_q,
                                                            const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                                            bool left_padded, bool causal, double eps,
                                                            bool return_state, bool keep_carries);
};

struct Backward {
  static constexpr const char* name = "softplus_attention_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor& grad_y, const Tensor& q, const Tensor& k, const MaybeTensor& v, const Tensor& carries,
      const MaybeTensor& state, const MaybeTensor& grad_state, const MaybeTensor& grad_rest,
      const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded,
      bool causal, double eps, std::array<bool, 5> output_mask);
};

struct Step {
  static constexpr const char* name = "softplus_attention_step";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                                    const Tensor& a, double eps);
};

// The rests are constants: the gradient of a state is that of the sum of a state and its rest.
struct SoftplusAttention : Function<SoftplusAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& state, const MaybeTensor& rest, const MaybeTensor& cu_seqlens_q,
                               const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded,
                               bool causal, double eps, bool return_state, bool keep_carries) {
    const auto [y, carries, new_state, new_rest] = call_below_autograd<Forward>(
        q, k, v, state, rest, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal, eps, return_state, true);
    // q: for its softplus and sigmoid. k: the sums are formed again. v: the same, and for grad_k; grad_v needs v only
    // for its strides. carries: where each chunk of sums begins. state: where the first one begins. Lengths: which
    // positions belong to which sequence.
    const bool state_wanted = state && state->requires_grad();
    const bool reads_v = q.requires_grad() || k.requires_grad() || state_wanted || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor(), carries, state.value_or(Tensor()),
                            cu_seqlens_q.value_or(Tensor()), cu_seqlens_k.value_or(Tensor()),
                            lengths.value_or(Tensor())});
    ctx->saved_data["left_padded"] = left_padded;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["state_wanted"] = state_wanted;
    ctx->set_materialize_grads(false);
    const Tensor returned = kept_output(carries, keep_carries, /*dimension=*/1);
    ctx->mark_non_differentiable(return_state ? variable_list{returned, new_rest}
                                              : variable_list{returned, new_state, new_rest});
    return {y, returned, new_state, new_rest};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad_state = grads[2];
    if (!grads[0].defined() && !grad_state.defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const Tensor& q = saved[0];
    const Tensor grad_y = grads[0].defined() ? grads[0] : at::zeros({}, q.options()).expand_symint(q.sym_sizes());
    const auto wanted = wanted_gradients<3>(ctx);
    const bool state_wanted = ctx->saved_data["state_wanted"].toBool() && ctx->needs_input_grad(3);
    const auto [grad_q, grad_k, grad_v, grad_initial, grad_rest] = call_operator<Backward>(
        grad_y, q, saved[1], if_defined(saved[2]), saved[3], if_defined(saved[4]), if_defined(grad_state),
        /*grad_rest=*/std::nullopt, if_defined(saved[5]), if_defined(saved[6]), if_defined(saved[7]),
        ctx->saved_data["left_padded"].toBool(), ctx->saved_data["causal"].toBool(), ctx->saved_data["eps"].toDouble(),
        std::array<bool, 5>{wanted[0], wanted[1], wanted[2], state_wanted, false});
    return gradients_of<Forward>({grad_q, grad_k, grad_v, grad_initial});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, SoftplusAttention>(m);
  register_backward<Backward>(m);
  register_without_gradient<Step>(m);
}

}  // namespace
}  // namespace memcheck::softplus_attention_autograd
