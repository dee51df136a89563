#include <array>

#include "common/torch/autograd.h"

namespace memcheck {
namespace {

using MaybeTensor = std::optional<Tensor>;
using Scale = std::optional<double>;
using Mask = std::array<bool, 3>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

struct Forward {
  static constexpr const char* name = "compressed_attention";
  using Schema = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            int64_t factor, bool causal, bool strict, Scale scale,
                                                            bool keep);
};

struct Backward {
  static constexpr const char* name = "compressed_attention_backward";
  using Schema = Gradients(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                           const MaybeTensor& y, const Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal,
                           bool strict, Scale scale, c10::SymIntArrayRef grad_k_stride,
                           c10::SymIntArrayRef grad_v_stride, Mask output_mask);
};

struct PooledForward {
  static constexpr const char* name = "compressed_attention_pooled";
  using Schema = std::tuple<Tensor, Tensor>(const Tensor& q, const Tensor& kc, const Tensor& vc, int64_t factor,
                                            c10::SymInt kv_len, bool causal, bool strict, Scale scale, bool keep_lse);
};

struct PooledBackward {
  static constexpr const char* name = "compressed_attention_pooled_backward";
  using Schema = Gradients(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                           const MaybeTensor& y, const Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal,
                           bool strict, Scale scale, Mask output_mask);
};

struct Options {
  int64_t factor;
  bool causal, strict;
  Scale scale;
};

void save_options(AutogradContext* ctx, const Options& options, const c10::SymInt& kv_len) {
  ctx->saved_data["factor"] = options.factor;
  ctx->saved_data["causal"] = options.causal;
  ctx->saved_data["strict"] = options.strict;
  ctx->saved_data["scale"] = options.scale;
  ctx->saved_data["kv_len"] = kv_len;
}

Options saved_options(AutogradContext* ctx) {
  return {ctx->saved_data["factor"].toInt(), ctx->saved_data["causal"].toBool(), ctx->saved_data["strict"].toBool(),
          ctx->saved_data["scale"].toOptional<double>()};
}

// q and kc: the scores are formed again, and their gradients are sums of kc and of q. lse: the softmax weights from
// scores. vc: for the gradient of a weight, but not for that of the values. y: grad_y . y, unless y was rounded to 16
// bits, when that is a sum over blocks.
void save_tensors(AutogradContext* ctx, const Tensor& q, const Tensor& kc, const Tensor& vc, const Tensor& y,
                  const Tensor& lse, bool grads_scores, bool saves_vc) {
  const bool exact = acc_scalar_type(q.scalar_type()) == q.scalar_type();
  ctx->save_for_backward({q, kc, saves_vc ? vc : Tensor(), grads_scores && exact ? y : Tensor(), lse});
  ctx->set_materialize_grads(false);
}

// The strides of the gradient of x: those of x if it is dense and does not overlap itself, else of a contiguous tensor.
std::vector<c10::SymInt> gradient_stride(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x.sym_strides().vec();
  std::vector<c10::SymInt> stride(x.dim(), 1);
  for (int64_t i = x.dim() - 1; i > 0; --i) stride[i - 1] = stride[i] * x.sym_size(i).max(1);
  return stride;
}

struct CompressedAttention : Function<CompressedAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, int64_t factor,
                               bool causal, bool strict, Scale scale, bool keep) {
    const auto [y, lse, kc, vc] = call_below_autograd<Forward>(q, k, v, factor, causal, strict, scale, true);
    const bool grads_scores = q.requires_grad() || k.requires_grad();
    // k and v are not saved, but the strides of their gradients.
    save_tensors(ctx, q, kc, vc, y, lse, grads_scores, grads_scores);
    save_options(ctx, {factor, causal, strict, scale}, k.sym_size(2));
    ctx->saved_data["grad_k_stride"] = gradient_stride(k);
    ctx->saved_data["grad_v_stride"] = gradient_stride(v);
    const auto returned = [&](const Tensor& x) { return kept_output(x, keep, /*dimension=*/2); };
    const variable_list kept{returned(lse), returned(kc), returned(vc)};
    ctx->mark_non_differentiable(kept);
    return {y, kept[0], kept[1], kept[2]};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const Options options = saved_options(ctx);
    const auto [grad_q, grad_k, grad_v] =
        call_operator<Backward>(grads[0], saved[0], saved[1], if_defined(saved[2]), if_defined(saved[3]), saved[4],
                                options.factor, ctx->saved_data["kv_len"].toSymInt(), options.causal, options.strict,
                                options.scale, ctx->saved_data["grad_k_stride"].toSymIntVector(),
                                ctx->saved_data["grad_v_stride"].toSymIntVector(), wanted_gradients<3>(ctx));
    const variable_list gradients{grad_q, grad_k, grad_v};
    // Gradients of scores depend on k and v through kc and vc alone. The gradient of the values does not depend on
    // them.
    if (!required_gradient(0) && !required_gradient(1)) return gradients_of<Forward>(gradients);
    return gradients_of<Forward>(refuse_double_backward_through_kept("compressed_attention", gradients, grads[0]));
  }
};

struct PooledAttention : Function<PooledAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& kc, const Tensor& vc,
                               int64_t factor, c10::SymInt kv_len, bool causal, bool strict, Scale scale,
                               bool /*keep_lse*/) {
    const auto [y, lse] = call_below_autograd<PooledForward>(q, kc, vc, factor, kv_len, causal, strict, scale, true);
    const bool grads_scores = q.requires_grad() || kc.requires_grad();
    // The gradient of vc takes the strides of vc.
    save_tensors(ctx, q, kc, vc, y, lse, grads_scores, grads_scores || !vc.is_contiguous());
    save_options(ctx, {factor, causal, strict, scale}, kv_len);
    ctx->mark_non_differentiable({lse});
    return {y, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return gradients_of<PooledForward>({});
    const auto saved = ctx->get_saved_variables();
    const Options options = saved_options(ctx);
    const auto [grad_q, grad_kc, grad_vc] = call_operator<PooledBackward>(
        grads[0], saved[0], saved[1], if_defined(saved[2]), if_defined(saved[3]), saved[4], options.factor,
        ctx->saved_data["kv_len"].toSymInt(), options.causal, options.strict, options.scale, wanted_gradients<3>(ctx));
    return gradients_of<PooledForward>({grad_q, grad_kc, grad_vc});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, CompressedAttention>(m);
  register_backward<Backward>(m);
  register_differentiable<PooledForward, PooledAttention>(m);
  register_backward<PooledBackward>(m);
}

}  // namespace
}  // namespace memcheck
