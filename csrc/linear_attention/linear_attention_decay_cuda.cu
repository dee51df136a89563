#include <limits>

#include "linear_attention/linear_attention_scan_cuda.cuh"

// The gradient of decays on CUDA, from what queries and keys give to each position. Sums are in float64.

namespace memcheck {
namespace linear_cuda {

namespace {

constexpr int kThreads = 256;

// Adds up over the threads: thread i gets the sum of those up to i, and `total` that of all.
__device__ __forceinline__ double sum_up_to(double x, double& total) {
  double* sums = shared<double[kThreads]>();
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = x;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const double before = thread < distance ? 0 : sums[thread - distance];
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  const double sum = sums[thread];
  total = sums[kThreads - 1];
  __syncthreads();
  return sum;
}

// This thread's share of the sum of x y over one head, of matrices (rows,columns). Null counts as zeros.
template <typename acc_t>
__device__ __forceinline__ double product_sum(const Strided<4>& x, const Strided<4>& y, int64_t b, int64_t head,
                                              int64_t rows, int64_t columns) {
  double sum = 0;
  if (!x) return sum;
  for (int64_t i = threadIdx.x; i < rows * columns; i += kThreads)
    sum += static_cast<double>(*x.at<acc_t>(b, head, i / columns, i % columns)) *
           *y.at<acc_t>(b, head, i / columns, i % columns);
  return sum;
}

// phi(q).(grad phi(q)) of the queries at position t, less phi(k).(grad phi(k)). The first is (g.y) / den eps if y is
// normalized, else g.y.
template <typename acc_t>
__device__ __forceinline__ double grad_of_position(const LinearAttentionBackward& p, const DecayProducts& of, int64_t b,
                                                   int64_t head, int64_t t) {
  const LinearAttentionShape& n = p.shape;
  const acc_t* key_products = static_cast<const acc_t*>(of.of_keys);
  const acc_t* inverse = static_cast<const acc_t*>(p.rows);
  const acc_t* products = inverse + n.B * n.H * n.S;
  double sum = 0;
  const int64_t s = t - (n.T - n.S);
  for (int64_t i = 0; i < n.group() && s >= 0; ++i) {
    const int64_t row = query_row(n, b, head * n.group() + i) + s;
    double product = 0;
    for (int64_t part = 0; part < of.query_parts; ++part) product += products[part * n.B * n.H * n.S + row];
    sum += n.normalize ? product * inverse[row] * p.eps : product;
  }
  for (int64_t part = 0; part < of.key_parts; ++part) sum -= key_products[((part * n.B + b) * n.Hkv + head) * n.T + t];
  return sum;
}

// A block has a key head of one batch entry, and goes from the last position to the first. The sum of a decay below the
// precision of acc_t is smaller than its rounding errors, and divided by the decay it would be anything: its gradient
// is 0.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads)
    grad_decay_kernel(const LinearAttentionBackward p, const DecayProducts products) {
  const LinearAttentionShape& n = p.shape;
  const int64_t b = blockIdx.x / n.Hkv;
  const int64_t head = blockIdx.x % n.Hkv;
  double sum = 0;
  sum_up_to(product_sum<acc_t>(p.grad_last.m, p.last.m, b, head, n.D, n.Dv) +
                product_sum<acc_t>(p.grad_last.z, p.last.z, b, head, 1, n.D),
            sum);
  for (int64_t end = n.T; end > 0; end -= kThreads) {
    const int64_t t = end - 1 - threadIdx.x;
    double of_chunk = 0;
    const double x = t < 0 ? 0 : grad_of_position<acc_t>(p, products, b, head, t);
    const double later = sum + sum_up_to(x, of_chunk);
    sum += of_chunk;
    if (t < 0) continue;
    const double decay = *p.decay.at<acc_t>(b, head, t);
    *p.grad_decay.at<acc_t>(b, head, t) =
        decay < std::numeric_limits<acc_t>::epsilon() ? acc_t(0) : static_cast<acc_t>(later / decay);
  }
}

template <typename acc_t>
__global__ void __launch_bounds__(kThreads) sum_decays_kernel(const LinearAttentionDecaySum p) {
  const int64_t head = blockIdx.x;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.B * p.T; i += kThreads) sum += *p.from.at<acc_t>(i / p.T, head, i % p.T);
  double total = 0;
  sum_up_to(sum, total);
  if (threadIdx.x == 0) *p.to.at<acc_t>(head) = static_cast<acc_t>(total);
}

Launch launch_of_heads(const char* name, int64_t heads, cudaStream_t stream) {
  return {name, dim3(static_cast<unsigned>(heads)), dim3(kThreads), kThreads * sizeof(double), stream};
}

}  // namespace

void finish_grad_decay(const LinearAttentionBackward& p, const DecayProducts& products, Dtype dtype,
                       cudaStream_t stream) {
  const Launch with = launch_of_heads("linear_attention_backward_decay", p.shape.B * p.shape.Hkv, stream);
  if (dtype == Dtype::Float64)
    launch(with, grad_decay_kernel<double>, p, products);
  else
    launch(with, grad_decay_kernel<float>, p, products);
}

}  // namespace linear_cuda

void linear_attention_sum_decays_cuda(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  const Launch with = launch_of_heads("linear_attention_sum_decays", p.Hkv, stream);
  if (dtype == Dtype::Float64)
    launch(with, sum_decays_kernel<double>, p);
  else
    launch(with, sum_decays_kernel<float>, p);
}

}  // namespace memcheck
