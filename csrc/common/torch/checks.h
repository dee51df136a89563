#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "common/torch/device.h"
#include "common/types.h"

// Checks of arguments, and what kernels get of tensors. Every message names the operator, the argument, the rule and
// the value.

namespace memcheck {

inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

// The dispatcher accepts None for a tensor.
inline void check_tensor(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), op, ": ", name, " must be a tensor, got None");
}

inline void check_rank(const char* op, const char* name, const at::Tensor& x, int64_t rank, const char* letters) {
  check_tensor(op, name, x);
  TORCH_CHECK_VALUE(x.dim() == rank, op, ": ", name, " must be ", letters, ", of ", rank, " dimensions, got ",
                    x.sym_sizes());
}

inline void check_shape(const char* op, const char* name, const at::Tensor& x, const char* letters,
                        std::initializer_list<c10::SymInt> shape, const char* like, const char* remedy = "") {
  const c10::SymIntArrayRef expected(shape.begin(), shape.size());
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.sym_size(static_cast<int64_t>(i)) == expected[i];
  TORCH_CHECK_VALUE(same, op, ": ", name, " must be ", letters, " = ", expected, " to match ", like, ", got ",
                    x.sym_sizes(), remedy);
}

inline void check_floating(const char* op, const char* name, const at::Tensor& x) {
  const auto type = x.scalar_type();
  const bool floating = type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK_TYPE(floating, op, ": ", name, " must be float64, float32, float16 or bfloat16, got ", dtype_name(type));
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& x, at::ScalarType type, const char* like) {
  TORCH_CHECK_TYPE(x.scalar_type() == type, op, ": ", name, " must be ", dtype_name(type), " to match ", like, ", got ",
                   dtype_name(x.scalar_type()));
}

inline void check_device(const char* op, const char* name, const at::Tensor& x, const at::Tensor& first,
                         const char* first_name) {
  TORCH_CHECK_VALUE(x.device() == first.device(), op, ": ", name, " must be on ", first.device(), " as ", first_name,
                    " is, got ", x.device());
}

inline void check_like(const char* op, const char* name, const at::Tensor& x, const at::Tensor& first,
                       const char* first_name) {
  check_dtype(op, name, x, first.scalar_type(), first_name);
  check_device(op, name, x, first, first_name);
}

// float64 for float64, else float32.
inline at::ScalarType acc_scalar_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// x is in the accumulation type of q, on its device.
inline void check_acc(const char* op, const char* name, const at::Tensor& x, const at::Tensor& q) {
  check_dtype(op, name, x, acc_scalar_type(q.scalar_type()), "the accumulation type of q");
  check_device(op, name, x, q, "q");
}

inline Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return Dtype::Float64;
    case at::kHalf:
      return Dtype::Float16;
    case at::kBFloat16:
      return Dtype::BFloat16;
    default:
      return Dtype::Float32;
  }
}

// The last query sees the last key. With more queries than keys the first queries would see no key.
inline void check_causal(const char* op, bool causal, const c10::SymInt& S, const c10::SymInt& T,
                         const char* T_name = "T") {
  TORCH_CHECK_VALUE(!causal || S <= T, op, ": causal needs no more queries than keys, S <= ", T_name, ", got S = ", S,
                    " and ", T_name, " = ", T);
}

// Query head h reads key head h / (H / Hkv).
inline void check_groups(const char* op, const c10::SymInt& H, const c10::SymInt& Hkv, const char* k_name = "k") {
  TORCH_CHECK_VALUE(Hkv == 0 ? H == 0 : H % Hkv == 0, op, ": H, the heads of q, must be a multiple of Hkv, ",
                    "the heads of ", k_name, ", got H = ", H, " and Hkv = ", Hkv);
}

// eps is added in the accumulation type of `type`, in which neither eps nor 1 / eps may be 0 or infinite.
inline void check_eps(const char* op, double eps, at::ScalarType type) {
  TORCH_CHECK_VALUE(eps > 0 && std::isfinite(eps), op, ": eps must be a positive number, got ", eps);
  const bool fits = acc_scalar_type(type) == at::kDouble
                        ? eps >= std::numeric_limits<double>::min()
                        : eps >= std::numeric_limits<float>::min() && eps <= std::numeric_limits<float>::max();
  TORCH_CHECK_VALUE(fits, op, ": eps must be a normal number of ", dtype_name(acc_scalar_type(type)), ", got ", eps);
}

// scale multiplies in the accumulation type of `type`, in which it may not be infinite.
inline void check_scale(const char* op, double scale, at::ScalarType type) {
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale must be a finite number, got ", scale);
  const bool fits =
      acc_scalar_type(type) == at::kDouble || std::abs(scale) <= double{std::numeric_limits<float>::max()};
  TORCH_CHECK_VALUE(fits, op, ": scale must be a finite number of ", dtype_name(acc_scalar_type(type)), ", got ",
                    scale);
}

// An argument that may be None, undefined if it is.
inline at::Tensor tensor_or_none(const std::optional<at::Tensor>& x) {
  return x.value_or(at::Tensor());
}

// x as a kernel that reads it gets it; null if it is undefined or None.
template <int kRank>
Strided<kRank> reads(const at::Tensor& x) {
  Strided<kRank> seen;
  if (!x.defined()) return seen;
  seen.data = const_cast<void*>(x.const_data_ptr());
  for (int i = 0; i < kRank; ++i) seen.stride[i] = x.stride(i);
  return seen;
}

template <int kRank>
Strided<kRank> reads(const std::optional<at::Tensor>& x) {
  return reads<kRank>(tensor_or_none(x));
}

// The memory of x for a kernel that writes it, null if x is undefined. A lazily copied tensor gets memory of its own.
inline void* data_to_write(const at::Tensor& x) {
  if (!x.defined()) return nullptr;
  forget_on_simulated_gpu(x);
  return x.mutable_data_ptr();
}

// x as a kernel that writes it gets it.
template <int kRank>
Strided<kRank> writes(const at::Tensor& x) {
  data_to_write(x);
  return reads<kRank>(x);
}

}  // namespace memcheck
