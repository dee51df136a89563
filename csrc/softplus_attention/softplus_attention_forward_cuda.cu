#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_tiles_cuda.cuh"

// The forward on CUDA. Causal: one pass over keys and queries, in which sums go from block to block. Not
// causal: a pass over the keys, then one over the queries.

namespace memcheck {
namespace softplus_cuda {
namespace {

template <typename scalar_t>
struct ForwardShared {
  KeyTiles<scalar_t> tiles[kGroups / 2];
  GroupSums<acc_type<scalar_t>> groups;
  ChainShared<acc_type<scalar_t>> chain;
};

// The blocks of a multiprocessor that registers must suffice for.
template <typename scalar_t>
constexpr int kForwardBlocks = sizeof(scalar_t) > 4 ? 1 : 3;

// Replaces q by y = softplus(q) m.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void attend(const Means<acc_t>& means, const acc_t (&z)[kRows], const acc_t (&a)[kRows],
                                       scalar_t (&q)[kRows]) {
  unroll<kRows>([&](int row) {
    const acc_t m = means.mean(a[row], means.inverse(z[row]));
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  });
}

// The first chunk begins from the state before, and the last one writes the state after. Every full chunk writes the
// sums up to its end to `carries`, if there are any.
template <bool has_states, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    forward_causal_kernel(SoftplusAttentionForward p, TileOrders orders, Chain<acc_type<scalar_t>> chain,
                          Slots<acc_type<scalar_t>> carries) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = key_work(p.shape, chain.turn(memory.chain.turn));
  const int64_t T = work.x.keys;
  const int64_t S = work.x.queries;
  if (work.chunk >= chunks_of(T)) return;
  const int64_t t = work.chunk * kChunk;
  const int64_t s = t - (T - S);  // the query whose last key is the chunk's first
  auto& tiles = memory.tiles[me.warp()];
  request_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  scalar_t q[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows_of(me, s, S), q);
  await_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  acc_t z[kRows], a[kRows];
  weigh(tiles, true, me, rows_of(me, t, T), z, a);
  const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
  memory.groups[me.group][me.lane] = own;
  __syncthreads();
  const Pair<acc_t> groups = sum_of_groups<false>(memory.groups, me);
  const bool is_last = me.group == kGroups - 1;
  const Link<acc_t> link{work, me, work.chunk, chunks_of(T), is_last, groups + own};
  const auto begin = [&]() -> CompensatedPair<acc_t> {
    if (!has_states) return {};
    return {load_state<acc_t>(p.state.before, work.sequence, work.channel(me)),
            load_state<acc_t>(p.state.before_rest, work.sequence, work.channel(me))};
  };
  const auto end = [&](const CompensatedPair<acc_t>& sums) {
    if (carries.data != nullptr && t + kChunk <= T)
      carries.store(p.shape.first_carry(work.x, work.sequence) + work.chunk, work.channel(me), sums.sum);
    if (has_states && t + kChunk >= T) {
      store_state(p.state.after, work.sequence, work.channel(me), sums.sum);
      store_state(p.state.after_rest, work.sequence, work.channel(me), sums.rest);
    }
  };
  const Pair<acc_t> before = chain.pass(link, memory.chain, begin, end);
  attend(Means<acc_t>(before + groups, p.eps), z, a, q);
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s).store(rows_of(me, s, S), q);
}

// Not causal: the sums over each chunk of keys, into its slot.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    key_sums_kernel(SoftplusAttentionForward p, TileOrders orders, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = key_work(p.shape, blockIdx.x);
  if (work.chunk >= chunks_of(work.x.keys)) return;
  auto& tiles = memory.tiles[me.warp()];
  request_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  await_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  acc_t z[kRows], a[kRows];
  weigh(tiles, true, me, rows_of(me, work.chunk * kChunk, work.x.keys), z, a);
  const Pair<acc_t> own{sum_of_rows(z), sum_of_rows(a)};
  memory.groups[me.group][me.lane] = own;
  __syncthreads();
  const Places places = places_of(p.shape, work.sequence, work.x.first_key, kChunk);
  if (me.group == kGroups - 1 && work.has(me))
    slots.store(places.at(work.chunk), work.channel(me), sum_of_groups<false>(memory.groups, me) + own);
}

// Not causal: a chunk of queries, all of which see the same keys.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<scalar_t>)
    forward_queries_kernel(SoftplusAttentionForward p, Slots<acc_type<scalar_t>> totals) {
  using acc_t = acc_type<scalar_t>;
  const Thread me = this_thread();
  const Work work = query_work(p.shape, blockIdx.x);
  const int64_t s = work.chunk * kChunk;
  if (s >= work.x.queries) return;
  const RowRange rows = rows_of(me, s, work.x.queries);
  scalar_t q[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows, q);
  const Means<acc_t> means(totals.load(work.sequence, work.channel(me)), p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  unroll<kRows>([&](int row) {
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  });
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s).store(rows, q);
}

// ---- launches

template <typename scalar_t>
void forward_causal(SoftplusAttentionForward p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  // Without queries the kernel still computes their addresses, which must not be null.
  if (shape.S == 0) p.q = p.y = p.k;
  const auto chain = begin_chain<acc_t>("softplus_attention_forward, begin of sums", shape, p.scratch, stream);
  const bool has_states = has_state(p.state);
  launch_work({"softplus_attention_forward", shape, shape.T > 0 ? key_tile_places(shape, kChunk) : 0,
               sizeof(ForwardShared<scalar_t>), stream},
              has_states ? forward_causal_kernel<true, scalar_t> : forward_causal_kernel<false, scalar_t>, p, orders,
              chain, slots_in<acc_t>(p.carries, shape));
  // Without keys the state after is that before.
  if (has_states && shape.T == 0)
    sum_slots<acc_t>({"softplus_attention_forward, state", shape, /*of_queries=*/false, p.state},
                     slots_in<acc_t>(nullptr, shape), nullptr, stream);
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<acc_t>(p.carries ? p.carries : p.scratch, shape);
  const bool sums_chunks = shape.sequences || shape.key_chunks() != 1;
  const auto slots = !sums_chunks ? totals
                     : p.carries  ? slots_in<acc_t>(p.scratch, shape)
                                  : slots_in<acc_t>(totals.data + 2 * sequence_count(shape) * shape.R, shape);
  launch_work({"softplus_attention_forward, sums of keys", shape, shape.T > 0 ? key_tile_places(shape, kChunk) : 0,
               sizeof(ForwardShared<scalar_t>), stream},
              key_sums_kernel<scalar_t>, p, orders, slots);
  if (sums_chunks || has_state(p.state))
    sum_slots({"softplus_attention_forward, sums of chunks", shape, /*of_queries=*/false, p.state}, slots, totals.data,
              stream);
  launch_work(
      {"softplus_attention_forward, queries", shape, shape.S > 0 ? query_tile_places(shape, kChunk) : 0, 0, stream},
      forward_queries_kernel<scalar_t>, p, totals);
}

}  // namespace
}  // namespace softplus_cuda

void softplus_attention_forward_cuda(const SoftplusAttentionForward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using namespace softplus_cuda;
    using scalar_t = decltype(scalar);
    const TileOrders orders{tile_order<scalar_t>(p.k), tile_order<scalar_t>(p.v), {}, {}};
    p.shape.causal ? forward_causal<scalar_t>(p, orders, stream) : forward_not_causal<scalar_t>(p, orders, stream);
  });
}

}  // namespace memcheck
