#include <limits>

#include "linear_attention/linear_attention_scan_cuda.cuh"

// The gradient of decays on CUDA, from what queries and keys give to each position. Sums are in float64. The terms do
// not have the decay as a factor, as they do on the CPU: they cancel where it is small, and the gradient is no more
// accurate than they are.

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

// The segment of a block, from its last position to its first, and its key head.
struct DecayWork {
  int64_t index;  // of the sequence
  Sequence sequence;
  int64_t head, place;
  int64_t segment, segments;
  Span positions;  // of the batch; empty if the sequence ends before

  __device__ __forceinline__ explicit DecayWork(const LinearAttentionShape& n) {
    head = blockIdx.x % n.Hkv;
    place = blockIdx.x / n.Hkv;
    const SequenceTile at = key_tile_at(n, place, kLinearAttentionDecays);
    index = at.sequence;
    sequence = sequence_of(n, index);
    segment = at.tile;
    segments = ceil_div(sequence.keys, kLinearAttentionDecays);
    const int64_t begin = min(sequence.keys, segment * kLinearAttentionDecays);
    const int64_t end = min(sequence.keys, begin + kLinearAttentionDecays);
    positions = {sequence.first_key + begin, sequence.first_key + end};
  }
};

// This thread's share of what the state behind the sequence gives to its last segment.
template <typename acc_t>
__device__ __forceinline__ double grad_of_last_state(const LinearAttentionBackward& p, const DecayWork& work) {
  if (work.segment != work.segments - 1) return 0;
  return product_sum<acc_t>(p.grad_last.m, p.last.m, work.index, work.head, p.shape.D, p.shape.Dv) +
         product_sum<acc_t>(p.grad_last.z, p.last.z, work.index, work.head, 1, p.shape.D);
}

// phi(q).(grad phi(q)) of the queries at position t, less phi(k).(grad phi(k)). The first is (g.y) / den eps if y is
// normalized, else g.y.
template <typename acc_t>
__device__ __forceinline__ double grad_of_position(const LinearAttentionBackward& p, const DecayProducts& of,
                                                   const DecayWork& work, int64_t t) {
  const LinearAttentionShape& n = p.shape;
  const acc_t* key_products = static_cast<const acc_t*>(of.of_keys);
  const acc_t* inverse = static_cast<const acc_t*>(p.rows);
  const acc_t* products = inverse + n.B * n.H * n.S;
  double sum = 0;
  const Sequence& x = work.sequence;
  const int64_t s = x.queries - (x.first_key + x.keys - t);
  for (int64_t i = 0; i < n.group() && s >= 0; ++i) {
    const int64_t row = query_row(n, x.row, work.head * n.group() + i) + x.first_query + s;
    double product = 0;
    for (int64_t part = 0; part < of.query_parts; ++part) product += products[part * n.B * n.H * n.S + row];
    sum += n.normalize ? product * inverse[row] * p.eps : product;
  }
  for (int64_t part = 0; part < of.key_parts; ++part)
    sum -= key_products[part * n.B * n.Hkv * n.T + key_row(n, x.row, work.head) + t];
  return sum;
}

// The sum over a segment, and for the last one of what the state behind the sequence gives.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads)
    decay_sums_kernel(const LinearAttentionBackward p, const DecayProducts products) {
  const DecayWork work(p.shape);
  double sum = grad_of_last_state<acc_t>(p, work);
  for (int64_t t = work.positions.begin + threadIdx.x; t < work.positions.end; t += kThreads)
    sum += grad_of_position<acc_t>(p, products, work, t);
  double total = 0;
  sum_up_to(sum, total);
  if (threadIdx.x == 0) products.sums[blockIdx.x] = total;
}

// The sum of a decay below the precision of acc_t is smaller than its rounding errors: its gradient is 0.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads)
    grad_decay_kernel(const LinearAttentionBackward p, const DecayProducts products) {
  const LinearAttentionShape& n = p.shape;
  const DecayWork work(n);
  if (work.segment >= work.segments) return;
  // What later positions give: the sums of later segments. Of its own segment only the last one has more.
  double later = grad_of_last_state<acc_t>(p, work);
  for (int64_t i = work.segment + 1 + threadIdx.x; i < work.segments; i += kThreads)
    later += products.sums[(work.place - work.segment + i) * n.Hkv + work.head];
  double sum = 0;
  sum_up_to(later, sum);
  for (int64_t end = work.positions.end; end > work.positions.begin; end -= kThreads) {
    const int64_t t = end - 1 - threadIdx.x;
    const bool exists = t >= work.positions.begin;
    double of_chunk = 0;
    const double up_to = sum + sum_up_to(exists ? grad_of_position<acc_t>(p, products, work, t) : 0.0, of_chunk);
    sum += of_chunk;
    if (!exists) continue;
    const double decay = p.decay.at<acc_t>(work.sequence.row, work.head, t);
    const double of_log = decay < std::numeric_limits<acc_t>::epsilon() ? 0 : up_to;
    *p.grad_decay.at<acc_t>(work.sequence.row, work.head, t) =
        static_cast<acc_t>(p.decay.logarithms || of_log == 0 ? of_log : of_log / decay);
  }
}

// ---- a decay for each head

// A block of threads for each head.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads) sum_decays_kernel(const LinearAttentionDecaySum p) {
  const int64_t head = blockIdx.x;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.B * p.T; i += kThreads) sum += *p.from.at<acc_t>(i / p.T, head, i % p.T);
  double total = 0;
  sum_up_to(sum, total);
  if (threadIdx.x == 0) *p.to.at<acc_t>(head) = static_cast<acc_t>(total);
}

Launch launch_of(const char* name, int64_t blocks, cudaStream_t stream) {
  return {name, blocks, dim3(kThreads), kThreads * sizeof(double), stream};
}

template <typename acc_t>
void launch_finish(const LinearAttentionBackward& p, const DecayProducts& products, cudaStream_t stream) {
  const int64_t blocks = key_tile_places(p.shape, kLinearAttentionDecays) * p.shape.Hkv;
  launch(launch_of("linear_attention_backward_decay_sums", blocks, stream), decay_sums_kernel<acc_t>, p, products);
  launch(launch_of("linear_attention_backward_decay", blocks, stream), grad_decay_kernel<acc_t>, p, products);
}

}  // namespace

void finish_grad_decay(const LinearAttentionBackward& p, const DecayProducts& products, Dtype dtype,
                       cudaStream_t stream) {
  dtype == Dtype::Float64 ? launch_finish<double>(p, products, stream) : launch_finish<float>(p, products, stream);
}

}  // namespace linear_cuda

void linear_attention_sum_decays_cuda(const LinearAttentionDecaySum& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  const Launch with = launch_of("linear_attention_sum_decays", p.Hkv, stream);
  dtype == Dtype::Float64 ? launch(with, sum_decays_kernel<double>, p) : launch(with, sum_decays_kernel<float>, p);
}

}  // namespace memcheck
