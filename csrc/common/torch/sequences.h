#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "common/sequences.h"
#include "common/torch/allocate.h"
#include "common/torch/device.h"

// Packed and padded batches: the arguments of operators, and their tables for kernels.

namespace memcheck {

// The arguments by which operators take sequences. Packed: both cu_seqlens. Padded: lengths. Neither: all undefined.
struct SequenceArguments {
  at::Tensor cu_seqlens_q;  // (N+1,), where each sequence begins in S, and the end
  at::Tensor cu_seqlens_k;  // (N+1,), in T
  at::Tensor lengths;       // (B,), the keys of each row that count; they are the last ones where left_padded
  bool left_padded = false;

  bool packed() const { return cu_seqlens_q.defined(); }
  bool padded() const { return lengths.defined(); }
  // N, where the batch has B rows. It does not depend on values.
  c10::SymInt count(const c10::SymInt& B) const { return packed() ? cu_seqlens_q.sym_size(0) - 1 : B; }
};

// The arguments for a batch of q, k and v with B rows, after all checks that need no values.
SequenceArguments check_sequences(const char* op, const std::optional<at::Tensor>& cu_seqlens_q,
                                  const std::optional<at::Tensor>& cu_seqlens_k,
                                  const std::optional<at::Tensor>& lengths, bool left_padded, const at::Tensor& q,
                                  const c10::SymInt& B);

// The sequences of one call, for kernels on the device of q, which is the current one.
class Sequences {
 public:
  // For a batch with S queries and T keys in a row. Values that are checked (checks_values) and break a rule are a
  // ValueError. `build` fills a table on a GPU, and is null on the CPU.
  Sequences(const char* op, const SequenceArguments& arguments, Kernel<SequenceTableBuild> build, const at::Tensor& q,
            int64_t S, int64_t T, bool causal, cudaStream_t stream);

  // Without sequences if the batch is neither packed nor padded.
  const SequenceTable& table() const { return table_; }
  // The same table in the host's memory. Only of values that are checked.
  SequenceTable host_table() const { return {table_ ? on_host_.data() : nullptr, table_.count, table_.packed}; }
  // Fills a result of a padded batch before the operator's kernels, which do not write its padding. x may be undefined.
  void fill_if_padded(const at::Tensor& x, double value = 0) const {
    if (x.defined() && table_ && !table_.packed) x.fill_(value);
  }

 private:
  std::vector<Sequence> on_host_;
  Scratch on_gpu_;
  SequenceTable table_;
};

// The sequences of a call, whose table the shape gets.
template <typename Shape>
Sequences sequences_of(const char* op, const SequenceArguments& arguments, Kernel<SequenceTableBuild> build,
                       const at::Tensor& q, const DeviceScope& device, Shape& shape) {
  Sequences sequences(op, arguments, build, q, shape.S, shape.T, shape.causal, device.stream);
  shape.sequences = sequences.table();
  return sequences;
}

}  // namespace memcheck
