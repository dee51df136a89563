#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "linear_attention/linear_attention.h"

// What the operators of linear attention check and allocate alike.

namespace memcheck::linear_attention_glue {

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, H, Hkv, S, T, D, Dv;
  bool causal;
  FeatureMap feature_map;
  bool normalize = true, decayed = false, continued = false;

  LinearAttentionShape shape() const {
    return {B.expect_int(),  H.expect_int(), Hkv.expect_int(), S.expect_int(), T.expect_int(), D.expect_int(),
            Dv.expect_int(), causal,         feature_map,      normalize,      decayed,        continued};
  }
};

inline FeatureMap feature_map_named(const char* op, std::string_view name) {
  const bool identity = name == "identity";
  TORCH_CHECK_VALUE(identity || name == "elu+1", op, ": feature_map must be 'elu+1' or 'identity', got '", name, "'");
  return identity ? FeatureMap::Identity : FeatureMap::EluPlusOne;
}

// Dv is that of v, or of another tensor if v is not needed.
inline Sizes check_inputs(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                          std::string_view feature_map, double eps, const at::Tensor& instead_of_v = {}) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  check_rank(op, "k", k, 4, "(B,Hkv,T,D)");
  if (v.defined() || !instead_of_v.defined()) check_rank(op, "v", v, 4, "(B,Hkv,T,Dv)");
  const at::Tensor& has_Dv = v.defined() ? v : instead_of_v;
  Sizes n{q.sym_size(0),      q.sym_size(1), k.sym_size(1),
          q.sym_size(2),      k.sym_size(2), q.sym_size(3),
          has_Dv.sym_size(3), causal,        feature_map_named(op, feature_map)};
  check_shape(op, "k", k, "(B,Hkv,T,D)", {n.B, n.Hkv, n.T, n.D}, "q");
  check_groups(op, n.H, n.Hkv);
  check_floating(op, "q", q);
  check_like(op, "k", k, q, "q");
  if (v.defined()) {
    check_shape(op, "v", v, "(B,Hkv,T,Dv)", {n.B, n.Hkv, n.T, n.Dv}, "k");
    check_like(op, "v", v, q, "q");
  }
  check_causal(op, causal, n.S, n.T);
  check_eps(op, eps, q.scalar_type());
  return n;
}

inline at::Tensor empty_output(const Sizes& n, const at::Tensor& q) {
  return empty_result({n.B, n.H, n.S, n.Dv}, q.options());
}

}  // namespace memcheck::linear_attention_glue
