#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/sequences.h"
#include "compressed_attention/compressed_attention.h"
#include "compressed_attention/compressed_attention_operators.h"

// What the operators of compressed attention share: checks of their arguments, and results.

namespace memcheck::compressed_attention_glue {

// The limits of factor and kv_len, so that no product of positions overflows.
constexpr int64_t kLongest = int64_t{1} << 31;
constexpr int64_t kMostPositions = int64_t{1} << 62;

struct Options {
  int64_t factor;
  bool causal, strict;
  std::optional<double> scale;
  std::optional<int64_t> window = std::nullopt;

  // A window of T positions has all of them.
  int64_t window_size(int64_t T) const { return std::min(*window, std::max<int64_t>(1, T)); }
};

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, H, Hkv, S, T, D, C;

  CompressedAttentionShape shape(const Options& options) const {
    CompressedAttentionShape shape{.B = B.expect_int(),
                                   .H = H.expect_int(),
                                   .Hkv = Hkv.expect_int(),
                                   .S = S.expect_int(),
                                   .T = T.expect_int(),
                                   .D = D.expect_int(),
                                   .C = C.expect_int(),
                                   .factor = options.factor,
                                   .causal = options.causal,
                                   .strict = options.strict};
    if (options.window) shape.lag = options.window_size(shape.T) - (options.strict ? 1 : 0);
    return shape;
  }
};

inline double scale_of(const CompressedAttentionShape& shape, const Options& options) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(1, shape.D))));
}

inline void check_factor(const char* op, int64_t factor) {
  TORCH_CHECK_VALUE(factor >= 1 && factor <= kLongest, op, ": factor must be from 1 to ", kLongest, ", got ", factor);
}

inline void check_options(const char* op, const Options& options, const at::Tensor& q) {
  check_factor(op, options.factor);
  TORCH_CHECK_VALUE(options.causal || !options.strict, op,
                    ": strict needs causal, as it is about the block a query is in, got strict=True and causal=False");
  if (options.scale) check_scale(op, *options.scale, q.scalar_type());
  if (!options.window) return;
  TORCH_CHECK_VALUE(options.causal, op, ": window needs causal, got causal=False");
  TORCH_CHECK_VALUE(*options.window >= 1 && *options.window <= kMostPositions, op, ": window must be from 1 to ",
                    kMostPositions, ", got ", *options.window);
}

// The places for blocks of keys of T positions.
inline c10::SymInt block_places(const Sizes& n, int64_t factor, const SequenceArguments& sequences) {
  return compressed_attention_blocks(n.T, factor, sequences.packed(), sequences.count(n.B));
}

// q, and keys k or kc of any length. The caller sets T and C.
inline Sizes check_heads(const char* op, const at::Tensor& q, const char* k_name, const char* k_letters,
                         const at::Tensor& k) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  check_rank(op, k_name, k, 4, k_letters);
  Sizes n{.B = q.sym_size(0), .H = q.sym_size(1), .Hkv = k.sym_size(1), .S = q.sym_size(2), .D = q.sym_size(3)};
  check_shape(op, k_name, k, k_letters, {n.B, n.Hkv, k.sym_size(2), n.D}, "q");
  check_groups(op, n.H, n.Hkv, k_name);
  check_floating(op, "q", q);
  check_like(op, k_name, k, q, "q");
  return n;
}

// Of the arguments of an operator.
template <typename Arguments>
SequenceArguments sequence_arguments(const char* op, const Arguments& in) {
  return check_sequences(op, in.cu_seqlens_q, in.cu_seqlens_k, in.lengths, in.left_padded, in.q, in.q.sym_size(0));
}
template <typename Arguments>
Options options_of(const Arguments& in) {
  return {.factor = in.factor, .causal = in.causal, .strict = in.strict, .scale = in.scale, .window = in.window};
}

// The sizes of k and v. The caller sets C.
inline Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const Options& options) {
  Sizes n = check_heads(op, q, "k", "(B,Hkv,T,D)", k);
  n.T = k.sym_size(2);
  check_rank(op, "v", v, 4, "(B,Hkv,T,D)");
  check_shape(op, "v", v, "(B,Hkv,T,D)", {n.B, n.Hkv, n.T, n.D}, "k");
  check_like(op, "v", v, q, "q");
  check_options(op, options, q);
  check_causal(op, options.causal, n.S, n.T);
  return n;
}

// Keys and values in blocks, however many. vc may be undefined unless it is needed.
inline Sizes check_blocks(const char* op, const at::Tensor& q, const at::Tensor& kc, const at::Tensor& vc,
                          const c10::SymInt& kv_len, const Options& options, bool needs_vc) {
  Sizes n = check_heads(op, q, "kc", "(B,Hkv,C,D)", kc);
  check_options(op, options, q);
  TORCH_CHECK_VALUE(kv_len >= 0 && kv_len <= kMostPositions, op, ": kv_len must be from 0 to ", kMostPositions,
                    ", got ", kv_len);
  n.T = kv_len;
  n.C = kc.sym_size(2);
  check_causal(op, options.causal, n.S, n.T, "kv_len");
  if (!vc.defined() && !needs_vc) return n;
  check_rank(op, "vc", vc, 4, "(B,Hkv,C,D)");
  check_shape(op, "vc", vc, "(B,Hkv,C,D)", {n.B, n.Hkv, n.C, n.D}, "kc");
  check_like(op, "vc", vc, q, "q");
  return n;
}

// The first position that a query at position t sees as it is.
inline c10::SymInt first_in_window(const Sizes& n, const Options& options, const c10::SymInt& t) {
  return (t - *options.window + 1).max(0) / options.factor * options.factor;
}

// With a window, the keys and values of the newest positions. v may be undefined unless it is needed.
inline void check_window(const char* op, const Sizes& n, const at::Tensor& q, const Options& options,
                         const std::optional<at::Tensor>& k, const std::optional<at::Tensor>& v, bool needs_v,
                         const SequenceArguments& sequences) {
  TORCH_CHECK_VALUE(options.window || (!k && !v), op, ": k and v need a window, got window=None");
  if (!options.window) return;
  const auto check = [&](const char* name, const at::Tensor& x) {
    check_rank(op, name, x, 4, "(B,Hkv,n,D)");
    check_shape(op, name, x, "(B,Hkv,n,D)", {n.B, n.Hkv, k->sym_size(2), n.D}, "kc");
    check_like(op, name, x, q, "q");
  };
  check("k", tensor_or_none(k));
  if (v || needs_v) check("v", tensor_or_none(v));
  const c10::SymInt count = k->sym_size(2);
  const c10::SymInt least =
      sequences.packed() || sequences.padded() ? n.T : n.T - first_in_window(n, options, n.T - n.S);
  TORCH_CHECK_VALUE(n.S == 0 || (count >= least && count <= n.T), op, ": k must be of ", least, " to ", n.T,
                    " positions, those that queries see as they are, got ", count);
}

// There is a block for every `factor` positions of kv_len, or if packed, a place for it.
inline void check_block_count(const char* op, const Sizes& n, const Options& options,
                              const SequenceArguments& sequences) {
  const c10::SymInt all = block_places(n, options.factor, sequences);
  if (sequences.packed()) {
    TORCH_CHECK_VALUE(n.C == all, op, ": kc must be (1,Hkv,C,D) with C = floor(kv_len / factor) + N = ", all,
                      " for kv_len = ", n.T, ", factor = ", options.factor, " and N = ", sequences.count(n.B),
                      " packed sequences, got C = ", n.C);
    return;
  }
  if (options.window) {
    const c10::SymInt least = first_in_window(n, options, n.T - 1) / options.factor;
    TORCH_CHECK_VALUE(n.C >= least && n.C <= all, op, ": kc must be (B,Hkv,C,D) with C from ", least, " to ", all,
                      " for kv_len = ", n.T, ", factor = ", options.factor, " and window = ", *options.window,
                      ", got C = ", n.C);
    return;
  }
  const bool fits = n.C == all || (options.causal && n.C == n.T / options.factor);
  TORCH_CHECK_VALUE(fits, op, ": kc must be (B,Hkv,C,D) with C = ceil(kv_len / factor) = ", all,
                    options.causal ? ", or floor when causal," : "", " for kv_len = ", n.T,
                    " and factor = ", options.factor, ", got C = ", n.C);
}

// The sink logits of the heads, if there are any.
inline void check_sink(const char* op, const Sizes& n, const at::Tensor& q, const std::optional<at::Tensor>& sink) {
  if (!sink) return;
  check_rank(op, "sink", *sink, 1, "(H,)");
  check_shape(op, "sink", *sink, "(H,)", {n.H}, "q");
  check_acc(op, "sink", *sink, q);
}

// ---- a state and new positions

// C complete blocks, and an open one.
struct State {
  const at::Tensor& kc;  // (B,Hkv,C,D), as vc
  const at::Tensor& vc;
  const at::Tensor& k_sum;  // (B,Hkv,D) in the accumulation type, as v_sum
  const at::Tensor& v_sum;
  c10::SymInt positions;  // of the open block
};

// New keys and values, of T positions. The caller sets the sizes of q.
inline Sizes check_new_keys(const char* op, const at::Tensor& k, const at::Tensor& v, int64_t factor) {
  constexpr const char* kLetters = "(B,Hkv,n,D)";
  check_rank(op, "k", k, 4, kLetters);
  check_rank(op, "v", v, 4, kLetters);
  const Sizes n{.B = k.sym_size(0), .Hkv = k.sym_size(1), .T = k.sym_size(2), .D = k.sym_size(3)};
  check_shape(op, "v", v, kLetters, {n.B, n.Hkv, n.T, n.D}, "k");
  check_floating(op, "k", k);
  check_like(op, "v", v, k, "k");
  check_factor(op, factor);
  return n;
}

inline void check_state(const char* op, const Sizes& n, const State& state, const at::Tensor& k, int64_t factor) {
  const auto check = [&](const char* name, const at::Tensor& x, const char* letters,
                         std::initializer_list<c10::SymInt> shape, at::ScalarType type) {
    check_tensor(op, name, x);
    check_shape(op, name, x, letters, shape, "k");
    check_dtype(op, name, x, type, "k");
    check_device(op, name, x, k, "k");
  };
  check_rank(op, "kc", state.kc, 4, "(B,Hkv,C,D)");
  const c10::SymInt C = state.kc.sym_size(2);
  const at::ScalarType type = k.scalar_type();
  check("kc", state.kc, "(B,Hkv,C,D)", {n.B, n.Hkv, C, n.D}, type);
  check("vc", state.vc, "(B,Hkv,C,D)", {n.B, n.Hkv, C, n.D}, type);
  check("k_sum", state.k_sum, "(B,Hkv,D)", {n.B, n.Hkv, n.D}, acc_scalar_type(type));
  check("v_sum", state.v_sum, "(B,Hkv,D)", {n.B, n.Hkv, n.D}, acc_scalar_type(type));
  TORCH_CHECK_VALUE(state.positions >= 0 && state.positions < factor, op,
                    ": positions must be from 0 to factor - 1 = ", factor - 1, ", got ", state.positions);
}

// The newest of T positions so far. Sets H and S.
inline void check_new_queries(const char* op, Sizes& n, const at::Tensor& q, const at::Tensor& k,
                              const std::optional<double>& scale) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  n.H = q.sym_size(1);
  n.S = q.sym_size(2);
  check_shape(op, "q", q, "(B,H,S,D)", {n.B, n.H, n.S, n.D}, "k");
  check_groups(op, n.H, n.Hkv);
  check_like(op, "q", q, k, "k");
  TORCH_CHECK_VALUE(n.S <= n.T, op, ": q must be of no more positions than k so far, S <= T, got S = ", n.S,
                    " and T = ", n.T);
  if (scale) check_scale(op, *scale, q.scalar_type());
}

// ---- what kernels get, and results

inline const void* data_of(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr() : nullptr;
}

inline at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.H, n.S, n.D}, q.options());
}

inline at::Tensor empty_lse(const Sizes& n, const at::Tensor& q, bool keep) {
  return at::empty_symint({n.B, n.H, keep ? n.S : 0}, q.options().dtype(acc_scalar_type(q.scalar_type())));
}

inline at::Tensor empty_compressed(const Sizes& n, const at::Tensor& q, bool keep) {
  return at::empty_symint({n.B, n.Hkv, keep ? n.C : 0, n.D}, q.options());
}

inline at::Tensor contiguous_or_not(const at::Tensor& x) {
  return x.defined() ? x.contiguous() : x;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline bool is_exact(const at::Tensor& x) {
  return acc_scalar_type(x.scalar_type()) == x.scalar_type();
}

// What a forward returned for q, and the gradients of that.
template <typename Arguments>
void check_results(const char* op, const Sizes& n, const Arguments& in, bool needs_y) {
  const auto check_like_q = [&](const char* name, const at::Tensor& x) {
    check_rank(op, name, x, 4, "(B,H,S,D)");
    check_shape(op, name, x, "(B,H,S,D)", {n.B, n.H, n.S, n.D}, "q");
    check_like(op, name, x, in.q, "q");
  };
  check_like_q("grad_y", in.grad_y);
  if (in.y || (needs_y && is_exact(in.q))) check_like_q("y", tensor_or_none(in.y));
  const auto check_numbers = [&](const char* name, const at::Tensor& x) {
    check_tensor(op, name, x);
    check_shape(op, name, x, "(B,H,S)", {n.B, n.H, n.S}, "q");
    check_acc(op, name, x, in.q);
  };
  check_numbers("lse", in.lse);
  if (in.grad_lse) check_numbers("grad_lse", *in.grad_lse);
}

// The arguments of a backward operator.
template <typename Arguments>
Sizes check_backward(const char* op, const Arguments& in) {
  const auto& wanted = in.output_mask;
  const bool needs_all = wanted[0] || wanted[1] || wanted[3] || (wanted.size() > 4 && wanted[4]);
  const Sizes n = check_blocks(op, in.q, in.kc, tensor_or_none(in.vc), in.kv_len, options_of(in), needs_all);
  check_results(op, n, in, needs_all);
  if (in.sink || wanted[3]) check_sink(op, n, in.q, tensor_or_none(in.sink));
  const SequenceArguments sequences = sequence_arguments(op, in);
  check_block_count(op, n, options_of(in), sequences);
  check_window(op, n, in.q, options_of(in), in.k, in.v, needs_all, sequences);
  return n;
}

// Whether a tensor of these strides would leave memory unused.
inline bool has_gaps(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  c10::SymInt elements = 1, last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    elements *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  const auto known = elements.maybe_as_int(), last_known = last.maybe_as_int();
  return known && last_known && *known > 0 && *last_known >= *known;
}

// The gradient of keys or values, of which the strides were saved; undefined if it is not wanted. A process that has a
// part of them, of a DTensor, gets strides of the whole, and makes contiguous gradients where these have gaps.
inline at::Tensor empty_of_strides(const char* op, bool wanted, const char* name, c10::SymIntArrayRef sizes,
                                   c10::SymIntArrayRef stride, const at::TensorOptions& options) {
  if (!wanted) return {};
  TORCH_CHECK_VALUE(stride.size() == 4, op, ": ", name, " must be 4 strides, got ", stride);
  if (has_gaps(sizes, stride)) return at::empty_symint(sizes, options);
  return at::empty_strided_symint(sizes, stride, options);
}

}  // namespace memcheck::compressed_attention_glue
