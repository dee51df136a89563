#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <limits>
#include <vector>

#include "common/integer.h"
#include "common/torch/device.h"
#include "common/torch/sequence_runs.h"
#include "compressed_attention/compressed_attention_checks.h"

// What the operators of compressed attention on packed and padded batches share.

namespace memcheck::compressed_attention_glue {

using MaybeTensor = std::optional<at::Tensor>;

// The sequences of one call. Numbers of queries, (B,H,S) for a caller, are (H,queries) of each sequence for a kernel,
// and blocks begin anew with each sequence.
struct Batch {
  bool packed;
  std::vector<SequenceView> sequences;
  CompressedAttentionShape all;
  Dtype dtype;

  CompressedAttentionShape shape(const SequenceView& x) const {
    return {x.rows,     all.H,      all.Hkv,   x.queries, x.keys, all.D, ceil_div(x.keys, all.factor),
            all.factor, all.causal, all.strict};
  }
  SequenceRun run(const at::Tensor& q) const {
    return SequenceRun(sequences, q.device(), [this](const SequenceView& x) {
      const CompressedAttentionShape one = shape(x);
      return (one.H * one.S * one.C + one.Hkv * one.T) * one.D;
    });
  }

  Strided<4> queries_of(const Strided<4>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_query, 0});
  }
  Strided<4> keys_of(const Strided<4>& x, const SequenceView& one) const {
    return starting_at(x, dtype, {one.row, 0, one.first_key, 0});
  }
  int64_t first_number(const SequenceView& x) const { return all.H * (x.row * all.S + (packed ? x.first_query : 0)); }
  char* numbers_of(const at::Tensor& numbers, const SequenceView& x) const {
    if (!numbers.defined()) return nullptr;
    return static_cast<char*>(numbers.mutable_data_ptr()) + first_number(x) * acc_bytes(dtype);
  }

  at::Tensor empty_numbers(const at::Tensor& q) const {
    return at::empty({all.B * all.H * all.S}, q.options().dtype(acc_scalar_type(q.scalar_type())));
  }
  // The numbers of a sequence's queries as (H,queries): among those of all sequences, and in (B,H,S).
  at::Tensor view_numbers(const at::Tensor& numbers, const SequenceView& x) const {
    return numbers.narrow(0, first_number(x), all.H * x.queries).view({all.H, x.queries});
  }
  static at::Tensor view_queries(const at::Tensor& x, const SequenceView& one) {
    return x.select(0, one.row).narrow(1, one.first_query, one.queries);
  }
  // From (B,H,S). Undefined if x is.
  at::Tensor numbers_from(const at::Tensor& x) const {
    if (!x.defined()) return {};
    const at::Tensor numbers = empty_numbers(x);
    for (const SequenceView& one : sequences) view_numbers(numbers, one).copy_(view_queries(x, one));
    return numbers;
  }
  // To lse (B,H,S), which is -inf in padding.
  void copy_numbers(const at::Tensor& numbers, const at::Tensor& lse) const {
    if (!packed) lse.fill_(-std::numeric_limits<double>::infinity());
    for (const SequenceView& one : sequences) view_queries(lse, one).copy_(view_numbers(numbers, one));
  }
};

// ---- backward

struct BackwardTensors {
  const at::Tensor& grad_y;     // (B,H,S,D)
  const at::Tensor& q;          // (B,H,S,D)
  const MaybeTensor& y;         // (B,H,S,D), none as in BackwardInputs
  const at::Tensor& lse;        // (B,H,S)
  const MaybeTensor& grad_lse;  // (B,H,S), none for zeros
  const MaybeTensor& sink;      // (H,)
  const Options& options;
  const at::Tensor& grad_q;     // (B,H,S,D), undefined if it is not wanted, as the next
  const at::Tensor& grad_sink;  // (H,)
};

// The keys of one sequence: its blocks, and their gradients as CompressedAttentionBackward has them.
struct BackwardKeys {
  CompressedAttentionShape shape;
  Strided<4> kc, vc;
  Strided<4> grad_k, grad_v;
  int64_t block_length, gradient_length;
};

// The sum over sequences, in their order, so that the number of threads does not matter. parts (N,H)
inline void add_sink_gradients(const at::Tensor& parts, const at::Tensor& grad_sink) {
  const at::Tensor total = at::zeros(grad_sink.sizes(), parts.options().dtype(at::kDouble));
  for (int64_t i = 0; i < parts.size(0); ++i) total.add_(parts.select(0, i));
  grad_sink.copy_(total);
}

// Fills the gradients of all sequences but in padding.
inline void run_backward(const CompressedAttentionKernels& kernels, const Batch& batch, const BackwardTensors& in,
                         bool wants_keys, const std::function<BackwardKeys(const SequenceView&)>& keys_of) {
  const DeviceScope device(in.q);
  const at::Tensor lses = batch.numbers_from(in.lse), grad_lses = batch.numbers_from(defined_or_not(in.grad_lse));
  const at::Tensor delta = wants_keys || in.grad_sink.defined() ? batch.empty_numbers(in.q) : at::Tensor();
  const at::Tensor sinks = contiguous_or_not(defined_or_not(in.sink));
  const int64_t count = static_cast<int64_t>(batch.sequences.size());
  const at::Tensor sink_parts =
      in.grad_sink.defined() ? at::empty({count, batch.all.H}, sinks.options()) : at::Tensor();
  SequenceRun run = batch.run(in.q);
  run.allocate_scratch(in.q, [&](const SequenceView& x, int64_t threads) {
    return kernels.plan(keys_of(x).shape, batch.dtype, threads).backward_scratch_bytes;
  });
  const Strided<4> g_all = reads<4>(in.grad_y), q_all = reads<4>(in.q), dq_all = writes<4>(in.grad_q);
  const Strided<4> y_all = reads<4>(is_exact(in.q) ? defined_or_not(in.y) : at::Tensor());
  char* const sinks_out = sink_parts.defined() ? static_cast<char*>(sink_parts.mutable_data_ptr()) : nullptr;
  run.each([&](const SequenceView& x, int64_t threads, void* scratch) {
    const BackwardKeys keys = keys_of(x);
    const int64_t sink_bytes = x.index * keys.shape.H * acc_bytes(batch.dtype);
    const CompressedAttentionBackward p{keys.shape,
                                        scale_of(keys.shape, in.options),
                                        batch.queries_of(g_all, x),
                                        batch.numbers_of(grad_lses, x),
                                        batch.queries_of(q_all, x),
                                        keys.kc,
                                        keys.vc,
                                        batch.queries_of(y_all, x),
                                        batch.numbers_of(lses, x),
                                        data_of(sinks),
                                        keys.block_length,
                                        keys.gradient_length,
                                        batch.queries_of(dq_all, x),
                                        keys.grad_k,
                                        keys.grad_v,
                                        sinks_out == nullptr ? nullptr : sinks_out + sink_bytes,
                                        batch.numbers_of(delta, x),
                                        scratch,
                                        threads};
    kernels.backward(p, batch.dtype, device.stream);
  });
  if (in.grad_sink.defined()) add_sink_gradients(sink_parts, in.grad_sink);
}

}  // namespace memcheck::compressed_attention_glue
