#include <type_traits>

#include "combinator/combinator.h"
#include "common/formulas.cuh"
#include "common/tile.cuh"
#include "common/types.h"

// A block takes some rows, and its threads take packs of them: 16 bytes if all addresses allow it, else single
// elements, by the same code. These kernels read what a GEMM wrote, and memory alone limits their speed.

namespace memcheck {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadRows = 2;  // rows of each thread, all loaded before the first is used

// How a block of threads lies over rows of E elements.
struct Tiling {
  int log_across;  // 2^log_across threads along a row; the other threads take further rows

  __device__ int across() const { return 1 << log_across; }
  __device__ int column() const { return static_cast<int>(threadIdx.x) & (across() - 1); }
  // This thread's row i in block `block`.
  __device__ int64_t row(int64_t block, int i) const {
    const int down = kThreads >> log_across;
    return (block * kThreadRows + i) * down + (static_cast<int>(threadIdx.x) >> log_across);
  }
};

// y = softplus(a) b.
template <typename scalar_t, int kCount>
__device__ __forceinline__ Pack<scalar_t, kCount> forward_pack(const Pack<scalar_t, kCount>& a,
                                                               const Pack<scalar_t, kCount>& b) {
  Pack<scalar_t, kCount> y;
  unroll<kCount>([&](int i) {
    y.values[i] = from_acc<scalar_t>(softplus_on_device<scalar_t>(to_acc(a.values[i])) * to_acc(b.values[i]));
  });
  return y;
}

// Replaces a and b by their gradients.
template <typename scalar_t, int kCount>
__device__ __forceinline__ void backward_pack(const Pack<scalar_t, kCount>& g, Pack<scalar_t, kCount>& a,
                                              Pack<scalar_t, kCount>& b) {
  unroll<kCount>([&](int i) {
    const auto grad = to_acc(g.values[i]);
    const auto both = softplus_and_sigmoid_on_device<scalar_t>(to_acc(a.values[i]));
    const auto gradients = combinator_gradients(grad, both, to_acc(b.values[i]));
    a.values[i] = from_acc<scalar_t>(gradients.grad_a);
    b.values[i] = from_acc<scalar_t>(gradients.grad_b);
  });
}

template <typename scalar_t, int kCount>
__global__ void __launch_bounds__(kThreads) forward_kernel(CombinatorForward p, Tiling tiling) {
  // The last rows first: GEMM wrote them last, so they are still in the cache.
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  for (int64_t column = tiling.column() * kCount; column < p.E; column += tiling.across() * kCount) {
    Pack<scalar_t, kCount> a[kThreadRows], b[kThreadRows];
    unroll<kThreadRows>([&](int i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) return;
      const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E + column;
      a[i] = load_pack<kCount>(pair);
      b[i] = load_pack<kCount>(pair + p.E);
    });
    unroll<kThreadRows>([&](int i) {
      const int64_t row = tiling.row(block, i);
      if (row < p.rows) store_pack(forward_pack(a[i], b[i]), static_cast<scalar_t*>(p.y) + row * p.E + column);
    });
  }
}

// grad_packed: grad_y can be read in the same packs as the pre-activations.
template <typename scalar_t, int kCount>
__global__ void __launch_bounds__(kThreads) backward_kernel(CombinatorBackward p, Tiling tiling, bool grad_packed) {
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  for (int64_t column = tiling.column() * kCount; column < p.E; column += tiling.across() * kCount) {
    Pack<scalar_t, kCount> a[kThreadRows], b[kThreadRows], g[kThreadRows];
    unroll<kThreadRows>([&](int i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) return;
      const scalar_t* pair = static_cast<const scalar_t*>(p.preactivations) + row * 2 * p.E + column;
      const int64_t stride = p.grad_y.stride[1];
      const scalar_t* grad_y = static_cast<const scalar_t*>(p.grad_y.data) + row * p.grad_y.stride[0] + column * stride;
      a[i] = load_pack<kCount>(pair);
      b[i] = load_pack<kCount>(pair + p.E);
      g[i] = grad_packed ? load_pack<kCount>(grad_y) : gather_pack<kCount>(grad_y, stride, kCount);
    });
    unroll<kThreadRows>([&](int i) {
      const int64_t row = tiling.row(block, i);
      if (row >= p.rows) return;
      scalar_t* grad_pair = static_cast<scalar_t*>(p.grad_preactivations) + row * 2 * p.E + column;
      backward_pack(g[i], a[i], b[i]);
      store_pack(a[i], grad_pair);
      store_pack(b[i], grad_pair + p.E);
    });
  }
}

// ---- launches

bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kPackBytes == 0;
}

// Whether every row begins at a multiple of 16 bytes and is contiguous.
bool is_packed(const Strided<2>& x, int64_t item) {
  return is_aligned(x.data) && x.stride[1] == 1 && x.stride[0] * item % kPackBytes == 0;
}

Tiling tiling_of(int64_t packs) {
  Tiling tiling{0};
  while ((1 << tiling.log_across) < kThreads && (int64_t{1} << tiling.log_across) < packs) ++tiling.log_across;
  return tiling;
}

int64_t blocks_of(int64_t rows, Tiling tiling) {
  const int64_t of_block = (kThreads >> tiling.log_across) * kThreadRows;
  return ceil_div(rows, of_block);
}

// Calls run(elements of a pack, as a constant, tiling).
template <typename scalar_t, typename Run>
void with_packs(bool packed, int64_t E, const Run& run) {
  constexpr int kCount = kPackSize<scalar_t>;
  if (packed && E % kCount == 0) return run(std::integral_constant<int, kCount>{}, tiling_of(E / kCount));
  run(std::integral_constant<int, 1>{}, tiling_of(E));
}

}  // namespace

void combinator_forward_cuda(const CombinatorForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    with_packs<scalar_t>(is_aligned(p.preactivations) && is_aligned(p.y), p.E, [&](auto count, Tiling tiling) {
      launch({"combinator_forward", blocks_of(p.rows, tiling), dim3(kThreads), 0, stream},
             forward_kernel<scalar_t, count.value>, p, tiling);
    });
  });
}

void combinator_backward_cuda(const CombinatorBackward& p, Dtype dtype, cudaStream_t stream) {
  const bool packed = is_aligned(p.preactivations) && is_aligned(p.grad_preactivations);
  const bool grad_packed = is_packed(p.grad_y, element_bytes(dtype));
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    with_packs<scalar_t>(packed, p.E, [&](auto count, Tiling tiling) {
      launch({"combinator_backward", blocks_of(p.rows, tiling), dim3(kThreads), 0, stream},
             backward_kernel<scalar_t, count.value>, p, tiling, grad_packed);
    });
  });
}

const CombinatorKernels combinator_cuda{combinator_plan_cuda, combinator_forward_cuda, combinator_backward_cuda};

}  // namespace memcheck
