#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_sums_cuda.cuh"

// The step of decoding on CUDA, and the scan of sums that forward and backward share.

namespace memcheck {
namespace softplus_cuda {
namespace {

// ---- scan

// scan_slots; a thread for each channel.
template <typename acc_t>
__global__ void scan_kernel(Slots<acc_t> slots, int64_t channels, bool reversed, acc_t* totals) {
  constexpr int kBatch = 16;  // slots that are loaded together, before their additions
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= channels) return;
  acc_t* row = slots.data + index / slots.R * slots.count * slots.R + index % slots.R;
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t start = 0; start < slots.count; start += kBatch) {
    acc_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = reversed ? slots.count - 1 - start - i : start + i;
      batch[i] = start + i < slots.count ? row[slot * slots.R] : acc_t(0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = reversed ? slots.count - 1 - start - i : start + i;
      if (start + i >= slots.count) break;
      add_to_sum(batch[i], sum, rest);
      row[slot * slots.R] = sum;
    }
  }
  if (totals != nullptr) totals[index] = sum;
}

// ---- decoding

constexpr int kStepThreads = 128;

// A thread for each channel.
template <typename scalar_t>
__global__ void __launch_bounds__(kStepThreads) step_kernel(SoftplusAttentionStep p) {
  using acc_t = acc_type<scalar_t>;
  const int64_t index = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;
  if (index >= p.B * p.R) return;
  const int64_t b = index / p.R;
  const int64_t r = index % p.R;
  Pair<acc_t> state{*p.z.at<acc_t>(b, 0, r), *p.a.at<acc_t>(b, 0, r)};
  Pair<acc_t> rest{acc_t(0), acc_t(0)};
  for (int64_t chunk = 0; chunk < p.T; chunk += kChunk) {
    const int64_t chunk_end = chunk + kChunk < p.T ? chunk + kChunk : p.T;
    Pair<acc_t> of_chunk{acc_t(0), acc_t(0)};
    for (int64_t start = chunk; start < chunk_end; start += kWarpRows) {
      const int64_t end = start + kWarpRows < chunk_end ? start + kWarpRows : chunk_end;
      Pair<acc_t> of_rows{acc_t(0), acc_t(0)};
      for (int64_t t = start; t < end; ++t) {
        const acc_t weight = softplus_on_device<scalar_t>(to_acc(*p.k.at<scalar_t>(b, r, t)));
        of_rows = of_rows + Pair<acc_t>{weight, weight * to_acc(*p.v.at<scalar_t>(b, r, t))};
      }
      of_chunk = of_chunk + of_rows;
    }
    add_pair_to_sum(of_chunk, state, rest);
  }
  const Means<acc_t> means(state, p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  const acc_t softplus_q = softplus_on_device<scalar_t>(to_acc(*p.q.at<scalar_t>(b, 0, r)));
  *p.y.at<scalar_t>(b, 0, r) = from_acc<scalar_t>(softplus_attention_from_mean(softplus_q, m));
  *p.new_z.at<acc_t>(b, 0, r) = state.first;
  *p.new_a.at<acc_t>(b, 0, r) = state.second;
}

}  // namespace

template <typename acc_t>
void scan_slots(const SlotScan& scan, const Slots<acc_t>& slots, acc_t* totals, cudaStream_t stream) {
  constexpr int64_t kScanThreads = 128;
  const int64_t channels = scan.planes * slots.B * slots.R;
  const auto blocks = static_cast<unsigned>(ceil_div(channels, kScanThreads));
  if (blocks > 0)
    launch({scan.kernel, dim3(blocks), dim3(kScanThreads), 0, stream}, scan_kernel<acc_t>, slots, channels,
           scan.reversed, totals);
}

template void scan_slots<float>(const SlotScan&, const Slots<float>&, float*, cudaStream_t);
template void scan_slots<double>(const SlotScan&, const Slots<double>&, double*, cudaStream_t);

}  // namespace softplus_cuda

void softplus_attention_step_cuda(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t stream) {
  using namespace softplus_cuda;
  const auto blocks = static_cast<unsigned>(ceil_div(p.B * p.R, kStepThreads));
  if (blocks == 0) return;
  with_device_type(dtype, [&](auto scalar) {
    launch({"softplus_attention_step", dim3(blocks), dim3(kStepThreads), 0, stream}, step_kernel<decltype(scalar)>, p);
  });
}

const SoftplusAttentionKernels softplus_attention_cuda{softplus_attention_plan_cuda, softplus_attention_forward_cuda,
                                                       softplus_attention_backward_cuda, softplus_attention_step_cuda};

}  // namespace memcheck
