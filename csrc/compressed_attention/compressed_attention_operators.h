#pragma once

#include "common/torch/arguments.h"

namespace memcheck::operators {

struct CompressedAttention {
  static constexpr const char* schema =
      "compressed_attention(Tensor q, Tensor k, Tensor v, Tensor? sink=None, *, Tensor? cu_seqlens_q=None,"
      " Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False, int factor, bool causal=True,"
      " bool strict=False, float? scale=None, bool keep=False, bool return_lse=False, int? window=None)"
      " -> (Tensor y, Tensor lse, Tensor kc, Tensor vc)";
  struct Arguments {
    Tensor q;          // (B,H,S,D)
    Tensor k, v;       // (B,Hkv,T,D)
    MaybeTensor sink;  // (H,)
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded;
    int64_t factor;
    bool causal, strict;
    std::optional<double> scale;
    bool keep, return_lse;
    std::optional<int64_t> window;

    auto fields() {
      return std::tie(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor, causal, strict, scale,
                      keep, return_lse, window);
    }
  };
  // (B,H,S,D), (B,H,S), and twice (B,Hkv,C,D); those that are not kept have no elements.
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
};

// What the backward operators of attention have in common.
struct CompressedAttentionGradients {
  Tensor grad_y;         // (B,H,S,D)
  Tensor q;              // (B,H,S,D)
  Tensor kc;             // (B,Hkv,C,D)
  MaybeTensor vc;        // (B,Hkv,C,D), none if only the gradient of values is wanted
  MaybeTensor y;         // (B,H,S,D), none as vc is, and if y was rounded to 16 bits
  Tensor lse;            // (B,H,S)
  MaybeTensor grad_lse;  // (B,H,S), none for zeros
  MaybeTensor sink;      // (H,)
  MaybeTensor k;         // (B,Hkv,n,D) the newest positions, with a window
  MaybeTensor v;         // (B,Hkv,n,D), none as vc is
  MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
  bool left_padded;
  int64_t factor;
  c10::SymInt kv_len;  // T
  bool causal, strict;
  std::optional<double> scale;
  std::optional<int64_t> window;

  auto fields() {
    return std::tie(grad_y, q, kc, vc, y, lse, grad_lse, sink, k, v, cu_seqlens_q, cu_seqlens_k, lengths, left_padded,
                    factor, kv_len, causal, strict, scale, window);
  }
};

struct CompressedAttentionBackward {
  static constexpr const char* schema =
      "compressed_attention_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y, Tensor lse,"
      " Tensor? grad_lse=None, Tensor? sink=None, Tensor? k=None, Tensor? v=None, Tensor? cu_seqlens_q=None,"
      " Tensor? cu_seqlens_k=None, Tensor? lengths=None, *, bool left_padded=False, int factor, SymInt kv_len,"
      " bool causal, bool strict, float? scale, int? window=None, SymInt[] grad_k_stride, SymInt[] grad_v_stride, "
      "bool[4] output_mask)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)";
  struct Arguments : CompressedAttentionGradients {
    std::vector<c10::SymInt> grad_k_stride, grad_v_stride;
    std::array<bool, 4> output_mask;  // of q, k, v and sink

    auto fields() {
      return std::tuple_cat(CompressedAttentionGradients::fields(),
                            std::tie(grad_k_stride, grad_v_stride, output_mask));
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
};

// Keys and values that are compressed already. With a window, k and v are those of the newest positions.
struct CompressedAttentionPooled {
  static constexpr const char* schema =
      "compressed_attention_pooled(Tensor q, Tensor kc, Tensor vc, Tensor? sink=None, Tensor? k=None, Tensor? v=None,"
      " *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False,"
      " int factor, SymInt kv_len, bool causal=True, bool strict=False, float? scale=None, bool keep=False,"
      " bool return_lse=False, int? window=None)"
      " -> (Tensor y, Tensor lse)";
  struct Arguments {
    Tensor q;          // (B,H,S,D)
    Tensor kc, vc;     // (B,Hkv,C,D)
    MaybeTensor sink;  // (H,)
    MaybeTensor k, v;  // (B,Hkv,n,D)
    MaybeTensor cu_seqlens_q, cu_seqlens_k, lengths;
    bool left_padded;
    int64_t factor;
    c10::SymInt kv_len;  // T
    bool causal, strict;
    std::optional<double> scale;
    bool keep, return_lse;
    std::optional<int64_t> window;

    auto fields() {
      return std::tie(q, kc, vc, sink, k, v, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, factor, kv_len, causal,
                      strict, scale, keep, return_lse, window);
    }
  };
  using Results = std::tuple<Tensor, Tensor>;
};

struct CompressedAttentionPooledBackward {
  static constexpr const char* schema =
      "compressed_attention_pooled_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y, Tensor lse,"
      " Tensor? grad_lse=None, Tensor? sink=None, Tensor? k=None, Tensor? v=None, Tensor? cu_seqlens_q=None,"
      " Tensor? cu_seqlens_k=None, Tensor? lengths=None, *, bool left_padded=False, int factor, SymInt kv_len,"
      " bool causal, bool strict, float? scale, int? window=None, bool[6] output_mask)"
      " -> (Tensor grad_q, Tensor grad_kc, Tensor grad_vc, Tensor grad_sink, Tensor grad_k, Tensor grad_v)";
  struct Arguments : CompressedAttentionGradients {
    std::array<bool, 6> output_mask;  // of q, kc, vc, sink, k and v

    auto fields() { return std::tuple_cat(CompressedAttentionGradients::fields(), std::tie(output_mask)); }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
};

// Blocks that go on from a state: of new positions, means of those that they complete, and the sums of the open block.
// A dense batch has one number of positions for all rows, and kc and vc of its blocks alone. Sequence i of a batch that
// is packed, or else padded, has counts[i] new positions from begins[i] on, and its means are in the only row of kc and
// vc from places[i] on; the last place is their length.
struct CompressedAttentionExtend {
  static constexpr const char* schema =
      "compressed_attention_extend(Tensor k, Tensor v, Tensor k_sum, Tensor v_sum, *, SymInt[] positions, int factor,"
      " int[] begins=[], int[] counts=[], int[] places=[], bool packed=False)"
      " -> (Tensor kc, Tensor vc, Tensor new_k_sum, Tensor new_v_sum)";
  struct Arguments {
    Tensor k, v;                         // (B,Hkv,T,D)
    Tensor k_sum, v_sum;                 // (N,Hkv,D)
    std::vector<c10::SymInt> positions;  // of the open block of each sequence
    int64_t factor;
    std::vector<int64_t> begins, counts, places;
    bool packed;

    auto fields() { return std::tie(k, v, k_sum, v_sum, positions, factor, begins, counts, places, packed); }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
};

struct CompressedAttentionExtendBackward {
  static constexpr const char* schema =
      "compressed_attention_extend_backward(Tensor? grad_kc, Tensor? grad_vc, Tensor? grad_k_sum, Tensor? grad_v_sum,"
      " Tensor like, *, SymInt[] sizes, SymInt[] k_stride, SymInt[] v_stride, SymInt[] positions, int factor,"
      " int[] begins=[], int[] counts=[], int[] places=[], bool packed=False, bool[4] output_mask)"
      " -> (Tensor grad_k, Tensor grad_v, Tensor grad_k_sum, Tensor grad_v_sum)";
  struct Arguments {
    MaybeTensor grad_kc, grad_vc, grad_k_sum, grad_v_sum;  // of the results, none for zeros
    Tensor like;                                           // of the dtype of k
    std::vector<c10::SymInt> sizes, k_stride, v_stride;    // of k and v
    std::vector<c10::SymInt> positions;
    int64_t factor;
    std::vector<int64_t> begins, counts, places;
    bool packed;
    std::array<bool, 4> output_mask;

    auto fields() {
      return std::tie(grad_kc, grad_vc, grad_k_sum, grad_v_sum, like, sizes, k_stride, v_stride, positions, factor,
                      begins, counts, places, packed, output_mask);
    }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
};

// Decoding: y of one position, and the sums over the open block after it.
struct CompressedAttentionStep {
  static constexpr const char* schema =
      "compressed_attention_step(Tensor q, Tensor k, Tensor v, Tensor kc, Tensor vc, Tensor k_sum, Tensor v_sum,"
      " SymInt positions, *, int factor, bool strict=False, float? scale=None)"
      " -> (Tensor y, Tensor new_k_sum, Tensor new_v_sum)";
  struct Arguments {
    Tensor q;             // (B,H,1,D)
    Tensor k, v;          // (B,Hkv,1,D)
    Tensor kc, vc;        // (B,Hkv,C,D)
    Tensor k_sum, v_sum;  // (B,Hkv,D)
    c10::SymInt number;   // of positions in the open block; for the last step, of blocks before it
    int64_t factor;
    bool strict;
    std::optional<double> scale;

    auto fields() { return std::tie(q, k, v, kc, vc, k_sum, v_sum, number, factor, strict, scale); }
  };
  using Results = std::tuple<Tensor, Tensor, Tensor>;
};

// The step of the last position of a block, which is written behind `blocks` of them in kc and vc.
struct CompressedAttentionLastStep {
  static constexpr const char* schema =
      "compressed_attention_last_step(Tensor q, Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor k_sum,"
      " Tensor v_sum, SymInt blocks, *, int factor, bool strict=False, float? scale=None)"
      " -> (Tensor y, Tensor new_k_sum, Tensor new_v_sum)";
  using Arguments = CompressedAttentionStep::Arguments;
  using Results = CompressedAttentionStep::Results;
};

// Decoding with a window: y of one position. The state is `blocks` of them in kc and vc, and `positions` from place
// `start` of near_k and near_v on, behind which the new one is written. If these then hold a block that the next
// position sees as such, its means are written behind the blocks.
struct CompressedAttentionWindowStep {
  static constexpr const char* schema =
      "compressed_attention_window_step(Tensor q, Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor(c!) near_k,"
      " Tensor(d!) near_v, SymInt blocks, SymInt start, SymInt positions, *, int factor, int window,"
      " bool strict=False, float? scale=None)"
      " -> Tensor y";
  struct Arguments {
    Tensor q;               // (B,H,1,D)
    Tensor k, v;            // (B,Hkv,1,D)
    Tensor kc, vc;          // (B,Hkv,places,D)
    Tensor near_k, near_v;  // (B,Hkv,places,D)
    c10::SymInt blocks, start, positions;
    int64_t factor, window;
    bool strict;
    std::optional<double> scale;

    auto fields() {
      return std::tie(q, k, v, kc, vc, near_k, near_v, blocks, start, positions, factor, window, strict, scale);
    }
  };
  using Results = std::tuple<Tensor>;
};

}  // namespace memcheck::operators
