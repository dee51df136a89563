#pragma once

#include "common/torch/arguments.h"

namespace memcheck::operators {

struct SoftplusAttention {
  static constexpr const char* schema =
      "softplus_attention(Tensor q, Tensor k, Tensor v, Tensor? state=None, Tensor? rest=None, *,"
      " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False,"
      " bool causal=True, float eps=1e-06, bool return_state=False, bool keep_carries=False)"
      " -> (Tensor y, Tensor carries, Tensor new_state, Tensor new_rest)";
  struct Arguments {
    Tensor q;           // (B,S,R)
    Tensor k;           // (B,R,T)
    Tensor v;           // (B,R,T)
    MaybeTensor state;  // (2,N,R)
    MaybeTensor rest;   // (2,N,R), what rounding has left out of the state
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded, causal;
    double eps;
    bool return_state, keep_carries;

    auto fields() {
      return std::tie(q, k, v, state, rest, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, causal, eps, return_state,
                      keep_carries);
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // undefined if not wanted, all but y (B,S,R)
};

struct SoftplusAttentionBackward {
  static constexpr const char* schema =
      "softplus_attention_backward(Tensor grad_y, Tensor q, Tensor k, Tensor? v, Tensor carries, Tensor? state=None,"
      " Tensor? grad_state=None, Tensor? grad_rest=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
      " Tensor? lengths=None, *, bool left_padded=False, bool causal, float eps, bool[5] output_mask)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_initial, Tensor grad_initial_rest)";
  struct Arguments {
    Tensor grad_y;  // (B,S,R)
    Tensor q, k;
    MaybeTensor v;           // none if the gradient of v alone is wanted
    Tensor carries;          // (B,C,2,R), of the forward
    MaybeTensor state;       // (2,N,R)
    MaybeTensor grad_state;  // (2,N,R), of the state after the last position; none for zeros
    MaybeTensor grad_rest;
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded, causal;
    double eps;
    std::array<bool, 5> output_mask;  // of q, k, v, the state before and its rest

    auto fields() {
      return std::tie(grad_y, q, k, v, carries, state, grad_state, grad_rest, cu_seqlens_q, cu_seqlens_k, lengths,
                      left_padded, causal, eps, output_mask);
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
};

// Decoding: the sums after a few keys more, and y of one query.
struct SoftplusAttentionStep {
  static constexpr const char* schema =
      "softplus_attention_step(Tensor q, Tensor k, Tensor v, Tensor z, Tensor a, *, float eps=1e-06)"
      " -> (Tensor y, Tensor new_z, Tensor new_a)";
  struct Arguments {
    Tensor q;  // (B,1,R)
    Tensor k;  // (B,R,n)
    Tensor v;  // (B,R,n)
    Tensor z;  // (B,R)
    Tensor a;  // (B,R)
    double eps;

    auto fields() { return std::tie(q, k, v, z, a, eps); }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor>;
};

}  // namespace memcheck::operators
