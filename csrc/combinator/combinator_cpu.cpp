#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "combinator/combinator.h"
#include "common/cpu_level.h"
#include "common/formulas.h"
#include "common/half.h"
#include "common/parallel.h"
#include "common/tile.h"
#include "common/types.h"

// A row is computed in blocks, in the accumulation type. The length of a block is known to the compiler; the last block
// of a row may be shorter, and zeros then pad it.

namespace memcheck {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kTaskElements = 8192;

// For values that are read and stored as scalar_t.
template <typename scalar_t>
using MathsOf = std::conditional_t<sizeof(scalar_t) == 2, CpuMathsFor16Bits, CpuMaths>;

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_block(const scalar_t* from, int64_t count, acc_t* to) {
  if (count == kBlock) {
    convert_line(from, kBlock, to);
  } else {
    for (int64_t i = 0; i < kBlock; ++i) to[i] = i < count ? static_cast<acc_t>(from[i]) : acc_t(0);
  }
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void load_strided_block(const scalar_t* from, int64_t stride, int64_t count, acc_t* to) {
  if (stride == 1) return load_block(from, count, to);
  if (stride == 0) {
    const acc_t all = static_cast<acc_t>(*from);
    for (int64_t i = 0; i < kBlock; ++i) to[i] = all;
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<acc_t>(from[i * stride]);
  for (int64_t i = count; i < kBlock; ++i) to[i] = acc_t(0);
}

template <typename scalar_t, typename acc_t>
MEMCHECK_INLINE void store_block(const acc_t* from, int64_t count, scalar_t* to) {
  if (count == kBlock) {
    convert_line(from, kBlock, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<scalar_t>(from[i]);
  }
}

MEMCHECK_INLINE int64_t block_length(int64_t column, int64_t E) {
  return E - column < kBlock ? E - column : kBlock;
}

// y = softplus(a) b.
template <typename scalar_t>
MEMCHECK_INLINE void forward_rows_body(const CombinatorForward& p, int64_t begin, int64_t end) {
  using acc_t = acc_type<scalar_t>;
  using Maths = MathsOf<scalar_t>;
  alignas(64) acc_t a[kBlock];
  alignas(64) acc_t b[kBlock];
  alignas(64) acc_t e[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E;
    scalar_t* y = static_cast<scalar_t*>(p.y) + row * p.E;
    for (int64_t column = 0; column < p.E; column += kBlock) {
      const int64_t count = block_length(column, p.E);
      load_block(pair + column, count, a);
      load_block(pair + p.E + column, count, b);
      exponentials_minus_abs<Maths>(a, kBlock, e);
      for (int64_t i = 0; i < kBlock; ++i) b[i] *= softplus_from_exponential<Maths>(a[i], e[i]);
      store_block(b, count, y + column);
    }
  }
}

// grad_a and grad_b, which replace a and b.
template <typename scalar_t>
MEMCHECK_INLINE void backward_rows_body(const CombinatorBackward& p, int64_t begin, int64_t end) {
  using acc_t = acc_type<scalar_t>;
  using Maths = MathsOf<scalar_t>;
  alignas(64) acc_t a[kBlock];
  alignas(64) acc_t b[kBlock];
  alignas(64) acc_t e[kBlock];
  alignas(64) acc_t g[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E;
    scalar_t* grad_pair = static_cast<scalar_t*>(p.grad_preactivations) + row * 2 * p.E;
    const scalar_t* grad_y = static_cast<const scalar_t*>(p.grad_y.data) + row * p.grad_y.stride[0];
    const int64_t stride = p.grad_y.stride[1];
    for (int64_t column = 0; column < p.E; column += kBlock) {
      const int64_t count = block_length(column, p.E);
      load_block(pair + column, count, a);
      load_block(pair + p.E + column, count, b);
      load_strided_block(grad_y + column * stride, stride, count, g);
      exponentials_minus_abs<Maths>(a, kBlock, e);
      for (int64_t i = 0; i < kBlock; ++i) {
        const auto of_a = softplus_and_sigmoid_from_exponential<Maths>(a[i], e[i]);
        const auto gradients = combinator_gradients(g[i], of_a, b[i]);
        a[i] = gradients.grad_a;
        b[i] = gradients.grad_b;
      }
      store_block(a, count, grad_pair + column);
      store_block(b, count, grad_pair + p.E + column);
    }
  }
}

MEMCHECK_PER_CPU_LEVEL(scalar_t, forward_rows, (const CombinatorForward& p, int64_t begin, int64_t end),
                       (p, begin, end))
MEMCHECK_PER_CPU_LEVEL(scalar_t, backward_rows, (const CombinatorBackward& p, int64_t begin, int64_t end),
                       (p, begin, end))

// Calls run(begin, end) on ranges of rows. A task is as many rows as are worth a thread.
template <typename Run>
void parallel_rows(int64_t rows, int64_t E, const Run& run) {
  const int64_t rows_each = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(E, 1));
  const int64_t tasks = ceil_div(rows, rows_each);
  parallel_tasks(tasks, tasks,
                 [&](int64_t begin, int64_t end, int) { run(begin * rows_each, std::min(rows, end * rows_each)); });
}

}  // namespace

void combinator_forward_cpu(const CombinatorForward& p, Dtype dtype, cudaStream_t) {
  with_scalar_type(dtype, [&](auto scalar) {
    parallel_rows(p.rows, p.E, [&](int64_t begin, int64_t end) { forward_rows<decltype(scalar)>(p, begin, end); });
  });
}

void combinator_backward_cpu(const CombinatorBackward& p, Dtype dtype, cudaStream_t) {
  with_scalar_type(dtype, [&](auto scalar) {
    parallel_rows(p.rows, p.E, [&](int64_t begin, int64_t end) { backward_rows<decltype(scalar)>(p, begin, end); });
  });
}

CombinatorPlan combinator_plan_of_machine(int64_t N, int64_t E, Dtype dtype) {
  return combinator_plan_cpu(N, E, dtype, cpu_multiplies(dtype, N));
}

const CombinatorKernels combinator_cpu{combinator_plan_of_machine, combinator_forward_cpu, combinator_backward_cpu};

}  // namespace memcheck
