#include <ATen/ops/zeros.h>

#include "common/torch/autograd.h"
#include "compressed_attention/compressed_attention_operators.h"

namespace memcheck::compressed_attention_autograd {
namespace {

using Op = operators::CompressedAttention;
using BackwardOp = operators::CompressedAttentionBackward;
using Pooled = operators::CompressedAttentionPooled;
using PooledBackwardOp = operators::CompressedAttentionPooledBackward;
using ExtendOp = operators::CompressedAttentionExtend;
using ExtendBackwardOp = operators::CompressedAttentionExtendBackward;

// The gradient of y, which is undefined if only lse was differentiated.
Tensor gradient_of_y(const variable_list& grads, const Tensor& q) {
  return grads[0].defined() ? grads[0] : at::zeros({}, q.options()).expand_symint(q.sym_sizes());
}

// The strides of the gradient of x: those of x if it is dense and does not overlap itself, else of a contiguous tensor.
std::vector<c10::SymInt> gradient_stride(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x.sym_strides().vec();
  std::vector<c10::SymInt> stride(x.dim(), 1);
  for (int64_t i = x.dim() - 1; i > 0; --i) stride[i - 1] = stride[i] * x.sym_size(i).max(1);
  return stride;
}

// y as a backward reads it. Its own gradient is that of the other tensors, from which it can be computed.
std::optional<Tensor> kept_y(const Tensor& y) {
  return y.defined() ? std::optional<Tensor>(y.detach()) : std::nullopt;
}

// q and kc: the scores are formed again, and their gradients are sums of kc and of q. lse: the softmax weights from
// scores. vc: for the gradient of a weight, but not for that of the values. y: grad_y . y, unless y was rounded to 16
// bits, when that is a sum over blocks. sink: its weight, for its own gradient and for those of
// gradients; the lse includes it. Lengths: which positions belong to which sequence. k and v of a window: as kc and vc.
template <typename Arguments>
variable_list saved_tensors(const Arguments& in, const Tensor& kc, const Tensor& vc, const Tensor& y, const Tensor& lse,
                            bool grads_scores) {
  const bool exact = acc_scalar_type(in.q.scalar_type()) == in.q.scalar_type();
  const MaybeTensor k = in.k, v = in.v;
  return tensors_among(in.q, kc, vc, grads_scores && exact ? y : Tensor(), lse, in.sink, in.cu_seqlens_q,
                       in.cu_seqlens_k, in.lengths, in.window ? k : std::nullopt,
                       in.window && grads_scores ? v : std::nullopt);
}

// memcheck/ops/derivatives.py defines it: the gradient of k from that of its means, or of v.
struct MeansBackward {
  static constexpr const char* schema = "compressed_attention_means_backward";
  struct Arguments {
    Tensor grad;  // (B,Hkv,C,D)
    MaybeTensor cu_seqlens_k, lengths;
    bool left_padded;
    int64_t factor;
    c10::SymInt kv_len;

    auto fields() { return std::tie(grad, cu_seqlens_k, lengths, left_padded, factor, kv_len); }
  };
  using Results = std::tuple<Tensor>;  // (B,Hkv,T,D)
};

// What a backward operator takes of the tensors that saved_tensors has chosen, and of the options.
template <typename Saved>
operators::CompressedAttentionGradients gradients_of(const Saved& saved, const variable_list& grads,
                                                     c10::SymInt kv_len) {
  const auto& of = saved.options;
  return {.grad_y = gradient_of_y(grads, saved.tensors[0]),
          .q = saved.tensors[0],
          .kc = saved.tensors[1],
          .vc = saved.given(2),
          .y = kept_y(saved.tensors[3]),
          .lse = saved.tensors[4].detach(),
          .grad_lse = if_defined(grads[1]),
          .sink = saved.given(5),
          .k = saved.given(9),
          .v = saved.given(10),
          .cu_seqlens_q = saved.given(6),
          .cu_seqlens_k = saved.given(7),
          .lengths = saved.given(8),
          .left_padded = of.left_padded,
          .factor = of.factor,
          .kv_len = std::move(kv_len),
          .causal = of.causal,
          .strict = of.strict,
          .scale = of.scale,
          .window = of.window};
}

struct CompressedAttention : Differentiable<CompressedAttention, Op> {
  static variable_list run(AutogradContext* ctx, Arguments in) {
    const bool keep = std::exchange(in.keep, true);
    const auto [y, lse, kc, vc] = call_below<Op>(in);
    const bool grads_scores = in.q.requires_grad() || in.k.requires_grad() || requires_gradient(in.sink);
    ctx->save_for_backward(saved_tensors(in, kc, grads_scores ? vc : Tensor(), y, lse, grads_scores));
    // Without a window k and v are not saved, but the strides of their gradients.
    ctx->saved_data["kv_len"] = in.k.sym_size(2);
    ctx->saved_data["grad_k_stride"] = gradient_stride(in.k);
    ctx->saved_data["grad_v_stride"] = gradient_stride(in.v);
    // y has a gradient, lse if it was asked for, and kc and vc in a backward that is differentiated.
    const variable_list results{y,
                                kept_output(lse, keep || in.return_lse, /*dimension=*/2),
                                kept_output(kc, keep, /*dimension=*/2),
                                kept_output(vc, keep, /*dimension=*/2),
                                kc,
                                vc};
    ctx->mark_non_differentiable({results.begin() + (in.return_lse ? 2 : 1), results.begin() + (keep ? 2 : 4)});
    return results;
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    auto& data = saved.ctx->saved_data;
    const auto kv_len = data["kv_len"].toSymInt();
    const auto wanted = saved.wanted_of<4>();
    variable_list gradients(4);
    if (grads[0].defined() || grads[1].defined())
      gradients =
          list_of(call_backward<BackwardOp>({gradients_of(saved, grads, kv_len), data["grad_k_stride"].toSymIntVector(),
                                             data["grad_v_stride"].toSymIntVector(), wanted}));
    const Arguments& of = saved.options;
    for (const size_t i : {1, 2})
      if (const Tensor& of_means = grads[3 + i]; wanted[i] && of_means.defined())
        add_gradient(gradients[i], std::get<0>(call<MeansBackward>({.grad = of_means,
                                                                    .cu_seqlens_k = saved.given(7),
                                                                    .lengths = saved.given(8),
                                                                    .left_padded = of.left_padded,
                                                                    .factor = of.factor,
                                                                    .kv_len = kv_len})));
    return gradients;
  }
};

struct PooledAttention : Differentiable<PooledAttention, Pooled> {
  static variable_list run(AutogradContext* ctx, Arguments in) {
    in.keep = true;
    const auto [y, lse] = call_below<Pooled>(in);
    const bool grads_scores =
        in.q.requires_grad() || in.kc.requires_grad() || requires_gradient(in.sink) || requires_gradient(in.k);
    // The gradient of vc takes the strides of vc.
    const bool saves_vc = grads_scores || !in.vc.is_contiguous();
    ctx->save_for_backward(saved_tensors(in, in.kc, saves_vc ? in.vc : Tensor(), y, lse, grads_scores));
    if (!in.return_lse) ctx->mark_non_differentiable({lse});
    return {y, lse};
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    return list_of(
        call_backward<PooledBackwardOp>({gradients_of(saved, grads, saved.options.kv_len), saved.wanted_of<6>()}));
  }
};

struct Extension : Differentiable<Extension, ExtendOp> {
  static variable_list run(AutogradContext* ctx, const Arguments& in) {
    // The results are linear in the inputs, of which nothing is saved but sizes, strides and the dtype.
    ctx->save_for_backward({at::empty({0}, in.k.options())});
    ctx->saved_data["sizes"] = in.k.sym_sizes();
    ctx->saved_data["k_stride"] = gradient_stride(in.k);
    ctx->saved_data["v_stride"] = gradient_stride(in.v);
    return list_of(call_below<ExtendOp>(in));
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    auto& data = saved.ctx->saved_data;
    const Arguments& of = saved.options;
    return list_of(call_backward<ExtendBackwardOp>({.grad_kc = if_defined(grads[0]),
                                                    .grad_vc = if_defined(grads[1]),
                                                    .grad_k_sum = if_defined(grads[2]),
                                                    .grad_v_sum = if_defined(grads[3]),
                                                    .like = saved.tensors[0],
                                                    .sizes = data["sizes"].toSymIntVector(),
                                                    .k_stride = data["k_stride"].toSymIntVector(),
                                                    .v_stride = data["v_stride"].toSymIntVector(),
                                                    .positions = of.positions,
                                                    .factor = of.factor,
                                                    .begins = of.begins,
                                                    .counts = of.counts,
                                                    .places = of.places,
                                                    .packed = of.packed,
                                                    .output_mask = saved.wanted_of<4>()}));
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<Op, CompressedAttention>(m);
  register_node<Pooled, PooledAttention>(m);
  register_node<ExtendOp, Extension>(m);
  register_no_gradient<operators::CompressedAttentionStep>(m);
  register_no_gradient<operators::CompressedAttentionLastStep>(m);
  register_no_gradient<operators::CompressedAttentionWindowStep>(m);
}

}  // namespace
}  // namespace memcheck::compressed_attention_autograd
