#include "linear_attention/linear_attention_tensor_products_cuda.cuh"

// Scans of 16-bit types on tensor cores.

namespace memcheck {
namespace linear_cuda {

namespace {

// ---- states, and results

// Before and after the scan the state is moved by way of shared memory, so that memory is accessed in its order, and
// that addresses take few registers beside the state. Calls move(element, staged) for the thread's elements.
template <typename T, typename Move>
__device__ __forceinline__ void for_state(State<T>& state, StagedState<T>& staged, const Move& move) {
  const Place at;
  unroll<T::kSlabTiles, T::kDepthTiles, 4>([&](int tile, int depth, int i) {
    move(state[tile][depth][i], staged.matrix[fragment_column(depth, at.lane) + i % 2]
                                             [T::kSlab * at.warp + fragment_row(tile, i / 2, at.lane)]);
  });
}

// Calls use(row, m, half) for the rows of this thread's results out[m][n][2 half + i].
template <typename Use>
__device__ __forceinline__ void for_rows(const Use& use) {
  const Place at;
  unroll<kRowTiles, 2>([&](int m, int half) { use(fragment_row(m, half, at.lane), m, half); });
}

// Calls change(row, n, x, y) for the pairs of this thread's results.
template <typename T, typename Change>
__device__ __forceinline__ void for_pairs(Out<T>& out, const Change& change) {
  for_rows([&](int row, int m, int half) {
    unroll<T::kOutTiles>([&](int n) { change(row, n, out[m][n][2 * half], out[m][n][2 * half + 1]); });
  });
}

// Multiplies the rows of the results.
template <typename T, typename Factor>
__device__ __forceinline__ void scale_rows(Out<T>& out, const Factor& factor_of) {
  for_rows([&](int row, int m, int half) {
    const float factor = factor_of(row);
    unroll<T::kOutTiles, 2>([&](int n, int j) { out[m][n][2 * half + j] *= factor; });
  });
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

// 1 / den and g.y of a query.
struct QueryRow {
  float inverse, product;
};

// GradQ of all of the width: den = phi(q).z + eps and g.y = phi(q).(sum so far) / den of every query. Stores each
// warp's shares. phi(q).(sum so far) may overflow where g.y does not: a warp divides its share of it by its share of
// den, if that is above 1.
template <typename T>
__device__ __forceinline__ void share_rows(const Scan& scan, SharedTiles<T>& s, const Out<T>& z, const Out<T>& out) {
  const Place at;
  for_rows([&](int row, int m, int half) {
    float q[T::kOutTiles][2];
    float denominator = 0.0f;
    unroll<T::kOutTiles>([&](int n) {
      const int column = T::kSlab * at.warp + fragment_column(n, at.lane);
      const float2 x = read_pair(pair_at<T>(s.rows(), at, row, n));
      q[n][0] = column < s.columns ? fast_feature(scan.shape.feature_map, x.x) : 0.0f;
      q[n][1] = column + 1 < s.columns ? fast_feature(scan.shape.feature_map, x.y) : 0.0f;
      denominator += q[n][0] * z[m][n][2 * half];
      denominator += q[n][1] * z[m][n][2 * half + 1];
    });
    denominator = sum_of_row(denominator);
    const float scale = 1.0f / share_scale(denominator);
    float product = 0.0f;
    unroll<T::kOutTiles, 2>([&](int n, int j) { product += q[n][j] * (out[m][n][2 * half + j] * scale); });
    product = sum_of_row(product);
    if (at.lane % 4 == 0) {
      s.row_sums[at.warp][row][0] = denominator;
      s.row_sums[at.warp][row][1] = product;
    }
  });
}

// Whether the gradients need 1 / den or g.y of queries.
__device__ __forceinline__ bool needs_rows(const Scan& scan) {
  return scan.shape.normalize || scan.decay;
}

// Adds up the shares of a query, and stores the result in memory.
template <typename T>
__device__ __forceinline__ QueryRow add_shares(const Scan& scan, const SharedTiles<T>& s, int line) {
  const Place at;
  float denominator = static_cast<float>(scan.eps);
  unroll<kWarps>([&](int warp) { denominator += s.row_sums[warp][line][0]; });
  const float inverse = scan.shape.normalize ? 1.0f / denominator : 1.0f;
  float product = 0.0f;
  unroll<kWarps>(
      [&](int warp) { product += s.row_sums[warp][line][1] * (share_scale(s.row_sums[warp][line][0]) * inverse); });
  if (at.warp == 0 && at.lane % 4 == 0 && s.step.chunk.rows.has(line) && needs_rows(scan)) {
    const int64_t row = query_row(scan.shape, s.work.b(), s.step.row_head) + s.step.chunk.rows.first + line;
    scan.inverse_at<float>(row) = inverse;
    scan.product_at<float>(0, row) = product;
  }
  return {inverse, scan.shape.normalize ? product : 0.0f};
}

// GradQ: the gradient from 1 / den and g.y.
template <typename T>
__device__ __forceinline__ void finish_queries(const Scan& scan, SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const FeatureMap map = scan.shape.feature_map;
  Out<T> z = {};
  if (s.step.chunk.has_columns && scan.shape.normalize) sum_chunk(s, z);
  for_pairs<T>(z, [&](int row, int n, float& x, float& y) {
    const int column = T::kSlab * at.warp + fragment_column(n, at.lane);
    x += weighted_by_row(s, row, s.vector[column]);
    y += weighted_by_row(s, row, s.vector[column + 1]);
  });
  if constexpr (T::kWhole) share_rows(scan, s, z, out);
  __syncthreads();
  for_rows([&](int row, int m, int half) {
    const QueryRow query = T::kWhole ? add_shares(scan, s, row) : QueryRow{s.scale[row], s.bias[row]};
#pragma unroll
    for (int n = 0; n < T::kOutTiles; ++n) {
      auto* to = pair_at<T>(s.rows(), at, row, n);
      const float2 x = read_pair(to);
      const auto gradient = [&](int j, float last) {
        const float difference = out[m][n][2 * half + j] - query.product * z[m][n][2 * half + j];
        return difference * query.inverse * fast_derivative(map, last);
      };
      store_pair(to, gradient(0, x.x), gradient(1, x.y));
    }
  });
}

// 1 / den of a query of the chunk.
template <typename T>
__device__ __forceinline__ float inverse_of(const Scan& scan, const SharedTiles<T>& s, int row) {
  if (!scan.shape.normalize) return 1.0f;
  float denominator = weighted_by_row(s, row, s.denominator[row]);
  if (s.step.chunk.has_columns) unroll<kRowTiles>([&](int tile) { denominator += s.score_sums[tile][row]; });
  return 1.0f / (denominator + static_cast<float>(scan.eps));
}

// For the thread of each line: the sum over the block's columns of results, times a number of the row, times a number
// of what is in the same place of s.rows().
template <typename T, typename OfRow, typename OfElement>
__device__ __forceinline__ float sum_of_products(SharedTiles<T>& s, const Out<T>& out, const OfRow& of_row,
                                                 const OfElement& of_element) {
  const Place at;
  for_rows([&](int row, int m, int half) {
    const float factor = of_row(row);
    float product = 0.0f;
    unroll<T::kOutTiles>([&](int n) {
      const float2 x = read_pair(pair_at<T>(s.rows(), at, row, n));
      product += out[m][n][2 * half] * factor * of_element(x.x);
      product += out[m][n][2 * half + 1] * factor * of_element(x.y);
    });
    product = sum_of_row(product);
    if (at.lane % 4 == 0) s.row_sums[at.warp][row][0] = product;
  });
  __syncthreads();
  const int line = thread_number() % kChunk;
  float sum = 0.0f;
  unroll<kWarps>([&](int warp) { sum += s.row_sums[warp][line][0]; });
  return sum;
}

// Denominators: stores 1 / den, and the part of g.y of the block's columns.
template <typename T>
__device__ __forceinline__ void finish_denominators(const Scan& scan, SharedTiles<T>& s, Out<T>& out) {
  cp_async_wait<0>();
  __syncthreads();
  const float product =
      sum_of_products(s, out, [&](int row) { return inverse_of(scan, s, row); }, [](float g) { return g; });
  const int line = thread_number();
  if (line >= kChunk || !s.step.chunk.rows.has(line)) return;
  const int64_t row = query_row(scan.shape, s.work.b(), s.step.row_head) + s.step.chunk.rows.first + line;
  scan.product_at<float>(s.work.part, row) = product;
  if (s.work.part == 0) scan.inverse_at<float>(row) = inverse_of(scan, s, line);
}

// GradK: stores the block's part of phi(k).(grad phi(k)), which the gradient of a decay needs.
template <typename T>
__device__ __forceinline__ void store_key_products(const Scan& scan, SharedTiles<T>& s, const Out<T>& out) {
  const float product = sum_of_products(
      s, out, [](int) { return 1.0f; }, [&](float k) { return fast_feature(scan.shape.feature_map, k); });
  const int line = thread_number();
  if (line >= kChunk || !s.step.chunk.rows.has(line)) return;
  const int64_t row = key_row(scan.shape, s.work.b(), s.work.key_head) + s.step.chunk.rows.first + line;
  scan.key_product_at<float>(s.work.part, row) = product;
}

template <typename T>
__device__ __forceinline__ void finish(const Scan& scan, SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const auto store = [&](int row, int n, float x, float y) { store_pair(pair_at<T>(s.rows(), at, row, n), x, y); };
  if constexpr (T::kFeatures) {
    if constexpr (!T::kWhole)
      if (scan.kind == ScanKind::Denominators) return finish_denominators(scan, s, out);
    if (scan.kind == ScanKind::Output) scale_rows<T>(out, [&](int row) { return inverse_of(scan, s, row); });
    for_pairs<T>(out, store);
  } else if (scan.kind == ScanKind::GradQ) {
    finish_queries(scan, s, out);
  } else {
    if constexpr (T::kDecayed)
      if (scan.key_products != nullptr) store_key_products(scan, s, out);
    for_pairs<T>(out, [&](int row, int n, float x, float y) {
      const float2 last = read_pair(pair_at<T>(s.rows(), at, row, n));
      const FeatureMap map = scan.shape.feature_map;
      store(row, n, x * fast_derivative(map, last.x), y * fast_derivative(map, last.y));
    });
  }
}

// Copies results to memory, of the rows that exist.
template <typename T>
__device__ __forceinline__ void store_results(const Scan& scan, SharedTiles<T>& s) {
  using scalar_t = typename T::scalar;
  const ColumnPacks<scalar_t, T::kWidth> packs;
  const Lines rows = s.unstored.lines;
  if (!scan.out || packs.column >= s.columns) return;
  scalar_t* to = scan.out.at<scalar_t>(s.work.b(), s.unstored.head, rows.first, s.first_column + packs.column);
  store_tile<2>(
      packs, RowLayout{scan.out.stride[3], s.columns, scan.out_in_packs},
      [&](int line) { return to + line * scan.out.stride[2]; },
      [&](int line) { return s.rows().pack(line, packs.column / 8); }, [&](int line) { return rows.has(line); });
}

// ---- a step

// Zeros, or for GradK minus the sum of bias_j x_j, which is the same for all rows.
template <typename T>
__device__ __forceinline__ void start_out(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const bool biased = scan.kind == ScanKind::GradK;
  for_pairs<T>(out, [&](int, int n, float& x, float& y) {
    const float* sums = &s.vector[T::kSlab * at.warp + fragment_column(n, at.lane)];
    x = biased ? -sums[0] : 0.0f;
    y = biased ? -sums[1] : 0.0f;
  });
}

// Begins to load the rows' g, q or k.
template <typename T>
__device__ __forceinline__ void request_last(const Scan& scan, SharedTiles<T>& s) {
  request_lines(scan.last, scan.last_in_packs, s.work.b(), s.step.row_head, s.step.chunk.rows, s.first_column,
                s.columns, s.rows());
}

// Waits for x, and splits it.
template <typename T>
__device__ __forceinline__ void await_x(const Scan& scan, SharedTiles<T>& s) {
  cp_async_wait<0>();
  if (s.step.takes_columns) split_x(scan, s.step.chunk, s);
}

// Loads the rows and columns that the step takes. A thread splits what it loaded itself of one tile while the next ones
// arrive. If a and b are not split, x arrives while they are multiplied.
template <typename T>
__device__ __forceinline__ void load_step(const Scan& scan, SharedTiles<T>& s) {
  const ScanWork& work = s.work;
  const Step& step = s.step;
  const Chunk& chunk = step.chunk;
  if (step.takes_rows) request_lines<T>(scan.a, work.b(), step.row_head, chunk.rows, 0, scan.depth, s.a);
  cp_async_commit();
  if (step.takes_columns) request_lines<T>(scan.b, work.b(), step.column_head, chunk.columns, 0, scan.depth, s.b);
  cp_async_commit();
  if (step.takes_columns)
    request_lines<T>(scan.x, work.b(), step.column_head, chunk.columns, s.first_column, s.columns, s.x);
  if constexpr (!T::kFeatures)
    if (step.takes_rows) {
      store_results(scan, s);  // where a thread's own copies go to
      request_last(scan, s);
    }
  cp_async_commit();
  if constexpr (T::kDecayed)
    if (step.head == 0 && thread_number() / 32 == kWarps - 1) weigh_chunk(scan, s);
  if (!scan.rows_are_queries()) {
    if (step.takes_columns) load_query_rows(scan, work.b(), step.column_head, chunk.columns, s);
  } else if (!T::kWhole && step.takes_rows && scan.kind == ScanKind::GradQ) {
    load_query_rows(scan, work.b(), step.row_head, chunk.rows, s);
  }
  if constexpr (T::kFactorParts == 2) {
    cp_async_wait<2>();
    if (step.takes_rows) split_a(scan, chunk, s);
    cp_async_wait<1>();
    // For 1 / den and g.y of the queries, or the weights of decays.
    if (T::kDecayed || !scan.rows_are_queries()) __syncthreads();
    if (step.takes_columns) split_b(scan, chunk, s);
    await_x(scan, s);
    __syncthreads();
  } else if (T::kDecayed || chunk.has_rows || !scan.rows_are_queries()) {
    cp_async_wait<1>();
    __syncthreads();
  }
}

// Multiplies the state by the decays of the chunk. A thread has the numbers of the vector that it later adds to.
template <typename T>
__device__ __forceinline__ void fade_state(State<T>& state, SharedTiles<T>& s) {
  for_state(state, s.state, [&](float& x, float&) { x *= s.decays.all; });
  for (int column = thread_number(); column < T::kDepth; column += kThreads) s.vector[column] *= s.decays.all;
}

// Adds the columns of a loaded head to the state.
template <typename T>
__device__ __forceinline__ void join_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  if constexpr (T::kDecayed)
    if (s.step.fades) fade_state(state, s);
  add_to_state(scan, s, state);
  if (!scan.has_bias() && !scan.has_denominator()) return;
  const int sums = scan.has_bias() ? T::kWidth : T::kDepth;
  for (int column = thread_number(); column < sums; column += kThreads) {
    float sum = s.sums[0][column];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += s.sums[warp][column];
    s.vector[column] += sum;
  }
}

// Begins the next step: of the next head, or of the next chunk. One thread calls it.
template <typename T>
__device__ __forceinline__ void next_step(const Scan& scan, SharedTiles<T>& s) {
  const bool queries = scan.rows_are_queries();
  Step& step = s.step;
  if (++step.head >= step.heads) {
    const bool summing = ++step.number < s.summed_chunks;
    step.chunk = chunk_of(scan, s.work.sequence, summing ? s.ranges.columns : s.ranges.rows,
                          summing ? step.number : step.number - s.summed_chunks, summing, kChunk);
    const bool has_heads = queries ? step.chunk.has_rows : step.chunk.has_columns;
    step.heads = has_heads ? static_cast<int>(queries ? s.work.row_heads : s.work.column_heads) : 1;
    step.head = 0;
  }
  const bool is_first = step.head == 0, is_last = step.head == step.heads - 1;
  step.row_head = s.work.row_head + (queries ? step.head : 0);
  step.column_head = s.work.first_column_head + (queries ? 0 : step.head);
  step.takes_rows = step.chunk.has_rows && (queries || is_first);
  step.takes_columns = step.chunk.has_columns && (!queries || is_first);
  step.finishes_rows = step.chunk.has_rows && (queries || is_last);
  step.joins_columns = step.chunk.has_columns && (!queries || is_last);
  step.fades = queries ? is_last : is_first;
}

// The rows read the state before the columns of the chunk join it.
template <typename T>
__device__ __forceinline__ void scan_step(const Scan& scan, State<T>& state, Out<T>& out, SharedTiles<T>& s) {
  load_step(scan, s);
  if (s.step.chunk.has_rows && s.step.chunk.has_columns) form_scores(scan, s);
  if (s.step.takes_rows) {
    start_out(scan, s, out);
    read_state(scan, s, state, out);
    if constexpr (T::kDecayed) scale_rows<T>(out, [&](int row) { return s.decays.of_row[row]; });
  }
  if constexpr (T::kFactorParts == 1) await_x(scan, s);
  if (s.step.chunk.has_rows || T::kFactorParts == 1) __syncthreads();
  if (s.step.chunk.has_rows) {
    if constexpr (T::kFeatures && !T::kWhole)
      if (scan.kind == ScanKind::Denominators) {
        request_last(scan, s);
        cp_async_commit();
      }
    if (s.step.chunk.has_columns) read_chunk(scan, s, out);
    if (s.step.finishes_rows) finish(scan, s, out);
  }
  if (s.step.joins_columns) {
    join_state(scan, state, s);
  } else if constexpr (T::kDecayed) {
    if (s.step.fades) fade_state(state, s);
  }
}

// ---- states

// Calls move(k, column, staged) for the elements of the block's matrix that this thread moves, and move_sum(i, element)
// for those of its vector: of the sum of b_j each block has all.
template <typename T, typename Move, typename MoveSum>
__device__ __forceinline__ void for_staged(const Scan& scan, SharedTiles<T>& s, const Move& move,
                                           const MoveSum& move_sum) {
  const int thread = thread_number();
#pragma unroll 8
  for (int i = thread; i < T::kDepth * T::kWidth; i += kThreads) {
    const int k = i / T::kWidth;
    const int column = i % T::kWidth;
    if (k < scan.depth && column < s.columns) move(k, s.first_column + column, s.state.matrix[k][column]);
  }
  const int64_t sums = scan.forms_output() ? scan.depth : s.columns;
  const int64_t first = scan.forms_output() ? 0 : s.first_column;
  for (int i = thread; i < sums; i += kThreads) move_sum(first + i, s.vector[i]);
}

template <typename T>
__device__ __forceinline__ void begin_with_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  for (int i = thread_number(); i < T::kDepth; i += kThreads) s.vector[i] = 0.0f;
  for_state(state, s.state, [](float& x, float&) { x = 0.0f; });
  if (scan.phase == ScanPhase::Sums || (s.work.is_whole() && !scan.m && !scan.z)) return;
  for_state(state, s.state, [](float&, float& staged) { staged = 0.0f; });
  __syncthreads();
  load_state<typename T::scalar>(scan, s.work,
                                 [&](const auto& move, const auto& move_sum) { for_staged(scan, s, move, move_sum); });
  __syncthreads();
  for_state(state, s.state, [](float& x, float& staged) { x = staged; });
}

template <typename T>
__device__ __forceinline__ void end_with_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  if (!s.work.stores_state(scan)) return;
  for_state(state, s.state, [](float& x, float& staged) { staged = x; });
  __syncthreads();
  store_state<typename T::scalar>(scan, s.work,
                                  [&](const auto& move, const auto& move_sum) { for_staged(scan, s, move, move_sum); });
  if constexpr (T::kDecayed)
    if (scan.phase == ScanPhase::Sums && s.work.part == 0 && thread_number() == 0)
      kept_of<float>(scan, s.work, s.work.segment) = static_cast<float>(s.decays.kept);
}

template <typename scalar_t, int kDepth, int kWidth, bool kFeatures, bool kDecayed>
__global__ void __launch_bounds__(kThreads, kDepth == 64 ? 3 : 2) tensor_scan_kernel(const Scan scan) {
  using T = Traits<scalar_t, kDepth, kWidth, kFeatures, kDecayed>;
  SharedTiles<T>& s = shared<SharedTiles<T>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x);
    s.ranges = ranges_of(scan, s.work);
    s.first_column = s.work.part * scan.tile;
    s.columns = min(scan.tile, scan.width - s.first_column);
    s.summed_chunks = s.ranges.column_chunks(kChunk);
    s.chunks = s.summed_chunks + s.ranges.row_chunks(kChunk);
    s.unstored = {};
    s.step = {};
    s.step.number = -1;
    if constexpr (kDecayed) s.decays.kept = 1;
  }
  __syncthreads();
  if (!s.work.exists) return;
  State<T> state;
  Out<T> out;
  begin_with_state(scan, state, s);
#pragma unroll 1
  for (;;) {
    if (thread_number() == 0) next_step(scan, s);
    __syncthreads();
    if (s.step.number == s.chunks) break;
    scan_step(scan, state, out, s);
    if (thread_number() == 0 && (T::kFeatures || s.step.finishes_rows))
      s.unstored = {s.step.row_head, s.step.finishes_rows ? s.step.chunk.rows : Lines{}};
    __syncthreads();
    if constexpr (T::kFeatures) store_results(scan, s);
  }
  if constexpr (!T::kFeatures) store_results(scan, s);
  end_with_state(scan, state, s);
}

template <typename scalar_t, int kDepth, int kWidth, bool kDecayed>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  const bool features = scan.forms_output() || scan.kind == ScanKind::GradV;
  const auto launch_with = [&](auto traits, auto kernel) {
    constexpr size_t kBytes = sizeof(SharedTiles<decltype(traits)>);
    static_assert(kBytes <= kSharedBytesEverywhere);
    launch({name_of(scan.kind, true), blocks * scan.parts(), dim3(kThreads), kBytes, stream}, kernel, scan);
  };
  if (features)
    launch_with(Traits<scalar_t, kDepth, kWidth, true, kDecayed>{},
                tensor_scan_kernel<scalar_t, kDepth, kWidth, true, kDecayed>);
  else
    launch_with(Traits<scalar_t, kDepth, kWidth, false, kDecayed>{},
                tensor_scan_kernel<scalar_t, kDepth, kWidth, false, kDecayed>);
}

template <typename scalar_t, bool kDecayed>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  const int64_t larger = std::max(scan.depth, scan.width);
  if (larger <= 64) return launch_scan<scalar_t, 64, 64, kDecayed>(scan, blocks, stream);
  if (larger <= kWidestWhole) return launch_scan<scalar_t, kWidestWhole, kWidestWhole, kDecayed>(scan, blocks, stream);
  launch_scan<scalar_t, kLinearAttentionDeepest, 64, kDecayed>(scan, blocks, stream);
}

template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  scan.decay ? launch_scan<scalar_t, true>(scan, blocks, stream) : launch_scan<scalar_t, false>(scan, blocks, stream);
}

}  // namespace

void scan_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    dtype == Dtype::Float16 ? launch_scan<__half>(phase, blocks, stream) : launch_scan<bf16>(phase, blocks, stream);
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
