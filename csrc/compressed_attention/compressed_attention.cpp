#include "compressed_attention/compressed_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"

namespace memcheck {
namespace {

constexpr const char* kForward = "compressed_attention";
constexpr const char* kBackward = "compressed_attention_backward";
constexpr const char* kPooled = "compressed_attention_pooled";
constexpr const char* kPooledBackward = "compressed_attention_pooled_backward";

// The limits of factor and kv_len, so that no product of positions overflows.
constexpr int64_t kLongest = int64_t{1} << 31;
constexpr int64_t kMostPositions = int64_t{1} << 62;

struct Options {
  int64_t factor;
  bool causal, strict;
  std::optional<double> scale;
};

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, H, Hkv, S, T, D, C;

  CompressedAttentionShape shape(const Options& options) const {
    return {B.expect_int(), H.expect_int(), Hkv.expect_int(), S.expect_int(), T.expect_int(),
            D.expect_int(), C.expect_int(), options.factor,   options.causal, options.strict};
  }
};

double scale_of(const CompressedAttentionShape& shape, const Options& options) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, shape.D))));
}

void check_options(const char* op, const Options& options, const at::Tensor& q) {
  TORCH_CHECK_VALUE(options.factor >= 1 && options.factor <= kLongest, op, ": factor must be from 1 to ", kLongest,
                    ", got ", options.factor);
  TORCH_CHECK_VALUE(options.causal || !options.strict, op,
                    ": strict needs causal, as it is about the block a query is in, got strict=True and causal=False");
  if (options.scale) check_scale(op, *options.scale, q.scalar_type());
}

c10::SymInt blocks_of(const c10::SymInt& T, int64_t factor) {
  return (T + (factor - 1)) / factor;
}

// q, and keys k or kc of any length. The caller sets T and C.
Sizes check_heads(const char* op, const at::Tensor& q, const char* k_name, const char* k_letters, const at::Tensor& k) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  check_rank(op, k_name, k, 4, k_letters);
  Sizes n{q.sym_size(0), q.sym_size(1), k.sym_size(1), q.sym_size(2), 0, q.sym_size(3), 0};
  check_shape(op, k_name, k, k_letters, {n.B, n.Hkv, k.sym_size(2), n.D}, "q");
  TORCH_CHECK_VALUE(n.Hkv == 0 ? n.H == 0 : n.H % n.Hkv == 0, op, ": H, the heads of q, must be a multiple of Hkv, ",
                    "the heads of ", k_name, ", got H = ", n.H, " and Hkv = ", n.Hkv);
  check_floating(op, "q", q);
  check_like(op, k_name, k, q, "q");
  return n;
}

void check_lengths(const char* op, const Sizes& n, const char* T_name, bool causal) {
  TORCH_CHECK_VALUE(!causal || n.S <= n.T, op, ": causal needs no more queries than keys, S <= ", T_name,
                    ", got S = ", n.S, " and ", T_name, " = ", n.T);
}

Sizes check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Options& options) {
  Sizes n = check_heads(kForward, q, "k", "(B,Hkv,T,D)", k);
  n.T = k.sym_size(2);
  check_rank(kForward, "v", v, 4, "(B,Hkv,T,D)");
  check_shape(kForward, "v", v, "(B,Hkv,T,D)", {n.B, n.Hkv, n.T, n.D}, "k");
  check_like(kForward, "v", v, q, "q");
  check_options(kForward, options, q);
  check_lengths(kForward, n, "T", options.causal);
  n.C = blocks_of(n.T, options.factor);
  return n;
}

// vc may be undefined unless it is needed.
Sizes check_pooled(const char* op, const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc,
                   const c10::SymInt& kv_len, const Options& options, bool needs_vc) {
  Sizes n = check_heads(op, q, "kc", "(B,Hkv,C,D)", kc);
  check_options(op, options, q);
  TORCH_CHECK_VALUE(kv_len >= 0 && kv_len <= kMostPositions, op, ": kv_len must be from 0 to ", kMostPositions,
                    ", got ", kv_len);
  n.T = kv_len;
  n.C = kc.sym_size(2);
  check_lengths(op, n, "kv_len", options.causal);
  const c10::SymInt all = blocks_of(n.T, options.factor);
  const bool fits = n.C == all || (options.causal && n.C == n.T / options.factor);
  TORCH_CHECK_VALUE(fits, op, ": kc must be (B,Hkv,C,D) with C = ceil(kv_len / factor) = ", all,
                    options.causal ? ", or floor when causal," : "", " for kv_len = ", n.T,
                    " and factor = ", options.factor, ", got C = ", n.C);
  if (!vc.defined() && !needs_vc) return n;
  check_rank(op, "vc", vc, 4, "(B,Hkv,C,D)");
  check_shape(op, "vc", vc, "(B,Hkv,C,D)", {n.B, n.Hkv, n.C, n.D}, "kc");
  check_like(op, "vc", vc, q, "q");
  return n;
}

at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.H, n.S, n.D}, q.options());
}

at::Tensor empty_lse(const Sizes& n, const at::Tensor& q, bool keep) {
  return at::empty_symint({n.B, n.H, keep ? n.S : 0}, q.options().dtype(acc_scalar_type(q.scalar_type())));
}

at::Tensor empty_compressed(const Sizes& n, const at::Tensor& q, bool keep = true) {
  return at::empty_symint({n.B, n.Hkv, keep ? n.C : 0, n.D}, q.options());
}

// ---- forward

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using PooledResult = std::tuple<at::Tensor, at::Tensor>;

ForwardResult forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t factor, bool causal,
                           bool strict, std::optional<double> scale, bool keep) {
  const Sizes n = check_inputs(q, k, v, {factor, causal, strict, scale});
  return {empty_output(n, q), empty_lse(n, q, keep), empty_compressed(n, q, keep), empty_compressed(n, q, keep)};
}

// lse is undefined if it is not kept.
CompressedAttentionForward forward_parameters(const CompressedAttentionShape& shape, const Options& options,
                                              const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc,
                                              const at::Tensor& y, const at::Tensor& lse, const at::Tensor& scratch,
                                              int64_t threads) {
  return {shape,
          scale_of(shape, options),
          reads<4>(q),
          reads<4>(kc),
          reads<4>(vc),
          writes<4>(y),
          lse.defined() ? lse.mutable_data_ptr() : nullptr,
          scratch.mutable_data_ptr(),
          threads};
}

ForwardResult forward(const CompressedAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, int64_t factor, bool causal, bool strict, std::optional<double> scale,
                      bool keep) {
  const Options options{factor, causal, strict, scale};
  const Sizes n = check_inputs(q, k, v, options);
  const CompressedAttentionShape shape = n.shape(options);
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, keep);
  const at::Tensor kc = empty_compressed(n, q);
  const at::Tensor vc = empty_compressed(n, q);
  const at::Tensor scratch = empty_bytes(plan.forward_scratch_bytes, q);
  const CompressedAttentionPooling pooling{
      shape, reads<4>(k), reads<4>(v), writes<4>(kc), writes<4>(vc), scratch.mutable_data_ptr(), device.threads};
  kernels.pool(pooling, dtype_of(q), device.stream);
  kernels.forward(forward_parameters(shape, options, q, kc, vc, y, keep ? lse : at::Tensor(), scratch, device.threads),
                  dtype_of(q), device.stream);
  if (keep) return {y, lse, kc, vc};
  return {y, lse, empty_compressed(n, q, false), empty_compressed(n, q, false)};
}

PooledResult pooled_meta(const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc, int64_t factor,
                         c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale, bool keep) {
  const Sizes n = check_pooled(kPooled, q, kc, vc, kv_len, {factor, causal, strict, scale}, true);
  return {empty_output(n, q), empty_lse(n, q, keep)};
}

PooledResult pooled(const CompressedAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& kc,
                    const at::Tensor& vc, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                    std::optional<double> scale, bool keep) {
  const Options options{factor, causal, strict, scale};
  const Sizes n = check_pooled(kPooled, q, kc, vc, kv_len, options, true);
  const CompressedAttentionShape shape = n.shape(options);
  const DeviceScope device(q);
  const auto plan = kernels.plan(shape, dtype_of(q), device.threads);
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, keep);
  const at::Tensor scratch = empty_bytes(plan.pooled_forward_scratch_bytes, q);
  kernels.forward(forward_parameters(shape, options, q, kc, vc, y, keep ? lse : at::Tensor(), scratch, device.threads),
                  dtype_of(q), device.stream);
  return {y, lse};
}

// ---- backward

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Mask = std::array<bool, 3>;

// The arguments of both backward operators.
struct BackwardInputs {
  const at::Tensor& grad_y;  // (B,H,S,D)
  const at::Tensor& q;       // (B,H,S,D)
  const at::Tensor& kc;      // (B,Hkv,C,D)
  at::Tensor vc;             // (B,Hkv,C,D), undefined if only the gradient of values is wanted
  at::Tensor y;              // (B,H,S,D), undefined as vc is, and if y was rounded to 16 bits
  const at::Tensor& lse;     // (B,H,S)
  c10::SymInt kv_len;        // T
  Options options;
  Mask wanted;
};

at::Tensor defined_or_not(const std::optional<at::Tensor>& x) {
  return x.value_or(at::Tensor());
}

Sizes check_backward(const char* op, const BackwardInputs& in) {
  const bool needs_all = in.wanted[0] || in.wanted[1];
  const Sizes n = check_pooled(op, in.q, in.kc, in.vc, in.kv_len, in.options, needs_all);
  const auto check_like_q = [&](const char* name, const at::Tensor& x) {
    check_rank(op, name, x, 4, "(B,H,S,D)");
    check_shape(op, name, x, "(B,H,S,D)", {n.B, n.H, n.S, n.D}, "q");
    check_like(op, name, x, in.q, "q");
  };
  check_like_q("grad_y", in.grad_y);
  const bool exact = acc_scalar_type(in.q.scalar_type()) == in.q.scalar_type();
  if (in.y.defined() || (needs_all && exact)) check_like_q("y", in.y);
  check_tensor(op, "lse", in.lse);
  check_shape(op, "lse", in.lse, "(B,H,S)", {n.B, n.H, n.S}, "q");
  check_dtype(op, "lse", in.lse, acc_scalar_type(in.q.scalar_type()), "the accumulation type of q");
  check_device(op, "lse", in.lse, in.q, "q");
  return n;
}

// Fills the gradients. Those of keys and values have gradient_length positions, each a part of a block of block_length.
void run_backward(const CompressedAttentionKernels& kernels, const Sizes& n, const BackwardInputs& in,
                  int64_t block_length, int64_t gradient_length, const Gradients& gradients) {
  const CompressedAttentionShape shape = n.shape(in.options);
  const auto& [grad_q, grad_k, grad_v] = gradients;
  const at::Tensor lse = in.lse.contiguous();
  const bool rounds = acc_scalar_type(in.q.scalar_type()) != in.q.scalar_type();
  const DeviceScope device(in.q);
  const auto plan = kernels.plan(shape, dtype_of(in.q), device.threads);
  const at::Tensor delta = empty_bytes(grad_k.defined() ? plan.delta_bytes : 0, in.q);
  const at::Tensor scratch = empty_bytes(plan.backward_scratch_bytes, in.q);
  const CompressedAttentionBackward p{shape,
                                      scale_of(shape, in.options),
                                      reads<4>(in.grad_y),
                                      reads<4>(in.q),
                                      reads<4>(in.kc),
                                      reads<4>(in.vc),
                                      reads<4>(rounds ? at::Tensor() : in.y),
                                      lse.const_data_ptr(),
                                      block_length,
                                      gradient_length,
                                      writes<4>(grad_q),
                                      writes<4>(grad_k),
                                      writes<4>(grad_v),
                                      grad_k.defined() ? delta.mutable_data_ptr() : nullptr,
                                      scratch.mutable_data_ptr(),
                                      device.threads};
  kernels.backward(p, dtype_of(in.q), device.stream);
}

// Those that are not wanted are undefined. Keys and values were not saved, but the strides of their gradients.
Gradients empty_gradients(const Sizes& n, const BackwardInputs& in, c10::SymIntArrayRef grad_k_stride,
                          c10::SymIntArrayRef grad_v_stride) {
  const auto empty = [&](bool wanted, const char* name, c10::SymIntArrayRef stride) {
    if (!wanted) return at::Tensor();
    TORCH_CHECK_VALUE(stride.size() == 4, kBackward, ": ", name, " must be 4 strides, got ", stride);
    return at::empty_strided_symint({n.B, n.Hkv, n.T, n.D}, stride, in.q.options());
  };
  return {empty_gradient(in.wanted[0], in.q), empty(in.wanted[1], "grad_k_stride", grad_k_stride),
          empty(in.wanted[2], "grad_v_stride", grad_v_stride)};
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                        const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y, const at::Tensor& lse,
                        int64_t factor, c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale,
                        c10::SymIntArrayRef grad_k_stride, c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, defined_or_not(vc), defined_or_not(y), lse, kv_len, options, output_mask};
  return empty_gradients(check_backward(kBackward, in), in, grad_k_stride, grad_v_stride);
}

Gradients backward(const CompressedAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                   const at::Tensor& kc, const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y,
                   const at::Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                   std::optional<double> scale, c10::SymIntArrayRef grad_k_stride, c10::SymIntArrayRef grad_v_stride,
                   Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, defined_or_not(vc), defined_or_not(y), lse, kv_len, options, output_mask};
  const Sizes n = check_backward(kBackward, in);
  const Gradients gradients = empty_gradients(n, in, grad_k_stride, grad_v_stride);
  run_backward(kernels, n, in, factor, n.T.expect_int(), gradients);
  return gradients;
}

Gradients empty_pooled_gradients(const BackwardInputs& in) {
  return {empty_gradient(in.wanted[0], in.q), empty_gradient(in.wanted[1], in.kc),
          empty_gradient(in.wanted[2], in.vc, in.kc.sym_sizes(), in.kc.options())};
}

Gradients pooled_backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                               const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y,
                               const at::Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                               std::optional<double> scale, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, defined_or_not(vc), defined_or_not(y), lse, kv_len, options, output_mask};
  check_backward(kPooledBackward, in);
  return empty_pooled_gradients(in);
}

Gradients pooled_backward(const CompressedAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                          const at::Tensor& kc, const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y,
                          const at::Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                          std::optional<double> scale, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, defined_or_not(vc), defined_or_not(y), lse, kv_len, options, output_mask};
  const Sizes n = check_backward(kPooledBackward, in);
  const Gradients gradients = empty_pooled_gradients(in);
  run_backward(kernels, n, in, 1, n.C.expect_int(), gradients);
  return gradients;
}

const Registration registration(
    MEMCHECK_KERNELS(compressed_attention),
    OperatorRow{"compressed_attention(Tensor q, Tensor k, Tensor v, *, int factor, bool causal=True, bool strict=False,"
                " float? scale=None, bool keep=False) -> (Tensor y, Tensor lse, Tensor kc, Tensor vc)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{
        "compressed_attention_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y, Tensor lse, *,"
        " int factor, SymInt kv_len, bool causal, bool strict, float? scale, SymInt[] grad_k_stride,"
        " SymInt[] grad_v_stride, bool[3] output_mask) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
        backward_meta, backward},
    OperatorRow{"compressed_attention_pooled(Tensor q, Tensor kc, Tensor vc, *, int factor, SymInt kv_len,"
                " bool causal=True, bool strict=False, float? scale=None, bool keep_lse=False)"
                " -> (Tensor y, Tensor lse)",
                pooled_meta, pooled, /*cast_inputs=*/3},
    OperatorRow{"compressed_attention_pooled_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y,"
                " Tensor lse, *, int factor, SymInt kv_len, bool causal, bool strict, float? scale,"
                " bool[3] output_mask) -> (Tensor grad_q, Tensor grad_kc, Tensor grad_vc)",
                pooled_backward_meta, pooled_backward});

}  // namespace
}  // namespace memcheck
