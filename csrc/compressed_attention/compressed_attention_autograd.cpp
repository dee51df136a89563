#include "compressed_attention/compressed_attention_autograd.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

namespace memcheck::compressed_attention_autograd {
namespace {

bool requires_gradient(const MaybeTensor& x) {
  return x && x->requires_grad();
}

// Arguments that a backward takes as its forward does.
struct Options {
  MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
  bool left_padded;
  int64_t factor;
  c10::SymInt kv_len;
  bool causal, strict;
  Scale scale;

  // `inputs` of the backward, before the tensors of sequences.
  void save(AutogradContext* ctx, variable_list inputs) const {
    for (const MaybeTensor& x : {cu_seqlens_q, cu_seqlens_k, lengths}) inputs.push_back(x.value_or(Tensor()));
    ctx->save_for_backward(std::move(inputs));
    ctx->set_materialize_grads(false);
    ctx->saved_data["left_padded"] = left_padded;
    ctx->saved_data["factor"] = factor;
    ctx->saved_data["kv_len"] = kv_len;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["strict"] = strict;
    ctx->saved_data["scale"] = scale;
  }

  static Options saved(AutogradContext* ctx, const variable_list& inputs) {
    return {if_defined(inputs[6]),
            if_defined(inputs[7]),
            if_defined(inputs[8]),
            ctx->saved_data["left_padded"].toBool(),
            ctx->saved_data["factor"].toInt(),
            ctx->saved_data["kv_len"].toSymInt(),
            ctx->saved_data["causal"].toBool(),
            ctx->saved_data["strict"].toBool(),
            ctx->saved_data["scale"].toOptional<double>()};
  }
};

// q and kc: the scores are formed again, and their gradients are sums of kc and of q. lse: the softmax weights from
// scores. vc: for the gradient of a weight, but not for that of the values. y: grad_y . y, unless y was rounded to 16
// bits, when that is a sum over blocks. sink: its weight, for its own gradient and for those of
// gradients; the lse includes it.
variable_list saved_tensors(const Tensor& q, const Tensor& kc, const Tensor& vc, const Tensor& y, const Tensor& lse,
                            const MaybeTensor& sink, bool grads_scores, bool saves_vc) {
  const bool exact = acc_scalar_type(q.scalar_type()) == q.scalar_type();
  return {q, kc, saves_vc ? vc : Tensor(), grads_scores && exact ? y : Tensor(), lse, sink.value_or(Tensor())};
}

// Which gradients the backward that is running is asked for. A sink has a place among the inputs only if it was given.
Mask wanted_with_sink(const AutogradContext* ctx, const Tensor& sink) {
  return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
          sink.defined() && ctx->needs_input_grad(3)};
}

// The outputs of a forward, of which y has a gradient, and lse if it was asked for.
variable_list returned(AutogradContext* ctx, const variable_list& outputs, bool keep, bool return_lse) {
  const Tensor lse = kept_output(outputs[1], keep || return_lse, /*dimension=*/2);
  const Tensor kc = kept_output(outputs[2], keep, /*dimension=*/2);
  const Tensor vc = kept_output(outputs[3], keep, /*dimension=*/2);
  ctx->mark_non_differentiable(return_lse ? variable_list{kc, vc} : variable_list{lse, kc, vc});
  return {outputs[0], lse, kc, vc};
}

// For each position its block among those that the forward kept, and how many positions that has, 0 for padding:
// (1,1,T,1), or (B,1,T,1) if padded.
struct BlocksOfPositions {
  Tensor index, lengths;
};

BlocksOfPositions blocks_of_positions(const Options& of, const at::TensorOptions& options) {
  const int64_t T = of.kv_len.guard_int(__FILE__, __LINE__), factor = of.factor;
  const auto integers = options.dtype(at::kLong);
  const Tensor position = at::arange(T, integers);
  Tensor place = position, count = at::full({}, T, integers), first = at::zeros({}, integers);
  if (of.cu_seqlens_k) {
    const Tensor ends = of.cu_seqlens_k->to(integers.device(), at::kLong);
    const Tensor sequence = at::searchsorted(ends.slice(0, 1), position, /*out_int32=*/false, /*right=*/true);
    const Tensor begin = ends.index_select(0, sequence);
    place = position - begin;
    count = ends.index_select(0, sequence + 1) - begin;
    first = begin.div(factor, "floor") + sequence;
  } else if (of.lengths) {
    count = of.lengths->to(integers.device(), at::kLong).unsqueeze(1);
    if (of.left_padded) place = position - (T - count);
  }
  const Tensor block = place.clamp_min(0).div(factor, "floor");
  const Tensor length = (count - block * factor).clamp(0, factor).masked_fill(place < 0, 0);
  const auto spread = [&](const Tensor& x) { return x.unsqueeze(-2).unsqueeze(-1).expand({-1, 1, T, 1}); };
  const auto rows = [&](const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x; };
  return {spread(rows(first + block)), spread(rows(length))};
}

// The means kc (B,Hkv,C,D) that the forward kept, as a function of k (B,Hkv,T,D); or vc, of v.
struct KeptMeans : Function<KeptMeans> {
  static variable_list forward(AutogradContext* ctx, const Tensor& /*stands for k*/, const Tensor& kept,
                               const Tensor& index, const Tensor& lengths) {
    ctx->save_for_backward({index, lengths});
    return {kept};
  }

  // A position gets the gradient of its block, divided by the block's length.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &grad = grads[0], &lengths = saved[1];
    std::vector<int64_t> sizes = grad.sizes().vec();
    sizes[2] = lengths.size(2);
    const Tensor index = saved[0].clamp_max(std::max<int64_t>(0, grad.size(2) - 1)).expand(sizes);
    const Tensor of_positions = grad.gather(2, index).div(lengths.clamp_min(1)).masked_fill(lengths == 0, 0);
    return {of_positions, {}, {}, {}};
  }
};

// The same where a backward may be differentiated.
Tensor kept_means(const Tensor& kept, size_t input, const BlocksOfPositions& blocks) {
  if (!kept.defined() || !blocks.index.defined()) return kept;
  return KeptMeans::apply(stands_for_input(input, kept), kept, blocks.index, blocks.lengths)[0];
}

struct CompressedAttention : Function<CompressedAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                               const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded,
                               int64_t factor, bool causal, bool strict, Scale scale, bool keep, bool return_lse) {
    const auto [y, lse, kc, vc] =
        call_below_autograd<Forward>(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor, causal,
                                     strict, scale, true, return_lse);
    const bool grads_scores = q.requires_grad() || k.requires_grad() || requires_gradient(sink);
    // k and v are not saved, but the strides of their gradients.
    Options{cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor, k.sym_size(2), causal, strict, scale}.save(
        ctx, saved_tensors(q, kc, vc, y, lse, sink, grads_scores, grads_scores));
    ctx->saved_data["grad_k_stride"] = gradient_stride(k);
    ctx->saved_data["grad_v_stride"] = gradient_stride(v);
    return returned(ctx, {y, lse, kc, vc}, keep, return_lse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return gradients_of<Forward>({});
    const auto saved = ctx->get_saved_variables();
    const Options of = Options::saved(ctx, saved);
    const Tensor grad_y = gradient_of_y(grads, saved[0]);
    BlocksOfPositions blocks;
    if (at::GradMode::is_enabled()) {
      const at::NoGradGuard guard;
      blocks = blocks_of_positions(of, grad_y.options());
    }
    const Tensor kc = kept_means(saved[1], 1, blocks), vc = kept_means(saved[2], 2, blocks);
    const auto [grad_q, grad_k, grad_v, grad_sink] = call_operator<Backward>(
        grad_y, saved[0], kc, if_defined(vc), kept_y(saved[3]), saved[4].detach(), if_defined(grads[1]),
        if_defined(saved[5]), of.cu_seqlens_q, of.cu_seqlens_k, of.lengths, of.left_padded, of.factor, of.kv_len,
        of.causal, of.strict, of.scale, ctx->saved_data["grad_k_stride"].toSymIntVector(),
        ctx->saved_data["grad_v_stride"].toSymIntVector(), wanted_with_sink(ctx, saved[5]));
    return gradients_of<Forward>({grad_q, grad_k, grad_v, grad_sink});
  }
};

struct PooledAttention : Function<PooledAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& kc, const Tensor& vc,
                               const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                               const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded,
                               int64_t factor, c10::SymInt kv_len, bool causal, bool strict, Scale scale, bool /*keep*/,
                               bool return_lse) {
    const auto [y, lse] =
        call_below_autograd<PooledForward>(q, kc, vc, sink, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor,
                                           kv_len, causal, strict, scale, true, return_lse);
    const bool grads_scores = q.requires_grad() || kc.requires_grad() || requires_gradient(sink);
    // The gradient of vc takes the strides of vc.
    Options{cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor, kv_len, causal, strict, scale}.save(
        ctx, saved_tensors(q, kc, vc, y, lse, sink, grads_scores, grads_scores || !vc.is_contiguous()));
    if (!return_lse) ctx->mark_non_differentiable({lse});
    return {y, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return gradients_of<PooledForward>({});
    const auto saved = ctx->get_saved_variables();
    const Options of = Options::saved(ctx, saved);
    const auto [grad_q, grad_kc, grad_vc, grad_sink] = call_operator<PooledBackward>(
        gradient_of_y(grads, saved[0]), saved[0], saved[1], if_defined(saved[2]), kept_y(saved[3]), saved[4].detach(),
        if_defined(grads[1]), if_defined(saved[5]), of.cu_seqlens_q, of.cu_seqlens_k, of.lengths, of.left_padded,
        of.factor, of.kv_len, of.causal, of.strict, of.scale, wanted_with_sink(ctx, saved[5]));
    return gradients_of<PooledForward>({grad_q, grad_kc, grad_vc, grad_sink});
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_differentiable<Forward, CompressedAttention>(m);
  register_backward<Backward>(m);
  register_differentiable<PooledForward, PooledAttention>(m);
  register_backward<PooledBackward>(m);
  register_without_gradient<Step>(m);
  register_without_gradient<LastStep>(m);
}

}  // namespace
}  // namespace memcheck::compressed_attention_autograd
