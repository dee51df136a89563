#pragma once

#include <string_view>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/sequences.h"
#include "linear_attention/linear_attention.h"
#include "linear_attention/linear_attention_operators.h"

// What the operators of linear attention check.

namespace memcheck::linear_attention_glue {

// Symbolic while torch.compile traces.
struct Sizes {
  c10::SymInt B, H, Hkv, S, T, D, Dv;
  bool causal;
  FeatureMap feature_map;
  bool normalize = true, decayed = false, decays_learn = false, continued = false;

  LinearAttentionShape shape() const {
    return {.B = B.expect_int(),
            .H = H.expect_int(),
            .Hkv = Hkv.expect_int(),
            .S = S.expect_int(),
            .T = T.expect_int(),
            .D = D.expect_int(),
            .Dv = Dv.expect_int(),
            .causal = causal,
            .feature_map = feature_map,
            .normalize = normalize,
            .decayed = decayed,
            .decays_learn = decays_learn,
            .continued = continued};
  }
};

// Arguments after all checks that need no values. Tensors that are not given are undefined.
struct Call {
  const char* op;
  Sizes n;
  SequenceArguments sequences;
  at::Tensor decay, initial_m, initial_z;
  bool log_decay;

  const char* decay_name() const { return log_decay ? "log_decay" : "decay"; }
  c10::SymInt N() const { return sequences.count(n.B); }
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
  Sizes n{.B = q.sym_size(0),
          .H = q.sym_size(1),
          .Hkv = k.sym_size(1),
          .S = q.sym_size(2),
          .T = k.sym_size(2),
          .D = q.sym_size(3),
          .Dv = has_Dv.sym_size(3),
          .causal = causal,
          .feature_map = feature_map_named(op, feature_map)};
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

inline void check_causal_for(const char* op, const char* argument, bool causal) {
  TORCH_CHECK_VALUE(causal, op, ": ", argument, " needs causal=True, got causal=False");
}

inline void check_state(const Call& x, const char* m_name, const at::Tensor& m, const char* z_name, const at::Tensor& z,
                        const at::Tensor& q) {
  if (m.defined()) {
    check_shape(x.op, m_name, m, "(N,Hkv,D,Dv)", {x.N(), x.n.Hkv, x.n.D, x.n.Dv}, "k and v");
    check_acc(x.op, m_name, m, q);
  }
  TORCH_CHECK_VALUE(x.n.normalize || !z.defined(), x.op, ": ", z_name, " must be None if normalize is False, got ",
                    z.sym_sizes());
  if (z.defined()) {
    check_shape(x.op, z_name, z, "(N,Hkv,D)", {x.N(), x.n.Hkv, x.n.D}, "k");
    check_acc(x.op, z_name, z, q);
  }
}

inline void check_decay(const Call& x, const at::Tensor& q) {
  check_causal_for(x.op, x.decay_name(), x.n.causal);
  if (x.decay.dim() == 1) {
    check_shape(x.op, x.decay_name(), x.decay, "(Hkv,)", {x.n.Hkv}, "k");
  } else {
    check_shape(x.op, x.decay_name(), x.decay, "(Hkv,) or (B,Hkv,T)", {x.n.B, x.n.Hkv, x.n.T}, "k");
  }
  check_acc(x.op, x.decay_name(), x.decay, q);
}

// Arguments of the forward or the backward.
template <typename Arguments>
Call check_call(const char* op, const Arguments& in, const at::Tensor& v, const at::Tensor& instead_of_v = {}) {
  const Sizes n = check_inputs(op, in.q, in.k, v, in.causal, in.feature_map, in.eps, instead_of_v);
  Call x{.op = op,
         .n = n,
         .sequences = check_sequences(op, in.cu_seqlens_q, in.cu_seqlens_k, in.lengths, in.left_padded, in.q, n.B),
         .decay = tensor_or_none(in.decay),
         .initial_m = tensor_or_none(in.initial_m),
         .initial_z = tensor_or_none(in.initial_z),
         .log_decay = in.log_decay};
  x.n.normalize = in.normalize;
  x.n.decayed = x.decay.defined();
  x.n.continued = x.initial_m.defined();
  if (x.n.decayed) check_decay(x, in.q);
  if (x.n.continued || x.initial_z.defined()) {
    check_causal_for(op, "initial_state", n.causal);
    TORCH_CHECK_VALUE(x.n.continued && x.initial_z.defined() == in.normalize, op, ": initial_state must be ",
                      in.normalize ? "a pair (m, z)" : "(m, None) if normalize is False");
    check_state(x, "m of initial_state", x.initial_m, "z of initial_state", x.initial_z, in.q);
  }
  return x;
}

}  // namespace memcheck::linear_attention_glue
