#include "common/torch/sequences.h"

#include <algorithm>
#include <array>

#include "common/torch/checks.h"

namespace memcheck {
namespace {

void check_integers(const char* op, const char* name, const at::Tensor& x, const at::Tensor& q) {
  const bool integers = x.scalar_type() == at::kInt || x.scalar_type() == at::kLong;
  TORCH_CHECK_TYPE(integers, op, ": ", name, " must be int32 or int64, got ", dtype_name(x.scalar_type()));
  TORCH_CHECK_VALUE(x.device() == q.device() || x.is_cpu(), op, ": ", name, " must be on the CPU, or on ", q.device(),
                    " as q is, got ", x.device());
}

void check_cu_seqlens(const char* op, const char* name, const at::Tensor& x, const at::Tensor& q) {
  check_integers(op, name, x, q);
  TORCH_CHECK_VALUE(x.dim() == 1 && x.sym_size(0) >= 1, op, ": ", name, " must be (N+1,), of 1 dimension, got ",
                    x.sym_sizes());
}

// The names by which the caller gave cu_seqlens.
std::array<const char*, 2> names_of(const SequenceArguments& x) {
  if (x.cu_seqlens_q.is_same(x.cu_seqlens_k)) return {"cu_seqlens", "cu_seqlens"};
  return {"cu_seqlens_q", "cu_seqlens_k"};
}

// The source of a table, from tensors that the caller keeps alive.
SequenceSource source_of(const at::Tensor& queries, const at::Tensor& keys, const SequenceArguments& x, int64_t B,
                         int64_t S, int64_t T, bool causal) {
  return {queries.defined() ? queries.const_data_ptr() : nullptr,
          keys.const_data_ptr(),
          queries.defined() && queries.scalar_type() == at::kLong,
          keys.scalar_type() == at::kLong,
          x.packed(),
          x.left_padded,
          causal,
          x.packed() ? queries.size(0) - 1 : B,
          S,
          T};
}

// Raises for the first rule that values break. The same rules are in is_valid, for kernels.
void check_values(const char* op, const SequenceArguments& arguments, const SequenceSource& x) {
  const auto check_starts = [&](const char* name, char letter, int64_t length, const auto& value) {
    TORCH_CHECK_VALUE(value(0) == 0, op, ": ", name, " must begin with 0, got ", value(0));
    TORCH_CHECK_VALUE(value(x.count) == length, op, ": ", name, " must end with the packed length ", letter, " = ",
                      length, ", got ", value(x.count));
    for (int64_t i = 0; i < x.count; ++i)
      TORCH_CHECK_VALUE(value(i) <= value(i + 1), op, ": ", name, " must ascend, got ", value(i + 1), " at index ",
                        i + 1, " after ", value(i));
  };
  if (!x.packed) {
    for (int64_t i = 0; i < x.count; ++i)
      TORCH_CHECK_VALUE(x.key_value(i) >= 0 && x.key_value(i) <= x.T, op, ": lengths must be from 0 to T = ", x.T,
                        ", got ", x.key_value(i), " at index ", i);
    return;
  }
  check_starts(names_of(arguments)[0], 'S', x.S, [&](int64_t i) { return x.query_value(i); });
  check_starts(names_of(arguments)[1], 'T', x.T, [&](int64_t i) { return x.key_value(i); });
  for (int64_t i = 0; i < x.count && x.causal; ++i) {
    const Sequence at = sequence_at(x, i);
    TORCH_CHECK_VALUE(at.queries <= at.keys, op, ": causal needs no more queries than keys, got ", at.queries,
                      " queries and ", at.keys, " keys of sequence ", i);
  }
}

at::Tensor on_device(const at::Tensor& x, c10::Device device) {
  if (!x.defined()) return x;
  // A copy to a GPU does not wait for it.
  return x.to(device, x.scalar_type(), /*non_blocking=*/!device.is_cpu()).contiguous();
}

}  // namespace

SequenceArguments check_sequences(const char* op, const std::optional<at::Tensor>& cu_seqlens_q,
                                  const std::optional<at::Tensor>& cu_seqlens_k,
                                  const std::optional<at::Tensor>& lengths, bool left_padded, const at::Tensor& q,
                                  const c10::SymInt& B) {
  const SequenceArguments x{tensor_or_none(cu_seqlens_q), tensor_or_none(cu_seqlens_k), tensor_or_none(lengths),
                            left_padded};
  TORCH_CHECK_VALUE(x.cu_seqlens_q.defined() == x.cu_seqlens_k.defined(), op,
                    ": cu_seqlens_q and cu_seqlens_k must be given together");
  TORCH_CHECK_VALUE(!x.packed() || !x.padded(), op, ": takes cu_seqlens or lengths, not both");
  if (x.packed()) {
    const auto [of_queries, of_keys] = names_of(x);
    check_cu_seqlens(op, of_queries, x.cu_seqlens_q, q);
    check_cu_seqlens(op, of_keys, x.cu_seqlens_k, q);
    check_shape(op, of_keys, x.cu_seqlens_k, "(N+1,)", {x.cu_seqlens_q.sym_size(0)}, "cu_seqlens_q");
    TORCH_CHECK_VALUE(B == 1, op, ": packed sequences need a batch of one, B = 1, got B = ", B);
  }
  if (x.padded()) {
    check_integers(op, "lengths", x.lengths, q);
    check_shape(op, "lengths", x.lengths, "(B,)", {B}, "q");
  }
  return x;
}

Sequences::Sequences(const char* op, const SequenceArguments& arguments, Kernel<SequenceTableBuild> build,
                     const at::Tensor& q, int64_t S, int64_t T, bool causal, cudaStream_t stream) {
  if (!arguments.packed() && !arguments.padded()) return;
  at::Tensor queries = arguments.cu_seqlens_q, keys = arguments.packed() ? arguments.cu_seqlens_k : arguments.lengths;
  // A table without sequences is a table, so it has a place.
  const auto places = [](const SequenceSource& x) { return std::max<int64_t>(1, x.count); };
  if (checks_values(keys.device()) && (!arguments.packed() || checks_values(queries.device()))) {
    const at::Tensor host_queries = on_device(queries, at::kCPU), host_keys = on_device(keys, at::kCPU);
    const SequenceSource source = source_of(host_queries, host_keys, arguments, q.size(0), S, T, causal);
    check_values(op, arguments, source);
    on_host_.resize(places(source));
    for (int64_t i = 0; i < source.count; ++i) on_host_[i] = sequence_at(source, i);
    table_ = {on_host_.data(), source.count, arguments.packed()};
  }
  if (build == nullptr) return;
  queries = on_device(queries, q.device()), keys = on_device(keys, q.device());
  const SequenceSource source = source_of(queries, keys, arguments, q.size(0), S, T, causal);
  on_gpu_ = Scratch(places(source) * static_cast<int64_t>(sizeof(Sequence)), q);
  auto* const memory = static_cast<Sequence*>(on_gpu_.data());
  build({source, memory}, Dtype::Float32, stream);
  table_ = {memory, source.count, arguments.packed()};
}

}  // namespace memcheck
