#pragma once

#include "common/torch/arguments.h"

namespace memcheck::operators {

struct LinearAttention {
  static constexpr const char* schema =
      "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? decay=None, Tensor? initial_m=None,"
      " Tensor? initial_z=None, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None,"
      " bool left_padded=False, bool causal=False, str feature_map=\"elu+1\", bool normalize=True,"
      " bool log_decay=False, float eps=1e-06, bool return_state=False) -> (Tensor y, Tensor m, Tensor z)";
  struct Arguments {
    Tensor q;               // (B,H,S,D)
    Tensor k;               // (B,Hkv,T,D)
    Tensor v;               // (B,Hkv,T,Dv)
    MaybeTensor decay;      // (Hkv,) or (B,Hkv,T), or its logarithm
    MaybeTensor initial_m;  // (N,Hkv,D,Dv)
    MaybeTensor initial_z;  // (N,Hkv,D)
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded, causal;
    std::string feature_map;
    bool normalize, log_decay;
    double eps;
    bool return_state;

    auto fields() {
      return std::tie(q, k, v, decay, initial_m, initial_z, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal,
                      feature_map, normalize, log_decay, eps, return_state);
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor>;  // (B,H,S,Dv), and the last state as far as it is wanted
};

struct LinearAttentionBackward {
  static constexpr const char* schema =
      "linear_attention_backward(Tensor? grad_y, Tensor? grad_m, Tensor? grad_z, Tensor q, Tensor k, Tensor? v,"
      " Tensor? decay=None, Tensor? initial_m=None, Tensor? initial_z=None, Tensor? m=None, Tensor? z=None,"
      " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, *, bool left_padded=False,"
      " bool causal, str feature_map, bool normalize=True, bool log_decay=False, float eps, bool[6] output_mask)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_decay, Tensor grad_initial_m,"
      " Tensor grad_initial_z)";
  struct Arguments {
    MaybeTensor grad_y, grad_m, grad_z;  // as the results, none for zeros
    Tensor q, k;
    MaybeTensor v;  // none if the gradient of v alone is wanted, which depends only on its size
    MaybeTensor decay, initial_m, initial_z;
    MaybeTensor m, z;  // the last state, for the gradient of decay if the state has one
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded, causal;
    std::string feature_map;
    bool normalize, log_decay;
    double eps;
    std::array<bool, 6> output_mask;  // of q, k, v, decay, initial_m, initial_z

    auto fields() {
      return std::tie(grad_y, grad_m, grad_z, q, k, v, decay, initial_m, initial_z, m, z, cu_seqlens_q, cu_seqlens_k,
                      lengths, left_padded, causal, feature_map, normalize, log_decay, eps, output_mask);
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
};

// Decoding: the state after a few keys more, and y of one query.
struct LinearAttentionStep {
  static constexpr const char* schema =
      "linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor m, Tensor z, *, str feature_map=\"elu+1\","
      " float eps=1e-06) -> (Tensor y, Tensor new_m, Tensor new_z)";
  struct Arguments {
    Tensor q;  // (B,H,1,D)
    Tensor k;  // (B,Hkv,n,D)
    Tensor v;  // (B,Hkv,n,Dv)
    Tensor m;  // (B,Hkv,D,Dv)
    Tensor z;  // (B,Hkv,D)
    std::string feature_map;
    double eps;

    auto fields() { return std::tie(q, k, v, m, z, feature_map, eps); }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor>;
};

}  // namespace memcheck::operators
