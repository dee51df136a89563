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
#pragma unroll
  for (int tile = 0; tile < T::kSlabTiles; ++tile)
#pragma unroll
    for (int depth = 0; depth < T::kDepthTiles; ++depth)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        move(state.part[tile][depth][i],
             staged.matrix[8 * depth + at.pair + i % 2][T::kSlab * at.warp + 16 * tile + at.group + i / 2 * 8]);
}

// Calls change(of_row, row, column, x, y) for the pairs of this thread's results, where of_row = start(row).
template <typename T, typename Start, typename Change>
__device__ __forceinline__ void for_pairs(Out<T>& out, const Start& start, const Change& change) {
  const Place at;
#pragma unroll
  for (int tile_row = 0; tile_row < kRowTiles; ++tile_row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * tile_row + at.group + 8 * half;
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
  const FeatureMap map = scan.shape.feature_map;
  const auto phi = [&](float x) { return map == FeatureMap::Identity ? x : elu_plus_one(x, fast_exp(x)); };
#pragma unroll
  for (int row = 0; row < kRowTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * row + at.group + 8 * half;
      float q[T::kOutTiles][2];
      float denominator = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const int column = T::kSlab * at.warp + 8 * tile + at.pair;
        const float2 x = read_pair(&s.last[line][column]);
        q[tile][0] = column < s.columns ? phi(x.x) : 0.0f;
        q[tile][1] = column + 1 < s.columns ? phi(x.y) : 0.0f;
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
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) denominator += s.row_sums[warp][line][0];
  const float inverse = scan.shape.normalize ? 1.0f / denominator : 1.0f;
  float product = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp)
    product += s.row_sums[warp][line][1] * (share_scale(s.row_sums[warp][line][0]) * inverse);
  if (at.warp == 0 && at.pair == 0 && s.step.chunk.rows.has(line) && needs_rows(scan)) {
    const int64_t row = query_row(scan.shape, s.work.b(), s.step.row_head) + s.step.chunk.rows.first + line;
    static_cast<float*>(scan.inverse)[row] = inverse;
    static_cast<float*>(scan.products)[row] = product;
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
  for_pairs<T>(
      z, [](int) { return 0.0f; },
      [&](float, int row, int column, float& x, float& y) {
        x += weighted_by_row(s, row, s.vector[column]);
        y += weighted_by_row(s, row, s.vector[column + 1]);
      });
  if constexpr (T::kWhole) share_rows(scan, s, z, out);
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRowTiles; ++row)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = 16 * row + at.group + 8 * half;
      const QueryRow query = T::kWhole ? add_shares(scan, s, line) : QueryRow{s.scale[line], s.bias[line]};
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        auto* to = &s.last[line][T::kSlab * at.warp + 8 * tile + at.pair];
        const float2 x = read_pair(to);
        const auto gradient = [&](int j, float last) {
          const float difference = out.part[row][tile][2 * half + j] - query.product * z.part[row][tile][2 * half + j];
          return difference * query.inverse * fast_derivative(map, last);
        };
        store_pair(to, gradient(0, x.x), gradient(1, x.y));
      }
    }
}

// 1 / den of a query of the chunk.
template <typename T>
__device__ __forceinline__ float inverse_of(const Scan& scan, const SharedTiles<T>& s, int row) {
  if (!scan.shape.normalize) return 1.0f;
  float denominator = weighted_by_row(s, row, s.denominator[row]);
  if (s.step.chunk.has_columns)
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) denominator += s.score_sums[tile][row];
  return 1.0f / (denominator + static_cast<float>(scan.eps));
}

// Denominators: stores 1 / den, and the part of g.y of the block's columns.
template <typename T>
__device__ __forceinline__ void finish_denominators(const Scan& scan, SharedTiles<T>& s, Out<T>& out) {
  const Place at;
  const int line = thread_number();
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + at.group + 8 * half;
      const float inverse = inverse_of(scan, s, row);
      float product = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const float2 g = read_pair(&s.after_a[row][T::kSlab * at.warp + 8 * tile + at.pair]);
        product += out.part[row_tile][tile][2 * half] * inverse * g.x;
        product += out.part[row_tile][tile][2 * half + 1] * inverse * g.y;
      }
      product = sum_of_four(product);
      if (at.pair == 0) s.row_sums[at.warp][row][1] = product;
    }
  __syncthreads();
  if (line >= kChunk || !s.step.chunk.rows.has(line)) return;
  const LinearAttentionShape& n = scan.shape;
  const int64_t row = query_row(n, s.work.b(), s.step.row_head) + s.step.chunk.rows.first + line;
  float product = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) product += s.row_sums[warp][line][1];
  static_cast<float*>(scan.products)[s.work.part * n.B * n.H * n.S + row] = product;
  if (s.work.part == 0) static_cast<float*>(scan.inverse)[row] = inverse_of(scan, s, line);
}

// GradK: stores the block's part of phi(k).(grad phi(k)), which the gradient of a decay needs.
template <typename T>
__device__ __forceinline__ void store_key_products(const Scan& scan, SharedTiles<T>& s, const Out<T>& out) {
  const Place at;
  const FeatureMap map = scan.shape.feature_map;
  const auto phi = [&](float x) { return map == FeatureMap::Identity ? x : elu_plus_one(x, fast_exp(x)); };
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + at.group + 8 * half;
      float product = 0.0f;
#pragma unroll
      for (int tile = 0; tile < T::kOutTiles; ++tile) {
        const float2 k = read_pair(&s.last[row][T::kSlab * at.warp + 8 * tile + at.pair]);
        product += out.part[row_tile][tile][2 * half] * phi(k.x);
        product += out.part[row_tile][tile][2 * half + 1] * phi(k.y);
      }
      product = sum_of_four(product);
      if (at.pair == 0) s.row_sums[at.warp][row][0] = product;
    }
  __syncthreads();
  const int line = thread_number();
  if (line >= kChunk || !s.step.chunk.rows.has(line)) return;
  const LinearAttentionShape& n = scan.shape;
  float product = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) product += s.row_sums[warp][line][0];
  const int64_t head = s.work.b() * n.Hkv + s.work.key_head;
  static_cast<float*>(scan.key_products)[(s.work.part * n.B * n.Hkv + head) * n.T + s.step.chunk.rows.first + line] =
      product;
}

template <typename T>
__device__ __forceinline__ void finish(const Scan& scan, SharedTiles<T>& s, Out<T>& out) {
  if constexpr (T::kFeatures) {
    if constexpr (!T::kWhole)
      if (scan.kind == ScanKind::Denominators) return finish_denominators(scan, s, out);
    const auto scale = [&](int row) { return scan.kind == ScanKind::Output ? inverse_of(scan, s, row) : 1.0f; };
    for_pairs<T>(out, scale, [&](float scale, int row, int column, float x, float y) {
      store_pair(&s.results()[row][column], x * scale, y * scale);
    });
  } else if (scan.kind == ScanKind::GradQ) {
    finish_queries(scan, s, out);
  } else {
    if constexpr (T::kDecayed)
      if (scan.key_products != nullptr) store_key_products(scan, s, out);
    const auto zero = [](int) { return 0.0f; };
    for_pairs<T>(out, zero, [&](float, int row, int column, float x, float y) {
      auto* to = &s.last[row][column];
      const FeatureMap map = scan.shape.feature_map;
      const float2 last = read_pair(to);
      store_pair(to, x * fast_derivative(map, last.x), y * fast_derivative(map, last.y));
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
      packs, RowLayout{scan.out.stride[3], s.columns, scan.out_packed},
      [&](int line) { return to + line * scan.out.stride[2]; },
      [&](int line) { return &s.results()[line][packs.column]; }, [&](int line) { return rows.has(line); });
}

// ---- a step

// Zeros, or for GradK minus the sum of bias_j x_j, which is the same for all rows.
template <typename T>
__device__ __forceinline__ void start_out(const Scan& scan, const SharedTiles<T>& s, Out<T>& out) {
  const bool biased = scan.kind == ScanKind::GradK;
  const auto zero = [](int) { return 0.0f; };
  for_pairs<T>(out, zero, [&](float, int, int column, float& x, float& y) {
    x = biased ? -s.vector[column] : 0.0f;
    y = biased ? -s.vector[column + 1] : 0.0f;
  });
}

// Begins to load the rows' g, q or k.
template <typename T>
__device__ __forceinline__ void request_last(const Scan& scan, const SharedTiles<T>& s,
                                             typename SharedTiles<T>::Line* to) {
  request_lines(scan.last, scan.last_packed, s.work.b(), s.step.row_head, s.step.chunk.rows, s.first_column, s.columns,
                to);
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
      request_last(scan, s, s.last);
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
    if constexpr (T::kDecayed)
      for_pairs<T>(
          out, [&](int row) { return s.decays.of_row[row]; },
          [](float weight, int, int, float& x, float& y) {
            x *= weight;
            y *= weight;
          });
  }
  if constexpr (T::kFactorParts == 1) await_x(scan, s);
  if (s.step.chunk.has_rows || T::kFactorParts == 1) __syncthreads();
  if (s.step.chunk.has_rows) {
    if constexpr (T::kFeatures && !T::kWhole)
      if (scan.kind == ScanKind::Denominators) {
        request_last(scan, s, s.after_a);
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
__device__ __forceinline__ void start_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  for (int i = thread_number(); i < T::kDepth; i += kThreads) s.vector[i] = 0.0f;
  for_state(state, s.state, [](float& x, float&) { x = 0.0f; });
  const bool from_slot = !s.work.is_whole();
  if (scan.phase == ScanPhase::Sums || (!from_slot && !scan.m && !scan.z)) return;
  for_state(state, s.state, [](float&, float& staged) { staged = 0.0f; });
  __syncthreads();
  if (from_slot) {
    const auto slot = slot_of<typename T::scalar>(scan, s.work, s.work.segment);
    for_staged(
        scan, s, [&](int64_t k, int64_t column, float& to) { to = slot.read(slot.at(k, column)); },
        [&](int64_t i, float& to) { to = slot.read(slot.sum_at(i)); });
  } else {
    for_staged(
        scan, s, [&](int64_t k, int64_t column, float& to) { to = initial_element<float>(scan, s.work, k, column); },
        [&](int64_t i, float& to) { to = initial_sum<float>(scan, s.work, i); });
  }
  __syncthreads();
  for_state(state, s.state, [](float& x, float& staged) { x = staged; });
}

template <typename T>
__device__ __forceinline__ void store_segment(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  const auto slot = slot_of<typename T::scalar>(scan, s.work, s.work.segment);
  for_state(state, s.state, [](float& x, float& staged) { staged = x; });
  __syncthreads();
  const bool only_matrix = !T::kWhole && scan.forms_output() && !scan.parts_have_slots() && s.work.part > 0;
  for_staged(
      scan, s, [&](int64_t k, int64_t column, float& from) { slot.write(slot.at(k, column), from); },
      [&](int64_t i, float& from) {
        if (!only_matrix) slot.write(slot.sum_at(i), from);
      });
  if constexpr (T::kDecayed)
    if (s.work.part == 0 && thread_number() == 0)
      kept_of<float>(scan, s.work, s.work.segment) = static_cast<float>(s.decays.kept);
}

// The state behind the scan, as far as it is wanted.
template <typename T>
__device__ __forceinline__ void store_last_state(const Scan& scan, State<T>& state, SharedTiles<T>& s) {
  for_state(state, s.state, [](float& x, float& staged) { staged = x; });
  __syncthreads();
  for_staged(
      scan, s,
      [&](int64_t k, int64_t column, float& from) {
        if (scan.new_m) *scan.new_m.at<float>(s.work.sequence.index, s.work.key_head, k, column) = from;
      },
      [&](int64_t i, float& from) {
        if (!scan.new_z || (scan.forms_output() && s.work.part > 0)) return;
        *scan.new_z.at<float>(s.work.sequence.index, s.work.key_head, 0, i) =
            scan.kind == ScanKind::GradK ? -from : from;
      });
}

template <typename scalar_t, int kDepth, int kWidth, bool kFeatures, bool kDecayed>
__global__ void __launch_bounds__(kThreads, kDepth == 64 ? 3 : 2) tensor_scan_kernel(const Scan scan) {
  using T = Traits<scalar_t, kDepth, kWidth, kFeatures, kDecayed>;
  SharedTiles<T>& s = shared<SharedTiles<T>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x, scan.parts());
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
  start_state(scan, state, s);
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
  if (scan.phase == ScanPhase::Sums) return store_segment(scan, state, s);
  if (s.work.stores_state(scan)) store_last_state(scan, state, s);
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
