#include "softplus_attention/softplus_attention.h"
#include "softplus_attention/softplus_attention_tiles_cuda.cuh"

// The forward on CUDA. Causal: one pass over keys and queries, after a pass over the keys alone where blocks are split.
// Not causal: a pass over the keys, then one over the queries.

namespace memcheck {
namespace softplus_cuda {
namespace {

template <typename scalar_t>
struct ForwardShared {
  KeyTiles<scalar_t, kForwardTile> stages[kMostStages<scalar_t>];
  WarpSums<acc_type<scalar_t>, kForwardWarps> warps;
  Pair<acc_type<scalar_t>> before[2][kLanes];  // the sums over all tiles before this one, and before the next
};

// Sums over keys, without queries: those of each chunk into its slot, or those of all keys into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 2)
    key_sums_kernel(SoftplusAttentionForward p, Segments segments, TileOrders orders, bool of_each,
                    Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t end = work.end_chunk * kChunk < T ? work.end_chunk * kChunk : T;
  const bool writes = me.warp == kForwardWarps - 1 && work.has(me);
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  Pair<acc_t> of_chunk = zero;
  Pair<acc_t> of_all = zero;
  Pair<acc_t> rest = zero;
  int stage = 0;
  request_keys(p.k, p.v, orders, work, T, work.first_chunk * kChunk, memory.stages[0]);
  for (int64_t t = work.first_chunk * kChunk; t < end; t += kForwardTile) {
    const bool more = t + kForwardTile < end;
    await_keys();
    auto& tiles = memory.stages[stage];
    stage = (stage + 1) % kMostStages<scalar_t>;
    if (kMostStages<scalar_t> > 1 && more)
      request_keys(p.k, p.v, orders, work, T, t + kForwardTile, memory.stages[stage]);
    acc_t z[kWarpRows], a[kWarpRows];
    weigh(tiles, true, me, T - t, z, a);
    const Pair<acc_t> own{sum_of_rows(z), sum_of_rows(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kMostStages<scalar_t> == 1 && more) request_keys(p.k, p.v, orders, work, T, t + kForwardTile, tiles);
    if (!writes) continue;
    of_chunk = of_chunk + (sum_of_warps<false>(memory.warps, me) + own);
    if ((t + kForwardTile) % kChunk != 0 && more) continue;
    if (of_each) slots.store(work.b, t / kChunk, work.channel(me), of_chunk);
    add_pair_to_sum(of_chunk, of_all, rest);
    of_chunk = zero;
  }
  if (writes && !of_each) slots.store(work.b, 0, work.channel(me), of_all);
}

// Replaces q by y = softplus(q) m.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void attend(const Means<acc_t>& means, const acc_t (&z)[kWarpRows],
                                       const acc_t (&a)[kWarpRows], scalar_t (&q)[kWarpRows]) {
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    const acc_t m = means.mean(a[row], means.inverse(z[row]));
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 2)
    forward_causal_kernel(SoftplusAttentionForward p, Segments segments, TileOrders orders,
                          Slots<acc_type<scalar_t>> carries) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<ForwardShared<scalar_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t end = work.end_chunk * kChunk < T ? work.end_chunk * kChunk : T;
  const bool split = segments.count > 1;            // then carries exist
  int64_t s = work.first_chunk * kChunk - (T - S);  // the query whose last key is the tile's first
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kWarpRows);
  QueryRows<scalar_t> y_rows(p.y, work, me, s + me.warp * kWarpRows);
  request_keys(p.k, p.v, orders, work, T, work.first_chunk * kChunk, memory.stages[0]);
  scalar_t q[kWarpRows];
  q_rows.load(rows_of<kForwardTile>(me, s, S), q);
  // The last warp keeps the sums before the tile: of earlier chunks, and of earlier tiles of this chunk.
  const bool is_last_warp = me.warp == kForwardWarps - 1;
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  Pair<acc_t> of_chunk = zero;
  Pair<acc_t> of_chunks = zero;
  Pair<acc_t> rest = zero;
  if (is_last_warp && split && work.first_chunk > 0)
    of_chunks = carries.load(work.b, work.first_chunk - 1, work.channel(me));
  if (is_last_warp) memory.before[0][me.lane] = of_chunks;
  int turn = 0;
  for (int64_t t = work.first_chunk * kChunk; t < end; t += kForwardTile) {
    const bool more = t + kForwardTile < end;
    await_keys();
    auto& tiles = memory.stages[turn % kMostStages<scalar_t>];
    if (kMostStages<scalar_t> > 1 && more)
      request_keys(p.k, p.v, orders, work, T, t + kForwardTile, memory.stages[(turn + 1) % kMostStages<scalar_t>]);
    acc_t z[kWarpRows], a[kWarpRows];
    weigh(tiles, true, me, T - t, z, a);
    const Pair<acc_t> own{scan_rows<false>(z), scan_rows<false>(a)};
    memory.warps[me.warp][me.lane] = own;
    __syncthreads();
    if (kMostStages<scalar_t> == 1 && more) request_keys(p.k, p.v, orders, work, T, t + kForwardTile, tiles);
    const Pair<acc_t> warps = sum_of_warps<false>(memory.warps, me);
    const Means<acc_t> means(memory.before[turn][me.lane] + warps, p.eps);
    turn = 1 - turn;
    if (is_last_warp) {
      of_chunk = of_chunk + (warps + own);
      if ((t + kForwardTile) % kChunk == 0) {
        const int64_t chunk = t / kChunk;
        const bool has_carry = carries.data != nullptr && chunk < carries.count;
        // A sum that began at this block's first chunk would lack the compensation of the chunks before it.
        if (split && has_carry)
          of_chunks = carries.load(work.b, chunk, work.channel(me));
        else
          add_pair_to_sum(of_chunk, of_chunks, rest);
        of_chunk = zero;
        if (!split && has_carry && work.has(me)) carries.store(work.b, chunk, work.channel(me), of_chunks);
      }
      memory.before[turn][me.lane] = of_chunks + of_chunk;
    }
    attend(means, z, a, q);
    if (work.has(me)) y_rows.store(rows_of<kForwardTile>(me, s, S), q);
    s += kForwardTile;
    y_rows.move(kForwardTile);
    q_rows.move(kForwardTile);
    if (more) q_rows.load(rows_of<kForwardTile>(me, s, S), q);
  }
}

// Not causal: a chunk of queries, all of which see the same keys.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 2)
    forward_queries_kernel(SoftplusAttentionForward p, Segments segments, Slots<acc_type<scalar_t>> totals) {
  using acc_t = acc_type<scalar_t>;
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t m = means.mean(acc_t(0), means.inverse(acc_t(0)));
  const int64_t s = work.first_chunk * kChunk;
  const RowRange rows = rows_of(me, s, p.shape.S);
  scalar_t q[kWarpRows];
  QueryRows<scalar_t>(p.q, work, me, s + me.warp * kWarpRows).load(rows, q);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row)
    q[row] = from_acc<scalar_t>(softplus_attention_from_mean(softplus_on_device<scalar_t>(to_acc(q[row])), m));
  if (work.has(me)) QueryRows<scalar_t>(p.y, work, me, s + me.warp * kWarpRows).store(rows, q);
}

// ---- launches

template <typename scalar_t>
void forward_causal(SoftplusAttentionForward p, const TileOrders& orders, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  // Without queries the kernel still computes their addresses, which must not be null.
  if (shape.S == 0) p.q = p.y = p.k;
  const auto carries = slots_in<acc_type<scalar_t>>(p.carries, shape, shape.carries());
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  constexpr size_t kBytes = sizeof(ForwardShared<scalar_t>);
  if (chunks == 0) return;
  if (splits) {
    const Segments keys = divided(shape, carries.count);
    launch_work({"softplus_attention_forward, sums of keys", shape, keys, kForwardThreads, kBytes, stream},
                key_sums_kernel<scalar_t>, p, keys, orders, true, carries);
    scan_slots<acc_type<scalar_t>>({"softplus_attention_forward, scan", 2, false}, carries, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work({"softplus_attention_forward", shape, segments, kForwardThreads, kBytes, stream},
              forward_causal_kernel<scalar_t>, p, segments, orders, carries);
}

template <typename scalar_t>
void forward_not_causal(const SoftplusAttentionForward& p, const TileOrders& orders, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<acc_type<scalar_t>>(p.carries, shape, 1);
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = splits || chunks == 0 ? slots_in<acc_type<scalar_t>>(p.sums, shape, chunks) : totals;
  const Segments keys = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work({"softplus_attention_forward, sums of keys", shape, keys, kForwardThreads,
               sizeof(ForwardShared<scalar_t>), stream},
              key_sums_kernel<scalar_t>, p, keys, orders, splits, slots);
  // Without keys the totals become zeros.
  if (splits || chunks == 0) scan_slots({"softplus_attention_forward, scan", 2, false}, slots, totals.data, stream);
  const Segments queries = one_by_one(shape.query_chunks());
  launch_work({"softplus_attention_forward, queries", shape, queries, kThreads, 0, stream},
              forward_queries_kernel<scalar_t>, p, queries, totals);
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
