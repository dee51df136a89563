#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_tiles_cuda.cuh"

// The forward on CUDA. Causal: one pass over keys and queries, in which running sums go from block to block. Not
// causal: a pass over the keys, then one over the queries.

namespace memcheck {
namespace softplus_cuda {
namespace {

template <typename scalar_t>
struct ForwardShared {
  KeyTiles<scalar_t> tiles[kGroups / 2];
  GroupSums<acc_type<scalar_t>> groups;
  Pair<acc_type<scalar_t>> before[kLanes];  // the sums over all earlier chunks
  uint32_t turn;
};

// The blocks of a multiprocessor that registers must suffice for.
template <typename scalar_t>
constexpr int kForwardBlocks = sizeof(scalar_t) > 4 ? 1 : 3;

// Replaces q by y = softplus(q) m.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void attend(const Means<acc_t>& means, const acc_t (&z)[kRows], const acc_t (&a)[kRows],
                                       scalar_t (&q)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const acc_t m = means.mean(a[row], means.inverse(z[row]));
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  }
}

// The first chunk begins from the state before, and the last one writes the state after.
template <bool has_states, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    forward_causal_kernel(SoftplusAttentionForward p, TileOrders orders, RunningSums<acc_type<scalar_t>> running) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, running.turn(memory.turn));
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t t = work.chunk * kChunk;
  const int64_t s = t - (T - S);  // the query whose last key is the chunk's first
  auto& tiles = memory.tiles[me.warp()];
  request_keys(p.k, p.v, orders, work, me, T, tiles);
  scalar_t q[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows_of(me, s, S), q);
  await_keys();
  acc_t z[kRows], a[kRows];
  weigh(tiles, true, me, rows_of(me, t, T), z, a);
  const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
  memory.groups[me.group][me.lane] = own;
  const bool is_last = me.group == kGroups - 1;
  CompensatedPair<acc_t> sums{};
  if (is_last) {
    if (work.chunk > 0)
      sums = running.await(work.b, work.chunk - 1, work.channel(me));
    else if (has_states)
      sums = {load_state<acc_t>(p.state.before, work.b, work.channel(me)),
              load_state<acc_t>(p.state.before_rest, work.b, work.channel(me))};
    memory.before[me.lane] = sums.sum;
  }
  __syncthreads();
  const Pair<acc_t> groups = sum_of_groups<false>(memory.groups, me);
  const bool passes_on = work.chunk < running.sums.count;
  const bool ends = has_states && (work.chunk + 1) * kChunk >= T;
  if (is_last && work.has(me) && (passes_on || ends)) {
    sums.add(groups + own);
    if (passes_on) running.pass_on(work.b, work.chunk, work.channel(me), sums);
    if (ends) {
      store_state(p.state.after, work.b, work.channel(me), sums.sum);
      store_state(p.state.after_rest, work.b, work.channel(me), sums.rest);
    }
  }
  attend(Means<acc_t>(memory.before[me.lane] + groups, p.eps), z, a, q);
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s).store(rows_of(me, s, S), q);
}

// Not causal: the sums over each chunk of keys, into its slot.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    key_sums_kernel(SoftplusAttentionForward p, TileOrders orders, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, blockIdx.x);
  auto& tiles = memory.tiles[me.warp()];
  request_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  await_keys();
  acc_t z[kRows], a[kRows];
  weigh(tiles, true, me, rows_of(me, work.chunk * kChunk, p.shape.T), z, a);
  const Pair<acc_t> own{sum_of_rows(z), sum_of_rows(a)};
  memory.groups[me.group][me.lane] = own;
  __syncthreads();
  if (me.group == kGroups - 1 && work.has(me))
    slots.store(work.b, work.chunk, work.channel(me), sum_of_groups<false>(memory.groups, me) + own);
}

// Not causal: a chunk of queries, all of which see the same keys.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    forward_queries_kernel(SoftplusAttentionForward p, Slots<acc_type<scalar_t>> totals) {
  using acc_t = acc_type<scalar_t>;
  const Thread me = this_thread();
  const Work work = work_of(p.shape, blockIdx.x);
  const int64_t s = work.chunk * kChunk;
  const RowRange rows = rows_of(me, s, p.shape.S);
  scalar_t q[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows, q);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s).store(rows, q);
}

// ---- launches

template <typename scalar_t>
void forward_causal(SoftplusAttentionForward p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  // Without queries the kernel still computes their addresses, which must not be null.
  if (shape.S == 0) p.q = p.y = p.k;
  const int64_t chunks = shape.key_chunks();
  const auto running = running_sums_in<acc_t>(p.carries, p.sums, shape, chunks, p.carries ? shape.carries() : 0);
  begin_sums("softplus_attention_forward, begin of sums", running, stream);
  const bool has_states = has_state(p.state);
  launch_work({"softplus_attention_forward", shape, chunks, sizeof(ForwardShared<scalar_t>), stream},
              has_states ? forward_causal_kernel<true, scalar_t> : forward_causal_kernel<false, scalar_t>, p, orders,
              running);
  // Without keys the state after is that before.
  if (has_states && chunks == 0)
    sum_slots<acc_t>({"softplus_attention_forward, state", 2, p.state}, slots_in<acc_t>(nullptr, shape, 0), nullptr,
                     stream);
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  const int64_t chunks = shape.key_chunks();
  const auto totals = slots_in<acc_t>(p.carries, shape, 1);
  const auto slots = chunks == 1 ? totals : slots_in<acc_t>(p.sums, shape, chunks);
  launch_work({"softplus_attention_forward, sums of keys", shape, chunks, sizeof(ForwardShared<scalar_t>), stream},
              key_sums_kernel<scalar_t>, p, orders, slots);
  if (chunks != 1 || has_state(p.state))
    sum_slots({"softplus_attention_forward, sums of chunks", 2, p.state}, slots, totals.data, stream);
  launch_work({"softplus_attention_forward, queries", shape, shape.query_chunks(), 0, stream},
              forward_queries_kernel<scalar_t>, p, totals);
}

}  // namespace
}  // namespace softplus_cuda

void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using namespace softplus_cuda;
    using scalar_t = decltype(scalar);
    const int64_t T = p.shape.T;
    const TileOrders orders{tile_order<scalar_t>(p.k, T), tile_order<scalar_t>(p.v, T), {}, {}};
    p.shape.causal ? forward_causal<scalar_t>(p, orders, stream) : forward_not_causal<scalar_t>(p, orders, stream);
  });
}

}  // namespace memcheck
