#include "projection/projection.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/device.h"
#include "common/matrix.h"
#include "common/product.h"

namespace memcheck {
namespace {

struct Sizes {
  c10::SymInt B, S, E, R;
};

Sizes check_inputs(const char* op, const at::Tensor& x, const at::Tensor& w) {
  check_rank(op, "x", x, 3, "(B,S,E)");
  check_rank(op, "w", w, 2, "(E,R)");
  Sizes n{x.sym_size(0), x.sym_size(1), x.sym_size(2), w.sym_size(1)};
  check_shape(op, "w", w, "(E,R)", {n.E, n.R}, "x");
  check_floating(op, "x", x);
  check_like(op, "w", w, x, "x");
  return n;
}

// (B,S,R) as (B S,R), or undefined where the strides do not allow it.
at::Tensor rows_of(const at::Tensor& x) {
  const bool merges = x.size(0) == 1 || x.size(1) == 1 || x.stride(0) == x.size(1) * x.stride(1);
  return merges && x.numel() > 0 ? x.view({x.size(0) * x.size(1), x.size(2)}) : at::Tensor();
}

struct Cpu {
  explicit Cpu(const at::Tensor&) {}

  static constexpr bool kMultipliesBatches = false;
  static constexpr bool kMultipliesIntoFloat = false;
};

// Every product is one of torch's, whether there are kernels for CUDA or not.
struct Cuda {
  explicit Cuda(const at::Tensor& x) : guard(x.device()) {}

  static constexpr bool kMultipliesBatches = true;    // as a single call
  static constexpr bool kMultipliesIntoFloat = true;  // matrices of 16 bits
  c10::DeviceGuard guard;
};

// y = x w for y (B,S,R) of any strides: one product, or one a batch entry.
template <typename Device>
void multiply_rows(const at::Tensor& y, const at::Tensor& x, const at::Tensor& w) {
  const at::Tensor y_rows = rows_of(y), x_rows = rows_of(x);
  if (y_rows.defined() && x_rows.defined()) return multiply(y_rows, x_rows, w, /*adds=*/false);
  if (Device::kMultipliesBatches && y.size(0) > 0 && is_matrix(y.select(0, 0)) && is_matrix(x.select(0, 0))) {
    const at::Tensor matrix = is_matrix(w) ? w : w.contiguous();
    at::Tensor to = y;
    at::bmm_out(to, x, matrix.expand({x.size(0), w.size(0), w.size(1)}));
    return;
  }
  for (int64_t b = 0; b < y.size(0); ++b) multiply(y.select(0, b), x.select(0, b), w, /*adds=*/false);
}

at::Tensor linear_r_meta(const at::Tensor& x, const at::Tensor& w) {
  const Sizes n = check_inputs("linear_r", x, w);
  return empty_result({n.B, n.S, n.R}, x.options());
}

template <typename Device>
at::Tensor linear_r(const at::Tensor& x, const at::Tensor& w) {
  const at::Tensor y = linear_r_meta(x, w);
  const Device device(x);
  multiply_rows<Device>(y, x, w);
  return y;
}

at::Tensor linear_l_meta(const at::Tensor& x, const at::Tensor& w) {
  const Sizes n = check_inputs("linear_l", x, w);
  return empty_result({n.B, n.R, n.S}, x.options());
}

template <typename Device>
at::Tensor linear_l(const at::Tensor& x, const at::Tensor& w) {
  const at::Tensor y = linear_l_meta(x, w);
  const Device device(x);
  multiply_rows<Device>(y.transpose(1, 2), x, w);
  return y;
}

using Gradients = std::tuple<at::Tensor, at::Tensor>;

// Shapes as in the forward; x is not needed for grad_x, nor w for grad_w.
Gradients check_backward(const char* op, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w,
                         const std::array<bool, 2>& wanted) {
  TORCH_CHECK_VALUE(w.defined() || !wanted[0], op, ": w is needed for the gradient of x");
  TORCH_CHECK_VALUE(x.defined() || !wanted[1], op, ": x is needed for the gradient of w");
  check_rank(op, "grad_y", grad, 3, "that of y");
  check_floating(op, "grad_y", grad);
  const c10::SymInt B = grad.sym_size(0), S = grad.sym_size(1), R = grad.sym_size(2);
  Gradients gradients;
  if (x.defined()) {
    check_rank(op, "x", x, 3, "(B,S,E)");
    check_shape(op, "x", x, "(B,S,E)", {B, S, x.sym_size(2)}, "grad_y");
    check_like(op, "x", x, grad, "grad_y");
  }
  if (w.defined()) {
    check_rank(op, "w", w, 2, "(E,R)");
    check_shape(op, "w", w, "(E,R)", {x.defined() ? x.sym_size(2) : w.sym_size(0), R}, "x and grad_y");
    check_like(op, "w", w, grad, "grad_y");
  }
  if (wanted[0])
    std::get<0>(gradients) = x.defined() ? empty_gradient(x) : empty_result({B, S, w.sym_size(0)}, grad.options());
  if (wanted[1])
    std::get<1>(gradients) = w.defined() ? empty_gradient(w) : empty_result({x.sym_size(2), R}, grad.options());
  return gradients;
}

// grad_w as a sum of products. One product over all rows is formed in the dtype of w. Where there are more, those of 16
// bits are summed in float32 and rounded once, at the end.
template <typename Device>
class WeightGradient {
 public:
  // wide_rows: how many rows of x and grad_y become float32 at a time, where GEMM has no float32 product of 16 bits.
  WeightGradient(at::Tensor grad_w, int64_t terms, int64_t wide_rows) : grad_w_(std::move(grad_w)) {
    if (!grad_w_.defined()) return;
    if (terms == 0) grad_w_.zero_();
    const auto wide = acc_scalar_type(grad_w_.scalar_type());
    if (terms < 2 || wide == grad_w_.scalar_type()) return;
    const auto options = grad_w_.options().dtype(wide);
    sum_ = at::empty(grad_w_.sizes(), options);
    if (!Device::kMultipliesIntoFloat) wide_ = at::empty({wide_rows, grad_w_.size(0) + grad_w_.size(1)}, options);
  }
  // x (count,E), grad (count,R)
  void add(const at::Tensor& x, const at::Tensor& grad) {
    if (!grad_w_.defined()) return;
    if (!sum_.defined()) {
      multiply(grad_w_, x.t(), grad, adds_);
    } else if (wide_.defined()) {
      for (int64_t row = 0; row < x.size(0); row += wide_.size(0)) {
        const int64_t count = std::min(wide_.size(0), x.size(0) - row);
        add_widened(x.narrow(0, row, count), grad.narrow(0, row, count));
      }
    } else {
      multiply_into_float(sum_, x.t(), grad, adds_);
    }
    adds_ = true;
  }
  void finish() {
    if (sum_.defined()) grad_w_.copy_(sum_);
  }

 private:
  void add_widened(const at::Tensor& x, const at::Tensor& grad) {
    const at::Tensor room = wide_.view({-1});
    multiply(sum_, widened(x, room).t(), widened(grad, room.narrow(0, x.numel(), grad.numel())), adds_);
    adds_ = true;
  }
  // Rows that are columns in memory stay so: a copy that transposes takes longer than the product.
  static at::Tensor widened(const at::Tensor& x, const at::Tensor& room) {
    const at::Tensor dense = room.narrow(0, 0, x.numel());
    const bool transposed = x.stride(0) == 1 && x.stride(1) != 1;
    return (transposed ? dense.view({x.size(1), x.size(0)}).t() : dense.view(x.sizes())).copy_(x);
  }

  at::Tensor grad_w_;
  at::Tensor sum_;
  at::Tensor wide_;  // (wide rows,E+R)
  bool adds_ = false;
};

// One product over all rows, where the strides allow it.
template <typename Device>
bool backward_whole(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, const Gradients& gradients) {
  const auto& [grad_x, grad_w] = gradients;
  const at::Tensor grad_rows = rows_of(grad);
  const at::Tensor x_rows = x.defined() ? rows_of(x) : at::Tensor();
  const at::Tensor grad_x_rows = grad_x.defined() ? rows_of(grad_x) : at::Tensor();
  const bool possible = grad_rows.defined() && is_matrix(grad_rows) && (!grad_w.defined() || x_rows.defined()) &&
                        (!grad_x.defined() || grad_x_rows.defined());
  if (!possible) return false;
  if (grad_x.defined()) multiply(grad_x_rows, grad_rows, w.t(), /*adds=*/false);
  WeightGradient<Device>(grad_w, /*terms=*/1, /*wide_rows=*/0).add(x_rows, grad_rows);
  return true;
}

template <typename Device>
void backward_in_pieces(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, const Gradients& gradients) {
  const auto& [grad_x, grad_w] = gradients;
  const int64_t B = grad.size(0), S = grad.size(1), R = grad.size(2);
  const bool copies = B > 0 && !is_matrix(grad.select(0, 0));
  const int64_t rows = copies ? projection_piece_rows(B, S, R, grad.element_size()) : std::max<int64_t>(S, 1);
  const at::Tensor piece = copies ? at::empty({rows, R}, grad.options()) : at::Tensor();
  const bool all_at_once = Device::kMultipliesBatches && !copies;
  if (all_at_once && grad_x.defined()) multiply_rows<Device>(grad_x, grad, w.t());
  const int64_t wide_rows = grad_w.defined() ? projection_wide_rows(B, S, grad_w.size(0), R, grad.element_size()) : 0;
  WeightGradient<Device> weight(grad_w, S == 0 ? 0 : B * ((S + rows - 1) / rows), wide_rows);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t s = 0; s < S; s += rows) {
      const int64_t count = std::min(rows, S - s);
      const auto part = [&](const at::Tensor& whole) { return whole.select(0, b).narrow(0, s, count); };
      const at::Tensor grad_part = copies ? piece.narrow(0, 0, count).copy_(part(grad)) : part(grad);
      if (grad_x.defined() && !all_at_once) multiply(part(grad_x), grad_part, w.t(), /*adds=*/false);
      if (grad_w.defined()) weight.add(part(x), grad_part);
    }
  }
  weight.finish();
}

template <typename Device>
Gradients backward(const char* op, const at::Tensor& grad, const std::optional<at::Tensor>& x_or_none,
                   const std::optional<at::Tensor>& w_or_none, const std::array<bool, 2>& wanted) {
  const at::Tensor x = x_or_none.value_or(at::Tensor());
  const at::Tensor w = w_or_none.value_or(at::Tensor());
  const Gradients gradients = check_backward(op, grad, x, w, wanted);
  const Device device(grad);
  if (!backward_whole<Device>(grad, x, w, gradients)) backward_in_pieces<Device>(grad, x, w, gradients);
  return gradients;
}

template <typename Device>
Gradients linear_r_backward(const at::Tensor& grad_y, const std::optional<at::Tensor>& x,
                            const std::optional<at::Tensor>& w, std::array<bool, 2> output_mask) {
  return backward<Device>("linear_r_backward", grad_y, x, w, output_mask);
}

template <typename Device>
Gradients linear_l_backward(const at::Tensor& grad_y, const std::optional<at::Tensor>& x,
                            const std::optional<at::Tensor>& w, std::array<bool, 2> output_mask) {
  check_rank("linear_l_backward", "grad_y", grad_y, 3, "(B,R,S)");
  return backward<Device>("linear_l_backward", grad_y.transpose(1, 2), x, w, output_mask);
}

Gradients linear_r_backward_meta(const at::Tensor& grad_y, const std::optional<at::Tensor>& x,
                                 const std::optional<at::Tensor>& w, std::array<bool, 2> output_mask) {
  return check_backward("linear_r_backward", grad_y, x.value_or(at::Tensor()), w.value_or(at::Tensor()), output_mask);
}

Gradients linear_l_backward_meta(const at::Tensor& grad_y, const std::optional<at::Tensor>& x,
                                 const std::optional<at::Tensor>& w, std::array<bool, 2> output_mask) {
  check_rank("linear_l_backward", "grad_y", grad_y, 3, "(B,R,S)");
  return check_backward("linear_l_backward", grad_y.transpose(1, 2), x.value_or(at::Tensor()), w.value_or(at::Tensor()),
                        output_mask);
}

template <typename Device>
void register_kernels(torch::Library& m) {
  m.impl("linear_r", linear_r<Device>);
  m.impl("linear_l", linear_l<Device>);
  m.impl("linear_r_backward", linear_r_backward<Device>);
  m.impl("linear_l_backward", linear_l_backward<Device>);
}

#ifndef MEMCHECK_HOST_CUDA
TORCH_LIBRARY_FRAGMENT(memcheck, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  for (const char* schema : {"linear_r(Tensor x, Tensor w) -> Tensor", "linear_l(Tensor x, Tensor w) -> Tensor"})
    m.def(schema, tags);
  for (const char* schema : {"linear_r_backward(Tensor grad_y, Tensor? x, Tensor? w, *, bool[2] output_mask) -> "
                             "(Tensor grad_x, Tensor grad_w)",
                             "linear_l_backward(Tensor grad_y, Tensor? x, Tensor? w, *, bool[2] output_mask) -> "
                             "(Tensor grad_x, Tensor grad_w)"})
    m.def(schema, tags);
}

TORCH_LIBRARY_IMPL(memcheck, CPU, m) {
  register_kernels<Cpu>(m);
}

TORCH_LIBRARY_IMPL(memcheck, Meta, m) {
  m.impl("linear_r", linear_r_meta);
  m.impl("linear_l", linear_l_meta);
  m.impl("linear_r_backward", linear_r_backward_meta);
  m.impl("linear_l_backward", linear_l_backward_meta);
}

#endif

TORCH_LIBRARY_IMPL(memcheck, MEMCHECK_CUDA_KEY, m) {
  register_kernels<Cuda>(m);
}

}  // namespace
}  // namespace memcheck
