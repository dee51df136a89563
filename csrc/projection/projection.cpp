#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/product.h"
#include "common/torch/registration.h"
#include "projection/projection_operators.h"

namespace memcheck::projection_operators {
namespace {

using namespace operators;

using Gradients = std::tuple<at::Tensor, at::Tensor>;

// The library's GEMM forms all products.
struct NoKernels {};
constexpr NoKernels no_kernels;

template <typename Op>
const char* name_of() {
  static const std::string name = operator_name(Op::schema);
  return name.c_str();
}

// y as (B,S,R).
template <typename Op>
at::Tensor token_major(const at::Tensor& y) {
  return Op::channel_major ? y.transpose(1, 2) : y;
}

// y (B,S,R) = x (B,S,E) w (E,R): one product over all rows if strides allow that, else one for each batch entry.
void multiply_rows(at::Tensor y, const at::Tensor& x, const at::Tensor& w) {
  const at::Tensor y_rows = rows_in_place(y), x_rows = rows_in_place(x);
  if (y_rows.defined() && x_rows.defined()) return multiply(y_rows, x_rows, w, /*adds=*/false);
  if (x.is_cuda()) {
    at::bmm_out(y, x, (is_matrix(w) ? w : w.contiguous()).expand({x.size(0), w.size(0), w.size(1)}));
    return;
  }
  for (int64_t b = 0; b < y.size(0); ++b) multiply(y.select(0, b), x.select(0, b), w, /*adds=*/false);
}

// Memory for rows of x and of a gradient (B,S,R) in float32: a sixteenth of the gradient's bytes, or 1 MiB.
at::Tensor empty_wide(const at::Tensor& x, const at::Tensor& grad) {
  const int64_t bytes = std::max<int64_t>(grad.numel() * grad.element_size() / 16, int64_t{1} << 20);
  const int64_t columns = x.size(2) + grad.size(2);
  const int64_t rows = std::clamp<int64_t>(bytes / (columns * 4), 1, x.size(1));
  return at::empty({rows * columns}, x.options().dtype(at::kFloat));
}

// grad_w (E,R) = the sum of x[b]^T grad[b] for x (B,S,E) and grad (B,S,R). Several products of 16-bit matrices are
// summed in float32.
void sum_rows(const at::Tensor& grad_w, const at::Tensor& x, const at::Tensor& grad) {
  const at::Tensor x_rows = rows_in_place(x), grad_rows = rows_in_place(grad);
  if (x_rows.defined() && grad_rows.defined())
    return multiply_transposed(grad_w, x_rows, grad_rows, /*adds=*/false, /*memory=*/{});
  const bool in_float = grad_w.element_size() == 2;
  WeightGradient sum(grad_w, in_float ? at::empty(grad_w.sizes(), grad_w.options().dtype(at::kFloat)) : grad_w);
  const at::Tensor wide = in_float && x.is_cpu() ? empty_wide(x, grad) : at::Tensor();
  for (int64_t b = 0; b < x.size(0); ++b) sum.add(x.select(0, b), grad.select(0, b), wide);
  sum.finish();
}

template <typename Op>
typename Op::Results forward_meta(const ProjectionArguments& in) {
  const char* op = name_of<Op>();
  check_rank(op, "x", in.x, 3, "(B,S,E)");
  check_rank(op, "w", in.w, 2, "(E,R)");
  check_shape(op, "w", in.w, "(E,R)", {in.x.sym_size(2), in.w.sym_size(1)}, "x");
  check_floating(op, "x", in.x);
  check_like(op, "w", in.w, in.x, "x");
  const c10::SymInt B = in.x.sym_size(0), S = in.x.sym_size(1), R = in.w.sym_size(1);
  if (Op::channel_major) return {empty_result({B, R, S}, in.x.options())};
  return {empty_result({B, S, R}, in.x.options())};
}

template <typename Op>
typename Op::Results forward(const NoKernels&, const ProjectionArguments& in) {
  const auto [y] = forward_meta<Op>(in);
  const c10::DeviceGuard guard(in.x.device());
  multiply_rows(token_major<Op>(y), in.x, in.w);
  return {y};
}

// Shapes as in the forward; x is not needed for grad_x, nor w for grad_w.
template <typename Op>
Gradients backward_meta(const ProjectionBackwardArguments& in) {
  const char* op = name_of<Op>();
  TORCH_CHECK_VALUE(in.w || !in.output_mask[0], op, ": w is needed for the gradient of x");
  TORCH_CHECK_VALUE(in.x || !in.output_mask[1], op, ": x is needed for the gradient of w");
  check_rank(op, "grad_y", in.grad_y, 3, Op::channel_major ? "(B,R,S)" : "(B,S,R)");
  check_floating(op, "grad_y", in.grad_y);
  const at::Tensor x = tensor_or_none(in.x), w = tensor_or_none(in.w), grad = token_major<Op>(in.grad_y);
  const c10::SymInt B = grad.sym_size(0), S = grad.sym_size(1), R = grad.sym_size(2);
  if (in.x) {
    check_rank(op, "x", x, 3, "(B,S,E)");
    check_shape(op, "x", x, "(B,S,E)", {B, S, x.sym_size(2)}, "grad_y");
    check_like(op, "x", x, grad, "grad_y");
  }
  if (in.w) {
    check_rank(op, "w", w, 2, "(E,R)");
    check_shape(op, "w", w, "(E,R)", {in.x ? x.sym_size(2) : w.sym_size(0), R}, "x and grad_y");
    check_like(op, "w", w, grad, "grad_y");
  }
  const c10::SymInt E = in.x ? x.sym_size(2) : in.w ? w.sym_size(0) : c10::SymInt(0);
  return {empty_gradient(in.output_mask[0], x, {B, S, E}, grad.options()),
          empty_gradient(in.output_mask[1], w, {E, R}, grad.options())};
}

template <typename Op>
Gradients backward(const NoKernels&, const ProjectionBackwardArguments& in) {
  const auto gradients = backward_meta<Op>(in);
  const auto& [grad_x, grad_w] = gradients;
  const c10::DeviceGuard guard(in.grad_y.device());
  const at::Tensor grad = token_major<Op>(in.grad_y);
  if (grad_x.defined()) multiply_rows(grad_x, grad, in.w->t());
  if (grad_w.defined()) sum_rows(grad_w, *in.x, grad);
  return gradients;
}

const Registration registration(tables_of_torch(no_kernels, no_kernels),
                                kernels_of<LinearR>(forward_meta<LinearR>, forward<LinearR>, /*cast_inputs=*/2),
                                kernels_of<LinearL>(forward_meta<LinearL>, forward<LinearL>, /*cast_inputs=*/2),
                                kernels_of<LinearRBackward>(backward_meta<LinearRBackward>, backward<LinearRBackward>),
                                kernels_of<LinearLBackward>(backward_meta<LinearLBackward>, backward<LinearLBackward>));

}  // namespace
}  // namespace memcheck::projection_operators
