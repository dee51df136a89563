#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_sums_cuda.cuh"

// The step of decoding on CUDA, and what forward and backward share: sums of slots, and the begin of a chain.

namespace memcheck {
namespace softplus_cuda {
namespace {

constexpr int kSlotThreads = 128;

// sum_slots; a thread for each channel of each plane.
template <bool has_states, typename acc_t>
__global__ void __launch_bounds__(kSlotThreads)
    sum_kernel(SoftplusAttentionShape shape, bool of_queries, Slots<acc_t> slots, SoftplusAttentionState state,
               acc_t* totals) {
  constexpr int kBatch = 16;  // slots that are loaded together, before their additions
  const int64_t index = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x;
  const int64_t r = index % slots.R;
  const int plane = static_cast<int>(index / slots.R % slots.planes);
  const int64_t sequence = index / slots.R / slots.planes;
  if (sequence >= sequence_count(shape)) return;
  const Sequence x = sequence_of(shape, sequence);
  const int64_t count = ((of_queries ? x.queries : x.keys) + kChunk - 1) / kChunk;
  const Places places = places_of(shape, sequence, of_queries ? x.first_query : x.first_key, kChunk);
  acc_t sum = acc_t(0);
  acc_t rest = acc_t(0);
  if (has_states && state.before) sum = *state.before.at<acc_t>(plane, sequence, r);
  if (has_states && state.before_rest) rest = *state.before_rest.at<acc_t>(plane, sequence, r);
  for (int64_t start = 0; start < count; start += kBatch) {
    acc_t batch[kBatch];
    unroll<kBatch>([&](int i) { batch[i] = start + i < count ? *slots.at(plane, places.at(start + i), r) : acc_t(0); });
    unroll<kBatch>([&](int i) { add_to_sum(batch[i], sum, rest); });
  }
  if (!has_states || totals != nullptr) totals[index] = sum;
  if (has_states && state.after) *state.after.at<acc_t>(plane, sequence, r) = sum;
  if (has_states && state.after_rest) *state.after_rest.at<acc_t>(plane, sequence, r) = rest;
}

// begin_chain; a thread for each number.
template <typename acc_t>
__global__ void __launch_bounds__(kSlotThreads) begin_kernel(Chain<acc_t> chain, int64_t numbers) {
  const int64_t index = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x;
  const auto not_passed = ~WordOf<acc_t>(0);
  if (index < numbers) __builtin_memcpy(&chain.sums.data[index], &not_passed, sizeof(not_passed));
  if (index == 0) *chain.ticket = 0;
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
  CompensatedPair<acc_t> state{{*p.z.at<acc_t>(b, 0, r), *p.a.at<acc_t>(b, 0, r)}, {acc_t(0), acc_t(0)}};
  for (int64_t chunk = 0; chunk < p.T; chunk += kChunk) {
    const int64_t chunk_end = chunk + kChunk < p.T ? chunk + kChunk : p.T;
    Pair<acc_t> of_chunk{acc_t(0), acc_t(0)};
    for (int64_t start = chunk; start < chunk_end; start += kRows) {
      const int64_t end = start + kRows < chunk_end ? start + kRows : chunk_end;
      Pair<acc_t> of_rows{acc_t(0), acc_t(0)};
      for (int64_t t = start; t < end; ++t) {
        const acc_t weight = softplus_on_device<scalar_t>(to_acc(*p.k.at<scalar_t>(b, r, t)));
        of_rows = of_rows + Pair<acc_t>{weight, weight * to_acc(*p.v.at<scalar_t>(b, r, t))};
      }
      of_chunk = of_chunk + of_rows;
    }
    state.add(of_chunk);
  }
  const Means<acc_t> means(state.sum, p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  const acc_t softplus_q = softplus_on_device<scalar_t>(to_acc(*p.q.at<scalar_t>(b, 0, r)));
  *p.y.at<scalar_t>(b, 0, r) = from_acc<scalar_t>(softplus_attention_from_mean(softplus_q, m));
  *p.new_z.at<acc_t>(b, 0, r) = state.sum.first;
  *p.new_a.at<acc_t>(b, 0, r) = state.sum.second;
}

}  // namespace

template <typename acc_t>
void sum_slots(const SlotSums& sums, const Slots<acc_t>& slots, acc_t* totals, cudaStream_t stream) {
  const int64_t channels = sequence_count(sums.shape) * slots.planes * slots.R;
  launch({sums.kernel, ceil_div(channels, kSlotThreads), dim3(kSlotThreads), 0, stream},
         has_state(sums.state) ? sum_kernel<true, acc_t> : sum_kernel<false, acc_t>, sums.shape, sums.of_queries, slots,
         sums.state, totals);
}

template void sum_slots<float>(const SlotSums&, const Slots<float>&, float*, cudaStream_t);
template void sum_slots<double>(const SlotSums&, const Slots<double>&, double*, cudaStream_t);

template <typename acc_t>
Chain<acc_t> begin_chain(const char* kernel, const SoftplusAttentionShape& shape, void* scratch, cudaStream_t stream) {
  const auto sums = slots_in<acc_t>(scratch, shape);
  if (shape.key_chunks() < 2) return {shape, sums, sums, nullptr};
  const int64_t of_chunks = 2 * key_tile_places(shape, kChunk) * shape.R;
  const int64_t of_hops = 2 * key_tile_places(shape, kHopChunks * kChunk) * shape.R;
  const int64_t numbers = of_chunks + of_hops;
  const Chain<acc_t> chain{shape, sums, slots_in<acc_t>(sums.data + of_chunks, shape),
                           reinterpret_cast<uint32_t*>(sums.data + numbers)};
  launch({kernel, ceil_div(numbers, kSlotThreads), dim3(kSlotThreads), 0, stream}, begin_kernel<acc_t>, chain, numbers);
  return chain;
}

template Chain<float> begin_chain<float>(const char*, const SoftplusAttentionShape&, void*, cudaStream_t);
template Chain<double> begin_chain<double>(const char*, const SoftplusAttentionShape&, void*, cudaStream_t);

}  // namespace softplus_cuda

void softplus_attention_step_cuda(const SoftplusAttentionStep& p, Dtype dtype, cudaStream_t stream) {
  using namespace softplus_cuda;
  const int64_t blocks = ceil_div(p.B * p.R, kStepThreads);
  with_device_type(dtype, [&](auto scalar) {
    launch({"softplus_attention_step", blocks, dim3(kStepThreads), 0, stream}, step_kernel<decltype(scalar)>, p);
  });
}

const SoftplusAttentionKernels softplus_attention_cuda{softplus_attention_plan_cuda, softplus_attention_forward_cuda,
                                                       softplus_attention_backward_cuda, softplus_attention_step_cuda,
                                                       build_sequences_cuda};

}  // namespace memcheck
