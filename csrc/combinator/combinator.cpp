#include "combinator/combinator.h"

#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "combinator/combinator_operators.h"
#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/product.h"
#include "common/torch/registration.h"

namespace memcheck::combinator_operators {
namespace {

using Op = operators::Combinator;
using BackwardOp = operators::CombinatorBackward;

constexpr const char* kForward = "combinator";
constexpr const char* kBackward = "combinator_backward";

using Gradients = std::tuple<at::Tensor, at::Tensor>;

void check_tokens(const char* op, const char* name, const at::Tensor& x) {
  check_tensor(op, name, x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": ", name, " must be (...,E), of 1 dimension or more, got ", x.sym_sizes());
  check_floating(op, name, x);
}

void check_weight(const char* op, const at::Tensor& weight, const at::Tensor& x, const char* x_name) {
  const c10::SymInt E = x.sym_size(-1);
  check_rank(op, "weight", weight, 3, "(2,E,E)");
  check_shape(op, "weight", weight, "(2,E,E)", {2, E, E}, x_name);
  check_like(op, "weight", weight, x, x_name);
}

// (...,2E) for x (...,E).
std::vector<c10::SymInt> preactivation_sizes(const at::Tensor& x) {
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes.back() = sizes.back() * 2;
  return sizes;
}

std::tuple<at::Tensor, at::Tensor> empty_outputs(const at::Tensor& x, bool keep_preactivations) {
  const auto kept = keep_preactivations ? preactivation_sizes(x) : std::vector<c10::SymInt>{0};
  return {empty_result(x.sym_sizes(), x.options()), empty_result(kept, x.options())};
}

// Rows of a matrix: itself if they are all.
at::Tensor some_rows(const at::Tensor& x, int64_t first, int64_t count) {
  return count == x.size(0) ? x : x.narrow(0, first, count);
}

// weight (2,E,E) as one matrix (2E,E), in float32 if the plan says so.
at::Tensor weight_matrix(const at::Tensor& weight, const CombinatorPlan& plan) {
  return rows_of(plan.weight_bytes > 0 ? weight.to(at::kFloat, false, false, at::MemoryFormat::Contiguous) : weight);
}

// Memory for a chunk in float32, of one dimension. Undefined where chunks are used as they are.
struct WideChunk {
  at::Tensor memory;  // of both
  at::Tensor pairs;   // (rows 2E)
  at::Tensor tokens;  // (rows E)
};

WideChunk empty_wide(const CombinatorPlan& plan, int64_t E, const at::TensorOptions& options) {
  const at::Tensor memory = at::empty({plan.rows * 3 * E}, options.dtype(at::kFloat));
  return {memory, memory.narrow(0, 0, plan.rows * 2 * E), memory.narrow(0, plan.rows * 2 * E, plan.rows * E)};
}

Op::Results forward_meta(const Op::Arguments& in) {
  check_tokens(kForward, "x", in.x);
  check_weight(kForward, in.weight, in.x, "x");
  return empty_outputs(in.x, in.keep_preactivations);
}

Op::Results forward(const CombinatorKernels& kernels, const Op::Arguments& in) {
  const auto outputs = forward_meta(in);
  const auto& [y, preactivations] = outputs;
  if (y.numel() == 0) return outputs;
  const int64_t E = in.x.size(-1), N = in.x.numel() / E;
  const DeviceScope device(in.x);
  const CombinatorPlan plan = kernels.plan(N, E, dtype_of(in.x));
  const at::Tensor x = rows_of(in.x), transposed = weight_matrix(in.weight, plan).t();
  const WideChunk wide = plan.weight_bytes > 0 ? empty_wide(plan, E, x.options()) : WideChunk();
  const bool keeps = in.keep_preactivations;
  const at::Tensor pairs = keeps ? preactivations.view({N, 2 * E}) : at::empty({plan.rows, 2 * E}, x.options());
  char* y_data = static_cast<char*>(data_to_write(y));
  for (int64_t first = 0, rows = keeps ? plan.kept_rows : plan.rows; first < N; first += rows) {
    const int64_t count = std::min(rows, N - first);
    const at::Tensor pair = some_rows(pairs, keeps ? first : 0, count);
    multiply_rounded(pair, converted(some_rows(x, first, count), wide.tokens), transposed, wide.pairs);
    kernels.forward(
        {.rows = count, .E = E, .preactivations = pair.const_data_ptr(), .y = y_data + first * E * y.element_size()},
        dtype_of(x), device.stream);
  }
  return outputs;
}

// Shapes as in the forward. Inputs that the wanted gradients do not need may be undefined.
Gradients check_backward(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& preactivations, const std::array<bool, 2>& wanted) {
  check_tokens(kBackward, "grad_y", grad_y);
  const bool recomputes = !preactivations.defined() && (wanted[0] || wanted[1]);
  TORCH_CHECK_VALUE(weight.defined() || !(wanted[0] || recomputes), kBackward,
                    ": weight is needed for the gradient of x, and without preactivations");
  TORCH_CHECK_VALUE(x.defined() || !(wanted[1] || recomputes), kBackward,
                    ": x is needed for the gradient of weight, and without preactivations");
  const auto check_sizes = [&](const char* name, const at::Tensor& tensor, const char* letters,
                               c10::SymIntArrayRef sizes) {
    TORCH_CHECK_VALUE(tensor.sym_sizes() == sizes, kBackward, ": ", name, " must be ", letters, " = ", sizes,
                      " to match grad_y, got ", tensor.sym_sizes());
    check_like(kBackward, name, tensor, grad_y, "grad_y");
  };
  if (x.defined()) check_sizes("x", x, "(...,E)", grad_y.sym_sizes());
  if (preactivations.defined()) check_sizes("preactivations", preactivations, "(...,2E)", preactivation_sizes(grad_y));
  if (weight.defined()) check_weight(kBackward, weight, grad_y, "grad_y");
  const c10::SymInt E = grad_y.sym_size(-1);
  return {empty_gradient(wanted[0], x, grad_y.sym_sizes(), grad_y.options()),
          empty_gradient(wanted[1], weight, {2, E, E}, grad_y.options())};
}

// (2E,E): grad_weight itself if it can be summed in place, else memory, which is in float32 for 16-bit types.
at::Tensor sum_for(const at::Tensor& grad_weight, const CombinatorPlan& plan) {
  if (!grad_weight.defined()) return {};
  const at::Tensor matrix = plan.sums_bytes == 0 ? rows_in_place(grad_weight) : at::Tensor();
  if (matrix.defined()) return matrix;
  const auto wide = grad_weight.options().dtype(acc_scalar_type(grad_weight.scalar_type()));
  return at::empty({2 * grad_weight.size(1), grad_weight.size(2)}, wide);
}

// (N,E): grad_x itself if it can be written in place, else memory: that of a copy of x, of which a chunk has been read
// when that of the gradient is written.
at::Tensor memory_for(const at::Tensor& grad_x, const at::Tensor& x, const at::Tensor& x_rows) {
  if (!grad_x.defined()) return {};
  const at::Tensor rows = rows_in_place(grad_x);
  if (rows.defined()) return rows;
  if (x_rows.defined() && !x_rows.is_alias_of(x)) return x_rows;
  return at::empty({grad_x.numel() / grad_x.size(-1), grad_x.size(-1)}, grad_x.options());
}

BackwardOp::Results backward_meta(const BackwardOp::Arguments& in) {
  return check_backward(in.grad_y, in.x.value_or(at::Tensor()), in.weight.value_or(at::Tensor()),
                        in.preactivations.value_or(at::Tensor()), in.output_mask);
}

BackwardOp::Results backward(const CombinatorKernels& kernels, const BackwardOp::Arguments& in) {
  const auto gradients = backward_meta(in);
  const at::Tensor& grad_y = in.grad_y;
  const auto& [grad_x, grad_weight] = gradients;
  if (!grad_x.defined() && !grad_weight.defined()) return gradients;
  if (grad_y.numel() == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    return gradients;
  }
  const int64_t E = grad_y.size(-1), N = grad_y.numel() / E;
  const DeviceScope device(grad_y);
  const CombinatorPlan plan = kernels.plan(N, E, dtype_of(grad_y));
  const at::Tensor kept = in.preactivations ? in.preactivations->contiguous().view({N, 2 * E}) : at::Tensor();
  const at::Tensor weight = grad_x.defined() || !kept.defined() ? weight_matrix(*in.weight, plan) : at::Tensor();
  const at::Tensor grad_rows = rows_of(grad_y);
  const at::Tensor x_rows = grad_weight.defined() || !kept.defined() ? rows_of(*in.x) : at::Tensor();
  const at::Tensor grad_x_rows = memory_for(grad_x, tensor_or_none(in.x), x_rows);
  const at::Tensor pairs = at::empty({plan.rows, 2 * E}, grad_y.options());
  const bool in_float = plan.weight_bytes > 0;  // all products
  const bool widens = in_float || (plan.wide_bytes > 0 && grad_weight.defined());
  const WideChunk wide = widens ? empty_wide(plan, E, grad_y.options()) : WideChunk();
  WeightGradient sum(grad_weight, sum_for(grad_weight, plan));
  for (int64_t first = 0; first < N; first += plan.rows) {
    const int64_t count = std::min(plan.rows, N - first);
    const at::Tensor x = x_rows.defined() ? some_rows(x_rows, first, count) : at::Tensor();
    const at::Tensor wide_x = x.defined() && in_float ? converted(x, wide.tokens) : x;
    const at::Tensor grad_pair = some_rows(pairs, 0, count);
    if (!kept.defined()) multiply_rounded(grad_pair, wide_x, weight.t(), wide.pairs);
    const at::Tensor pair = kept.defined() ? some_rows(kept, first, count) : grad_pair;
    kernels.backward({.rows = count,
                      .E = E,
                      .preactivations = pair.const_data_ptr(),
                      .grad_y = reads<2>(some_rows(grad_rows, first, count)),
                      .grad_preactivations = data_to_write(grad_pair)},
                     dtype_of(grad_y), device.stream);
    const at::Tensor wide_grad = in_float ? converted(grad_pair, wide.pairs) : grad_pair;
    sum.add(wide_grad, wide_x, in_float ? at::Tensor() : wide.memory);
    if (grad_x.defined()) multiply_rounded(some_rows(grad_x_rows, first, count), wide_grad, weight, wide.tokens);
  }
  sum.finish();
  if (grad_x.defined() && !grad_x_rows.is_alias_of(grad_x)) grad_x.copy_(grad_x_rows.view(grad_x.sizes()));
  return gradients;
}

const Registration registration(MEMCHECK_KERNELS(combinator, combinator_plan_cuda),
                                kernels_of<Op>(forward_meta, forward, /*cast_inputs=*/2),
                                kernels_of<BackwardOp>(backward_meta, backward));

}  // namespace
}  // namespace memcheck::combinator_operators
