#include <type_traits>

#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_tiles_cuda.cuh"

// The backward on CUDA. The formulas are those of softplus_query_gradients and softplus_key_gradients in
// common/formulas.h: w and w m are the gradients of a query's sums, and W and X their sums over the queries that see a
// key.

namespace memcheck {
namespace softplus_cuda {
namespace {

// w and wm are divided by the scale of the means.
template <typename scalar_t, typename acc_t = acc_type<scalar_t>>
__device__ __forceinline__ SoftplusQueryGradients<acc_t> query_gradients(const Means<acc_t>& means, Pair<acc_t> sums,
                                                                         acc_t q, acc_t g) {
  const acc_t inverse = means.inverse(sums.first);
  const acc_t m = means.mean(sums.second, inverse);
  return softplus_query_gradients(g, softplus_and_sigmoid_on_device<scalar_t>(q), inverse, m);
}

template <typename scalar_t>
struct BackwardShared {
  using acc_t = acc_type<scalar_t>;

  KeyTiles<scalar_t> tiles[kGroups / 2];
  GroupSums<acc_t> groups;
  GroupSums<acc_t> later_groups;
  ChainShared<acc_t> chain;
};

// The blocks of a multiprocessor that registers must suffice for.
template <typename scalar_t>
constexpr int kBackwardBlocks = sizeof(scalar_t) > 4 ? 1 : 2;

// Replaces k and v of a group's rows of a tile by their gradients, gradients(row, k, v).
template <typename scalar_t, typename Gradients>
__device__ __forceinline__ void differentiate_keys(bool has_v, Thread me, KeyTiles<scalar_t>& tiles,
                                                   const Gradients& gradients) {
  constexpr int kCount = kPackSize<scalar_t>;
#pragma unroll
  for (int start = 0; start < kRows; start += kCount) {
    acc_type<scalar_t> k[kCount];
    acc_type<scalar_t> v[kCount] = {};
    read_keys(tiles, has_v, me, start, k, v);
    unroll<kCount>([&](int i) {
      const auto of_key = gradients(start + i, softplus_and_sigmoid_on_device<scalar_t>(k[i]), v[i]);
      k[i] = of_key.grad_k;
      v[i] = of_key.grad_v;
    });
    const int position = me.group % 2 * kRows + start;
    store_pack(rounded_pack<scalar_t>(k), &tiles.k.channels[me.lane][position]);
    store_pack(rounded_pack<scalar_t>(v), &tiles.v.channels[me.lane][position]);
  }
}

// The gradients of a warp's tile, to global memory.
template <typename scalar_t>
__device__ __forceinline__ void store_keys(const SoftplusAttentionBackward& p, const TileOrders& orders,
                                           const Work& work, Thread me, KeyTiles<scalar_t>& tiles) {
  __syncwarp();
  if (p.grad_k) KeyTileInMemory<scalar_t>(p.grad_k, orders.grad_k, work, me, p.shape.T).store(tiles.k, me);
  if (p.grad_v) KeyTileInMemory<scalar_t>(p.grad_v, orders.grad_v, work, me, p.shape.T).store(tiles.v, me);
}

// W and X over the queries after the last position, (W, X) = (dA, -dZ), from the gradient of the state there.
template <typename acc_t>
__device__ __forceinline__ Pair<acc_t> load_later(const Strided<3>& grad_after, int64_t sequence, int64_t r) {
  const Pair<acc_t> of_state = load_state<acc_t>(grad_after, sequence, r);
  return {of_state.second, -of_state.first};
}

// The gradient of the state before, from W and X over all queries: (dZ, dA) = (-X, W).
template <typename acc_t>
__device__ __forceinline__ void store_grad_before(const Strided<3>& grad_before, int64_t sequence, int64_t r,
                                                  Pair<acc_t> sums) {
  store_state<acc_t>(grad_before, sequence, r, {-sums.second, sums.first});
}

// W and X over the queries after a chunk, from the chunks behind it, or from the gradient of the state after the last.
// The first chunk writes that of the state before.
template <bool has_states, typename acc_t, typename Memory>
__device__ __forceinline__ Pair<acc_t> pass_later(const SoftplusAttentionBackward& p, const Link<acc_t>& link,
                                                  Memory& memory, const Chain<acc_t>& chain) {
  const int64_t sequence = link.work.sequence, channel = link.work.channel(link.me);
  return chain.pass(
      link, memory,
      [&]() -> CompensatedPair<acc_t> {
        if (!has_states) return {};
        return {load_later<acc_t>(p.grad_after, sequence, channel),
                load_later<acc_t>(p.grad_after_rest, sequence, channel)};
      },
      [&](const CompensatedPair<acc_t>& sums) {
        if (!has_states || link.work.chunk > 0) return;
        store_grad_before(p.grad_before, sequence, channel, sums.sum);
        store_grad_before(p.grad_before_rest, sequence, channel, sums.rest);
      });
}

// Causal. Forms Z and A forwards for w and grad_q, then W and X backwards for grad_k and grad_v: the chain goes from
// the last chunk to the first.
template <bool has_states, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<scalar_t>)
    backward_causal_kernel(SoftplusAttentionBackward p, TileOrders orders, Slots<acc_type<scalar_t>> carries,
                           Chain<acc_type<scalar_t>> chain) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<BackwardShared<scalar_t>>();
  const Thread me = this_thread();
  Work work = key_work(p.shape, chain.turn(memory.chain.turn));
  const int64_t T = work.x.keys;
  const int64_t S = work.x.queries;
  const int64_t step = work.chunk;
  if (step >= chunks_of(T)) return;
  work.chunk = chunks_of(T) - 1 - step;
  const int64_t t = work.chunk * kChunk;
  const int64_t s = t - (T - S);  // the query whose last key is the chunk's first
  const bool has_v = static_cast<bool>(p.v);
  auto& tiles = memory.tiles[me.warp()];
  request_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  const RowRange rows = rows_of(me, s, S);
  scalar_t q[kRows], g[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows, q);
  QueryRows<scalar_t>(p.grad_y, work, me, s).load(rows, g);
  const Pair<acc_t> carry =
      work.chunk > 0 ? carries.load(p.shape.first_carry(work.x, work.sequence) + work.chunk - 1, work.channel(me))
                     : load_state<acc_t>(has_states ? p.before : Strided<3>{}, work.sequence, work.channel(me));
  await_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);

  acc_t weights[kRows], a[kRows], w[kRows], wm[kRows];
  weigh(tiles, has_v, me, rows_of(me, t, T), weights, a);
  const Pair<acc_t> of_keys{sum_of_rows(weights), scan_rows<false>(a)};
  memory.groups[me.group][me.lane] = of_keys;
  __syncthreads();
  const Means<acc_t> means(carry + sum_of_groups<false>(memory.groups, me), p.eps);
  acc_t z = acc_t(0);
  unroll<kRows>([&](int row) {
    z += weights[row];
    const auto gradients = query_gradients<scalar_t>(means, Pair<acc_t>{z, a[row]}, to_acc(q[row]), to_acc(g[row]));
    q[row] = from_acc<scalar_t>(gradients.grad_q);
    w[row] = gradients.w;
    wm[row] = gradients.wm;
  });
  clear_absent_rows(rows, w);
  clear_absent_rows(rows, wm);
  if (p.grad_q && work.has(me)) QueryRows<scalar_t>(p.grad_q, work, me, s).store(rows, q);
  if (!p.grad_k && !p.grad_v && !(has_states && p.grad_before)) return;

  const Pair<acc_t> own{scan_rows<true>(w) * means.scale, scan_rows<true>(wm) * means.scale};
  memory.later_groups[me.group][me.lane] = own;
  __syncthreads();
  const Pair<acc_t> groups = sum_of_groups<true>(memory.later_groups, me);
  const Link<acc_t> link{work, me, step, chunks_of(T), /*leads=*/me.group == 0, groups + own};
  const Pair<acc_t> later = pass_later<has_states>(p, link, memory.chain, chain);
  const Pair<acc_t> after = later + groups;
  // softplus(k) and sigmoid(k) are computed again: neither shared memory nor registers have room to keep them.
  differentiate_keys(has_v, me, tiles, [&](int row, SoftplusSigmoid<acc_t> k, acc_t v) {
    return softplus_key_gradients(k, v, after.first + w[row] * means.scale, after.second + wm[row] * means.scale);
  });
  store_keys(p, orders, work, me, tiles);
}

template <typename acc_t>
using QueryShared = acc_t[kGroups][kLanes];

// Not causal: a chunk of queries, all of which see the same keys. Forms grad_q, and the sums of w, into the chunk's
// slot.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<scalar_t>)
    backward_queries_kernel(SoftplusAttentionBackward p, Slots<acc_type<scalar_t>> totals,
                            Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& groups = shared<QueryShared<acc_t>>();
  const Thread me = this_thread();
  const Work work = query_work(p.shape, blockIdx.x);
  const int64_t s = work.chunk * kChunk;
  if (s >= work.x.queries) return;
  const RowRange rows = rows_of(me, s, work.x.queries);
  scalar_t q[kRows], g[kRows];
  QueryRows<scalar_t>(p.q, work, me, s).load(rows, q);
  QueryRows<scalar_t>(p.grad_y, work, me, s).load(rows, g);
  const Means<acc_t> means(totals.load(work.sequence, work.channel(me)), p.eps);
  acc_t w[kRows];
  unroll<kRows>([&](int row) {
    const auto gradients =
        query_gradients<scalar_t>(means, Pair<acc_t>{acc_t(0), acc_t(0)}, to_acc(q[row]), to_acc(g[row]));
    q[row] = from_acc<scalar_t>(gradients.grad_q);
    w[row] = gradients.w;
  });
  clear_absent_rows(rows, w);
  if (p.grad_q && work.has(me)) QueryRows<scalar_t>(p.grad_q, work, me, s).store(rows, q);
  groups[me.group][me.lane] = sum_of_rows(w) * means.scale;
  __syncthreads();
  if (me.group > 0 || !work.has(me)) return;
  acc_t sum = acc_t(0);
  for (int group = 0; group < kGroups; ++group) sum += groups[group][me.lane];
  const Places places = places_of(p.shape, work.sequence, work.x.first_query, kChunk);
  *slots.at(0, places.at(work.chunk), work.channel(me)) = sum;
}

// Not causal: W and X of every key of a channel. All queries see every key, so X = W m; then the gradient of the state
// after is added.
template <bool has_states, typename acc_t>
__device__ __forceinline__ Pair<acc_t> sums_of_queries(const SoftplusAttentionBackward& p, const Slots<acc_t>& totals,
                                                       const Slots<acc_t>& sums, int64_t sequence, int64_t r) {
  const Means<acc_t> means(totals.load(sequence, r), p.eps);
  const acc_t w = *sums.at(0, sequence, r);
  const Pair<acc_t> of_queries{w, w * means.mean(acc_t(0), means.inverse(acc_t(0)))};
  return has_states ? of_queries + load_later<acc_t>(p.grad_after, sequence, r) : of_queries;
}

// Not causal: the gradient of the state before; a thread for each channel.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads)
    backward_state_kernel(SoftplusAttentionBackward p, Slots<acc_t> totals, Slots<acc_t> sums) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t sequence = index / p.shape.R;
  const int64_t r = index % p.shape.R;
  if (sequence >= sequence_count(p.shape)) return;
  store_grad_before(p.grad_before, sequence, r, sums_of_queries<true>(p, totals, sums, sequence, r));
}

// Not causal: a chunk of keys, which all queries see. Every key has the same W and X.
template <bool has_states, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<scalar_t>)
    backward_keys_kernel(SoftplusAttentionBackward p, TileOrders orders, Slots<acc_type<scalar_t>> totals,
                         Slots<acc_type<scalar_t>> sums) {
  using acc_t = acc_type<scalar_t>;
  auto& tiles = shared<KeyTiles<scalar_t>[kGroups / 2]>()[this_thread().warp()];
  const Thread me = this_thread();
  const Work work = key_work(p.shape, blockIdx.x);
  if (work.chunk * kChunk >= work.x.keys) return;
  request_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  const Pair<acc_t> w = sums_of_queries<has_states>(p, totals, sums, work.sequence, work.channel(me));
  await_keys(p.k, p.v, orders, work, me, p.shape.T, tiles);
  differentiate_keys(static_cast<bool>(p.v), me, tiles, [&](int, SoftplusSigmoid<acc_t> k, acc_t v) {
    return softplus_key_gradients(k, v, w.first, w.second);
  });
  store_keys(p, orders, work, me, tiles);
}

// ---- launches

bool has_state(const SoftplusAttentionBackward& p) {
  return p.before || p.grad_after || p.grad_before;
}

template <typename scalar_t>
void backward_causal(SoftplusAttentionBackward p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  if (shape.S == 0) p.q = p.grad_y = p.grad_q = p.k;  // as in the forward
  // Without keys the gradient of the state before is that of the state after.
  if (shape.T == 0 && p.grad_before)
    sum_slots<acc_t>({"softplus_attention_backward, state",
                      shape,
                      /*of_queries=*/false,
                      {p.grad_after, p.grad_after_rest, p.grad_before, p.grad_before_rest}},
                     slots_in<acc_t>(nullptr, shape), nullptr, stream);
  if (shape.T == 0) return;
  const auto chain = begin_chain<acc_t>("softplus_attention_backward, begin of sums", shape, p.scratch, stream);
  launch_work(
      {"softplus_attention_backward", shape, key_tile_places(shape, kChunk), sizeof(BackwardShared<scalar_t>), stream},
      has_state(p) ? backward_causal_kernel<true, scalar_t> : backward_causal_kernel<false, scalar_t>, p, orders,
      slots_in<acc_t>(p.carries, shape), chain);
}

template <typename scalar_t>
void backward_not_causal(const SoftplusAttentionBackward& p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  const int64_t channels = sequence_count(shape) * shape.R;
  const auto totals = slots_in<acc_t>(p.carries, shape);
  const auto sums = slots_in<acc_t>(p.scratch, shape, /*planes=*/1);
  const bool sums_chunks = shape.sequences || shape.query_chunks() != 1;
  const auto slots = sums_chunks ? slots_in<acc_t>(sums.data + channels, shape, /*planes=*/1) : sums;
  launch_work({"softplus_attention_backward, queries", shape, shape.S > 0 ? query_tile_places(shape, kChunk) : 0,
               sizeof(QueryShared<acc_t>), stream},
              backward_queries_kernel<scalar_t>, p, totals, slots);
  if (!p.grad_k && !p.grad_v && !p.grad_before) return;
  if (sums_chunks)
    sum_slots({"softplus_attention_backward, sums of chunks", shape, /*of_queries=*/true}, slots, sums.data, stream);
  if (p.grad_before)
    launch({"softplus_attention_backward, state", ceil_div(channels, kThreads), dim3(kThreads), 0, stream},
           backward_state_kernel<acc_t>, p, totals, sums);
  if (!p.grad_k && !p.grad_v) return;
  launch_work({"softplus_attention_backward, keys", shape, shape.T > 0 ? key_tile_places(shape, kChunk) : 0,
               sizeof(KeyTiles<scalar_t>[kGroups / 2]), stream},
              has_state(p) ? backward_keys_kernel<true, scalar_t> : backward_keys_kernel<false, scalar_t>, p, orders,
              totals, sums);
}

}  // namespace
}  // namespace softplus_cuda

void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using namespace softplus_cuda;
    using scalar_t = decltype(scalar);
    const TileOrders orders{tile_order<scalar_t>(p.k), tile_order<scalar_t>(p.v), tile_order<scalar_t>(p.grad_k),
                            tile_order<scalar_t>(p.grad_v)};
    p.shape.causal ? backward_causal<scalar_t>(p, orders, stream) : backward_not_causal<scalar_t>(p, orders, stream);
  });
}

}  // namespace memcheck
