#include "compressed_attention/compressed_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/device.h"

namespace memcheck {
namespace {

constexpr const char* kForward = "compressed_attention";
constexpr const char* kBackward = "compressed_attention_backward";
constexpr const char* kPooled = "compressed_attention_pooled";
constexpr const char* kPooledBackward = "compressed_attention_pooled_backward";

// Of blocks, so that no product of positions overflows.
constexpr int64_t kLongest = int64_t{1} << 31;
constexpr int64_t kMostPositions = int64_t{1} << 62;

struct Cpu : OnCpu {
  using OnCpu::OnCpu;
  auto plan(const CompressedAttentionShape& shape, Dtype dtype) const {
    return compressed_attention_plan_cpu(shape, dtype, threads);
  }
  void pool(const CompressedAttentionPooling& p, Dtype dtype) const { compressed_attention_pool_cpu(p, dtype); }
  void forward(const CompressedAttentionForward& p, Dtype dtype) const { compressed_attention_forward_cpu(p, dtype); }
  void backward(const CompressedAttentionBackward& p, Dtype dtype) const {
    compressed_attention_backward_cpu(p, dtype);
  }
};

#ifdef MEMCHECK_WITH_CUDA
struct Cuda : OnCuda {
  using OnCuda::OnCuda;
  auto plan(const CompressedAttentionShape& shape, Dtype dtype) const {
    return compressed_attention_plan_cuda(shape, dtype);
  }
  void pool(const CompressedAttentionPooling& p, Dtype dtype) const {
    compressed_attention_pool_cuda(p, dtype, stream);
  }
  void forward(const CompressedAttentionForward& p, Dtype dtype) const {
    compressed_attention_forward_cuda(p, dtype, stream);
  }
  void backward(const CompressedAttentionBackward& p, Dtype dtype) const {
    compressed_attention_backward_cuda(p, dtype, stream);
  }
};
#endif

struct Options {
  int64_t factor;
  bool causal, strict;
  std::optional<double> scale;
};

// Sizes, symbolic while torch.compile traces.
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

// q, and keys of whatever length under their own name; T and C are left to the caller.
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

// vc may be undefined where nobody reads it.
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

template <typename Device>
void run_forward(const Device& device, const CompressedAttentionShape& shape, const Options& options,
                 const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc, const at::Tensor& y,
                 const at::Tensor& lse, bool keep, const at::Tensor& scratch) {
  const CompressedAttentionForward p{shape,
                                     scale_of(shape, options),
                                     reads<4>(q),
                                     reads<4>(kc),
                                     reads<4>(vc),
                                     writes<4>(y),
                                     keep ? lse.mutable_data_ptr() : nullptr,
                                     scratch.mutable_data_ptr()};
  device.forward(p, dtype_of(q));
}

template <typename Device>
ForwardResult forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t factor, bool causal,
                      bool strict, std::optional<double> scale, bool keep) {
  const Options options{factor, causal, strict, scale};
  const Sizes n = check_inputs(q, k, v, options);
  const CompressedAttentionShape shape = n.shape(options);
  const Device device(q);
  const auto plan = device.plan(shape, dtype_of(q));
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, keep);
  const at::Tensor kc = empty_compressed(n, q);
  const at::Tensor vc = empty_compressed(n, q);
  const at::Tensor scratch = empty_bytes(plan.forward_scratch_bytes, q);
  const CompressedAttentionPooling pooling{shape,         reads<4>(k),   reads<4>(v),
                                           writes<4>(kc), writes<4>(vc), scratch.mutable_data_ptr()};
  device.pool(pooling, dtype_of(q));
  run_forward(device, shape, options, q, kc, vc, y, lse, keep, scratch);
  if (keep) return {y, lse, kc, vc};
  return {y, lse, empty_compressed(n, q, false), empty_compressed(n, q, false)};
}

PooledResult pooled_meta(const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc, int64_t factor,
                         c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale, bool keep) {
  const Sizes n = check_pooled(kPooled, q, kc, vc, kv_len, {factor, causal, strict, scale}, true);
  return {empty_output(n, q), empty_lse(n, q, keep)};
}

template <typename Device>
PooledResult pooled(const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc, int64_t factor, c10::SymInt kv_len,
                    bool causal, bool strict, std::optional<double> scale, bool keep) {
  const Options options{factor, causal, strict, scale};
  const Sizes n = check_pooled(kPooled, q, kc, vc, kv_len, options, true);
  const CompressedAttentionShape shape = n.shape(options);
  const Device device(q);
  const auto plan = device.plan(shape, dtype_of(q));
  const at::Tensor y = empty_output(n, q);
  const at::Tensor lse = empty_lse(n, q, keep);
  const at::Tensor scratch = empty_bytes(plan.pooled_forward_scratch_bytes, q);
  run_forward(device, shape, options, q, kc, vc, y, lse, keep, scratch);
  return {y, lse};
}

// ---- backward

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Mask = std::array<bool, 3>;

// What the forward kept. Undefined where only the gradient of the values is wanted are vc and y; so is a y that was
// rounded to 16 bits.
struct Kept {
  const at::Tensor& q;
  const at::Tensor& kc;
  const at::Tensor vc;
  const at::Tensor y;
  const at::Tensor& lse;
};

Sizes check_backward(const char* op, const at::Tensor& grad_y, const Kept& kept, const c10::SymInt& kv_len,
                     const Options& options, const Mask& wanted) {
  const bool needs_all = wanted[0] || wanted[1];
  const Sizes n = check_pooled(op, kept.q, kept.kc, kept.vc, kv_len, options, needs_all);
  const auto check_like_q = [&](const char* name, const at::Tensor& x) {
    check_rank(op, name, x, 4, "(B,H,S,D)");
    check_shape(op, name, x, "(B,H,S,D)", {n.B, n.H, n.S, n.D}, "q");
    check_like(op, name, x, kept.q, "q");
  };
  check_like_q("grad_y", grad_y);
  const bool exact = acc_scalar_type(kept.q.scalar_type()) == kept.q.scalar_type();
  if (kept.y.defined() || (needs_all && exact)) check_like_q("y", kept.y);
  check_tensor(op, "lse", kept.lse);
  check_shape(op, "lse", kept.lse, "(B,H,S)", {n.B, n.H, n.S}, "q");
  check_dtype(op, "lse", kept.lse, acc_scalar_type(kept.q.scalar_type()), "the accumulation type of q");
  check_device(op, "lse", kept.lse, kept.q, "q");
  return n;
}

template <typename Device>
void run_backward(const Sizes& n, const Options& options, const at::Tensor& grad_y, const Kept& kept,
                  int64_t block_length, int64_t gradient_length, const Gradients& gradients) {
  const CompressedAttentionShape shape = n.shape(options);
  const auto& [grad_q, grad_k, grad_v] = gradients;
  const at::Tensor lse = kept.lse.contiguous();
  const bool rounds = acc_scalar_type(kept.q.scalar_type()) != kept.q.scalar_type();
  const Device device(kept.q);
  const auto plan = device.plan(shape, dtype_of(kept.q));
  const at::Tensor delta = empty_bytes(grad_k.defined() ? plan.delta_bytes : 0, kept.q);
  const at::Tensor scratch = empty_bytes(plan.backward_scratch_bytes, kept.q);
  const CompressedAttentionBackward p{shape,
                                      scale_of(shape, options),
                                      reads<4>(grad_y),
                                      reads<4>(kept.q),
                                      reads<4>(kept.kc),
                                      reads<4>(kept.vc),
                                      reads<4>(rounds ? at::Tensor() : kept.y),
                                      lse.const_data_ptr(),
                                      block_length,
                                      gradient_length,
                                      writes<4>(grad_q),
                                      writes<4>(grad_k),
                                      writes<4>(grad_v),
                                      grad_k.defined() ? delta.mutable_data_ptr() : nullptr,
                                      scratch.mutable_data_ptr()};
  device.backward(p, dtype_of(kept.q));
}

// Only those that are wanted; the others stay undefined. Keys and values are not kept, their gradients' strides are.
Gradients empty_gradients(const Sizes& n, const at::Tensor& q, c10::SymIntArrayRef grad_k_stride,
                          c10::SymIntArrayRef grad_v_stride, const Mask& wanted) {
  const auto room = [&](const char* name, c10::SymIntArrayRef stride) {
    TORCH_CHECK_VALUE(stride.size() == 4, kBackward, ": ", name, " must be 4 strides, got ", stride);
    return at::empty_strided_symint({n.B, n.Hkv, n.T, n.D}, stride, q.options());
  };
  return {wanted[0] ? empty_gradient(q) : at::Tensor(), wanted[1] ? room("grad_k_stride", grad_k_stride) : at::Tensor(),
          wanted[2] ? room("grad_v_stride", grad_v_stride) : at::Tensor()};
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                        const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y, const at::Tensor& lse,
                        int64_t factor, c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale,
                        c10::SymIntArrayRef grad_k_stride, c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  const Kept kept{q, kc, vc.value_or(at::Tensor()), y.value_or(at::Tensor()), lse};
  const Sizes n = check_backward(kBackward, grad_y, kept, kv_len, {factor, causal, strict, scale}, output_mask);
  return empty_gradients(n, q, grad_k_stride, grad_v_stride, output_mask);
}

template <typename Device>
Gradients backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                   const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y, const at::Tensor& lse,
                   int64_t factor, c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale,
                   c10::SymIntArrayRef grad_k_stride, c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const Kept kept{q, kc, vc.value_or(at::Tensor()), y.value_or(at::Tensor()), lse};
  const Sizes n = check_backward(kBackward, grad_y, kept, kv_len, options, output_mask);
  const Gradients gradients = empty_gradients(n, q, grad_k_stride, grad_v_stride, output_mask);
  run_backward<Device>(n, options, grad_y, kept, factor, n.T.expect_int(), gradients);
  return gradients;
}

Gradients empty_pooled_gradients(const Kept& kept, const Mask& wanted) {
  const auto room = [](const at::Tensor& x, bool want) { return want ? empty_gradient(x) : at::Tensor(); };
  // Where vc was not kept it was contiguous.
  const auto room_for_vc = [&] {
    return kept.vc.defined() ? empty_gradient(kept.vc) : empty_result(kept.kc.sym_sizes(), kept.kc.options());
  };
  return {room(kept.q, wanted[0]), room(kept.kc, wanted[1]), wanted[2] ? room_for_vc() : at::Tensor()};
}

Gradients pooled_backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                               const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y,
                               const at::Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                               std::optional<double> scale, Mask output_mask) {
  const Kept kept{q, kc, vc.value_or(at::Tensor()), y.value_or(at::Tensor()), lse};
  check_backward(kPooledBackward, grad_y, kept, kv_len, {factor, causal, strict, scale}, output_mask);
  return empty_pooled_gradients(kept, output_mask);
}

template <typename Device>
Gradients pooled_backward(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc,
                          const std::optional<at::Tensor>& vc, const std::optional<at::Tensor>& y,
                          const at::Tensor& lse, int64_t factor, c10::SymInt kv_len, bool causal, bool strict,
                          std::optional<double> scale, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const Kept kept{q, kc, vc.value_or(at::Tensor()), y.value_or(at::Tensor()), lse};
  const Sizes n = check_backward(kPooledBackward, grad_y, kept, kv_len, options, output_mask);
  const Gradients gradients = empty_pooled_gradients(kept, output_mask);
  run_backward<Device>(n, options, grad_y, kept, 1, n.C.expect_int(), gradients);
  return gradients;
}

template <typename Device>
void register_kernels(torch::Library& m) {
  m.impl("compressed_attention", forward<Device>);
  m.impl("compressed_attention_backward", backward<Device>);
  m.impl("compressed_attention_pooled", pooled<Device>);
  m.impl("compressed_attention_pooled_backward", pooled_backward<Device>);
}

#ifndef MEMCHECK_HOST_CUDA
TORCH_LIBRARY_FRAGMENT(memcheck, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "compressed_attention(Tensor q, Tensor k, Tensor v, *, int factor, bool causal=True, bool strict=False,"
      " float? scale=None, bool keep=False) -> (Tensor y, Tensor lse, Tensor kc, Tensor vc)",
      tags);
  m.def(
      "compressed_attention_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y, Tensor lse, *,"
      " int factor, SymInt kv_len, bool causal, bool strict, float? scale, SymInt[] grad_k_stride,"
      " SymInt[] grad_v_stride, bool[3] output_mask) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
      tags);
  m.def(
      "compressed_attention_pooled(Tensor q, Tensor kc, Tensor vc, *, int factor, SymInt kv_len, bool causal=True,"
      " bool strict=False, float? scale=None, bool keep_lse=False) -> (Tensor y, Tensor lse)",
      tags);
  m.def(
      "compressed_attention_pooled_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y, Tensor lse, *,"
      " int factor, SymInt kv_len, bool causal, bool strict, float? scale, bool[3] output_mask)"
      " -> (Tensor grad_q, Tensor grad_kc, Tensor grad_vc)",
      tags);
}

TORCH_LIBRARY_IMPL(memcheck, CPU, m) {
  register_kernels<Cpu>(m);
}

TORCH_LIBRARY_IMPL(memcheck, Meta, m) {
  m.impl("compressed_attention", forward_meta);
  m.impl("compressed_attention_backward", backward_meta);
  m.impl("compressed_attention_pooled", pooled_meta);
  m.impl("compressed_attention_pooled_backward", pooled_backward_meta);
}

#endif

#ifdef MEMCHECK_WITH_CUDA
TORCH_LIBRARY_IMPL(memcheck, MEMCHECK_CUDA_KEY, m) {
  register_kernels<Cuda>(m);
}
#endif

}  // namespace
}  // namespace memcheck
