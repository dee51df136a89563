#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

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

// For each position its block among those that the forward kept, and how many positions that has, 0 for padding:
// (1,1,T,1), or (B,1,T,1) if padded.
struct BlocksOfPositions {
  Tensor index, lengths;
};

BlocksOfPositions blocks_of_positions(const BackwardOp::Arguments& of, const at::TensorOptions& options) {
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

// What a backward operator takes of the tensors that saved_tensors has chosen, and of the options.
template <typename Saved>
operators::CompressedAttentionGradients gradients_of(const Saved& saved, const variable_list& grads,
                                                     c10::SymInt kv_len) {
  const auto given = [&saved](size_t i) { return if_defined(saved.tensors[i]); };
  const auto& of = saved.options;
  return {gradient_of_y(grads, saved.tensors[0]),
          saved.tensors[0],
          saved.tensors[1],
          given(2),
          kept_y(saved.tensors[3]),
          saved.tensors[4].detach(),
          if_defined(grads[1]),
          given(5),
          given(9),
          given(10),
          given(6),
          given(7),
          given(8),
          of.left_padded,
          of.factor,
          std::move(kv_len),
          of.causal,
          of.strict,
          of.scale,
          of.window};
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
    // y has a gradient, and lse if it was asked for.
    const variable_list results{y, kept_output(lse, keep || in.return_lse, /*dimension=*/2),
                                kept_output(kc, keep, /*dimension=*/2), kept_output(vc, keep, /*dimension=*/2)};
    ctx->mark_non_differentiable({results.begin() + (in.return_lse ? 2 : 1), results.end()});
    return results;
  }

  static variable_list differentiate(const Saved& saved, const variable_list& grads) {
    auto& data = saved.ctx->saved_data;
    BackwardOp::Arguments in{gradients_of(saved, grads, data["kv_len"].toSymInt()),
                             data["grad_k_stride"].toSymIntVector(), data["grad_v_stride"].toSymIntVector(),
                             saved.wanted_of<4>()};
    if (at::GradMode::is_enabled()) {
      const BlocksOfPositions blocks = [&] {
        const at::NoGradGuard guard;
        return blocks_of_positions(in, in.grad_y.options());
      }();
      in.kc = kept_means(in.kc, 1, blocks);
      if (in.vc) in.vc = kept_means(*in.vc, 2, blocks);
    }
    return list_of(call<BackwardOp>(in));
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
    return list_of(call<PooledBackwardOp>({gradients_of(saved, grads, saved.options.kv_len), saved.wanted_of<6>()}));
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
    return list_of(call<ExtendBackwardOp>(
        {if_defined(grads[0]), if_defined(grads[1]), if_defined(grads[2]), if_defined(grads[3]), saved.tensors[0],
         data["sizes"].toSymIntVector(), data["k_stride"].toSymIntVector(), data["v_stride"].toSymIntVector(),
         of.positions, of.factor, of.begins, of.counts, of.places, of.packed, saved.wanted_of<4>()}));
  }
};

TORCH_LIBRARY_IMPL(memcheck, Autograd, m) {
  register_node<Op, CompressedAttention>(m);
  register_gradients<BackwardOp>(m);
  register_node<Pooled, PooledAttention>(m);
  register_gradients<PooledBackwardOp>(m);
  register_node<ExtendOp, Extension>(m);
  register_gradients<ExtendBackwardOp>(m);
  register_no_gradient<operators::CompressedAttentionStep>(m);
  register_no_gradient<operators::CompressedAttentionLastStep>(m);
}

}  // namespace
}  // namespace memcheck::compressed_attention_autograd
