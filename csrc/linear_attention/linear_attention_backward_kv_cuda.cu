#include "linear_attention/linear_attention_steps_cuda.cuh"

// The gradients of k and v of 16-bit types on tensor cores, from one state: R, the sum of phi(q) / den g^T of the
// queries behind a chunk, and r, that of phi(q) / den (g.y). The warps have R in float32 registers. Both gradients read
// it, one of them transposed, so a copy lies in shared memory.

namespace memcheck {
namespace linear_cuda {

namespace {

template <typename T>
struct alignas(256) KeyMemory : StepMemory<KeyMemory<T>, T, 2, 4, 2> {
  enum { kK, kV, kQ, kG, kGradK, kGradV };

  ScoreTile<T> scores[2];                         // v g^T - g.y and phi(k) (phi(q) / den)^T
  Tile<T::kDepth, T::kDepth, T::kParts> R;        // rows are columns of v
  alignas(16) float query_products[T::kChunk];    // g.y
  alignas(16) float joining[T::kChunk];           // the same, with weights of decays
  float key_products[T::kDepth / 32][T::kChunk];  // phi(k).(grad phi(k)), of 32 columns each

  __device__ __forceinline__ void note_tensors(const Scan& scan) {
    this->note(kK, scan.last), this->note(kV, scan.a), this->note(kQ, scan.x), this->note(kG, scan.b);
    this->note(kGradK, scan.out), this->note(kGradV, scan.out_of_values);
  }
};

// A warp has 32 columns of both results, and of the rows squares `half` and kHigh - 1 - half, which have as many
// squares of scores in every warp. Of R it has 32 rows and half of the columns, and of r its 32 columns.
template <typename T>
struct KeyPlace {
  static constexpr int kGroups = T::kDepth / 32;
  static constexpr int kRows = T::kHigh / 2;
  int group = warp() % kGroups, half = warp() / kGroups;

  __device__ __forceinline__ int row(int m) const { return m == 0 ? half : T::kHigh - 1 - half; }
};

template <typename T>
struct KeyState {
  float R[2][T::kSteps / 2][2][4];
  float r[4][2];  // of depth 32 group + 8 t + lane % 4 * 2 + i
};

template <typename T>
struct KeyResult {
  float k[KeyPlace<T>::kRows][4][4];
  float v[KeyPlace<T>::kRows][4][4];
};

template <typename T>
__device__ __forceinline__ void store_state_for_warps(const KeyState<T>& state, KeyMemory<T>& s) {
  const KeyPlace<T> at;
  unroll<2, T::kSteps / 2, 2, 2>([&](int a, int d, int right, int low) {
    uint32_t parts[T::kParts];
    split(state.R[a][d][right][2 * low], state.R[a][d][right][2 * low + 1], parts);
    const uint32_t place = s.R.place_of_sums(2 * at.group + a, low, T::kSteps / 2 * at.half + d, right);
    unroll<T::kParts>([&](int part) { s.R.word(part, place) = parts[part]; });
  });
}

template <typename T>
__device__ __forceinline__ void form_all_scores(const ChunkDecays<T>& decays, const Step& step, KeyMemory<T>& s) {
  for (int job = warp(); job < 2 * kCorners<T>; job += T::kWarps) {
    const bool of_features = job >= kCorners<T>;
    const Corner at = corner_of(of_features ? job - kCorners<T> : job);
    ScoreTile<T>& scores = s.scores[of_features];
    form_scores<T>(s.tile(of_features ? s.kK : s.kV, step), s.tile(of_features ? s.kQ : s.kG, step), at.near, at.far,
                   [&](int low, int right, int i, int j, float x, float y) {
                     const float2 bias = *reinterpret_cast<const float2*>(&s.query_products[j]);
                     x -= of_features ? 0 : bias.x;
                     y -= of_features ? 0 : bias.y;
                     uint32_t parts[T::kMoreParts];
                     split(j >= i ? x * weight_between<T>(decays, j, i) : 0,
                           j + 1 >= i ? y * weight_between<T>(decays, j + 1, i) : 0, parts);
                     const uint32_t place = ScoreTile<T>::place_of_sums(at.near, low, at.far, right);
                     unroll<T::kMoreParts>([&](int part) { scores.word(part, place) = parts[part]; });
                   });
  }
}

// v R - r and phi(k) R^T, as rows see the state behind the chunk.
template <typename T>
__device__ __forceinline__ void read_state(const ChunkDecays<T>& decays, const Step& step, const KeyState<T>& state,
                                           KeyMemory<T>& s, KeyResult<T>& result) {
  using Loaded = typename KeyMemory<T>::Loaded;
  using OfR = Tile<T::kDepth, T::kDepth, T::kParts>;
  const KeyPlace<T> at;
  const Wide<Loaded> v(s.tile(s.kV, step)), k(s.tile(s.kK, step));
  const Wide<OfR> wide(s.R);
  const Tall<OfR> tall(s.R);
  unroll<KeyPlace<T>::kRows, 4, 4>([&](int m, int t, int i) {
    result.k[m][t][i] = -state.r[t][i % 2];
    result.v[m][t][i] = 0;
  });
  unroll<T::kSteps>([&](int d) {
    uint32_t x[2][T::kParts][4], y[2][T::kParts][4];
    unroll<2>([&](int c) {
      wide.template load<true>(d, 2 * at.group + c, x[c]);
      tall.template load<false>(2 * at.group + c, d, y[c]);
    });
    unroll<KeyPlace<T>::kRows>([&](int m) {
      uint32_t of_v[T::kParts][4], of_k[T::kParts][4];
      v.template load<false>(at.row(m), d, of_v);
      k.template load<false>(at.row(m), d, of_k);
      unroll<4>([&](int t) {
        multiply_half(of_v, x[t / 2], t % 2, result.k[m][t]);
        multiply_half(of_k, y[t / 2], t % 2, result.v[m][t]);
      });
    });
  });
  if constexpr (T::kDecayed)
    unroll<KeyPlace<T>::kRows, 4, 4>([&](int m, int t, int i) {
      const float weight = decays.of_row[16 * at.row(m) + fragment_row(0, i / 2)];
      result.k[m][t][i] *= weight;
      result.v[m][t][i] *= weight;
    });
}

// Adds scores phi(q) and scores g. Also forms what the chunk adds to r.
template <typename T>
__device__ __forceinline__ void read_chunk(const Step& step, KeyMemory<T>& s, bool sees, KeyResult<T>& result,
                                           float (&of_r)[4][4]) {
  using Loaded = typename KeyMemory<T>::Loaded;
  const KeyPlace<T> at;
  const Wide<Loaded> q(s.tile(s.kQ, step)), g(s.tile(s.kG, step));
  const Wide<ScoreTile<T>> of_values(s.scores[0]), of_features(s.scores[1]);
  unroll<T::kHigh>([&](int n) {
    uint32_t x[2][T::kParts][4], y[2][T::kParts][4];
    unroll<2>([&](int c) {
      q.template load<true>(n, 2 * at.group + c, x[c]);
      g.template load<true>(n, 2 * at.group + c, y[c]);
    });
    const auto weights = RowSums<T>::of_weights((T::kDecayed ? s.joining : s.query_products) + 16 * n);
    unroll<4>([&](int t) { weights.add(x[t / 2], t % 2, of_r[t]); });
    unroll<KeyPlace<T>::kRows>([&](int m) {
      if (!sees || n < at.row(m)) return;
      uint32_t a[T::kMoreParts][4], b[T::kMoreParts][4];
      of_values.template load<false>(at.row(m), n, a);
      of_features.template load<false>(at.row(m), n, b);
      unroll<4>([&](int t) {
        multiply_half(a, x[t / 2], t % 2, result.k[m][t]);
        multiply_half(b, y[t / 2], t % 2, result.v[m][t]);
      });
    });
  });
}

template <typename T>
__device__ __forceinline__ void fade(const ChunkDecays<T>& decays, KeyState<T>& state) {
  if constexpr (T::kDecayed) {
    unroll<2, T::kSteps / 2, 2, 4>([&](int a, int d, int h, int i) { state.R[a][d][h][i] *= decays.all; });
    unroll<4, 2>([&](int t, int i) { state.r[t][i] *= decays.all; });
  }
}

// Two features of k, which its tile has.
template <typename T>
__device__ __forceinline__ float2 features_at(typename KeyMemory<T>::Loaded& k, uint32_t place) {
  uint32_t parts[T::kParts];
  unroll<T::kParts>([&](int part) { parts[part] = k.word(part, place); });
  return sum_of_parts(parts);
}

// Stores phi(k).(grad phi(k)) of the rows, which the gradient of a decay needs.
template <typename T>
__device__ __forceinline__ void store_products(const Scan& scan, const Step& step, const KeyResult<T>& result,
                                               KeyMemory<T>& s) {
  const KeyPlace<T> at;
  auto& k = s.tile(s.kK, step);
  unroll<KeyPlace<T>::kRows, 2>([&](int m, int low) {
    float product = 0;
    unroll<4>([&](int t) {
      const float2 phi = features_at<T>(k, k.place_of_sums(at.row(m), low, 2 * at.group + t / 2, t % 2));
      product += phi.x * result.k[m][t][2 * low] + phi.y * result.k[m][t][2 * low + 1];
    });
    product = sum_of_row(product);
    if (lane() % 4 == 0) s.key_products[at.group][16 * at.row(m) + fragment_row(0, low)] = product;
  });
  __syncthreads();
  const int line = static_cast<int>(threadIdx.x);
  if (line >= T::kChunk || !step.chunk.rows.has(line)) return;
  float product = 0;
  unroll<KeyPlace<T>::kGroups>([&](int group) { product += s.key_products[group][line]; });
  scan.key_product_at<float>(0, key_row(scan.shape, s.work.b(), s.work.key_head) + step.chunk.rows.first + line) =
      product;
}

// The gradients, by way of the tiles of k and v: every thread writes where it alone reads.
template <typename T>
__device__ __forceinline__ void stage_gradients(FeatureMap map, const Step& step, const KeyResult<T>& result,
                                                KeyMemory<T>& s) {
  const KeyPlace<T> at;
  auto& k = s.tile(s.kK, step);
  auto& v = s.tile(s.kV, step);
  unroll<KeyPlace<T>::kRows, 2, 4>([&](int m, int low, int t) {
    const uint32_t place = k.place_of_sums(at.row(m), low, 2 * at.group + t / 2, t % 2);
    const float2 phi = features_at<T>(k, place);
    if (T::kPacks > 1) __syncwarp();
    store_pair<T>(k, place, result.k[m][t][2 * low] * derivative_of(map, phi.x),
                  result.k[m][t][2 * low + 1] * derivative_of(map, phi.y));
    store_pair<T>(v, place, result.v[m][t][2 * low], result.v[m][t][2 * low + 1]);
  });
}

// What a thread needs of the next step's queries: 1 / den of the lines that it loads, and g.y of its own.
template <typename T>
struct QueryRows {
  float inverse[OwnPacks<T>::kCount];
  float product;

  __device__ __forceinline__ void load(const Scan& scan, const Step& step, int64_t b) {
    if (!step.takes_columns) return;
    const int64_t first = query_row(scan.shape, b, step.column_head) + step.chunk.columns.first;
    const auto exists = [&](int line) { return scan.shape.normalize && step.chunk.columns.has(line); };
    const OwnPacks<T> own;
    unroll<OwnPacks<T>::kCount>(
        [&](int i) { inverse[i] = exists(own.line_of(i)) ? scan.inverse_at<float>(first + own.line_of(i)) : 1; });
    const int line = static_cast<int>(threadIdx.x);
    product = exists(line) ? scan.product_at<float>(0, first + line) : 0;
  }
};

template <typename T>
__device__ __forceinline__ void take_state(KeyMemory<T>& s, KeyState<T>& state) {
  const KeyPlace<T> at;
  for_state<false>(state.R, s.state(), 2 * at.group, T::kSteps / 2 * at.half,
                   [](float& x, float& staged) { x = staged; });
  unroll<4, 2>([&](int t, int i) { state.r[t][i] = s.vector[32 * at.group + fragment_column(t) + i]; });
}
template <typename T>
__device__ __forceinline__ void give_state(KeyState<T>& state, KeyMemory<T>& s) {
  const KeyPlace<T> at;
  for_state<false>(state.R, s.state(), 2 * at.group, T::kSteps / 2 * at.half,
                   [](float& x, float& staged) { staged = x; });
  if (lane() >= 4 || at.half > 0) return;
  unroll<4, 2>([&](int t, int i) { s.vector[32 * at.group + fragment_column(t) + i] = state.r[t][i]; });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kDepth == 64 ? 2 : 1)
    key_gradient_kernel(const Scan scan, const int stages) {
  auto& s = shared<KeyMemory<T>>();
  if (threadIdx.x == 0) begin_steps(scan, stages, T::kChunk, s);
  __syncthreads();
  if (!s.work.exists) return;
  KeyState<T> state = {};
  begin_with_state<T>(scan, s, [&] { take_state(s, state); });
  const FeatureMap map = scan.shape.feature_map;
  const KeyPlace<T> at;
  KeyResult<T> result;
  QueryRows<T> rows;
  Steps<T, KeyMemory<T>> steps(scan, s);
  for (rows.load(scan, steps.step(), s.work.b()); !steps.ended(); steps.go_on()) {
    const Step& step = steps.step();
    const auto& lines = steps.lines();
    const ChunkDecays<T>& decays = steps.decays();
    const bool sees = step.chunk.has_rows && step.chunk.has_columns;

    steps.wait();
    if (step.takes_columns && threadIdx.x < T::kChunk) s.query_products[threadIdx.x] = rows.product;
    if (step.takes_rows) store_state_for_warps(state, s);
    form_parts<T>(lines[s.kK], map, s.tile(s.kK, step));
    form_parts<T>(lines[s.kQ], map, s.tile(s.kQ, step), rows.inverse);
    if (T::kParts > 1) {
      form_parts<T>(lines[s.kV], FeatureMap::Identity, s.tile(s.kV, step));
      form_parts<T>(lines[s.kG], FeatureMap::Identity, s.tile(s.kG, step));
    }
    __syncthreads();
    rows.load(scan, steps.next(), s.work.b());
    steps.look_ahead();

    if constexpr (T::kDecayed)
      if (threadIdx.x < T::kChunk)
        s.joining[threadIdx.x] = s.query_products[threadIdx.x] * decays.of_column[threadIdx.x];
    if (sees) form_all_scores(decays, step, s);
    if (step.takes_rows) read_state(decays, step, state, s, result);
    __syncthreads();
    if (step.fades) fade(decays, state);
    if (step.chunk.has_columns) {
      float of_r[4][4] = {};
      read_chunk(step, s, sees, result, of_r);
      unroll<4, 2>([&](int t, int i) { state.r[t][i] += of_r[t][i] + of_r[t][2 + i]; });
      const float* weights = nullptr;
      if constexpr (T::kDecayed) weights = decays.of_column;
      join<T>(s.tile(s.kG, step), 2 * at.group, s.tile(s.kQ, step), T::kSteps / 2 * at.half, weights, state.R);
    }
    if constexpr (T::kDecayed)
      if (step.finishes_rows && scan.key_products != nullptr) store_products(scan, step, result, s);
    if (step.finishes_rows) stage_gradients(map, step, result, s);
    __syncthreads();
    if (!step.finishes_rows) continue;
    store_lines<T>(lines[s.kGradK], s.tile(s.kK, step));
    store_lines<T>(lines[s.kGradV], s.tile(s.kV, step));
  }
  end_with_state<T>(scan, s, [&] { give_state(state, s); });
}

}  // namespace

bool key_gradients_fit(const LinearAttentionShape& n, Dtype dtype) {
  if (dtype == Dtype::BFloat16 || std::max(n.D, n.Dv) <= 64) return true;
  return fits_in_a_block(dtype == Dtype::Float16 ? KeyMemory<Traits<__half, 128, 32, true>>::bytes(1)
                                                 : KeyMemory<Traits<float, 128, 32, true>>::bytes(1));
}

void key_gradients_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  with_traits(scan, dtype, [&](auto traits) {
    using T = decltype(traits);
    using Short = Traits<typename T::scalar, T::kDepth, 32, T::kDecayed>;
    run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
      if (fits_in_a_block(KeyMemory<T>::bytes(1)))
        launch_steps<T, KeyMemory<T>>(phase, blocks, stream, key_gradient_kernel<T>);
      else
        launch_steps<Short, KeyMemory<Short>>(phase, blocks, stream, key_gradient_kernel<Short>);
    });
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
