#include "combinator/combinator.h"

#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "combinator/combinator_operators.h"
#include "common/torch/allocate.h"
#include "common/torch/checks.h"
#include "common/torch/device.h"
#include "common/torch/matrix.h"
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

// The rows of grad_y (...,E). Leading dimensions that lie one behind the other become one.
CombinatorRows rows_of(const at::Tensor& x) {
  CombinatorRows rows;
  rows.data = x.const_data_ptr();
  rows.column_stride = x.size(-1) == 1 ? 1 : x.stride(-1);
  for (int64_t d = 0; d < x.dim() - 1; ++d) {
    if (x.size(d) == 1) continue;
    const int64_t last = rows.dimensions - 1;
    if (last >= 0 && rows.stride[last] == x.size(d) * x.stride(d)) {
      rows.size[last] *= x.size(d);
      rows.stride[last] = x.stride(d);
      continue;
    }
    TORCH_CHECK_VALUE(rows.dimensions < CombinatorRows::kLeading, kBackward, ": grad_y must have at most ",
                      CombinatorRows::kLeading, " leading dimensions that do not lie one behind the other, got sizes ",
                      x.sizes(), " and strides ", x.strides());
    rows.size[rows.dimensions] = x.size(d);
    rows.stride[rows.dimensions++] = x.stride(d);
  }
  return rows;
}

// Some rows of a matrix: itself if they are all.
at::Tensor some_rows(const at::Tensor& x, int64_t first, int64_t count) {
  return count == x.size(0) ? x : x.narrow(0, first, count);
}

CombinatorRows from_row(CombinatorRows rows, int64_t first) {
  rows.first = first;
  return rows;
}

// x (...,E) as a matrix (N,E). A view takes as long to make as a small product, so there is none to look at its form.
struct MatrixForm {
  int64_t N, E, row_stride, column_stride;
  bool in_place;  // GEMM takes it as it is
};

MatrixForm matrix_form(const at::Tensor& x) {
  const int64_t E = x.size(-1), column_stride = E == 1 ? 1 : x.stride(-1);
  // A single row has no stride of its own.
  int64_t N = 1, row_stride = column_stride == 1 ? std::max<int64_t>(1, E) : 1;
  bool even = true;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (N == 1) row_stride = x.stride(d);
    even = even && x.stride(d) == N * row_stride;
    N *= x.size(d);
  }
  return {N, E, row_stride, column_stride, even && is_matrix(N, E, row_stride, column_stride)};
}

// x (...,E) as a matrix (N,E) that GEMM takes in place; undefined if its strides forbid that.
at::Tensor matrix_of(const at::Tensor& x) {
  const MatrixForm form = matrix_form(x);
  if (!form.in_place) return {};
  return x.as_strided({form.N, form.E}, {form.row_stride, form.column_stride});
}

// weight (2,E,E) as one matrix (2E,E), in float32 if the plan says so; or transposed.
at::Tensor weight_matrix(const at::Tensor& weight, const CombinatorPlan& plan, bool transposed) {
  if (plan.weight_bytes == 0) {
    const MatrixForm form = matrix_form(weight);
    if (form.in_place)
      return transposed ? weight.as_strided({form.E, form.N}, {form.column_stride, form.row_stride})
                        : weight.as_strided({form.N, form.E}, {form.row_stride, form.column_stride});
  }
  const at::Tensor dense = plan.weight_bytes > 0 ? weight.to(at::kFloat, /*non_blocking=*/false, /*copy=*/false,
                                                             at::MemoryFormat::Contiguous)
                                                 : weight.contiguous();
  const at::Tensor matrix = dense.view({2 * weight.size(1), weight.size(2)});
  return transposed ? matrix.t() : matrix;
}

CombinatorPlan plan_for(const CombinatorKernels& kernels, const at::Tensor& x) {
  const int64_t E = x.size(-1);
  return kernels.plan(x.numel() / E, E, dtype_of(x), /*copies=*/!matrix_form(x).in_place);
}

// Calls run(part, its rows (n,E)) for the parts of x (...,E) whose rows, one after another, are those of `rows`
// (count,E) from row `first` of x.
template <typename Run>
void for_parts(const at::Tensor& x, int64_t first, const at::Tensor& rows, const Run& run) {
  const int64_t E = x.size(-1);
  for (int64_t row = 0, count; row < rows.size(0); row += count) {
    at::Tensor part = x;
    int64_t index = first + row, inner = x.numel() / E;  // inner: rows with one index of dimension d
    for (int64_t d = 0; inner > 1; ++d) {
      inner /= x.size(d);
      const int64_t begin = index / inner;
      index %= inner;
      const int64_t whole = index == 0 ? std::min((rows.size(0) - row) / inner, x.size(d) - begin) : 0;
      part = part.narrow(d, begin, std::max<int64_t>(1, whole));
      if (whole > 0) break;
    }
    count = part.numel() / E;
    run(part, rows.narrow(0, row, count).view(part.sizes()));
  }
}

// The rows of x (...,E), read or written a chunk (count,E) at a time: in place if GEMM can do that, else by way of
// `copy` (rows,E).
class Chunks {
 public:
  Chunks(at::Tensor x, at::Tensor copy) : x_(std::move(x)), matrix_(matrix_of(x_)), copy_(std::move(copy)) {}

  at::Tensor read(int64_t first, int64_t count) const {
    const at::Tensor chunk = memory_for(first, count);
    if (!matrix_.defined())
      for_parts(x_, first, chunk, [](const at::Tensor& part, const at::Tensor& rows) { rows.copy_(part); });
    return chunk;
  }

  // The memory that a chunk is written to. write() then brings it to x.
  at::Tensor memory_for(int64_t first, int64_t count) const {
    return matrix_.defined() ? some_rows(matrix_, first, count) : some_rows(copy_, 0, count);
  }
  void write(const at::Tensor& chunk, int64_t first) const {
    if (!matrix_.defined())
      for_parts(x_, first, chunk, [](const at::Tensor& part, const at::Tensor& rows) { part.copy_(rows); });
  }

  // All rows, if they are contiguous; else undefined.
  at::Tensor contiguous() const { return matrix_.defined() && matrix_.is_contiguous() ? matrix_ : at::Tensor(); }

 private:
  at::Tensor x_;
  at::Tensor matrix_;
  at::Tensor copy_;
};

at::Tensor empty_copy(const CombinatorPlan& plan, const at::Tensor& x) {
  return plan.copy_bytes > 0 ? at::empty({plan.rows, x.size(-1)}, x.options()) : at::Tensor();
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

// The memory of the pre-activations of chunks, which decides how many rows a chunk has: scratch, or for larger chunks
// the last rows of the result, which are not written yet.
class Pairs {
 public:
  // lender: the result (...,E), contiguous, or undefined. lent_rows: the most rows of a chunk in the result.
  Pairs(const CombinatorPlan& plan, int64_t E, at::Tensor lender, int64_t lent_rows, const at::TensorOptions& options)
      : rows_(plan.rows),
        lent_rows_(lender.defined() ? lent_rows : 0),
        scratch_(at::empty({plan.rows, 2 * E}, options)),
        lender_(std::move(lender)) {}

  int64_t next_rows(int64_t left) const { return combinator_next_rows(left, rows_, lent_rows_); }

  // (count,2E)
  at::Tensor memory_for(int64_t count) const {
    if (count <= rows_) return some_rows(scratch_, 0, count);
    const at::Tensor numbers = lender_.view({-1});
    const int64_t chunk = count * scratch_.size(1);
    return numbers.narrow(0, numbers.size(0) - chunk, chunk).view({count, scratch_.size(1)});
  }

 private:
  int64_t rows_;
  int64_t lent_rows_;
  at::Tensor scratch_;  // (rows,2E)
  at::Tensor lender_;
};

// Calls run(first row, count) for every chunk of N rows, of which the next has next_rows(left).
template <typename Next, typename Run>
void for_chunks(int64_t N, const Next& next_rows, const Run& run) {
  for (int64_t first = 0, count; first < N; first += count) {
    count = next_rows(N - first);
    run(first, count);
  }
}

Op::Results forward_meta(const Op::Arguments& in) {
  check_tokens(kForward, "x", in.x);
  check_weight(kForward, in.weight, in.x, "x");
  return empty_outputs(in.x, in.keep_preactivations);
}

Op::Results forward(const CombinatorKernels& kernels, const Op::Arguments& in) {
  const auto outputs = forward_meta(in);
  const auto& [y, preactivations] = outputs;
  const at::Tensor& x = in.x;
  if (y.numel() == 0) return outputs;
  const int64_t E = x.size(-1), N = x.numel() / E;
  const DeviceScope device(x);
  const CombinatorPlan plan = plan_for(kernels, x);
  const Chunks tokens(x, empty_copy(plan, x));
  const at::Tensor transposed = weight_matrix(in.weight, plan, /*transposed=*/true);
  const WideChunk wide = plan.weight_bytes > 0 ? empty_wide(plan, E, x.options()) : WideChunk();
  char* const y_data = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_bytes = E * y.element_size();
  const auto run = [&](int64_t first, const at::Tensor& pair) {
    const int64_t count = pair.size(0);
    multiply_rounded(pair, converted(tokens.read(first, count), wide.tokens), transposed, wide.pairs);
    kernels.forward({count, E, pair.const_data_ptr(), y_data + first * row_bytes}, dtype_of(x), device.stream);
  };
  if (in.keep_preactivations) {
    const at::Tensor kept = preactivations.view({N, 2 * E});
    for_chunks(
        N, [&](int64_t left) { return std::min(left, plan.kept_rows); },
        [&](int64_t first, int64_t count) { run(first, some_rows(kept, first, count)); });
  } else {
    const Pairs pairs(plan, E, y, plan.lent_rows, x.options());
    for_chunks(
        N, [&](int64_t left) { return pairs.next_rows(left); },
        [&](int64_t first, int64_t count) { run(first, pairs.memory_for(count)); });
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
  const at::Tensor matrix = plan.sums_bytes == 0 ? matrix_of(grad_weight) : at::Tensor();
  if (matrix.defined()) return matrix;
  const auto wide = grad_weight.options().dtype(acc_scalar_type(grad_weight.scalar_type()));
  return at::empty({2 * grad_weight.size(1), grad_weight.size(2)}, wide);
}

BackwardOp::Results backward_meta(const BackwardOp::Arguments& in) {
  return check_backward(in.grad_y, in.x.value_or(at::Tensor()), in.weight.value_or(at::Tensor()),
                        in.preactivations.value_or(at::Tensor()), in.output_mask);
}

BackwardOp::Results backward(const CombinatorKernels& kernels, const BackwardOp::Arguments& in) {
  const auto gradients = backward_meta(in);
  const at::Tensor& grad_y = in.grad_y;
  // Clang captures no structured bindings.
  const at::Tensor grad_x = std::get<0>(gradients), grad_weight = std::get<1>(gradients);
  if (!grad_x.defined() && !grad_weight.defined()) return gradients;
  if (grad_y.numel() == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    return gradients;
  }
  const int64_t E = grad_y.size(-1), N = grad_y.numel() / E;
  const at::Tensor& tokens = in.x ? *in.x : grad_x;
  const DeviceScope device(tokens);
  const CombinatorPlan plan = plan_for(kernels, tokens);
  const at::Tensor kept = in.preactivations ? in.preactivations->contiguous().view({N, 2 * E}) : at::Tensor();
  const at::Tensor matrix =
      grad_x.defined() || !kept.defined() ? weight_matrix(*in.weight, plan, /*transposed=*/false) : at::Tensor();
  const CombinatorRows grad_rows = rows_of(grad_y);
  // One copy serves both: a chunk of x has been read when that of grad_x is written.
  const at::Tensor copy = empty_copy(plan, tokens);
  const bool reads_x = grad_weight.defined() || !kept.defined();
  const auto x_chunks = reads_x ? std::optional(Chunks(*in.x, copy)) : std::nullopt;
  const auto grad_x_chunks = grad_x.defined() ? std::optional(Chunks(grad_x, copy)) : std::nullopt;
  // Every chunk reads and writes all of grad_weight, so fewer and larger chunks are faster.
  const Pairs pairs(plan, E, grad_x_chunks ? grad_x_chunks->contiguous() : at::Tensor(), plan.lent_rows > 0 ? N : 0,
                    grad_y.options());
  const bool in_float = plan.weight_bytes > 0;  // all products
  const bool widens = in_float || (plan.wide_bytes > 0 && grad_weight.defined());
  const WideChunk wide = widens ? empty_wide(plan, E, grad_y.options()) : WideChunk();
  WeightGradient sum(grad_weight, sum_for(grad_weight, plan));
  const auto run = [&](int64_t first, int64_t count) {
    const at::Tensor x = reads_x ? x_chunks->read(first, count) : at::Tensor();
    const at::Tensor wide_x = reads_x && in_float ? converted(x, wide.tokens) : x;
    const at::Tensor grad_pair = pairs.memory_for(count);
    if (!kept.defined()) multiply_rounded(grad_pair, wide_x, matrix.t(), wide.pairs);
    const at::Tensor pair = kept.defined() ? some_rows(kept, first, count) : grad_pair;
    kernels.backward({count, E, pair.const_data_ptr(), from_row(grad_rows, first), grad_pair.mutable_data_ptr()},
                     dtype_of(grad_y), device.stream);
    const at::Tensor wide_grad = in_float ? converted(grad_pair, wide.pairs) : grad_pair;
    sum.add(wide_grad, wide_x, in_float ? at::Tensor() : wide.memory);
    if (!grad_x.defined()) return;
    const at::Tensor grad_x_chunk = grad_x_chunks->memory_for(first, count);
    multiply_rounded(grad_x_chunk, wide_grad, matrix, wide.tokens);
    grad_x_chunks->write(grad_x_chunk, first);
  };
  for_chunks(N, [&](int64_t left) { return pairs.next_rows(left); }, run);
  sum.finish();
  return gradients;
}

const Registration registration(MEMCHECK_KERNELS(combinator), kernels_of<Op>(forward_meta, forward, /*cast_inputs=*/2),
                                kernels_of<BackwardOp>(backward_meta, backward));

}  // namespace
}  // namespace memcheck::combinator_operators
