#include "common/torch/sequences.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "common/finding.h"
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
          T,
          {x.packed() ? names_of(x)[0] : "", x.packed() ? names_of(x)[1] : "lengths"}};
}

// Values that lie on the CPU, before they are copied to a GPU.
void check_values(const char* op, const SequenceSource& source) {
  Finding finding = check_ends(op, source);
  for (int64_t i = 0; i < source.count && finding.rule == Rule::None; ++i) finding = check_sequence(op, source, i);
  TORCH_CHECK_VALUE(finding.rule == Rule::None, message_of(finding));
}

at::Tensor on_device_of(const at::Tensor& x, const at::Tensor& q) {
  if (!x.defined()) return x;
  return x.to(q.device(), x.scalar_type(), /*non_blocking=*/true).contiguous();
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

Sequences::Sequences(const char* op, const SequenceArguments& arguments, const SequenceKernels& kernels,
                     const at::Tensor& q, int64_t S, int64_t T, bool causal, cudaStream_t stream) {
  if (!arguments.packed() && !arguments.padded()) return;
  const at::Tensor& given_keys = arguments.packed() ? arguments.cu_seqlens_k : arguments.lengths;
  const bool on_cpu = given_keys.is_cpu() && (!arguments.packed() || arguments.cu_seqlens_q.is_cpu());
  if (on_cpu && !q.is_cpu()) {
    const at::Tensor queries = arguments.packed() ? arguments.cu_seqlens_q.contiguous() : at::Tensor();
    const at::Tensor keys = given_keys.contiguous();
    check_values(op, source_of(queries, keys, arguments, q.size(0), S, T, causal));
  }
  const at::Tensor queries = on_device_of(arguments.cu_seqlens_q, q), keys = on_device_of(given_keys, q);
  const SequenceSource source = source_of(queries, keys, arguments, q.size(0), S, T, causal);
  const int64_t places = std::max<int64_t>(1, source.count);  // a table without sequences is a table
  Sequence* memory = nullptr;
  if (q.is_cpu()) {
    on_host_.resize(places);
    memory = on_host_.data();
  } else {
    on_gpu_ = Scratch(places * static_cast<int64_t>(sizeof(Sequence)), q);
    memory = static_cast<Sequence*>(on_gpu_.data());
  }
  try {
    kernels.build({op, source, memory}, Dtype::Float32, stream);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  raise_findings_at_once(q.device(), stream);
  table_ = {memory, source.count, arguments.packed()};
}

}  // namespace memcheck
