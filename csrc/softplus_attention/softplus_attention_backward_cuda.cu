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

// kStages tiles of keys and values: the current chunk and, with two stages, the next one. Without stages, where a chunk
// would need too much shared memory, each lane reads its channel from global memory.
template <typename scalar_t, int kStages>
struct BackwardShared {
  using acc_t = acc_type<scalar_t>;
  struct Empty {};

  std::conditional_t<kStages == 0, Empty, KeyTiles<scalar_t>[kStages == 0 ? 1 : kStages]> stages;
  WarpSums<acc_t, kWarps> warps;
  WarpSums<acc_t, kWarps> later_warps;
  Pair<acc_t> later[2][kLanes];  // the sums over all chunks after this one, and after the next
};

// W and X of a warp's rows: the sums after the warp, and the running sums within it, divided by the scale of the means.
template <typename acc_t>
struct LaterSums {
  acc_t scale;
  Pair<acc_t> after;
  acc_t (&w)[kWarpRows];
  acc_t (&wm)[kWarpRows];

  // softplus(k) and sigmoid(k) are computed again: neither shared memory nor registers have room to keep them.
  template <typename scalar_t>
  __device__ __forceinline__ SoftplusKeyGradients<acc_t> gradients(int row, acc_t k, acc_t v) const {
    return softplus_key_gradients(softplus_and_sigmoid_on_device<scalar_t>(k), v, after.first + w[row] * scale,
                                  after.second + wm[row] * scale);
  }
};

// Replaces k and v of a warp's rows of a tile by their gradients, gradients(row, k, v).
template <typename scalar_t, int kPositions, typename Gradients>
__device__ __forceinline__ void differentiate_keys(bool has_v, Thread me, KeyTiles<scalar_t, kPositions>& tiles,
                                                   const Gradients& gradients) {
  constexpr int kCount = kPackSize<scalar_t>;
#pragma unroll
  for (int start = 0; start < kWarpRows; start += kCount) {
    const int position = me.warp * kWarpRows + start;
    acc_type<scalar_t> k[kCount];
    acc_type<scalar_t> v[kCount] = {};
    read_keys(tiles, has_v, me, position, k, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto of_key = gradients(start + i, k[i], v[i]);
      k[i] = of_key.grad_k;
      v[i] = of_key.grad_v;
    }
    store_pack(rounded_pack<scalar_t>(k), &tiles.k.channels[me.lane][position]);
    store_pack(rounded_pack<scalar_t>(v), &tiles.v.channels[me.lane][position]);
  }
}

// The gradients, to global memory.
template <typename scalar_t, int kPositions>
__device__ __forceinline__ void store_keys(const SoftplusAttentionBackward& p, const TileOrders& orders,
                                           const Work& work, int64_t t, const KeyTiles<scalar_t, kPositions>& tiles) {
  const int64_t left = p.shape.T - t;
  if (p.grad_k) KeyTileInMemory<scalar_t, kPositions>(p.grad_k, orders.grad_k, work, t).store(left, tiles.k);
  if (p.grad_v) KeyTileInMemory<scalar_t, kPositions>(p.grad_v, orders.grad_v, work, t).store(left, tiles.v);
}

// A warp's rows of a chunk of a tensor (B,R,T) in global memory.
template <typename scalar_t>
__device__ __forceinline__ QueryRows<scalar_t> key_rows(const Strided<3>& x, const Work& work, Thread me, int64_t t) {
  Strided<3> by_position = x;
  by_position.stride[1] = x.stride[2];
  by_position.stride[2] = x.stride[1];
  return {by_position, work, me, t + me.warp * kWarpRows};
}

template <typename scalar_t>
__device__ __forceinline__ void load_key_rows(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                              int64_t t, scalar_t (&k)[kWarpRows], scalar_t (&v)[kWarpRows]) {
  const RowRange rows = rows_of(me, t, p.shape.T);
  key_rows<scalar_t>(p.k, work, me, t).load(rows, k);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) v[row] = from_acc<scalar_t>(acc_type<scalar_t>(0));
  if (p.v) key_rows<scalar_t>(p.v, work, me, t).load(rows, v);
}

// The same as weigh and differentiate_keys, without tiles.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void weigh_in_memory(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                                int64_t t, acc_t (&weights)[kWarpRows], acc_t (&weighted)[kWarpRows]) {
  scalar_t k[kWarpRows], v[kWarpRows];
  load_key_rows(p, work, me, t, k, v);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    weights[row] = softplus_on_device<scalar_t>(to_acc(k[row]));
    weighted[row] = weights[row] * to_acc(v[row]);
  }
  const RowRange rows = rows_of(me, t, p.shape.T);
  clear_absent_rows(rows, weights);
  clear_absent_rows(rows, weighted);
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void differentiate_in_memory(const SoftplusAttentionBackward& p, const Work& work, Thread me,
                                                        int64_t t, const LaterSums<acc_t>& later) {
  scalar_t k[kWarpRows], v[kWarpRows];
  load_key_rows(p, work, me, t, k, v);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    const auto gradients = later.template gradients<scalar_t>(row, to_acc(k[row]), to_acc(v[row]));
    k[row] = from_acc<scalar_t>(gradients.grad_k);
    v[row] = from_acc<scalar_t>(gradients.grad_v);
  }
  if (!work.has(me)) return;
  const RowRange rows = rows_of(me, t, p.shape.T);
  if (p.grad_k) key_rows<scalar_t>(p.grad_k, work, me, t).store(rows, k);
  if (p.grad_v) key_rows<scalar_t>(p.grad_v, work, me, t).store(rows, v);
}

// Causal. Goes through the chunks from the last to the first. In each chunk it forms Z and A forwards for w and grad_q,
// then W and X backwards for grad_k and grad_v. With sums_only it stores the sums of w and w m of chunk i + 1 in slot
// i. Otherwise, where chunks are split, slot i holds the sums over all chunks after chunk i.
template <typename scalar_t, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    backward_causal_kernel(SoftplusAttentionBackward p, Segments segments, TileOrders orders, bool sums_only,
                           Slots<acc_type<scalar_t>> carries, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& memory = shared<BackwardShared<scalar_t, kStages>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t S = p.shape.S;
  const int64_t first_chunk = work.first_chunk + (sums_only ? 1 : 0);
  const int64_t last_chunk = work.end_chunk - (sums_only ? 0 : 1);
  const bool wants_keys = sums_only || p.grad_k || p.grad_v;
  const Pair<acc_t> zero{acc_t(0), acc_t(0)};
  int64_t s = last_chunk * kChunk - (T - S);  // the query whose last key is the chunk's first
  const auto request = [&](int64_t t, [[maybe_unused]] int stage) {
    if constexpr (kStages > 0) request_keys(p.k, p.v, orders, work, T, t, memory.stages[stage]);
  };
  request(last_chunk * kChunk, 0);
  scalar_t q[kWarpRows], g[kWarpRows];
  const auto load_queries = [&](int64_t s) {
    const RowRange rows = rows_of(me, s, S);
    QueryRows<scalar_t>(p.q, work, me, s + me.warp * kWarpRows).load(rows, q);
    QueryRows<scalar_t>(p.grad_y, work, me, s + me.warp * kWarpRows).load(rows, g);
  };
  load_queries(s);
  if (me.warp == 0) {
    const bool sums_follow = segments.count > 1 && !sums_only && last_chunk < slots.count;
    memory.later[0][me.lane] = sums_follow ? slots.load(work.b, last_chunk, work.channel(me)) : zero;
  }
  const bool reads_sums = segments.count > 1 && !sums_only;
  Pair<acc_t> rest = zero;
  for (int64_t chunk = last_chunk; chunk >= first_chunk; --chunk, s -= kChunk) {
    const int turn = static_cast<int>(last_chunk - chunk) % 2;
    [[maybe_unused]] const int stage = kStages > 1 ? turn : 0;
    const bool more = chunk > first_chunk;
    await_keys();
    const int64_t t = chunk * kChunk;
    if (kStages > 1 && more) request(t - kChunk, 1 - stage);
    const Pair<acc_t> carry = chunk > 0 ? carries.load(work.b, chunk - 1, work.channel(me)) : zero;
    const RowRange rows = rows_of(me, s, S);

    acc_t weights[kWarpRows], w[kWarpRows], wm[kWarpRows];
    acc_t(&a)[kWarpRows] = wm;
    if constexpr (kStages > 0) {
      weigh(memory.stages[stage], static_cast<bool>(p.v), me, T - t, weights, a);
    } else {
      weigh_in_memory<scalar_t>(p, work, me, t, weights, a);
    }
    memory.warps[me.warp][me.lane] = {sum_of_rows(weights), scan_rows<false>(a)};
    __syncthreads();

    const Means<acc_t> means(carry + sum_of_warps<false>(memory.warps, me), p.eps);
    acc_t z = acc_t(0);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      z += weights[row];
      const auto gradients = query_gradients<scalar_t>(means, Pair<acc_t>{z, a[row]}, to_acc(q[row]), to_acc(g[row]));
      q[row] = from_acc<scalar_t>(gradients.grad_q);
      w[row] = gradients.w;
      wm[row] = gradients.wm;
    }
    clear_absent_rows(rows, w);
    clear_absent_rows(rows, wm);
    if (p.grad_q && !sums_only && work.has(me))
      QueryRows<scalar_t>(p.grad_q, work, me, s + me.warp * kWarpRows).store(rows, q);
    if (wants_keys) {
      const Pair<acc_t> own{scan_rows<true>(w) * means.scale, scan_rows<true>(wm) * means.scale};
      memory.later_warps[me.warp][me.lane] = own;
      __syncthreads();
      const Pair<acc_t> later = memory.later[turn][me.lane];
      const Pair<acc_t> warps = sum_of_warps<true>(memory.later_warps, me);
      if (me.warp == 0) {
        Pair<acc_t> sum = later;
        // As in the forward: a sum that began at this block's first chunk would lack the compensation of earlier ones.
        if (reads_sums && chunk > 0)
          sum = slots.load(work.b, chunk - 1, work.channel(me));
        else
          add_pair_to_sum(warps + own, sum, rest);
        memory.later[1 - turn][me.lane] = sum;
        if (sums_only && work.has(me)) slots.store(work.b, chunk - 1, work.channel(me), warps + own);
      }
      if (!sums_only) {
        const LaterSums<acc_t> sums{means.scale, later + warps, w, wm};
        if constexpr (kStages > 0) {
          differentiate_keys(static_cast<bool>(p.v), me, memory.stages[stage],
                             [&](int row, acc_t k, acc_t v) { return sums.template gradients<scalar_t>(row, k, v); });
        } else {
          differentiate_in_memory<scalar_t>(p, work, me, t, sums);
        }
      }
    }
    if (more) load_queries(s - kChunk);
    if constexpr (kStages > 0) {
      if (wants_keys && !sums_only) {
        __syncthreads();
        store_keys(p, orders, work, t, memory.stages[stage]);
      }
    }
    if (kStages == 1 && more) {
      __syncthreads();
      request(t - kChunk, 0);
    }
  }
}

template <typename acc_t>
using QueryShared = acc_t[2][kWarps][kLanes];

// Not causal: queries, all of which see the same keys. Forms grad_q, and the sums of w: those of each chunk into its
// slot, or those of all queries into slot 0.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    backward_queries_kernel(SoftplusAttentionBackward p, Segments segments, bool of_each,
                            Slots<acc_type<scalar_t>> totals, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& warps = shared<QueryShared<acc_t>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const bool writes = me.warp == 0 && work.has(me);
  int64_t s = work.first_chunk * kChunk;
  QueryRows<scalar_t> q_rows(p.q, work, me, s + me.warp * kWarpRows);
  QueryRows<scalar_t> g_rows(p.grad_y, work, me, s + me.warp * kWarpRows);
  QueryRows<scalar_t> grad_q_rows(p.grad_q ? p.grad_q : p.q, work, me, s + me.warp * kWarpRows);
  scalar_t q[kWarpRows], g[kWarpRows];
  q_rows.load(rows_of(me, s, p.shape.S), q);
  g_rows.load(rows_of(me, s, p.shape.S), g);
  acc_t all = acc_t(0);
  acc_t rest = acc_t(0);
  for (int64_t chunk = work.first_chunk; chunk < work.end_chunk; ++chunk, s += kChunk) {
    auto& sums = warps[(chunk - work.first_chunk) % 2];
    const RowRange rows = rows_of(me, s, p.shape.S);
    acc_t w[kWarpRows];
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      const auto gradients =
          query_gradients<scalar_t>(means, Pair<acc_t>{acc_t(0), acc_t(0)}, to_acc(q[row]), to_acc(g[row]));
      q[row] = from_acc<scalar_t>(gradients.grad_q);
      w[row] = gradients.w;
    }
    clear_absent_rows(rows, w);
    if (p.grad_q && work.has(me)) grad_q_rows.store(rows, q);
    grad_q_rows.move(kChunk);
    q_rows.move(kChunk);
    g_rows.move(kChunk);
    if (chunk + 1 < work.end_chunk) {
      q_rows.load(rows_of(me, s + kChunk, p.shape.S), q);
      g_rows.load(rows_of(me, s + kChunk, p.shape.S), g);
    }
    sums[me.warp][me.lane] = sum_of_rows(w) * means.scale;
    __syncthreads();
    if (!writes) continue;
    acc_t sum = acc_t(0);
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][me.lane];
    add_to_sum(sum, all, rest);
    if (of_each) *slots.at(0, work.b, chunk, work.channel(me)) = sum;
  }
  if (writes && !of_each) *slots.at(0, work.b, 0, work.channel(me)) = all;
}

// Not causal: a tile of keys, which all queries see. Every key has the same W, and X = W m.
template <typename scalar_t>
__global__ void __launch_bounds__(kForwardThreads, 4)
    backward_keys_kernel(SoftplusAttentionBackward p, Segments segments, TileOrders orders,
                         Slots<acc_type<scalar_t>> totals, Slots<acc_type<scalar_t>> slots) {
  using acc_t = acc_type<scalar_t>;
  auto& tiles = shared<KeyTiles<scalar_t, kForwardTile>>();
  const Thread me = this_thread();
  const Work work = work_of(p.shape, segments);
  const int64_t T = p.shape.T;
  const int64_t t = work.first_chunk * kForwardTile;
  request_keys(p.k, p.v, orders, work, T, t, tiles);
  const Means<acc_t> means(totals.load(work.b, 0, work.channel(me)), p.eps);
  const acc_t w = *slots.at(0, work.b, slots.count - 1, work.channel(me));
  const acc_t wm = w * means.mean(acc_t(0), means.inverse(acc_t(0)));
  await_keys();
  differentiate_keys(static_cast<bool>(p.v), me, tiles, [&](int, acc_t k, acc_t v) {
    return softplus_key_gradients(softplus_and_sigmoid_on_device<scalar_t>(k), v, w, wm);
  });
  __syncthreads();
  store_keys(p, orders, work, t, tiles);
}

// ---- launches

template <typename scalar_t, int kStages>
void backward_causal_in_stages(SoftplusAttentionBackward p, const TileOrders& orders, cudaStream_t stream) {
  const SoftplusAttentionShape& shape = p.shape;
  if (shape.S == 0) p.q = p.grad_y = p.grad_q = p.k;  // as in the forward
  const auto carries = slots_in<acc_type<scalar_t>>(p.carries, shape, shape.carries());
  const int64_t chunks = shape.key_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = slots_in<acc_type<scalar_t>>(splits ? p.sums : nullptr, shape, chunks - 1);
  constexpr size_t kBytes = sizeof(BackwardShared<scalar_t, kStages>);
  if (chunks == 0) return;
  if (splits && (p.grad_k || p.grad_v)) {
    const Segments sums = divided(shape, slots.count);
    launch_work({"softplus_attention_backward, sums", shape, sums, kThreads, kBytes, stream},
                backward_causal_kernel<scalar_t, kStages>, p, sums, orders, true, carries, slots);
    scan_slots<acc_type<scalar_t>>({"softplus_attention_backward, scan", 2, true}, slots, nullptr, stream);
  }
  const Segments segments = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work({"softplus_attention_backward", shape, segments, kThreads, kBytes, stream},
              backward_causal_kernel<scalar_t, kStages>, p, segments, orders, false, carries, slots);
}

// With as many stages as the GPU's shared memory allows. The bits do not depend on it.
template <typename scalar_t>
void backward_causal(const SoftplusAttentionBackward& p, const TileOrders& orders, cudaStream_t stream) {
  constexpr int kMost = kMostStages<scalar_t>;
  constexpr size_t kBytes = sizeof(BackwardShared<scalar_t, kMost>);
  if constexpr (kBytes > kSharedBytesEverywhere) {
    static_assert(sizeof(BackwardShared<scalar_t, kMost - 1>) <= kSharedBytesEverywhere);
    if (!fits_in_a_block(kBytes)) return backward_causal_in_stages<scalar_t, kMost - 1>(p, orders, stream);
  }
  backward_causal_in_stages<scalar_t, kMost>(p, orders, stream);
}

template <typename scalar_t>
void backward_not_causal(const SoftplusAttentionBackward& p, const TileOrders& orders, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const SoftplusAttentionShape& shape = p.shape;
  const auto totals = slots_in<acc_type<scalar_t>>(p.carries, shape, 1);
  const int64_t chunks = shape.query_chunks();
  const bool splits = softplus_attention_splits_on_cuda(shape, chunks);
  const auto slots = slots_in<acc_type<scalar_t>>(p.sums, shape, splits ? chunks : 1);
  const Segments queries = splits ? divided(shape, chunks) : undivided(chunks);
  launch_work({"softplus_attention_backward, queries", shape, queries, kThreads, sizeof(QueryShared<acc_t>), stream},
              backward_queries_kernel<scalar_t>, p, queries, splits, totals, slots);
  if (!p.grad_k && !p.grad_v) return;
  if (splits) scan_slots<acc_t>({"softplus_attention_backward, scan", 1, false}, slots, nullptr, stream);
  // Without queries the sums become zeros.
  const auto none = slots_in<acc_type<scalar_t>>(p.sums, shape, 0);
  if (chunks == 0) scan_slots<acc_t>({"softplus_attention_backward, scan", 1, false}, none, slots.data, stream);
  const Segments keys = one_by_one(ceil_div(shape.T, kForwardTile));
  launch_work({"softplus_attention_backward, keys", shape, keys, kForwardThreads,
               sizeof(KeyTiles<scalar_t, kForwardTile>), stream},
              backward_keys_kernel<scalar_t>, p, keys, orders, totals, slots);
}

}  // namespace
}  // namespace softplus_cuda

void softplus_attention_backward_cuda(const SoftplusAttentionBackward& p, Dtype dtype, cudaStream_t stream) {
  with_device_type(dtype, [&](auto scalar) {
    using namespace softplus_cuda;
    using scalar_t = decltype(scalar);
    const int64_t T = p.shape.T;
    const TileOrders orders{tile_order<scalar_t>(p.k, T), tile_order<scalar_t>(p.v, T),
                            tile_order<scalar_t>(p.grad_k, T), tile_order<scalar_t>(p.grad_v, T)};
    p.shape.causal ? backward_causal<scalar_t>(p, orders, stream) : backward_not_causal<scalar_t>(p, orders, stream);
  });
}

}  // namespace memcheck
