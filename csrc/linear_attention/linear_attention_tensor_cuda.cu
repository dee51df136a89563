#include "linear_attention/linear_attention_tensor_products_cuda.cuh"

// Scans of 16-bit types on tensor cores.

namespace memcheck {
namespace linear_cuda {

namespace {

// ---- results

// Calls change(of_row, row, column, x, y) for the pairs of a pass's results of this thread, where of_row = start(row).
template <typename T, typename Start, typename Change>
__device__ __forceinline__ void for_pairs(Out<T>& out, int first_row, const Start& start, const Change& change) {
  const Place at;
#pragma unroll
  for (int tile_row = 0; tile_row < T::kPassTiles; ++tile_row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * (first_row + tile_row) + at.group + 8 * half;
      const float of_row = start(row);
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile)
        change(of_row, row, T::kSlab * at.warp + 8 * tile + at.pair, out.part[tile_row][tile][2 * half],
               out.part[tile_row][tile][2 * half + 1]);
    }
}

template <typename scalar_t>
__device__ __forceinline__ float2 read_pair(const scalar_t* from) {
  const Pack<scalar_t, 2> pair = load_pack<2>(from);
  return make_float2(to_acc(pair.values[0]), to_acc(pair.values[1]));
}

template <typename scalar_t>
__device__ __forceinline__ void store_pair(scalar_t* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = pack_pair(from_acc<scalar_t>(x), from_acc<scalar_t>(y));
}

// Finite, so that 0 times 1 / den stays 0 where den is infinite.
__device__ __forceinline__ float share_scale(float denominator) {
  return fminf(fmaxf(1.0f, fabsf(denominator)), 0x1p126f);
}

// GradQ: den = phi(q).z + eps and g.y = phi(q).(sum so far) / den, and from them the gradient. phi(q).(sum so far) may
// overflow where g.y does not: a warp divides its share of it by its share of den, if that is above 1.
template <typename T>
__device__ __forceinline__ void finish_queries(const Scan& scan, SharedTiles<T>& s, int first_row, Out<T>& out) {
  using scalar_t = typename T::scalar;
  const Place at;
  const FeatureMap map = scan.shape.feature_map;
  Out<T> z = {};
  if (s.chunk.has_columns) sum_chunk(s, first_row, z);
  for_pairs<T>(
      z, first_row, [](int) { return 0.0f; },
      [&](float, int, int column, float& x, float& y) {
        x += s.vector[column];
        y += s.vector[column + 1];
      });
  const auto phi = [&](float x) { return map == FeatureMap::Identity ? x : elu_plus_one(x, fast_exp(x)); };
#pragma unroll
  for (int row = 0; row < T::kPassTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * (first_row + row) + at.group + 8 * half;
      float q[T::kOutTiles][2];
      float denominator = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const int column = T::kSlab * at.warp + 8 * tile + at.pair;
        const float2 x = read_pair(&s.last[line][column]);
        q[tile][0] = column < scan.width ? phi(x.x) : 0.0f;
        q[tile][1] = column + 1 < scan.width ? phi(x.y) : 0.0f;
        denominator += q[tile][0] * z.part[row][tile][2 * half];
        denominator += q[tile][1] * z.part[row][tile][2 * half + 1];
      }
      denominator = sum_of_four(denominator);
      const float scale = 1.0f / share_scale(denominator);
      float product = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) product += q[tile][j] * (out.part[row][tile][2 * half + j] * scale);
      product = sum_of_four(product);
      if (at.pair == 0) {
        s.row_sums[at.warp][line][0] = denominator;
        s.row_sums[at.warp][line][1] = product;
      }
    }
  __syncthreads();
  const int64_t first = query_row(scan.shape, s.work.b, s.work.row_head) + s.chunk.rows.first;
#pragma unroll
  for (int row = 0; row < T::kPassTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * (first_row + row) + at.group + 8 * half;
      float denominator = static_cast<float>(scan.eps);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) denominator += s.row_sums[warp][line][0];
      const float inverse = 1.0f / denominator;
      float product = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp)
        product += s.row_sums[warp][line][1] * (share_scale(s.row_sums[warp][line][0]) * inverse);
      if (at.warp == 0 && at.pair == 0 && s.chunk.rows.has(line)) {
        static_cast<float*>(scan.inverse)[first + line] = inverse;
        static_cast<float*>(scan.products)[first + line] = product;
      }
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const int column = T::kSlab * at.warp + 8 * tile + at.pair;
        scalar_t* to = &s.last[line][column];
        const float2 x = read_pair(to);
        const auto gradient = [&](int j, float last) {
          const float difference = out.part[row][tile][2 * half + j] - product * z.part[row][tile][2 * half + j];
          return difference * inverse * fast_derivative(map, last);
        };
        store_pair(to, gradient(0, x.x), gradient(1, x.y));
      }
    }
}

template <typename T>
__device__ __forceinline__ void finish(const Scan& scan, SharedTiles<T>& s, int first_row, Out<T>& out) {
  const auto scale = [&](int row) {
    return scan.kind == ScanKind::Output ? 1.0f / (s.denominator[row] + static_cast<float>(scan.eps)) : 1.0f;
  };
  if constexpr (T::kFeatures) {
    for_pairs<T>(out, first_row, scale, [&](float scale, int row, int column, float x, float y) {
      store_pair(&s.results()[row][column], x * scale, y * scale);
    });
  } else if (scan.kind == ScanKind::GradQ) {
    finish_queries(scan, s, first_row, out);
  } else {
    for_pairs<T>(out, first_row, scale, [&](float, int row, int column, float x, float y) {
      auto* to = &s.last[row][column];
      const FeatureMap map = scan.shape.feature_map;
      const float2 last = read_pair(to);
      store_pair(to, x * fast_derivative(map, last.x), y * fast_derivative(map, last.y));
    });
  }
}

// Copies the results of a pass to memory, of the rows that exist.
template <typename T>
__device__ __forceinline__ void store_results(const Scan& scan, SharedTiles<T>& s, int first_row) {
  using scalar_t = typename T::scalar;
  const TilePacks<scalar_t, 16 * T::kPassTiles, T::kSize, kThreads> packs;
  if (!scan.out || packs.column >= scan.width) return;
  const Lines rows = s.chunk.rows;
  scalar_t* to = scan.out.at<scalar_t>(s.work.b, s.work.row_head, rows.first + 16 * first_row, packs.column);
  store_tile<2>(
      packs, RowLayout{scan.out.stride[3], scan.width, scan.out_packed},
      [&](int line) { return to + line * scan.out.stride[2]; },
      [&](int line) { return &s.results()[16 * first_row + line][packs.column]; },
      [&](int line) { return rows.has(16 * first_row + line); });
}

// ---- a chunk

// Zeros, or for GradK minus the sum of bias_j x_j, which is the same for all rows.
template <typename T>
__device__ __forceinline__ void start_out(const Scan& scan, const SharedTiles<T>& s, int first_row, Out<T>& out) {
  const bool biased = scan.kind == ScanKind::GradK;
  const auto zero = [](int) { return 0.0f; };
  for_pairs<T>(out, first_row, zero, [&](float, int, int column, float& x, float& y) {
    x = biased ? -s.vector[column] : 0.0f;
    y = biased ? -s.vector[column + 1] : 0.0f;
  });
}

// Loads the tiles of a head of columns, and those of the rows if they are wanted. A thread splits what it loaded itself
// of one tile while the next ones arrive.
template <typename T>
__device__ __forceinline__ void load_head(const Scan& scan, int head, bool with_rows, SharedTiles<T>& s) {
  const ScanWork& work = s.work;
  const Chunk& chunk = s.chunk;
  const int64_t column_head = work.first_column_head + head;
  if (with_rows) request_lines<T>(scan.a, work.b, work.row_head, chunk.rows, scan.depth, s.a);
  cp_async_commit();
  if (chunk.has_columns) request_lines<T>(scan.b, work.b, column_head, chunk.columns, scan.depth, s.b);
  cp_async_commit();
  if (chunk.has_columns) request_lines<T>(scan.x, work.b, column_head, chunk.columns, scan.width, s.x);
  if constexpr (!T::kFeatures)
    if (with_rows) request_lines<T>(scan.last, scan.last_packed, work.b, work.row_head, chunk.rows, scan.width, s.last);
  cp_async_commit();
  if (chunk.has_columns) load_query_rows(scan, work.b, column_head, chunk.columns, s);
  cp_async_wait<2>();
  if (with_rows) split_a(scan, chunk, s);
  cp_async_wait<1>();
  if (!scan.rows_are_queries()) __syncthreads();  // for 1 / den and g.y of the queries
  if (chunk.has_columns) split_b(scan, chunk, s);
  cp_async_wait<0>();
  if (chunk.has_columns) split_x(scan, chunk, s);
  __syncthreads();
}

// Adds the columns of a loaded head to the state.
template <typename T>
__device__ __forceinline__ void join_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  add_to_state(s, state);
  const int column = static_cast<int>(threadIdx.x);
  if (column < T::kSize && (scan.has_bias() || scan.kind == ScanKind::Output)) {
    float sum = s.sums[0][column];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += s.sums[warp][column];
    s.vector[column] += sum;
  }
}

// The rows are finished with all heads before columns join the state, so that results and the sums that join the state
// are not in registers together. Every pass over the heads begins with the head that the last one ended with, whose
// columns are still loaded.
template <typename T>
__device__ __forceinline__ void scan_chunk(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  const int heads = s.chunk.has_columns ? static_cast<int>(s.work.column_heads) : 0;
  const int last = max(heads - 1, 0);
  const int passes = s.chunk.has_rows ? T::kPasses : 0;
  int loaded = -1;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int first_row = pass * T::kPassTiles;
    Out<T> out;
#pragma unroll 1
    for (int i = 0; i <= last; ++i) {
      const int head = pass == 0 ? i : last - i;
      if (head != loaded) {
        load_head(scan, head, loaded < 0, s);
        if (heads > 0) form_scores(scan, first_row, s);
        loaded = head;
      }
      if (i == 0) {
        start_out(scan, s, first_row, out);
        read_state(s, state, first_row, out);
      }
      __syncthreads();
      if (heads > 0) read_chunk(scan, s, first_row, out);
      __syncthreads();
    }
    finish(scan, s, first_row, out);
    __syncthreads();
    store_results(scan, s, first_row);
  }
#pragma unroll 1
  for (int i = 0; i < heads; ++i) {
    const int head = passes == 2 ? i : last - i;
    if (head != loaded) load_head(scan, head, false, s);
    loaded = head;
    join_state(scan, state, s);
    __syncthreads();
  }
}

// ---- states

// Before and after the scan the state is moved by way of shared memory, so that memory is accessed in its order, and
// that addresses take few registers beside the state. Calls move(element, staged) for the thread's elements.
template <typename T, typename Move>
__device__ __forceinline__ void for_state(State<T>& state, StagedState<T>& staged, const Move& move) {
  const Place at;
#pragma unroll
  for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
    for (int depth = 0; depth < T::kDepthTiles; ++depth)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        move(state.part[tile][depth][i],
             staged.matrix[8 * depth + at.pair + i % 2][T::kSlab * at.warp + 16 * tile + at.group + i / 2 * 8]);
}

// Calls move(number, staged) for the numbers of a slot that this thread moves.
template <typename T, typename Move>
__device__ __forceinline__ void for_slot(const Scan& scan, const StateSlot<typename T::scalar>& slot, SharedTiles<T>& s,
                                         const Move& move) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 8
  for (int i = thread; i < T::kSize * T::kSize; i += kThreads) {
    const int k = i / T::kSize;
    const int column = i % T::kSize;
    if (k < scan.depth && column < scan.width) move(slot.at(k, column), s.state.matrix[k][column]);
  }
  if (thread < (scan.kind == ScanKind::Output ? scan.depth : scan.width)) move(slot.sum_at(thread), s.vector[thread]);
}

template <typename T>
__device__ __forceinline__ void start_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < T::kSize) s.vector[thread] = 0.0f;
  for_state(state, s.state, [](float& x, float&) { x = 0.0f; });
  if (scan.phase != ScanPhase::Pieces) return;
  for_state(state, s.state, [](float&, float& staged) { staged = 0.0f; });
  __syncthreads();
  const auto slot = slot_of<typename T::scalar>(scan, s.work, s.work.piece);
  for_slot(scan, slot, s, [&](int64_t number, float& to) { to = slot.read(number); });
  __syncthreads();
  for_state(state, s.state, [](float& x, float& staged) { x = staged; });
}

template <typename T>
__device__ __forceinline__ void store_segment(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  const auto slot = slot_of<typename T::scalar>(scan, s.work, s.work.piece);
  for_state(state, s.state, [](float& x, float& staged) { staged = x; });
  __syncthreads();
  for_slot(scan, slot, s, [&](int64_t number, float& from) { slot.write(number, from); });
}

template <typename scalar_t, int kSize, bool kFeatures>
__global__ void __launch_bounds__(kThreads, kSize == 64 ? 3 : 2) tensor_scan_kernel(const Scan scan) {
  using T = Traits<scalar_t, kSize, kFeatures>;
  SharedTiles<T>& s = shared<SharedTiles<T>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x, 1);
    s.ranges = ranges_of(scan, s.work);
  }
  __syncthreads();
  State<T> state;
  start_state(scan, state, s);
  const int sums = s.ranges.column_chunks(kChunk);
  const int steps = sums + s.ranges.row_chunks(kChunk);
  for (int i = 0; i < steps; ++i) {
    const bool summing = i < sums;
    if (threadIdx.x == 0)
      s.chunk = chunk_of(scan, summing ? s.ranges.columns : s.ranges.rows, summing ? i : i - sums, summing, kChunk);
    __syncthreads();
    if (s.chunk.has_rows || s.chunk.has_columns) scan_chunk<T>(scan, state, s);
    __syncthreads();
  }
  if (scan.phase == ScanPhase::Sums) store_segment(scan, state, s);
}

template <typename scalar_t, int kSize, bool kFeatures>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using T = Traits<scalar_t, kSize, kFeatures>;
  const Launch with{name_of(scan.kind, true), dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                    sizeof(SharedTiles<T>), stream};
  launch(with, tensor_scan_kernel<scalar_t, kSize, kFeatures>, scan);
}

template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  const bool features = scan.kind == ScanKind::Output || scan.kind == ScanKind::GradV;
  const bool small = std::max(scan.depth, scan.width) <= 64;
  if (features)
    return small ? launch_scan<scalar_t, 64, true>(scan, blocks, stream)
                 : launch_scan<scalar_t, 128, true>(scan, blocks, stream);
  small ? launch_scan<scalar_t, 64, false>(scan, blocks, stream)
        : launch_scan<scalar_t, 128, false>(scan, blocks, stream);
}

}  // namespace

bool suits_tensor_cores(const LinearAttentionShape& n, Dtype dtype) {
  constexpr int64_t kFewest = 32;
  constexpr int64_t kMost = 128;
  const int64_t larger = std::max(n.D, n.Dv);
  if (!n.is_plain() || (dtype != Dtype::Float16 && dtype != Dtype::BFloat16)) return false;
  if (std::min(n.D, n.Dv) < kFewest || larger > kMost) return false;
  // Forward and backward must choose alike, so this is the largest of all kernels for the depth and width.
  static_assert(sizeof(SharedTiles<Traits<__half, 64, false>>) <= kSharedBytesEverywhere);
  return larger <= 64 || fits_in_a_block(sizeof(SharedTiles<Traits<__half, 128, false>>));
}

void scan_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    dtype == Dtype::Float16 ? launch_scan<__half>(phase, blocks, stream) : launch_scan<bf16>(phase, blocks, stream);
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
