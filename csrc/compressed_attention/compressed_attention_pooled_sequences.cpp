#include <tuple>

#include "common/torch/registration.h"
#include "compressed_attention/compressed_attention_batch.h"

// Compressed attention on packed and padded batches whose keys and values are compressed already: the kernels of
// compressed_attention_pooled, once for each sequence, on blocks that each sequence has in tensors of its own.

namespace memcheck::compressed_attention_pooled_sequences_operators {
namespace {

using namespace compressed_attention_glue;
using Tensors = std::vector<at::Tensor>;

constexpr const char* kForward = "compressed_attention_pooled_sequences";
constexpr const char* kBackward = "compressed_attention_pooled_sequences_backward";

// Where the queries of the sequences are in q (B,H,S,D): `counts` of them from `begins` on, packed in the only row or
// padded in a row each. kv_lens: how many positions the blocks of each represent.
struct Places {
  bool packed;
  at::IntArrayRef begins, counts, kv_lens;

  std::vector<SequenceView> sequences() const {
    std::vector<SequenceView> sequences;
    for (int64_t i = 0; i < static_cast<int64_t>(begins.size()); ++i)
      sequences.push_back({i, packed ? 0 : i, 1, begins[i], counts[i], 0, kv_lens[i]});
    return sequences;
  }
};

void check_count(const char* op, const char* name, size_t count, size_t expected) {
  TORCH_CHECK_VALUE(count == expected, op, ": ", name, " must have one for each sequence, N = ", expected, ", got ",
                    count);
}

// Without T and C, which each sequence has for itself.
Sizes sizes_of_all(const at::Tensor& q, at::TensorList kc) {
  return {q.sym_size(0),
          q.sym_size(1),
          kc.empty() ? c10::SymInt(0) : kc[0].sym_size(1),
          q.sym_size(2),
          0,
          q.sym_size(3),
          0};
}

// What the kernels rely on.
void check_sequences(const char* op, const at::Tensor& q, at::TensorList kc, at::TensorList vc, const MaybeTensor& sink,
                     const Places& places, const Options& options) {
  check_rank(op, "q", q, 4, "(B,H,S,D)");
  check_floating(op, "q", q);
  check_options(op, options, q);
  const size_t count = places.begins.size();
  check_count(op, "counts", places.counts.size(), count);
  check_count(op, "kv_lens", places.kv_lens.size(), count);
  check_count(op, "kc", kc.size(), count);
  check_count(op, "vc", vc.size(), count);
  const c10::SymInt rows = places.packed ? c10::SymInt(1) : c10::SymInt(static_cast<int64_t>(count));
  TORCH_CHECK_VALUE(q.sym_size(0) == rows, op, ": q must have B = ", rows, " rows, got ", q.sym_size(0));
  const Sizes all = sizes_of_all(q, kc);
  for (const SequenceView& x : places.sequences()) {
    TORCH_CHECK_VALUE(x.first_query >= 0 && x.queries >= 0 && x.first_query + x.queries <= q.sym_size(2), op,
                      ": the queries of sequence ", x.index, " must be in 0 to S = ", q.sym_size(2), ", got ",
                      x.queries, " from ", x.first_query, " on");
    const at::Tensor its_q = q.narrow(0, x.row, 1).narrow(2, x.first_query, x.queries);
    const Sizes n = check_blocks(op, its_q, kc[x.index], vc[x.index], x.keys, options, true);
    check_block_count(op, n, options);
    TORCH_CHECK_VALUE(n.Hkv == all.Hkv, op, ": kc of sequence ", x.index, " must have Hkv = ", all.Hkv,
                      " heads, as that of sequence 0, got ", n.Hkv);
  }
  check_sink(op, all, q, sink);
}

Batch batch_of(const at::Tensor& q, at::TensorList kc, const Places& places, const Options& options) {
  return {places.packed, places.sequences(), sizes_of_all(q, kc).shape(options), dtype_of(q)};
}

// The shape of a sequence. It may have no block for the positions after the last whole one.
CompressedAttentionShape shape_of(const Batch& batch, const SequenceView& x, at::TensorList kc) {
  CompressedAttentionShape shape = batch.shape(x);
  shape.C = kc[x.index].size(2);
  return shape;
}

// ---- forward

using ForwardResult = std::tuple<at::Tensor, at::Tensor>;

ForwardResult forward_meta(const at::Tensor& q, at::TensorList kc, at::TensorList vc, const MaybeTensor& sink,
                           bool packed, at::IntArrayRef begins, at::IntArrayRef counts, at::IntArrayRef kv_lens,
                           int64_t factor, bool causal, bool strict, std::optional<double> scale, bool return_lse) {
  check_sequences(kForward, q, kc, vc, sink, {packed, begins, counts, kv_lens}, {factor, causal, strict, scale});
  const Sizes all = sizes_of_all(q, kc);
  return {empty_output(all, q), empty_lse(all, q, return_lse)};
}

ForwardResult forward(const CompressedAttentionKernels& kernels, const at::Tensor& q, at::TensorList kc,
                      at::TensorList vc, const MaybeTensor& sink, bool packed, at::IntArrayRef begins,
                      at::IntArrayRef counts, at::IntArrayRef kv_lens, int64_t factor, bool causal, bool strict,
                      std::optional<double> scale, bool return_lse) {
  const Options options{factor, causal, strict, scale};
  const Places places{packed, begins, counts, kv_lens};
  check_sequences(kForward, q, kc, vc, sink, places, options);
  const Sizes all = sizes_of_all(q, kc);
  const Batch batch = batch_of(q, kc, places, options);
  const DeviceScope device(q);
  const at::Tensor sinks = contiguous_or_not(defined_or_not(sink));
  const at::Tensor y = empty_output(all, q), lse = empty_lse(all, q, return_lse);
  if (!packed) y.zero_();
  const at::Tensor numbers = return_lse ? batch.empty_numbers(q) : at::Tensor();
  SequenceRun run = batch.run(q);
  run.allocate_scratch(q, [&](const SequenceView& x, int64_t threads) {
    return kernels.plan(shape_of(batch, x, kc), batch.dtype, threads).pooled_forward_scratch_bytes;
  });
  const Strided<4> q_all = reads<4>(q), y_all = writes<4>(y);
  run.each([&](const SequenceView& x, int64_t threads, void* scratch) {
    const CompressedAttentionShape shape = shape_of(batch, x, kc);
    const CompressedAttentionForward p{shape,
                                       scale_of(shape, options),
                                       batch.queries_of(q_all, x),
                                       reads<4>(kc[x.index]),
                                       reads<4>(vc[x.index]),
                                       data_of(sinks),
                                       batch.queries_of(y_all, x),
                                       batch.numbers_of(numbers, x),
                                       scratch,
                                       threads};
    kernels.forward(p, batch.dtype, device.stream);
  });
  if (numbers.defined()) batch.copy_numbers(numbers, lse);
  return {y, lse};
}

// ---- backward

using GradientLists = std::tuple<at::Tensor, Tensors, Tensors, at::Tensor>;

GradientLists check_backward_and_allocate(const at::Tensor& grad_y, const at::Tensor& q, at::TensorList kc,
                                          at::TensorList vc, const MaybeTensor& y, const at::Tensor& lse,
                                          const MaybeTensor& grad_lse, const MaybeTensor& sink, const Places& places,
                                          const Options& options, Mask wanted) {
  check_sequences(kBackward, q, kc, vc, sink, places, options);
  check_results(kBackward, sizes_of_all(q, kc), q, grad_y, y, /*needs_y=*/true, lse, grad_lse);
  const auto gradients_like = [](bool wanted, at::TensorList tensors) {
    Tensors gradients;
    for (const at::Tensor& x : tensors) gradients.push_back(empty_gradient(wanted, x));
    return wanted ? gradients : Tensors();
  };
  return {empty_gradient(wanted[0], q), gradients_like(wanted[1], kc), gradients_like(wanted[2], vc),
          empty_gradient(wanted[3], defined_or_not(sink))};
}

GradientLists backward_meta(const at::Tensor& grad_y, const at::Tensor& q, at::TensorList kc, at::TensorList vc,
                            const MaybeTensor& y, const at::Tensor& lse, const MaybeTensor& grad_lse,
                            const MaybeTensor& sink, bool packed, at::IntArrayRef begins, at::IntArrayRef counts,
                            at::IntArrayRef kv_lens, int64_t factor, bool causal, bool strict,
                            std::optional<double> scale, Mask output_mask) {
  return check_backward_and_allocate(grad_y, q, kc, vc, y, lse, grad_lse, sink, {packed, begins, counts, kv_lens},
                                     {factor, causal, strict, scale}, output_mask);
}

GradientLists backward(const CompressedAttentionKernels& kernels, const at::Tensor& grad_y, const at::Tensor& q,
                       at::TensorList kc, at::TensorList vc, const MaybeTensor& y, const at::Tensor& lse,
                       const MaybeTensor& grad_lse, const MaybeTensor& sink, bool packed, at::IntArrayRef begins,
                       at::IntArrayRef counts, at::IntArrayRef kv_lens, int64_t factor, bool causal, bool strict,
                       std::optional<double> scale, Mask output_mask) {
  const Options options{factor, causal, strict, scale};
  const Places places{packed, begins, counts, kv_lens};
  const GradientLists gradients =
      check_backward_and_allocate(grad_y, q, kc, vc, y, lse, grad_lse, sink, places, options, output_mask);
  const auto& [grad_q, grad_kc, grad_vc, grad_sink] = gradients;
  if (!packed && grad_q.defined()) grad_q.zero_();
  const Batch batch = batch_of(q, kc, places, options);
  const auto its = [](const Tensors& gradients, const SequenceView& x) {
    return gradients.empty() ? Strided<4>() : writes<4>(gradients[x.index]);
  };
  run_backward(kernels, batch, {grad_y, q, y, lse, grad_lse, sink, options, grad_q, grad_sink}, output_mask[1],
               [&, &grad_kc = grad_kc, &grad_vc = grad_vc](const SequenceView& x) {
                 const CompressedAttentionShape shape = shape_of(batch, x, kc);
                 return BackwardKeys{
                     shape, reads<4>(kc[x.index]), reads<4>(vc[x.index]), its(grad_kc, x), its(grad_vc, x), 1, shape.C};
               });
  return gradients;
}

const Registration registration(
    MEMCHECK_KERNELS(compressed_attention),
    OperatorRow{"compressed_attention_pooled_sequences(Tensor q, Tensor[] kc, Tensor[] vc, Tensor? sink=None, *,"
                " bool packed, int[] begins, int[] counts, int[] kv_lens, int factor, bool causal=True,"
                " bool strict=False, float? scale=None, bool return_lse=False) -> (Tensor y, Tensor lse)",
                forward_meta, forward},
    OperatorRow{"compressed_attention_pooled_sequences_backward(Tensor grad_y, Tensor q, Tensor[] kc, Tensor[] vc,"
                " Tensor? y, Tensor lse, Tensor? grad_lse=None, Tensor? sink=None, *, bool packed, int[] begins,"
                " int[] counts, int[] kv_lens, int factor, bool causal, bool strict, float? scale,"
                " bool[4] output_mask) -> (Tensor grad_q, Tensor[] grad_kc, Tensor[] grad_vc, Tensor grad_sink)",
                backward_meta, backward});

}  // namespace
}  // namespace memcheck::compressed_attention_pooled_sequences_operators
