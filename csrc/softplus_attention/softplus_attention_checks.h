#pragma once

#include <array>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "softplus_attention/softplus_attention.h"

// What the operators of softplus attention share: checks of q, k and v, and results.

namespace memcheck::softplus_attention_glue {

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, S, T, R;
  bool causal;

  c10::SymInt carries() const { return causal ? T / kCarrySpacing : c10::SymInt(1); }
  SoftplusAttentionShape shape() const {
    return {B.expect_int(), S.expect_int(), T.expect_int(), R.expect_int(), causal};
  }
};

inline Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                          double eps, bool needs_v = true) {
  check_rank(op, "q", q, 3, "(B,S,R)");
  check_rank(op, "k", k, 3, "(B,R,T)");
  Sizes n{q.sym_size(0), q.sym_size(1), k.sym_size(2), q.sym_size(2), causal};
  check_shape(op, "k", k, "(B,R,T)", {n.B, n.R, n.T}, "q");
  check_floating(op, "q", q);
  check_like(op, "k", k, q, "q");
  if (v.defined() || needs_v) {
    check_rank(op, "v", v, 3, "(B,R,T)");
    check_shape(op, "v", v, "(B,R,T)", {n.B, n.R, n.T}, "k");
    check_like(op, "v", v, q, "q");
  }
  check_causal(op, causal, n.S, n.T);
  check_eps(op, eps, q.scalar_type());
  return n;
}

inline at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.S, n.R}, q.options());
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Those that are not wanted are undefined.
inline Gradients empty_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::array<bool, 3>& wanted) {
  return {empty_gradient(wanted[0], q), empty_gradient(wanted[1], k),
          empty_gradient(wanted[2], v, k.sym_sizes(), k.options())};
}

}  // namespace memcheck::softplus_attention_glue
