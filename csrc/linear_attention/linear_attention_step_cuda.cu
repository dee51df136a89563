#include "linear_attention/linear_attention_scan_cuda.cuh"

// A step of decoding on CUDA. With the new keys and their values, for a query of each head:
//
//     M += phi(k)^T v        z += phi(k)        y = phi(q) M / (phi(q).z + eps)
//
// A block has kColumns columns of M of a key head, and reads and writes them once, for at most kHeads queries of the
// group. A row of them is a line of the cache. A thread has kVector neighbouring numbers of kRows rows at a time, and
// asks for all of them at once. Sums have a fixed order.

namespace memcheck {
namespace linear_cuda {
namespace {

constexpr int kThreads = 256, kColumns = 32, kVector = 4, kHeads = 2;
constexpr int kAcross = kColumns / kVector, kDown = kThreads / kAcross, kWarps = kThreads / 32;
constexpr int kRows = 2;  // of a thread, kDown apart
constexpr int64_t kKeys = 64;

template <typename acc_t>
struct StepShared {
  acc_t sums[kHeads][kWarps][kColumns];  // of y, over each warp's rows
  acc_t dens[kHeads][kWarps];
};

// What a thread computes.
struct StepWork {
  int b, key_head, head;  // head: the first query head
  int heads, columns;     // that exist, of kHeads and kVector
  int column;             // the first one
  bool stores;            // the new state, which several blocks form if a group has more than kHeads heads

  __device__ StepWork(const LinearAttentionShape& n, unsigned index) {
    const int Dv = static_cast<int>(n.Dv), Hkv = static_cast<int>(n.Hkv), group = static_cast<int>(n.H) / Hkv;
    const int parts = static_cast<int>(ceil_div(Dv, kColumns)), batches = static_cast<int>(ceil_div(group, kHeads));
    column = static_cast<int>(index % parts * kColumns + threadIdx.x % kAcross * kVector);
    columns = min(max(Dv - column, 0), kVector);
    const int batch = static_cast<int>(index / parts % batches);
    heads = min(group - batch * kHeads, kHeads);
    key_head = static_cast<int>(index / parts / batches % Hkv);
    head = key_head * group + batch * kHeads;
    b = static_cast<int>(index / parts / batches / Hkv);
    stores = batch == 0;
  }
};

template <typename scalar_t>
__device__ __forceinline__ acc_type<scalar_t> feature_at(const LinearAttentionShape& n, const Strided<4>& x, int64_t b,
                                                         int64_t head, int64_t t, int64_t row) {
  return feature(n.feature_map, to_acc(*x.at<const scalar_t>(b, head, t, row)));
}

// kVector numbers from the first column on; 0 where there are none. kPacked: in one instruction (float64: two).
template <bool kPacked, typename scalar_t>
__device__ __forceinline__ void read_columns(const Strided<4>& x, const StepWork& work, int64_t row,
                                             acc_type<scalar_t> (&to)[kVector]) {
  if (work.columns == 0) return;
  const scalar_t* from = x.at<const scalar_t>(work.b, work.key_head, row, work.column);
  const auto pack = kPacked ? load_pack<kVector>(from) : gather_pack<kVector>(from, x.stride[3], work.columns);
  unroll<kVector>([&](int i) { to[i] = to_acc(pack.values[i]); });
}

template <bool kPacked, typename acc_t>
__device__ __forceinline__ void write_columns(const Strided<4>& x, const StepWork& work, int64_t row,
                                              const acc_t (&from)[kVector]) {
  acc_t* to = x.at<acc_t>(work.b, work.key_head, row, work.column);
  if constexpr (kPacked) {
    if (work.columns > 0) store_pack(rounded_pack<acc_t>(from), to);
  } else {
    unroll<kVector>([&](int i) {
      if (i < work.columns) to[i * x.stride[3]] = from[i];
    });
  }
}

// A thread's rows of M, from `first` on, and of z.
template <typename acc_t>
struct StateRows {
  int64_t first, end;
  acc_t m[kRows][kVector] = {}, z[kRows] = {};

  // Calls run(i, row) for those that exist.
  template <typename Run>
  __device__ __forceinline__ void each(const Run& run) const {
    unroll<kRows>([&](int i) {
      if (first + i * kDown < end) run(i, first + i * kDown);
    });
  }
};

// Adds keys and values [t, end).
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void add_keys(const LinearAttentionForward& p, const StepWork& work, int64_t t, int64_t end,
                                         StateRows<acc_t>& rows) {
  for (; t < end; ++t) {
    acc_t value[kVector] = {};
    read_columns<false, scalar_t>(p.v, work, t, value);
    rows.each([&](int i, int64_t row) {
      const acc_t phi = feature_at<scalar_t>(p.shape, p.k, work.b, work.key_head, t, row);
      rows.z[i] += phi;
      unroll<kVector>([&](int c) { rows.m[i][c] += phi * value[c]; });
    });
  }
}

// The rows of the new state. A sum over a few keys is formed first, and joins the state by one rounding.
template <typename scalar_t, bool kPacked, typename acc_t>
__device__ __forceinline__ void form_state(const LinearAttentionForward& p, const StepWork& work,
                                           StateRows<acc_t>& rows) {
  rows.each([&](int i, int64_t row) {
    read_columns<kPacked, acc_t>(p.initial.m, work, row, rows.m[i]);
    rows.z[i] = *p.initial.z.at<const acc_t>(work.b, work.key_head, 0, row);
  });
  for (int64_t t = 0; t < p.shape.T; t += kKeys) {
    StateRows<acc_t> added{rows.first, rows.end};
    add_keys<scalar_t>(p, work, t, min(t + kKeys, p.shape.T), added);
    unroll<kRows>([&](int i) {
      rows.z[i] += added.z[i];
      unroll<kVector>([&](int c) { rows.m[i][c] += added.m[i][c]; });
    });
  }
}

template <bool kPacked, typename acc_t>
__device__ __forceinline__ void store_rows(const LinearAttentionForward& p, const StepWork& work,
                                           const StateRows<acc_t>& rows) {
  rows.each([&](int i, int64_t row) {
    write_columns<kPacked>(p.last.m, work, row, rows.m[i]);
    if (work.column == 0) *p.last.z.at<acc_t>(work.b, work.key_head, 0, row) = rows.z[i];
  });
}

// The sum over the lanes of a warp that have the same columns.
template <typename acc_t>
__device__ __forceinline__ acc_t sum_down(acc_t x) {
  unroll<2>([&](int i) { x += __shfl_xor_sync(~0u, x, kAcross << i); });
  return x;
}

template <typename scalar_t, bool kPacked>
__global__ void __launch_bounds__(kThreads, sizeof(acc_type<scalar_t>) == 4 ? 3 : 2)
    step_kernel(const LinearAttentionForward p) {
  using acc_t = acc_type<scalar_t>;
  auto& s = shared<StepShared<acc_t>>();
  const LinearAttentionShape& n = p.shape;
  const StepWork work(n, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), across = thread % kAcross;
  acc_t sums[kHeads][kVector] = {}, dens[kHeads] = {};
  for (int64_t first = thread / kAcross; first < n.D; first += kRows * kDown) {
    StateRows<acc_t> rows{first, n.D};
    form_state<scalar_t, kPacked>(p, work, rows);
    if (work.stores) store_rows<kPacked>(p, work, rows);
    unroll<kHeads>([&](int h) {
      if (h >= work.heads) return;
      rows.each([&](int i, int64_t row) {
        const acc_t phi = feature_at<scalar_t>(n, p.q, work.b, work.head + h, 0, row);
        dens[h] += phi * rows.z[i];
        unroll<kVector>([&](int c) { sums[h][c] += phi * rows.m[i][c]; });
      });
    });
  }
  unroll<kHeads>([&](int h) {
    const acc_t den = sum_down(dens[h]);
    if (thread % 32 == 0) s.dens[h][thread / 32] = den;
    unroll<kVector>([&](int c) {
      const acc_t sum = sum_down(sums[h][c]);
      if (thread % 32 < kAcross) s.sums[h][thread / 32][across * kVector + c] = sum;
    });
  });
  __syncthreads();
  const int h = thread / kColumns;
  const int column = work.column - across * kVector + thread % kColumns;
  if (h >= work.heads || column >= n.Dv) return;
  acc_t sum = 0, den = 0;
  unroll<kWarps>([&](int warp) {
    sum += s.sums[h][warp][thread % kColumns];
    den += s.dens[h][warp];
  });
  *p.y.at<scalar_t>(work.b, work.head + h, 0, column) = from_acc<scalar_t>(sum / (den + static_cast<acc_t>(p.eps)));
}

}  // namespace

void queue_step(const LinearAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  const LinearAttentionShape& n = p.shape;
  if (n.Hkv == 0) return;
  const int64_t blocks = n.B * n.Hkv * ceil_div(n.group(), kHeads) * ceil_div(n.Dv, kColumns);
  const bool packed = is_in_packs(p.initial.m, n.Dv, acc_bytes(dtype), kVector) &&
                      is_in_packs(p.last.m, n.Dv, acc_bytes(dtype), kVector);
  with_device_type(dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto kernel = packed ? step_kernel<scalar_t, true> : step_kernel<scalar_t, false>;
    launch({"linear_attention_step", blocks, dim3(kThreads), sizeof(StepShared<acc_type<scalar_t>>), stream}, kernel,
           p);
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
