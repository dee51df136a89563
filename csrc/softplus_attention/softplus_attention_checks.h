#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/sequences.h"
#include "softplus_attention/softplus_attention.h"

// What the operators of softplus attention check, and the results that they allocate.

namespace memcheck::softplus_attention_glue {

using MaybeTensor = std::optional<at::Tensor>;

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, S, T, R;
  c10::SymInt N;  // sequences
  bool causal;
  SequenceArguments sequences;

  // From the arguments of an operator.
  template <typename Arguments>
  void set_sequences(const char* op, const Arguments& in) {
    sequences = check_sequences(op, in.cu_seqlens_q, in.cu_seqlens_k, in.lengths, in.left_padded, in.q, B);
    N = sequences.count(B);
  }
  c10::SymInt carries() const { return causal ? T / kCarrySpacing : sequences.packed() ? N : c10::SymInt(1); }
  SoftplusAttentionShape shape() const {
    return {B.expect_int(), S.expect_int(), T.expect_int(), R.expect_int(), causal};
  }
};

inline at::TensorOptions sum_options(const at::Tensor& q) {
  return q.options().dtype(acc_scalar_type(q.scalar_type()));
}

inline Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                          double eps, bool needs_v = true) {
  check_rank(op, "q", q, 3, "(B,S,R)");
  check_rank(op, "k", k, 3, "(B,R,T)");
  // Keys or values of other attentions, (B,T,R).
  const auto token_major = [&](const at::Tensor& x) {
    return x.sym_size(1) != q.sym_size(2) && x.sym_size(2) == q.sym_size(2) && x.sym_size(0) == q.sym_size(0);
  };
  Sizes n{.B = q.sym_size(0),
          .S = q.sym_size(1),
          .T = k.sym_size(2),
          .R = q.sym_size(2),
          .N = q.sym_size(0),
          .causal = causal,
          .sequences = {}};
  check_shape(op, "k", k, "(B,R,T)", {n.B, n.R, n.T}, "q", token_major(k) ? "; pass k.mT" : "");
  check_floating(op, "q", q);
  check_like(op, "k", k, q, "q");
  if (v.defined() || needs_v) {
    check_rank(op, "v", v, 3, "(B,R,T)");
    check_shape(op, "v", v, "(B,R,T)", {n.B, n.R, n.T}, "k",
                token_major(v) && v.sym_size(1) == n.T ? "; pass v.mT" : "");
    check_like(op, "v", v, q, "q");
  }
  check_causal(op, causal, n.S, n.T);
  check_eps(op, eps, q.scalar_type());
  return n;
}

// Z and A of N sequences, or their rests, or gradients of them: (2,N,R).
inline void check_state(const char* op, const char* name, const MaybeTensor& x, const at::Tensor& q, const Sizes& n) {
  if (!x) return;
  check_shape(op, name, *x, "(2,N,R)", {2, n.N, n.R}, "q and the sequences");
  check_acc(op, name, *x, q);
}

inline at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.S, n.R}, q.options());
}

// Carries and states are undefined if they are not wanted: to make a tensor takes as long as to attend to a few
// positions.
inline at::Tensor empty_state(const Sizes& n, bool wanted, const at::Tensor& q) {
  return wanted ? at::empty_symint({2, n.N, n.R}, sum_options(q)) : at::Tensor();
}

// Of q, k, v, the state before and its rest. Those that are not wanted are undefined.
using Mask = std::array<bool, 5>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline Gradients empty_gradients(const Sizes& n, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const Mask& wanted) {
  return {empty_gradient(wanted[0], q), empty_gradient(wanted[1], k),
          empty_gradient(wanted[2], v, k.sym_sizes(), k.options()), empty_state(n, wanted[3], q),
          empty_state(n, wanted[4], q)};
}

}  // namespace memcheck::softplus_attention_glue
