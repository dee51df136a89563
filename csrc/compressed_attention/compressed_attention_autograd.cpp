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
using Scale = std::optional<double>;
using Mask = std::array<bool, 3>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

using ForwardSchema = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t,
                                                                 bool, bool, Scale, bool);
using BackwardSchema = Gradients(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                                 const Tensor&, int64_t, c10::SymInt, bool, bool, Scale, c10::SymIntArrayRef,
                                 c10::SymIntArrayRef, Mask);
using PooledSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t, c10::SymInt, bool,
                                                bool, Scale, bool);
using PooledBackwardSchema = Gradients(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                                       const MaybeTensor&, const Tensor&, int64_t, c10::SymInt, bool, bool, Scale,
                                       Mask);

auto forward_op() {
  static const auto op = find_operator<ForwardSchema>("memcheck::compressed_attention");
  return op;
}

auto backward_op() {
  static const auto op = find_operator<BackwardSchema>("memcheck::compressed_attention_backward");
  return op;
}

auto pooled_op() {
  static const auto op = find_operator<PooledSchema>("memcheck::compressed_attention_pooled");
  return op;
}

auto pooled_backward_op() {
  static const auto op = find_operator<PooledBackwardSchema>("memcheck::compressed_attention_pooled_backward");
  return op;
}

struct Options {
  int64_t factor;
  bool causal, strict;
  Scale scale;
};

void keep_options(AutogradContext* ctx, const Options& options, const c10::SymInt& kv_len) {
  ctx->saved_data["factor"] = options.factor;
  ctx->saved_data["causal"] = options.causal;
  ctx->saved_data["strict"] = options.strict;
  ctx->saved_data["scale"] = options.scale;
  ctx->saved_data["kv_len"] = kv_len;
}

Options kept_options(AutogradContext* ctx) {
  return {ctx->saved_data["factor"].toInt(), ctx->saved_data["causal"].toBool(), ctx->saved_data["strict"].toBool(),
          ctx->saved_data["scale"].toOptional<double>()};
}

Mask wanted_gradients(AutogradContext* ctx) {
  return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
}

// q and kc: the scores are formed again, and their gradients are sums of kc and of q. lse: the weights of softmax from
// scores. vc: the gradient of a weight; the gradient of the values alone does without. y: grad_y . y, unless y was
// rounded to 16 bits, when that is a sum over blocks.
void keep_tensors(AutogradContext* ctx, const Tensor& q, const Tensor& kc, const Tensor& vc, const Tensor& y,
                  const Tensor& lse, bool grads_scores, bool keeps_vc) {
  const bool exact = acc_scalar_type(q.scalar_type()) == q.scalar_type();
  ctx->save_for_backward({q, kc, keeps_vc ? vc : Tensor(), grads_scores && exact ? y : Tensor(), lse});
  ctx->set_materialize_grads(false);
}

// The strides of its gradient: those of x where it is dense and does not overlap itself, else of a contiguous tensor.
std::vector<c10::SymInt> gradient_stride(const Tensor& x) {
  if (x.is_non_overlapping_and_dense()) return x.sym_strides().vec();
  std::vector<c10::SymInt> stride(x.dim(), 1);
  for (int64_t i = x.dim() - 1; i > 0; --i) stride[i - 1] = stride[i] * x.sym_size(i).max(1);
  return stride;
}

struct CompressedAttention : Function<CompressedAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Options& options, bool returns_kept) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, lse, kc, vc] =
        forward_op().call(q, k, v, options.factor, options.causal, options.strict, options.scale, true);
    const bool grads_scores = q.requires_grad() || k.requires_grad();
    // Of k and v themselves nothing is kept but how their gradients lie.
    keep_tensors(ctx, q, kc, vc, y, lse, grads_scores, grads_scores);
    keep_options(ctx, options, k.sym_size(2));
    ctx->saved_data["grad_k_stride"] = gradient_stride(k);
    ctx->saved_data["grad_v_stride"] = gradient_stride(v);
    const auto returned = [&](const Tensor& x) { return kept_output(x, returns_kept, /*dimension=*/2); };
    const variable_list kept{returned(lse), returned(kc), returned(vc)};
    ctx->mark_non_differentiable(kept);
    return {y, kept[0], kept[1], kept[2]};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const Options options = kept_options(ctx);
    const auto [grad_q, grad_k, grad_v] =
        backward_op().call(grads[0], saved[0], saved[1], if_defined(saved[2]), if_defined(saved[3]), saved[4],
                           options.factor, ctx->saved_data["kv_len"].toSymInt(), options.causal, options.strict,
                           options.scale, ctx->saved_data["grad_k_stride"].toSymIntVector(),
                           ctx->saved_data["grad_v_stride"].toSymIntVector(), wanted_gradients(ctx));
    const variable_list gradients{grad_q, grad_k, grad_v};
    // k and v are known by kc and vc alone. The gradient of the values does not depend on the values.
    const bool of_values_alone = !required_gradient(0) && !required_gradient(1);
    const auto guarded =
        of_values_alone ? gradients : refuse_double_backward_through_kept("compressed_attention", gradients, grads[0]);
    return {guarded[0], guarded[1], guarded[2], Tensor(), Tensor()};
  }
};

struct PooledAttention : Function<PooledAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& kc, const Tensor& vc,
                               const Options& options, const c10::SymInt& kv_len) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, lse] =
        pooled_op().call(q, kc, vc, options.factor, kv_len, options.causal, options.strict, options.scale, true);
    const bool grads_scores = q.requires_grad() || kc.requires_grad();
    // The gradient of vc takes the strides of vc.
    keep_tensors(ctx, q, kc, vc, y, lse, grads_scores, grads_scores || !vc.is_contiguous());
    keep_options(ctx, options, kv_len);
    ctx->mark_non_differentiable({lse});
    return {y, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    const Options options = kept_options(ctx);
    const auto [grad_q, grad_kc, grad_vc] = pooled_backward_op().call(
        grads[0], saved[0], saved[1], if_defined(saved[2]), if_defined(saved[3]), saved[4], options.factor,
        ctx->saved_data["kv_len"].toSymInt(), options.causal, options.strict, options.scale, wanted_gradients(ctx));
    return {grad_q, grad_kc, grad_vc, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            int64_t factor, bool causal, bool strict, Scale scale,
                                                            bool keep) {
  check_tensors("compressed_attention", {{"q", q}, {"k", k}, {"v", v}});
  refuse_forward_mode("compressed_attention", {q, k, v});
  if (will_be_differentiated("compressed_attention", {q, k, v})) {
    const auto outputs = CompressedAttention::apply(q, k, v, Options{factor, causal, strict, scale}, keep);
    return {outputs[0], outputs[1], outputs[2], outputs[3]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return forward_op().call(q, k, v, factor, causal, strict, scale, keep);
}

std::tuple<Tensor, Tensor> pooled_autograd(const Tensor& q, const Tensor& kc, const Tensor& vc, int64_t factor,
                                           c10::SymInt kv_len, bool causal, bool strict, Scale scale, bool keep_lse) {
  check_tensors("compressed_attention_pooled", {{"q", q}, {"kc", kc}, {"vc", vc}});
  refuse_forward_mode("compressed_attention_pooled", {q, kc, vc});
  if (will_be_differentiated("compressed_attention_pooled", {q, kc, vc})) {
    const auto outputs = PooledAttention::apply(q, kc, vc, Options{factor, causal, strict, scale}, kv_len);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return pooled_op().call(q, kc, vc, factor, kv_len, causal, strict, scale, keep_lse);
}

Gradients refuse_more(const char* op, const Gradients& gradients, const Tensor& grad_y, const Tensor& q,
                      const Tensor& kc, const MaybeTensor& vc, const MaybeTensor& y, const Tensor& lse) {
  const auto& [grad_q, grad_k, grad_v] = gradients;
  const auto guarded = refuse_double_backward(op, {grad_q, grad_k, grad_v}, grad_y, q, kc, vc.value_or(Tensor()),
                                              y.value_or(Tensor()), lse);
  return {guarded[0], guarded[1], guarded[2]};
}

Gradients backward_autograd(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                            const MaybeTensor& y, const Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal,
                            bool strict, Scale scale, c10::SymIntArrayRef grad_k_stride,
                            c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  refuse_forward_mode("compressed_attention", {grad_y, q, kc, vc.value_or(Tensor()), y.value_or(Tensor()), lse});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(grad_y, q, kc, vc, y, lse, factor, kv_len, causal, strict, scale, grad_k_stride,
                              grad_v_stride, output_mask);
  };
  return refuse_more("compressed_attention", run(), grad_y, q, kc, vc, y, lse);
}

Gradients pooled_backward_autograd(const Tensor& grad_y, const Tensor& q, const Tensor& kc, const MaybeTensor& vc,
                                   const MaybeTensor& y, const Tensor& lse, int64_t factor, c10::SymInt kv_len,
                                   bool causal, bool strict, Scale scale, Mask output_mask) {
  refuse_forward_mode("compressed_attention_pooled", {grad_y, q, kc, vc.value_or(Tensor()), y.value_or(Tensor()), lse});
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return pooled_backward_op().call(grad_y, q, kc, vc, y, lse, factor, kv_len, causal, strict, scale, output_mask);
  };
  return refuse_more("compressed_attention_pooled", run(), grad_y, q, kc, vc, y, lse);
}

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  m.impl("compressed_attention", forward_autograd);
  m.impl("compressed_attention_backward", backward_autograd);
  m.impl("compressed_attention_pooled", pooled_autograd);
  m.impl("compressed_attention_pooled_backward", pooled_backward_autograd);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            int64_t factor, bool causal, bool strict, Scale scale,
                                                            bool keep) {
  const Autocast<device> cast;
  return forward_op().call(cast(q), cast(k), cast(v), factor, causal, strict, scale, keep);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> pooled_autocast(const Tensor& q, const Tensor& kc, const Tensor& vc, int64_t factor,
                                           c10::SymInt kv_len, bool causal, bool strict, Scale scale, bool keep_lse) {
  const Autocast<device> cast;
  return pooled_op().call(cast(q), cast(kc), cast(vc), factor, kv_len, causal, strict, scale, keep_lse);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCPU, m) {
  m.impl("compressed_attention", forward_autocast<c10::kCPU>);
  m.impl("compressed_attention_pooled", pooled_autocast<c10::kCPU>);
}

TORCH_LIBRARY_IMPL(memcheck, AutocastCUDA, m) {
  m.impl("compressed_attention", forward_autocast<c10::kCUDA>);
  m.impl("compressed_attention_pooled", pooled_autocast<c10::kCUDA>);
}

}  // namespace
}  // namespace memcheck
