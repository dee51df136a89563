#include "projection/projection.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <tuple>

#include "common/cpu_products.h"
#include "common/integer.h"
#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/matrix.h"
#include "common/torch/product.h"
#include "common/torch/registration.h"
#include "projection/projection_operators.h"

namespace memcheck::projection_operators {
namespace {

using namespace operators;

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

// x (B,S,R) as a matrix (B S,R), undefined if its strides do not allow that.
at::Tensor rows_of(const at::Tensor& x) {
  const bool merges = x.size(0) == 1 || x.size(1) == 1 || x.stride(0) == x.size(1) * x.stride(1);
  return merges && x.numel() > 0 ? x.view({x.size(0) * x.size(1), x.size(2)}) : at::Tensor();
}

// Whether products of 16-bit matrices are formed in float32, from copies, because the CPU has no instructions for them.
bool in_float(const ProjectionProducts& products, const at::Tensor& x) {
  return !products.into_float && !cpu_multiplies(dtype_of(x), x.size(0) * x.size(1));
}

// Makes all of them (1,B S,..) if the strides of each allow that. Undefined ones count as allowing it.
void merge_batches(std::initializer_list<at::Tensor*> tensors) {
  const auto merges = [](const at::Tensor* x) { return !x->defined() || rows_of(*x).defined(); };
  if (!std::all_of(tensors.begin(), tensors.end(), merges)) return;
  for (at::Tensor* x : tensors)
    if (x->defined()) *x = rows_of(*x).unsqueeze(0);
}

// Memory in float32 for a piece of rows of x (B,S,E) and of a gradient or result (B,S,R).
struct WidePiece {
  int64_t rows;
  at::Tensor memory;  // of both
  at::Tensor x;       // (rows E)
  at::Tensor y;       // (rows R)
};

WidePiece empty_wide(const at::Tensor& y, int64_t E) {
  const int64_t R = y.size(2), rows = projection_wide_rows(y.size(0), y.size(1), E, R, y.element_size());
  const at::Tensor memory = at::empty({rows * (E + R)}, y.options().dtype(at::kFloat));
  return {rows, memory, memory.narrow(0, 0, rows * E), memory.narrow(0, rows * E, rows * R)};
}

// Calls run(part) for every piece of so many of the rows (B,S), where part(x) is the piece of x (B,S,..).
template <typename Run>
void for_pieces(const at::Tensor& y, int64_t rows, const Run& run) {
  for (int64_t b = 0; b < y.size(0); ++b) {
    for (int64_t s = 0; s < y.size(1); s += rows) {
      const int64_t count = std::min(rows, y.size(1) - s);
      run([&](const at::Tensor& whole) { return whole.select(0, b).narrow(0, s, count); });
    }
  }
}

// y = x w.
void multiply_rows_in_float(at::Tensor y, at::Tensor x, const at::Tensor& w) {
  merge_batches({&y, &x});
  const at::Tensor wide_w = w.to(at::kFloat);
  const WidePiece wide = empty_wide(y, x.size(2));
  for_pieces(y, wide.rows,
             [&](const auto& part) { multiply_rounded(part(y), converted(part(x), wide.x), wide_w, wide.y); });
}

// y = x w for y (B,S,R) of any strides: one product, or one for every batch entry.
void multiply_rows(const ProjectionProducts& products, const at::Tensor& y, const at::Tensor& x, const at::Tensor& w) {
  if (in_float(products, x)) return multiply_rows_in_float(y, x, w);
  const at::Tensor y_rows = rows_of(y), x_rows = rows_of(x);
  if (y_rows.defined() && x_rows.defined()) return multiply(y_rows, x_rows, w, /*adds=*/false);
  if (products.batches && y.size(0) > 0 && is_matrix(y.select(0, 0)) && is_matrix(x.select(0, 0))) {
    const at::Tensor matrix = is_matrix(w) ? w : w.contiguous();
    at::Tensor to = y;
    at::bmm_out(to, x, matrix.expand({x.size(0), w.size(0), w.size(1)}));
    return;
  }
  for (int64_t b = 0; b < y.size(0); ++b) multiply(y.select(0, b), x.select(0, b), w, /*adds=*/false);
}

LinearR::Results linear_r_meta(const ProjectionArguments& in) {
  const Sizes n = check_inputs("linear_r", in.x, in.w);
  return {empty_result({n.B, n.S, n.R}, in.x.options())};
}

LinearR::Results linear_r(const ProjectionProducts& products, const ProjectionArguments& in) {
  const auto [y] = linear_r_meta(in);
  const c10::DeviceGuard guard(in.x.device());
  multiply_rows(products, y, in.x, in.w);
  return {y};
}

LinearL::Results linear_l_meta(const ProjectionArguments& in) {
  const Sizes n = check_inputs("linear_l", in.x, in.w);
  return {empty_result({n.B, n.R, n.S}, in.x.options())};
}

LinearL::Results linear_l(const ProjectionProducts& products, const ProjectionArguments& in) {
  const auto [y] = linear_l_meta(in);
  const c10::DeviceGuard guard(in.x.device());
  multiply_rows(products, y.transpose(1, 2), in.x, in.w);
  return {y};
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
  const c10::SymInt E = x.defined() ? x.sym_size(2) : w.defined() ? w.sym_size(0) : c10::SymInt(0);
  return {empty_gradient(wanted[0], x, {B, S, E}, grad.options()),
          empty_gradient(wanted[1], w, {E, R}, grad.options())};
}

at::Tensor empty_sum(const at::Tensor& grad_w) {
  return at::empty(grad_w.sizes(), grad_w.options().dtype(at::kFloat));
}

// Products of pieces in float32. grad_w is their sum, rounded once.
void backward_in_float(at::Tensor grad, at::Tensor x, const at::Tensor& w, const Gradients& gradients) {
  at::Tensor grad_x = std::get<0>(gradients), grad_w = std::get<1>(gradients);
  if (!grad_x.defined() && !grad_w.defined()) return;
  if (!grad_w.defined()) x = at::Tensor();
  const int64_t E = (grad_w.defined() ? x : grad_x).size(2);
  merge_batches({&grad, &x, &grad_x});
  const at::Tensor wide_w = grad_x.defined() ? w.to(at::kFloat).t() : at::Tensor();
  WeightGradient sum(grad_w, grad_w.defined() ? empty_sum(grad_w) : at::Tensor());
  const WidePiece wide = empty_wide(grad, E);
  for_pieces(grad, wide.rows, [&](const auto& part) {
    const at::Tensor wide_grad = converted(part(grad), wide.y);
    if (grad_w.defined()) sum.add(converted(part(x), wide.x), wide_grad, /*memory=*/{});
    if (grad_x.defined()) multiply_rounded(part(grad_x), wide_grad, wide_w, wide.x);
  });
  sum.finish();
}

// Forms each gradient whose strides allow that by one product over all rows. Returns those that are left, if any.
Gradients backward_whole(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, const Gradients& gradients) {
  auto [grad_x, grad_w] = gradients;
  const at::Tensor grad_rows = rows_of(grad);
  if (!grad_rows.defined() || !is_matrix(grad_rows)) return {grad_x, grad_w};
  const at::Tensor grad_x_rows = grad_x.defined() ? rows_of(grad_x) : at::Tensor();
  const at::Tensor x_rows = grad_w.defined() ? rows_of(x) : at::Tensor();
  if (grad_x_rows.defined()) {
    multiply(grad_x_rows, grad_rows, w.t(), /*adds=*/false);
    grad_x = at::Tensor();
  }
  if (x_rows.defined()) {
    multiply_transposed(grad_w, x_rows, grad_rows, /*adds=*/false, /*memory=*/{});
    grad_w = at::Tensor();
  }
  return {grad_x, grad_w};
}

void backward_in_pieces(const ProjectionProducts& products, const at::Tensor& grad, const at::Tensor& x,
                        const at::Tensor& w, const Gradients& gradients) {
  const auto& [grad_x, grad_w] = gradients;
  const int64_t B = grad.size(0), S = grad.size(1), R = grad.size(2);
  const bool copies = B > 0 && !is_matrix(grad.select(0, 0));
  const int64_t rows = copies ? projection_piece_rows(B, S, R, grad.element_size()) : std::max<int64_t>(S, 1);
  const at::Tensor piece = copies ? at::empty({rows, R}, grad.options()) : at::Tensor();
  const bool all_at_once = products.batches && !copies;
  if (all_at_once && grad_x.defined()) multiply_rows(products, grad_x, grad, w.t());
  // A single product is formed in the dtype of w. Several in 16-bit types are summed in float32.
  const bool sums = grad_w.defined() && grad_w.element_size() == 2 && B * ceil_div(S, rows) > 1;
  WeightGradient weight(grad_w, sums ? empty_sum(grad_w) : grad_w);
  // Rows of x and grad_y in float32, if GEMM has no float32 product of 16-bit matrices. Packed rows take no more
  // memory.
  const at::Tensor wide = sums && !products.into_float ? empty_wide(grad, grad_w.size(0)).memory : at::Tensor();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t s = 0; s < S; s += rows) {
      const int64_t count = std::min(rows, S - s);
      const auto part = [&](const at::Tensor& whole) { return whole.select(0, b).narrow(0, s, count); };
      const at::Tensor grad_part = copies ? piece.narrow(0, 0, count).copy_(part(grad)) : part(grad);
      if (grad_x.defined() && !all_at_once) multiply(part(grad_x), grad_part, w.t(), /*adds=*/false);
      if (grad_w.defined()) weight.add(part(x), grad_part, wide);
    }
  }
  weight.finish();
}

// grad (B,S,R)
Gradients meta_of(const char* op, const at::Tensor& grad, const ProjectionBackwardArguments& in) {
  return check_backward(op, grad, in.x.value_or(at::Tensor()), in.w.value_or(at::Tensor()), in.output_mask);
}

Gradients backward(const ProjectionProducts& products, const char* op, const at::Tensor& grad,
                   const ProjectionBackwardArguments& in) {
  const Gradients gradients = meta_of(op, grad, in);
  const at::Tensor x = in.x.value_or(at::Tensor()), w = in.w.value_or(at::Tensor());
  const c10::DeviceGuard guard(grad.device());
  if (in_float(products, grad)) {
    backward_in_float(grad, x, w, gradients);
  } else {
    const Gradients left = backward_whole(grad, x, w, gradients);
    if (std::get<0>(left).defined() || std::get<1>(left).defined()) backward_in_pieces(products, grad, x, w, left);
  }
  return gradients;
}

constexpr const char* kBackwardR = "linear_r_backward";
constexpr const char* kBackwardL = "linear_l_backward";

at::Tensor transposed_gradient(const ProjectionBackwardArguments& in) {
  check_rank(kBackwardL, "grad_y", in.grad_y, 3, "(B,R,S)");
  return in.grad_y.transpose(1, 2);
}

Gradients linear_r_backward_meta(const ProjectionBackwardArguments& in) {
  return meta_of(kBackwardR, in.grad_y, in);
}

Gradients linear_r_backward(const ProjectionProducts& products, const ProjectionBackwardArguments& in) {
  return backward(products, kBackwardR, in.grad_y, in);
}

Gradients linear_l_backward_meta(const ProjectionBackwardArguments& in) {
  return meta_of(kBackwardL, transposed_gradient(in), in);
}

Gradients linear_l_backward(const ProjectionProducts& products, const ProjectionBackwardArguments& in) {
  return backward(products, kBackwardL, transposed_gradient(in), in);
}

const Registration registration(tables_of_torch(projection_cpu, projection_cuda),
                                kernels_of<LinearR>(linear_r_meta, linear_r, /*cast_inputs=*/2),
                                kernels_of<LinearL>(linear_l_meta, linear_l, /*cast_inputs=*/2),
                                kernels_of<LinearRBackward>(linear_r_backward_meta, linear_r_backward),
                                kernels_of<LinearLBackward>(linear_l_backward_meta, linear_l_backward));

}  // namespace
}  // namespace memcheck::projection_operators
