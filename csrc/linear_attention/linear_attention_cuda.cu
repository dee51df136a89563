#include "common/compensated_sum.h"
#include "linear_attention/linear_attention_scan_cuda.cuh"

// Linear attention on CUDA: the scans of forward and backward, and the sum of segments.

namespace memcheck {
namespace linear_cuda {

namespace {

// add_up_segments; a thread for each number of a key head's slots.
template <typename acc_t>
__global__ void add_up_kernel(const Scan scan) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t most = linear_attention_slot(scan.depth, scan.width);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t number = index % most;
  const SequenceTile at = segment_at(scan, index / most / n.Hkv, 1);
  if (at.tile > 0 || at.sequence >= sequence_count(n)) return;
  ScanWork work = {};
  work.sequence = scan_sequence(scan, at.sequence);
  if (work.is_whole()) return;
  work.key_head = index / most % n.Hkv;
  const StateSlot<acc_t> first(scan, work, 0);
  if (number >= first.count) return;
  const int64_t count = work.sequence.segments;
  const auto of_segment = [&](int64_t i) -> acc_t& { return StateSlot<acc_t>(scan, work, i).numbers[number]; };
  acc_t sum = number < first.matrix ? initial_element<acc_t>(scan, work, number / first.width, number % first.width)
                                    : initial_sum<acc_t>(scan, work, number - first.matrix);
  acc_t rest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t segment = scan.backwards() ? count - 1 - i : i;
    const acc_t x = i < scan.summed(count) ? of_segment(segment) : acc_t(0);
    if (n.causal) of_segment(segment) = sum;
    if (scan.decay && i < scan.summed(count)) {
      const acc_t kept = kept_of<acc_t>(scan, work, segment);
      sum *= kept;
      rest *= kept;
    }
    add_to_sum(x, sum, rest);
  }
  for (int64_t i = 0; i < count && !n.causal; ++i) of_segment(i) = sum;
}

}  // namespace

void add_up_segments(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  constexpr unsigned kBlock = 256;
  const LinearAttentionShape& n = scan.shape;
  const int64_t places = n.sequences.packed ? scan.places() : n.B;
  const int64_t numbers = places * n.Hkv * linear_attention_slot(scan.depth, scan.width);
  const Launch with{"linear_attention_add_up", ceil_div(numbers, kBlock), dim3(kBlock), 0, stream};
  dtype == Dtype::Float64 ? launch(with, add_up_kernel<double>, scan) : launch(with, add_up_kernel<float>, scan);
}

namespace {

bool runs_on_tensor_cores(const LinearAttentionShape& n, Dtype dtype) {
  if (dtype == Dtype::Float32 && float32_runs_on_tensor_cores())
    return linear_attention_has_columns_for_tensor_cores(n);
  return linear_attention_suits_tensor_cores(n, dtype);
}

void run_scan(Scan scan, Dtype dtype, cudaStream_t stream) {
  scan.tile = scan.on_tensor_cores ? scan.width : linear_attention_tile(dtype);
  const int64_t bytes = element_bytes(dtype), in_pack = kPackBytes / bytes;
  const auto note = [&](ScanTensor& of, int64_t columns, int64_t count) {
    of.columns = columns;
    of.in_packs = is_in_packs(of.x, columns, bytes, count);
  };
  for (ScanTensor* factor : {&scan.a, &scan.b}) note(*factor, scan.depth, in_pack);
  note(scan.x, scan.width, in_pack);
  const int64_t of_results = scan.on_tensor_cores ? in_pack : 4;
  for (ScanTensor* rows : {&scan.last, &scan.out}) note(*rows, scan.width, of_results);
  note(scan.out_of_values, scan.depth, of_results);
  if (!scan.on_tensor_cores) return scan_by_fma(scan, dtype, stream);
  if (scan.kind == ScanKind::Output) return forward_on_tensor_cores(scan, dtype, stream);
  if (scan.kind == ScanKind::GradQ) return query_gradients_on_tensor_cores(scan, dtype, stream);
  key_gradients_on_tensor_cores(scan, dtype, stream);
}

Scan scan_of(const LinearAttentionShape& n, double eps, Dtype dtype, ScanKind kind, bool on_tensor_cores) {
  Scan scan = {};
  scan.shape = n;
  scan.eps = eps;
  scan.kind = kind;
  scan.on_tensor_cores = on_tensor_cores;
  const auto rows = scan.rows_are_queries() ? LinearAttentionRows::Queries : LinearAttentionRows::Keys;
  scan.segments = linear_attention_segments(n, dtype, rows);
  scan.segments.grouped = scan.segments.grouped && on_tensor_cores;
  const bool of_values = kind == ScanKind::Output || kind == ScanKind::Denominators || kind == ScanKind::GradV;
  scan.depth = of_values ? n.D : n.Dv;
  scan.width = of_values ? n.Dv : n.D;
  const bool finds_rows = grad_q_finds_rows(n, dtype, on_tensor_cores);
  scan.query_parts = finds_rows ? 1 : linear_attention_parts(n.Dv, dtype);
  scan.finds_rows = kind == ScanKind::GradQ && finds_rows;
  return scan;
}

// The segments' states, and behind them the products of their decays.
void place_states(void* memory, Dtype dtype, Scan& scan) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t of_states = n.B * n.Hkv * scan.segments.count * linear_attention_slot(n.D, n.Dv);
  scan.states = memory;
  scan.kept = static_cast<char*>(memory) + of_states * acc_bytes(dtype);
}

Strided<4> transposed(const Strided<4>& x) {
  return {x.data, {x.stride[0], x.stride[1], x.stride[3], x.stride[2]}};
}

// Those of keys lie behind 1 / den and the most parts of g.y.
DecayProducts decay_products(const LinearAttentionBackward& p, Dtype dtype, bool on_tensor_cores) {
  const LinearAttentionShape& n = p.shape;
  const int64_t parts = linear_attention_parts(n.Dv, dtype);
  const int64_t key_parts = linear_attention_parts(n.D, dtype);
  const bool finds_rows = grad_q_finds_rows(n, dtype, on_tensor_cores);
  char* rows = static_cast<char*>(p.rows);
  const int64_t of_queries = (1 + parts) * n.B * n.H * n.S * acc_bytes(dtype);
  const int64_t of_keys = key_parts * n.B * n.Hkv * n.T * acc_bytes(dtype);
  return {finds_rows ? 1 : parts, finds_rows ? 1 : key_parts, rows + of_queries,
          reinterpret_cast<double*>(rows + linear_attention_decay_sums_at(of_queries + of_keys))};
}

Scan backward_scan(const LinearAttentionBackward& p, Dtype dtype, ScanKind kind, bool on_tensor_cores) {
  const LinearAttentionShape& n = p.shape;
  Scan scan = scan_of(n, p.eps, dtype, kind, on_tensor_cores);
  scan.inverse = p.rows;
  scan.products = static_cast<char*>(p.rows) + n.B * n.H * n.S * acc_bytes(dtype);
  scan.deep = p.scratch;
  scan.decay = p.decay;
  const bool maps = n.feature_map == FeatureMap::EluPlusOne;
  const ScanTensor q{p.q, maps}, k{p.k, maps}, scaled_q{p.q, maps, n.normalize}, v{p.v}, g{p.grad_y};
  // Tensor cores read g as it is in memory, and multiply what they form of it by 1 / den.
  const ScanTensor scaled_g{p.grad_y, false, n.normalize && !on_tensor_cores};
  switch (kind) {
    case ScanKind::Output:
    case ScanKind::Denominators:
      scan.a = q, scan.b = k, scan.x = v, scan.last = g;
      scan.m = p.initial.m, scan.z = p.initial.z;
      break;
    case ScanKind::GradQ:
      scan.a = scaled_g, scan.b = v, scan.x = k, scan.last = q, scan.out = {p.grad_q};
      scan.m = transposed(p.initial.m), scan.z = p.initial.z;
      break;
    case ScanKind::GradK:
      scan.a = v, scan.b = g, scan.x = scaled_q, scan.last = k, scan.out = {p.grad_k};
      scan.m = transposed(p.grad_last.m), scan.z = p.grad_last.z;
      scan.new_m = transposed(p.grad_initial.m), scan.new_z = p.grad_initial.z;
      if (on_tensor_cores) scan.out_of_values = {p.grad_v};
      if (p.grad_decay) scan.key_products = decay_products(p, dtype, on_tensor_cores).of_keys;
      break;
    case ScanKind::GradV:
      scan.a = k, scan.b = scaled_q, scan.x = g, scan.out = {p.grad_v}, scan.m = p.grad_last.m;
      break;
  }
  place_states(p.states, dtype, scan);
  return scan;
}

}  // namespace
}  // namespace linear_cuda

void linear_attention_forward_cuda(const LinearAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  if (p.is_step()) return queue_step(p, dtype, stream);
  const bool on_tensor_cores = runs_on_tensor_cores(p.shape, dtype);
  Scan scan = scan_of(p.shape, p.eps, dtype, ScanKind::Output, on_tensor_cores);
  const bool maps = p.shape.feature_map == FeatureMap::EluPlusOne;
  scan.a = {p.q, maps}, scan.b = {p.k, maps}, scan.x = {p.v}, scan.out = {p.y};
  place_states(p.states, dtype, scan);
  scan.deep = p.scratch;
  scan.decay = p.decay;
  scan.m = p.initial.m, scan.z = p.initial.z;
  scan.new_m = p.last.m, scan.new_z = p.last.z;
  run_scan(scan, dtype, stream);
}

void linear_attention_backward_cuda(const LinearAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  using namespace linear_cuda;
  if (!p.grad_q && !p.grad_k && !p.grad_v && !p.grad_initial && !p.grad_decay) return;
  const bool on_tensor_cores = runs_on_tensor_cores(p.shape, dtype) && key_gradients_fit(p.shape, dtype);
  const bool with_grad_q = grad_q_finds_rows(p.shape, dtype, on_tensor_cores);
  const bool reads_rows = p.shape.normalize || p.grad_decay;
  const auto run = [&](ScanKind kind) { run_scan(backward_scan(p, dtype, kind, on_tensor_cores), dtype, stream); };
  if (reads_rows && !with_grad_q) run(ScanKind::Denominators);
  if (p.grad_q || (reads_rows && with_grad_q)) run(ScanKind::GradQ);
  if (p.grad_k || p.grad_initial || p.grad_decay || (on_tensor_cores && p.grad_v)) run(ScanKind::GradK);
  if (p.grad_v && !on_tensor_cores) run(ScanKind::GradV);
  if (p.grad_decay) finish_grad_decay(p, decay_products(p, dtype, on_tensor_cores), dtype, stream);
}

const LinearAttentionKernels linear_attention_cuda{linear_attention_plan_cuda, build_sequences_cuda,
                                                   linear_attention_forward_cuda, linear_attention_backward_cuda,
                                                   linear_attention_sum_decays_cuda};

}  // namespace memcheck
