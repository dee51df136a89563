#include "linear_attention/linear_attention_steps_cuda.cuh"

// The gradient of q of 16-bit types on tensor cores, and 1 / den and g.y of each query, where g is the gradient of y.
// A warp has 16 rows of S, the sum of phi(k) v^T, in float32 registers, and 16 numbers of z, the sum of phi(k). S has
// a part more than features, because S g - (g.y) z cancels where values have a mean.

namespace memcheck {
namespace linear_cuda {

namespace {

template <typename T>
struct alignas(256) QueryMemory : StepMemory<QueryMemory<T>, T, 2, 4, 1> {
  enum { kQ, kG, kK, kV, kGradQ };

  ScoreTile<T> scores;                 // g v^T
  float2 parts[T::kWarps][T::kChunk];  // phi(q) z and phi(q) S g / scale_of(it), of each warp's part of the depth
  float2 rows[T::kChunk];              // 1 / den and g.y

  __device__ __forceinline__ void note_tensors(const Scan& scan) {
    this->note(kQ, scan.last), this->note(kG, scan.a), this->note(kK, scan.x), this->note(kV, scan.b);
    this->note(kGradQ, scan.out);
  }
};

// Of a chunk: the sum of (g.v) phi(k), and that of phi(k).
template <typename T>
struct QueryResult {
  float S_g[T::kHigh][2][4];
  float z[T::kHigh][2][4];
};

template <typename T>
__device__ __forceinline__ void form_all_scores(const ChunkDecays<T>& decays, const Step& step, QueryMemory<T>& s) {
  for (int job = warp(); job < kCorners<T>; job += T::kWarps) {
    const Corner at = corner_of(job);
    form_scores<T>(s.tile(s.kG, step), s.tile(s.kV, step), at.far, at.near,
                   [&](int low, int right, int i, int j, float x, float y) {
                     uint32_t parts[T::kMoreParts];
                     split(j <= i ? x * weight_between<T>(decays, i, j) : 0,
                           j < i ? y * weight_between<T>(decays, i, j + 1) : 0, parts);
                     const uint32_t place = ScoreTile<T>::place_of_sums(at.far, low, at.near, right);
                     unroll<T::kMoreParts>([&](int part) { s.scores.word(part, place) = parts[part]; });
                   });
  }
}

// g S^T, as rows see the state before the chunk.
template <typename T>
__device__ __forceinline__ void read_state(const ChunkDecays<T>& decays, const Step& step, const WarpState<T>& state,
                                           QueryMemory<T>& s, QueryResult<T>& result) {
  const Wide<typename QueryMemory<T>::Loaded> g(s.tile(s.kG, step));
  unroll<T::kHigh, 2, 4>([&](int m, int t, int i) { result.S_g[m][t][i] = 0; });
  unroll<T::kSteps>([&](int e) {
    uint32_t of_state[T::kMoreParts][4];
    unroll<4>([&](int i) {
      const float(&pair)[4] = state.S[0][e][i % 2];
      uint32_t parts[T::kMoreParts];
      split(pair[i / 2 * 2], pair[i / 2 * 2 + 1], parts);
      unroll<T::kMoreParts>([&](int part) { of_state[part][i] = parts[part]; });
    });
    unroll<T::kHigh>([&](int m) {
      uint32_t of_g[T::kParts][4];
      g.template load<false>(m, e, of_g);
      multiply_square(of_g, of_state, result.S_g[m]);
    });
  });
  unroll<T::kHigh, 2, 4>([&](int m, int t, int i) {
    const float weight = weight_of_row<T>(decays, 16 * m + fragment_row(0, i / 2));
    result.S_g[m][t][i] *= weight;
  });
}

// z before the chunk.
template <typename T>
__device__ __forceinline__ void read_sums(const ChunkDecays<T>& decays, const WarpState<T>& state,
                                          QueryResult<T>& result) {
  unroll<T::kHigh, 2, 4>([&](int m, int t, int i) {
    result.z[m][t][i] = state.z[t][i % 2] * weight_of_row<T>(decays, 16 * m + fragment_row(0, i / 2));
  });
}

// A left factor that sums the columns that rows see, in the square at (m, n).
template <typename T, int kParts>
__device__ __forceinline__ void seen_columns(const ChunkDecays<T>& decays, int m, int n, uint32_t (&a)[kParts][4]) {
  unroll<4>([&](int i) {
    const int row = 16 * m + fragment_row(0, i % 2), column = 16 * n + fragment_column(i / 2);
    uint32_t parts[kParts];
    split(column <= row ? weight_between<T>(decays, row, column) : 0,
          column < row ? weight_between<T>(decays, row, column + 1) : 0, parts);
    unroll<kParts>([&](int part) { a[part][i] = parts[part]; });
  });
}

// Adds the columns of the chunk that each row sees.
template <typename T>
__device__ __forceinline__ void read_chunk(const ChunkDecays<T>& decays, const Step& step, QueryMemory<T>& s,
                                           QueryResult<T>& result) {
  const Wide<typename QueryMemory<T>::Loaded> k(s.tile(s.kK, step));
  const Wide<ScoreTile<T>> scores(s.scores);
  float before[2][4] = {};  // the sum of phi(k) of the squares so far, where nothing decays
  unroll<T::kHigh>([&](int n) {
    uint32_t of_k[T::kParts][4];
    k.template load<true>(n, warp(), of_k);
    unroll<T::kHigh>([&](int m) {
      if (m < n) return;
      uint32_t of_scores[T::kMoreParts][4];
      scores.template load<false>(m, n, of_scores);
      multiply_square(of_scores, of_k, result.S_g[m]);
      if (T::kDecayed || m == n) {
        uint32_t seen[T::kDecayed ? T::kParts : 1][4];
        seen_columns<T>(decays, m, n, seen);
        multiply_square(seen, of_k, result.z[m]);
      }
    });
    if constexpr (!T::kDecayed) {
      unroll<2, 4>([&](int t, int i) { result.z[n][t][i] += before[t][i % 2]; });
      unroll<2>([&](int t) { RowSums<T>::of_ones().add(of_k, t, before[t]); });
    }
  });
}

// phi(q) of this thread's numbers. Behind the last column, where the sums are 0, it is that of 0.
template <typename T>
struct QueryFeatures {
  float phi[8 * T::kHigh];

  __device__ __forceinline__ float at(int m, int low, int right, int i) const {
    return phi[8 * m + 4 * low + 2 * right + i];
  }
  __device__ __forceinline__ void form(FeatureMap map, const Step& step, QueryMemory<T>& s) {
    auto& q = s.tile(s.kQ, step);
    unroll<T::kHigh, 2, 2>([&](int m, int low, int right) {
      const float2 pair = load_pair<T>(q, q.place_of_sums(m, low, warp(), right));
      phi[8 * m + 4 * low + 2 * right] = pair.x;
      phi[8 * m + 4 * low + 2 * right + 1] = pair.y;
    });
    form_features<T>(map, phi);
  }
};

// At least 1, and finite, so that 0 times 1 / den stays 0 where den is infinite.
__device__ __forceinline__ float scale_of(float denominator) {
  return fminf(fmaxf(1.0f, fabsf(denominator)), 0x1p126f);
}

// This warp's parts of phi(q) z and phi(q) S g. The second may overflow where g.y does not, so it is divided by the
// scale of the first.
template <typename T>
__device__ __forceinline__ void share_rows(const QueryResult<T>& result, const QueryFeatures<T>& phi,
                                           QueryMemory<T>& s) {
  unroll<T::kHigh, 2>([&](int m, int low) {
    float2 part = {};
    unroll<2, 2>([&](int right, int i) { part.x += phi.at(m, low, right, i) * result.z[m][right][2 * low + i]; });
    part.x = sum_of_row(part.x);
    const float scale = reciprocal_flushed(scale_of(part.x));
    unroll<2, 2>(
        [&](int right, int i) { part.y += phi.at(m, low, right, i) * (result.S_g[m][right][2 * low + i] * scale); });
    part.y = sum_of_row(part.y);
    if (lane() % 4 == 0) s.parts[warp()][16 * m + fragment_row(0, low)] = part;
  });
}

// A thread for each row: 1 / den and g.y, for this kernel and the other gradients.
template <typename T>
__device__ __forceinline__ void find_rows(const Scan& scan, const Step& step, QueryMemory<T>& s) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= T::kChunk) return;
  float den = static_cast<float>(scan.eps), product = 0;
  unroll<T::kWarps>([&](int w) { den += s.parts[w][row].x; });
  const float inverse = scan.shape.normalize ? 1 / den : 1;
  unroll<T::kWarps>([&](int w) { product += s.parts[w][row].y * (scale_of(s.parts[w][row].x) * inverse); });
  s.rows[row] = make_float2(inverse, scan.shape.normalize ? product : 0);
  if (!step.chunk.rows.has(row) || !(scan.shape.normalize || scan.decay)) return;
  const int64_t index = query_row(scan.shape, s.work.b(), step.row_head) + step.chunk.rows.first + row;
  scan.inverse_at<float>(index) = inverse;
  scan.product_at<float>(0, index) = product;
}

// The gradient, by way of q's tile: every thread writes where it alone has read.
template <typename T>
__device__ __forceinline__ void stage_gradient(FeatureMap map, const Step& step, const QueryResult<T>& result,
                                               const QueryFeatures<T>& phi, QueryMemory<T>& s) {
  auto& q = s.tile(s.kQ, step);
  unroll<T::kHigh, 2>([&](int m, int low) {
    const float2 row = s.rows[16 * m + fragment_row(0, low)];
    unroll<2>([&](int right) {
      float gradient[2];
      unroll<2>([&](int i) {
        const float of_phi = result.S_g[m][right][2 * low + i] - row.y * result.z[m][right][2 * low + i];
        gradient[i] = of_phi * row.x * derivative_of(map, phi.at(m, low, right, i));
      });
      store_pair<T>(q, q.place_of_sums(m, low, warp(), right), gradient[0], gradient[1]);
    });
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kDepth == 64 ? 2 : 1)
    query_gradient_kernel(const Scan scan, const int stages) {
  auto& s = shared<QueryMemory<T>>();
  if (threadIdx.x == 0) begin_steps(scan, stages, T::kChunk, s);
  __syncthreads();
  if (!s.work.exists) return;
  WarpState<T> state = {};
  begin_with_state<T>(scan, s, [&] { take_state(s, state); });
  const FeatureMap map = scan.shape.feature_map;
  for (Steps<T, QueryMemory<T>> steps(scan, s); !steps.ended(); steps.go_on()) {
    const Step& step = steps.step();
    const auto& lines = steps.lines();
    const ChunkDecays<T>& decays = steps.decays();
    const bool has_rows = step.chunk.has_rows, sees = has_rows && step.chunk.has_columns;

    steps.wait();
    form_parts<T>(lines[s.kK], map, s.tile(s.kK, step));
    if (T::kParts > 1) {
      form_parts<T>(lines[s.kG], FeatureMap::Identity, s.tile(s.kG, step));
      form_parts<T>(lines[s.kV], FeatureMap::Identity, s.tile(s.kV, step));
    }
    __syncthreads();
    steps.look_ahead();

    QueryResult<T> result;
    if (sees) form_all_scores(decays, step, s);
    if (has_rows) read_state(decays, step, state, s, result);
    __syncthreads();
    if (has_rows) read_sums(decays, state, result);
    if (sees) read_chunk(decays, step, s, result);
    if (step.fades) fade(decays, state);
    if (step.joins_columns) {
      const auto& k = s.tile(s.kK, step);
      join_state(decays, k, s.tile(s.kV, step), k, state);
    }
    QueryFeatures<T> phi;
    if (has_rows) {
      phi.form(map, step, s);
      share_rows(result, phi, s);
    }
    __syncthreads();
    if (!has_rows) continue;
    find_rows(scan, step, s);
    __syncthreads();
    stage_gradient(map, step, result, phi, s);
    __syncthreads();
    store_lines<T>(lines[s.kGradQ], s.tile(s.kQ, step));
  }
  end_with_state<T>(scan, s, [&] { give_state(state, s); });
}

}  // namespace

void query_gradients_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  with_traits(scan, dtype, [&](auto traits) {
    using T = decltype(traits);
    run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
      launch_steps<T, QueryMemory<T>>(phase, blocks, stream, query_gradient_kernel<T>);
    });
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
