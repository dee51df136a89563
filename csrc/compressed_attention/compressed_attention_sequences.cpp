#include "common/arena.h"
#include "common/torch/registration.h"
#include "compressed_attention/compressed_attention_batch.h"

// Compressed attention on packed and padded batches: the kernels of compressed_attention, once for each sequence.

namespace memcheck::compressed_attention_sequences_operators {
namespace {

using namespace compressed_attention_glue;

constexpr const char* kForward = "compressed_attention";
constexpr const char* kBackward = "compressed_attention_sequences_backward";

// The number of blocks that are allocated for keys of T positions. It does not depend on the lengths of the sequences.
c10::SymInt block_slots(const SequenceArguments& arguments, const Sizes& n, int64_t factor) {
  return arguments.packed() ? n.T / factor + arguments.count(n.B) : blocks_of(n.T, factor);
}

Batch batch_of(const char* op, const SequenceArguments& arguments, const Sizes& n, const Options& options,
               const at::Tensor& q) {
  const CompressedAttentionShape all = n.shape(options);
  return {arguments.packed(), read_sequences(op, arguments, all.B, all.S, all.T, all.causal), all, dtype_of(q)};
}

// A sequence has at most one block more than its share of those of all positions.
Strided<4> kept_blocks(const Batch& batch, const Strided<4>& x, const SequenceView& one) {
  return starting_at(x, batch.dtype, {one.row, 0, batch.packed ? one.first_key / batch.all.factor + one.index : 0, 0});
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
  const Batch batch = batch_of(kForward, arguments, n, options, q);
  const DeviceScope device(q);
  const at::Tensor y = empty_output(n, q);
  zero_padded_queries(arguments, batch.sequences, y, 2);
  const at::Tensor lse = empty_lse(n, q, keep || return_lse);
  const at::Tensor numbers = keep || return_lse ? batch.empty_numbers(q) : at::Tensor();
  const at::Tensor kc = empty_compressed(n, q, keep).zero_(), vc = empty_compressed(n, q, keep).zero_();
  const auto scratch_of = [&](Arena& arena, const SequenceView& x, int64_t threads) {
    const CompressedAttentionShape shape = batch.shape(x);
    const int64_t bytes = kernels.plan(shape, batch.dtype, threads).forward_scratch_bytes;
    return ForwardScratch(arena, shape, bytes, keep ? 0 : element_bytes(batch.dtype));
  };
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    Arena arena{nullptr};
    scratch_of(arena, x, threads);
    return arena.bytes;
  });
  const Strided<4> q_all = reads<4>(q), k_all = reads<4>(k), v_all = reads<4>(v), y_all = writes<4>(y);
  const Strided<4> kc_all = writes<4>(kc), vc_all = writes<4>(vc);
  run.each([&](const SequenceView& x, int64_t threads, void* memory) {
    Arena arena{static_cast<char*>(memory)};
    const ForwardScratch scratch = scratch_of(arena, x, threads);
    const CompressedAttentionShape shape = batch.shape(x);
    const Strided<4> kc_one = keep ? kept_blocks(batch, kc_all, x) : scratch.kc;
    const Strided<4> vc_one = keep ? kept_blocks(batch, vc_all, x) : scratch.vc;
    const CompressedAttentionPooling pooling{
        shape, batch.keys_of(k_all, x), batch.keys_of(v_all, x), kc_one, vc_one, scratch.kernel, threads};
    kernels.pool(pooling, batch.dtype, device.stream);
    const CompressedAttentionForward p{
        shape,          scale_of(shape, options),   batch.queries_of(q_all, x),   kc_one,         vc_one,
        data_of(sinks), batch.queries_of(y_all, x), batch.numbers_of(numbers, x), scratch.kernel, threads};
    kernels.forward(p, batch.dtype, device.stream);
  });
  if (numbers.defined()) batch.copy_numbers(numbers, lse);
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
  const Batch batch = batch_of(kBackward, arguments, n, options, q);
  const DeviceScope device(q);
  const Gradients gradients = empty_gradients(kBackward, n, in, grad_k_stride, grad_v_stride);
  const auto& [grad_q, grad_k, grad_v, grad_sink] = gradients;
  zero_padded_queries(arguments, batch.sequences, grad_q, 2);
  zero_padded_keys(arguments, batch.sequences, grad_k, 2);
  zero_padded_keys(arguments, batch.sequences, grad_v, 2);
  const Strided<4> kc_all = reads<4>(kc), vc_all = reads<4>(defined_or_not(vc));
  const Strided<4> dk_all = writes<4>(grad_k), dv_all = writes<4>(grad_v);
  run_backward(kernels, batch, {grad_y, q, y, lse, grad_lse, sink, options, grad_q, grad_sink}, grad_k.defined(),
               [&](const SequenceView& x) {
                 return BackwardKeys{batch.shape(x),
                                     kept_blocks(batch, kc_all, x),
                                     kept_blocks(batch, vc_all, x),
                                     batch.keys_of(dk_all, x),
                                     batch.keys_of(dv_all, x),
                                     factor,
                                     x.keys};
               });
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
}  // namespace memcheck::compressed_attention_sequences_operators
