#include <array>

#include "common/torch/autograd.h"

namespace memcheck {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Forward {
  static constexpr const char* name = "softplus_attention_sequences";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                                            const MaybeTensor& lengths, bool left_padded, bool causal, double eps,
                                            bool keep_carries);
};

struct Backward {
  static constexpr const char* name = "softplus_attention_sequences_backward";
  using Schema = std::tuple<Tensor, Tensor, Tensor>(const Tensor& grad_y, const Tensor& q, const Tensor& k,
                                                    const MaybeTensor& v, const Tensor& carries,
                                                    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                                                    const MaybeTensor& lengths, bool left_padded, bool causal,
                                                    double eps, std::array<bool, 3> output_mask);
};

struct SoftplusAttentionSequences : Function<SoftplusAttentionSequences> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                               const MaybeTensor& lengths, bool left_padded, bool causal, double eps,
                               bool keep_carries) {
    const auto [y, carries] =
        call_below_autograd<Forward>(q, k, v, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal, eps, true);
    // As in softplus_attention, and which positions belong to which sequence.
    const bool reads_v = q.requires_grad() || k.requires_grad() || !v.is_contiguous();
    ctx->save_for_backward({q, k, reads_v ? v : Tensor(), carries, cu_seqlens_q.value_or(Tensor()),
                            cu_seqlens_k.value_or(Tensor()), lengths.value_or(Tensor())});
    ctx->saved_data["left_padded"] = left_padded;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    const Tensor returned = kept_output(carries, keep_carries, /*dimension=*/0);
    ctx->mark_non_differentiable({returned});
    return {y, returned};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const auto [grad_q, grad_k, grad_v] = call_operator<Backward>(
        grads[0], saved[0], saved[1], if_defined(saved[2]), saved[3], if_defined(saved[4]), if_defined(saved[5]),
        if_defined(saved[6]), ctx->saved_data["left_padded"].toBool(), ctx->saved_data["causal"].toBool(),
        ctx->saved_data["eps"].toDouble(), wanted_gradients<3>(ctx));
    return gradients_of<Forward>({grad_q, grad_k, grad_v});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, SoftplusAttentionSequences>(m);
  register_backward<Backward>(m);
}

}  // namespace
}  // namespace memcheck
