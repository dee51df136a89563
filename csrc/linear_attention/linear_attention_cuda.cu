#include "common/compensated_sum.h"
#include "linear_attention/linear_attention_scan_cuda.cuh"

// Linear attention on CUDA: the scans of forward, backward and step, and the sum of segments.

namespace memcheck {
namespace linear_cuda {

namespace {

// add_up_segments; a thread for each element of a state.
template <typename acc_t>
__global__ void add_up_kernel(const Scan scan, int64_t heads) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t slot = scan.slot();
  if (index >= heads * slot) return;
  const int64_t count = scan.segments.count;
  acc_t* first = static_cast<acc_t*>(scan.states) + index / slot * count * slot + index % slot;
  acc_t sum = 0;
  acc_t rest = 0;
  for (int64_t i = 0; i < count; ++i) {
    acc_t* segment = first + (scan.backwards() ? count - 1 - i : i) * slot;
    const acc_t x = *segment;
    if (scan.shape.causal) *segment = sum;
    add_to_sum(x, sum, rest);
  }
  if (!scan.shape.causal) *first = sum;
}

}  // namespace

void add_up_segments(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  constexpr unsigned kBlock = 256;
  const int64_t heads = scan.shape.B * scan.shape.Hkv;
  const Launch with{"linear_attention_add_up", dim3(static_cast<unsigned>(ceil_div(heads * scan.slot(), kBlock))),
                    dim3(kBlock), 0, stream};
  if (dtype == Dtype::Float64)
    launch(with, add_up_kernel<double>, scan, heads);
  else
    launch(with, add_up_kernel<float>, scan, heads);
}

namespace {

// Whether x may be read or written `bytes` at a time.
bool is_packed(const Strided<4>& x, int64_t columns, Dtype dtype, int64_t bytes) {
  const int64_t count = bytes / element_bytes(dtype);
  bool whole = x.stride[3] == 1 && columns % count == 0 && reinterpret_cast<uintptr_t>(x.data) % bytes == 0;
  for (int i = 0; i < 3; ++i) whole = whole && x.stride[i] % count == 0;
  return whole;
}

void run_scan(Scan scan, Dtype dtype, cudaStream_t stream) {
  const bool on_tensor_cores = suits_tensor_cores(scan.shape, dtype) && scan.kind != ScanKind::Denominators && !scan.m;
  scan.a.packed = is_packed(scan.a.x, scan.depth, dtype, kPackBytes);
  scan.b.packed = is_packed(scan.b.x, scan.depth, dtype, kPackBytes);
  scan.x.packed = is_packed(scan.x.x, scan.width, dtype, kPackBytes);
  scan.last_packed = is_packed(scan.last, scan.width, dtype, kPackBytes);
  scan.out_packed = is_packed(scan.out, scan.width, dtype, on_tensor_cores ? kPackBytes : 4 * element_bytes(dtype));
  on_tensor_cores ? scan_on_tensor_cores(scan, dtype, stream) : scan_by_fma(scan, dtype, stream);
}

Scan scan_of(const LinearAttentionShape& n, double eps, Dtype dtype, ScanKind kind) {
  Scan scan = {};
  scan.shape = n;
  scan.eps = eps;
  scan.kind = kind;
  const auto rows = scan.rows_are_queries() ? LinearAttentionRows::Queries : LinearAttentionRows::Keys;
  scan.segments = linear_attention_segments(n, dtype, rows);
  scan.pieces = linear_attention_pieces(n, dtype, rows);
  const bool of_values = kind == ScanKind::Output || kind == ScanKind::Denominators || kind == ScanKind::GradV;
  scan.depth = of_values ? n.D : n.Dv;
  scan.width = of_values ? n.Dv : n.D;
  return scan;
}

Scan backward_scan(const LinearAttentionBackward& p, Dtype dtype, ScanKind kind) {
  const LinearAttentionShape& n = p.shape;
  Scan scan = scan_of(n, p.eps, dtype, kind);
  scan.inverse = p.rows;
  scan.products = static_cast<char*>(p.rows) + n.B * n.H * n.S * acc_bytes(dtype);
  scan.states = p.states;
  scan.deep = p.scratch;
  const bool maps = n.feature_map == FeatureMap::EluPlusOne;
  const ScanFactor q{p.q, maps, false, false}, k{p.k, maps, false, false}, scaled_q{p.q, maps, true, false};
  const ScanFactor v{p.v, false, false, false}, g{p.grad_y, false, false, false};
  // On tensor cores the scan of grad q computes 1 / den.
  const ScanFactor scaled_g{p.grad_y, false, !suits_tensor_cores(n, dtype), false};
  switch (kind) {
    case ScanKind::Output:
    case ScanKind::Denominators:
      scan.a = q, scan.b = k, scan.x = v, scan.last = p.grad_y;
      break;
    case ScanKind::GradQ:
      scan.a = scaled_g, scan.b = v, scan.x = k, scan.last = p.q, scan.out = p.grad_q;
      break;
    case ScanKind::GradK:
      scan.a = v, scan.b = g, scan.x = scaled_q, scan.last = p.k, scan.out = p.grad_k;
      break;
    case ScanKind::GradV:
      scan.a = k, scan.b = scaled_q, scan.x = g, scan.out = p.grad_v;
      break;
  }
  return scan;
}

}  // namespace
}  // namespace linear_cuda

void linear_attention_forward_cuda(const LinearAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  Scan scan = scan_of(p.shape, p.eps, dtype, ScanKind::Output);
  const bool maps = p.shape.feature_map == FeatureMap::EluPlusOne;
  scan.a = {p.q, maps, false, false};
  scan.b = {p.k, maps, false, false};
  scan.x = {p.v, false, false, false};
  scan.out = p.y;
  scan.states = p.states;
  scan.deep = p.scratch;
  run_scan(scan, dtype, stream);
}

void linear_attention_backward_cuda(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  const bool stores_denominators = suits_tensor_cores(p.shape, dtype);
  if (!stores_denominators) run_scan(backward_scan(p, dtype, ScanKind::Denominators), dtype, stream);
  if (p.grad_q || stores_denominators) run_scan(backward_scan(p, dtype, ScanKind::GradQ), dtype, stream);
  if (p.grad_k) run_scan(backward_scan(p, dtype, ScanKind::GradK), dtype, stream);
  if (p.grad_v) run_scan(backward_scan(p, dtype, ScanKind::GradV), dtype, stream);
}

void linear_attention_step_cuda(const LinearAttentionStep& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  const bool maps = p.shape.feature_map == FeatureMap::EluPlusOne;
  Scan scan = scan_of(p.shape, p.eps, dtype, ScanKind::Output);
  scan.segments = scan.pieces = {1, std::max<int64_t>(1, p.shape.T)};
  scan.a = {p.q, maps, false, false};
  scan.b = {p.k, maps, false, false};
  scan.x = {p.v, false, false, false};
  scan.out = p.y;
  scan.m = p.m;
  scan.z = p.z;
  scan.new_m = p.new_m;
  scan.new_z = p.new_z;
  scan.deep = p.scratch;
  run_scan(scan, dtype, stream);
}

const LinearAttentionKernels linear_attention_cuda{linear_attention_plan_cuda, linear_attention_forward_cuda,
                                                   linear_attention_backward_cuda, linear_attention_step_cuda};

}  // namespace memcheck
