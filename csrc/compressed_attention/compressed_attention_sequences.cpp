#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "common/arena.h"
#include "common/integer.h"
#include "common/torch/device.h"
#include "common/torch/registration.h"
#include "common/torch/sequences.h"
#include "compressed_attention/compressed_attention_checks.h"

// Compressed attention on packed and padded batches: the kernels of compressed_attention, once for each sequence.

namespace memcheck {
namespace {

using namespace compressed_attention_glue;
using MaybeTensor = std::optional<at::Tensor>;

constexpr const char* kForward = "compressed_attention";
constexpr const char* kBackward = "compressed_attention_sequences_backward";

// The sequences of one call. Numbers of queries, (B,H,S) for a caller, are (H,queries) of each sequence for a kernel,
// and blocks begin anew with each sequence.
struct Batch {
  const SequenceArguments& arguments;
  std::vector<Sequence> sequences;
  CompressedAttentionShape all;
  Dtype dtype;

  Batch(const char* op, const SequenceArguments& arguments, const CompressedAttentionShape& all, Dtype dtype)
      : arguments(arguments),
        sequences(read_sequences(op, arguments, all.B, all.S, all.T, all.causal)),
        all(all),
        dtype(dtype) {}

  CompressedAttentionShape shape(const Sequence& x) const {
    return {x.rows,     all.H,      all.Hkv,   x.queries, x.keys, all.D, ceil_div(x.keys, all.factor),
            all.factor, all.causal, all.strict};
  }
  SequenceRun run(const at::Tensor& q) const {
    return SequenceRun(sequences, q.device(), [this](const Sequence& x) {
      const CompressedAttentionShape one = shape(x);
      return (one.H * one.S * one.C + one.Hkv * one.T) * one.D;
    });
  }

  Strided<4> queries_of(const Strided<4>& x, const Sequence& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_query, 0});
  }
  Strided<4> keys_of(const Strided<4>& x, const Sequence& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_key, 0});
  }
  // A sequence has at most one block more than its share of those of all positions.
  Strided<4> blocks_of(const Strided<4>& x, const Sequence& one) const {
    return starting_at(x, dtype, {one.row, 0, arguments.packed() ? one.first_key / all.factor + one.index : 0, 0});
  }
  int64_t first_number(const Sequence& x) const {
    return all.H * (x.row * all.S + (arguments.packed() ? x.first_query : 0));
  }
  char* numbers_of(const at::Tensor& numbers, const Sequence& x) const {
    if (!numbers.defined()) return nullptr;
    return static_cast<char*>(numbers.mutable_data_ptr()) + first_number(x) * acc_bytes(dtype);
  }

  at::Tensor empty_numbers(const at::Tensor& q) const {
    return at::empty({all.B * all.H * all.S}, q.options().dtype(acc_scalar_type(q.scalar_type())));
  }
  // The numbers of a sequence's queries as (H,queries): among those of all sequences, and in (B,H,S).
  at::Tensor view_numbers(const at::Tensor& numbers, const Sequence& x) const {
    return numbers.narrow(0, first_number(x), all.H * x.queries).view({all.H, x.queries});
  }
  static at::Tensor view_queries(const at::Tensor& x, const Sequence& one) {
    return x.select(0, one.row).narrow(1, one.first_query, one.queries);
  }
  // From (B,H,S). Undefined if x is.
  at::Tensor numbers_from(const at::Tensor& x) const {
    if (!x.defined()) return {};
    const at::Tensor numbers = empty_numbers(x);
    for (const Sequence& one : sequences) view_numbers(numbers, one).copy_(view_queries(x, one));
    return numbers;
  }
};

// The number of blocks that are allocated for keys of T positions. It does not depend on the lengths of the sequences.
c10::SymInt block_slots(const SequenceArguments& arguments, const Sizes& n, int64_t factor) {
  return arguments.packed() ? n.T / factor + arguments.count(n.B) : blocks_of(n.T, factor);
}

// ---- forward

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

ForwardResult forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& sink,
                           const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                           bool left_padded, int64_t factor, bool causal, bool strict, std::optional<double> scale,
                           bool keep, bool return_lse) {
  Sizes n = check_inputs(kForward, q, k, v, {factor, causal, strict, scale});
  const auto arguments = check_sequences(kForward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  check_sink(kForward, n, q, sink);
  n.C = block_slots(arguments, n, factor);
  return {empty_output(n, q), empty_lse(n, q, keep || return_lse), empty_compressed(n, q, keep),
          empty_compressed(n, q, keep)};
}

// Blocks that are not kept lie in the scratch.
struct ForwardScratch {
  void* kernel;
  Strided<4> kc, vc;  // (1,Hkv,C,D)

  ForwardScratch(Arena& arena, const CompressedAttentionShape& one, int64_t kernel_bytes, int64_t element_bytes)
      : kernel(arena.take<char>(kernel_bytes)),
        kc(take_blocks(arena, one, element_bytes)),
        vc(take_blocks(arena, one, element_bytes)) {}

  static Strided<4> take_blocks(Arena& arena, const CompressedAttentionShape& one, int64_t element_bytes) {
    const int64_t head = one.C * one.D;
    return {arena.take<char>(one.Hkv * head * element_bytes), {one.Hkv * head, head, one.D, 1}};
  }
};

ForwardResult forward(const CompressedAttentionKernels& kernels, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                      const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, int64_t factor,
                      bool causal, bool strict, std::optional<double> scale, bool keep, bool return_lse) {
  const Options options{factor, causal, strict, scale};
  Sizes n = check_inputs(kForward, q, k, v, options);
  const auto arguments = check_sequences(kForward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, q, n.B);
  const at::Tensor sinks = contiguous_or_not(check_sink(kForward, n, q, sink));
  n.C = block_slots(arguments, n, factor);
  const Batch batch(kForward, arguments, n.shape(options), dtype_of(q));
  const DeviceScope device(q);
  const at::Tensor y = empty_output(n, q);
  zero_padded_queries(arguments, batch.sequences, y, 2);
  const at::Tensor lse = empty_lse(n, q, keep || return_lse);
  const at::Tensor numbers = keep || return_lse ? batch.empty_numbers(q) : at::Tensor();
  const at::Tensor kc = empty_compressed(n, q, keep).zero_(), vc = empty_compressed(n, q, keep).zero_();
  const auto scratch_of = [&](Arena& arena, const Sequence& x, int64_t threads) {
    const CompressedAttentionShape shape = batch.shape(x);
    const int64_t bytes = kernels.plan(shape, batch.dtype, threads).forward_scratch_bytes;
    return ForwardScratch(arena, shape, bytes, keep ? 0 : element_bytes(batch.dtype));
  };
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const Sequence& x, int64_t threads) {
    Arena arena{nullptr};
    scratch_of(arena, x, threads);
    return arena.bytes;
  });
  const Strided<4> q_all = reads<4>(q), k_all = reads<4>(k), v_all = reads<4>(v), y_all = writes<4>(y);
  const Strided<4> kc_all = writes<4>(kc), vc_all = writes<4>(vc);
  run.each([&](const Sequence& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const ForwardScratch scratch = scratch_of(arena, x, threads);
    const CompressedAttentionShape shape = batch.shape(x);
    const Strided<4> kc_one = keep ? batch.blocks_of(kc_all, x) : scratch.kc;
    const Strided<4> vc_one = keep ? batch.blocks_of(vc_all, x) : scratch.vc;
    const CompressedAttentionPooling pooling{
        shape, batch.keys_of(k_all, x), batch.keys_of(v_all, x), kc_one, vc_one, scratch.kernel, threads};
    kernels.pool(pooling, batch.dtype, device.stream);
    const CompressedAttentionForward p{
        shape,          scale_of(shape, options),   batch.queries_of(q_all, x),   kc_one,         vc_one,
        data_of(sinks), batch.queries_of(y_all, x), batch.numbers_of(numbers, x), scratch.kernel, threads};
    kernels.forward(p, batch.dtype, device.stream);
  });
  if (numbers.defined()) {
    if (arguments.padded()) lse.fill_(-std::numeric_limits<double>::infinity());
    for (const Sequence& x : batch.sequences) Batch::view_queries(lse, x).copy_(batch.view_numbers(numbers, x));
  }
  return {y, lse, kc, vc};
}

// ---- backward

SequenceArguments check_backward_of_sequences(const BackwardInputs& in, Sizes& n, const MaybeTensor& cu_seqlens_q,
                                              const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths,
                                              bool left_padded) {
  n = check_backward(kBackward, in);
  const auto arguments = check_sequences(kBackward, cu_seqlens_q, cu_seqlens_k, lengths, left_padded, in.q, n.B);
  const c10::SymInt slots = block_slots(arguments, n, in.options.factor);
  TORCH_CHECK_VALUE(n.C == slots, kBackward, ": kc must be (B,Hkv,C,D) with C = ", slots, ", got C = ", n.C);
  return arguments;
}

Gradients backward_meta(const at::Tensor& grad_y, const at::Tensor& q, const at::Tensor& kc, const MaybeTensor& vc,
                        const MaybeTensor& y, const at::Tensor& lse, const MaybeTensor& grad_lse,
                        const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                        const MaybeTensor& lengths, bool left_padded, int64_t factor, c10::SymInt kv_len, bool causal,
                        bool strict, std::optional<double> scale, c10::SymIntArrayRef grad_k_stride,
                        c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, vc, y, lse, grad_lse, sink, kv_len, options, output_mask};
  Sizes n;
  check_backward_of_sequences(in, n, cu_seqlens_q, cu_seqlens_k, lengths, left_padded);
  return empty_gradients(kBackward, n, in, grad_k_stride, grad_v_stride);
}

// The sum over sequences, in their order, so that the number of threads does not matter. parts (N,H)
void add_sink_gradients(const at::Tensor& parts, const at::Tensor& grad_sink) {
  const at::Tensor total = at::zeros(grad_sink.sizes(), parts.options().dtype(at::kDouble));
  for (int64_t i = 0; i < parts.size(0); ++i) total.add_(parts.select(0, i));
  grad_sink.copy_(total);
}

Gradients backward(const CompressedAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                   const at::Tensor& kc, const MaybeTensor& vc, const MaybeTensor& y, const at::Tensor& lse,
                   const MaybeTensor& grad_lse, const MaybeTensor& sink, const MaybeTensor& cu_seqlens_q,
                   const MaybeTensor& cu_seqlens_k, const MaybeTensor& lengths, bool left_padded, int64_t factor,
                   c10::SymInt kv_len, bool causal, bool strict, std::optional<double> scale,
                   c10::SymIntArrayRef grad_k_stride, c10::SymIntArrayRef grad_v_stride, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const BackwardInputs in{grad_y, q, kc, vc, y, lse, grad_lse, sink, kv_len, options, output_mask};
  Sizes n;
  const auto arguments = check_backward_of_sequences(in, n, cu_seqlens_q, cu_seqlens_k, lengths, left_padded);
  const Batch batch(kBackward, arguments, n.shape(options), dtype_of(q));
  const DeviceScope device(q);
  const Gradients gradients = empty_gradients(kBackward, n, in, grad_k_stride, grad_v_stride);
  const auto& [grad_q, grad_k, grad_v, grad_sink] = gradients;
  zero_padded_queries(arguments, batch.sequences, grad_q, 2);
  zero_padded_keys(arguments, batch.sequences, grad_k, 2);
  zero_padded_keys(arguments, batch.sequences, grad_v, 2);
  const at::Tensor lses = batch.numbers_from(lse), grad_lses = batch.numbers_from(defined_or_not(in.grad_lse));
  const at::Tensor delta = grad_k.defined() || grad_sink.defined() ? batch.empty_numbers(q) : at::Tensor();
  const at::Tensor sinks = contiguous_or_not(defined_or_not(in.sink));
  const int64_t count = static_cast<int64_t>(batch.sequences.size());
  const at::Tensor sink_parts = grad_sink.defined() ? at::empty({count, batch.all.H}, sinks.options()) : at::Tensor();
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const Sequence& x, int64_t threads) {
    return kernels.plan(batch.shape(x), batch.dtype, threads).backward_scratch_bytes;
  });
  const Strided<4> g_all = reads<4>(grad_y), q_all = reads<4>(q), kc_all = reads<4>(kc),
                   vc_all = reads<4>(defined_or_not(vc));
  const Strided<4> y_all = reads<4>(is_exact(q) ? defined_or_not(y) : at::Tensor());
  const Strided<4> dq_all = writes<4>(grad_q), dk_all = writes<4>(grad_k), dv_all = writes<4>(grad_v);
  char* const sinks_out = sink_parts.defined() ? static_cast<char*>(sink_parts.mutable_data_ptr()) : nullptr;
  run.each([&](const Sequence& x, int64_t threads, void* scratch) {
    const CompressedAttentionShape shape = batch.shape(x);
    const int64_t sink_bytes = x.index * shape.H * acc_bytes(batch.dtype);
    const CompressedAttentionBackward p{shape,
                                        scale_of(shape, options),
                                        batch.queries_of(g_all, x),
                                        batch.numbers_of(grad_lses, x),
                                        batch.queries_of(q_all, x),
                                        batch.blocks_of(kc_all, x),
                                        batch.blocks_of(vc_all, x),
                                        batch.queries_of(y_all, x),
                                        batch.numbers_of(lses, x),
                                        data_of(sinks),
                                        factor,
                                        x.keys,
                                        batch.queries_of(dq_all, x),
                                        batch.keys_of(dk_all, x),
                                        batch.keys_of(dv_all, x),
                                        sinks_out == nullptr ? nullptr : sinks_out + sink_bytes,
                                        batch.numbers_of(delta, x),
                                        scratch,
                                        threads};
    kernels.backward(p, batch.dtype, device.stream);
  });
  if (grad_sink.defined()) add_sink_gradients(sink_parts, grad_sink);
  return gradients;
}

const Registration registration(
    MEMCHECK_KERNELS(compressed_attention),
    OperatorRow{"compressed_attention_sequences(Tensor q, Tensor k, Tensor v, Tensor? sink=None, *,"
                " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? lengths=None, bool left_padded=False,"
                " int factor, bool causal=True, bool strict=False, float? scale=None, bool keep=False,"
                " bool return_lse=False) -> (Tensor y, Tensor lse, Tensor kc, Tensor vc)",
                forward_meta, forward, /*cast_inputs=*/3},
    OperatorRow{"compressed_attention_sequences_backward(Tensor grad_y, Tensor q, Tensor kc, Tensor? vc, Tensor? y,"
                " Tensor lse, Tensor? grad_lse=None, Tensor? sink=None, *, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
                " Tensor? lengths, bool left_padded, int factor, SymInt kv_len, bool causal, bool strict,"
                " float? scale, SymInt[] grad_k_stride, SymInt[] grad_v_stride, bool[4] output_mask)"
                " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)",
                backward_meta, backward});

}  // namespace
}  // namespace memcheck
