#include "linear_attention/linear_attention_steps_cuda.cuh"

// The forward of 16-bit types on tensor cores. A warp has 16 columns of the state S, the sum of phi(k) v^T, in float32
// registers, and 16 numbers of z, the sum of phi(k).

namespace memcheck {
namespace linear_cuda {

namespace {

template <typename T>
struct alignas(256) ForwardMemory : StepMemory<ForwardMemory<T>, T, 1, 3, 1> {
  enum { kQ, kK, kV, kY };

  ScoreTile<T> scores;
  float score_sums[T::kHigh][T::kChunk];   // of each square of columns
  float state_sums[T::kWarps][T::kChunk];  // phi(q) z of each warp's numbers
  float inverse[T::kChunk];                // 1 / den

  __device__ __forceinline__ void note_tensors(const Scan& scan) {
    this->note(kQ, scan.a), this->note(kK, scan.b), this->note(kV, scan.x), this->note(kY, scan.out);
  }
};

template <typename T>
using ForwardResult = float[T::kHigh][2][4];

// The scores of a chunk, and their sums, shared by all warps.
template <typename T>
__device__ __forceinline__ void form_all_scores(const ChunkDecays<T>& decays, const Step& step, ForwardMemory<T>& s) {
  for (int job = warp(); job < kCorners<T>; job += T::kWarps) {
    const Corner at = corner_of(job);
    float sums[2] = {};
    form_scores<T>(s.tile(s.kQ, step), s.tile(s.kK, step), at.far, at.near,
                   [&](int low, int right, int i, int j, float x, float y) {
                     x = j <= i ? x * weight_between<T>(decays, i, j) : 0;
                     y = j < i ? y * weight_between<T>(decays, i, j + 1) : 0;
                     uint32_t parts[T::kMoreParts];
                     split(x, y, parts);
                     const uint32_t place = ScoreTile<T>::place_of_sums(at.far, low, at.near, right);
                     unroll<T::kMoreParts>([&](int part) { s.scores.word(part, place) = parts[part]; });
                     sums[low] += x + y;
                   });
    unroll<2>([&](int low) {
      const float sum = sum_of_row(sums[low]);
      if (lane() % 4 == 0) s.score_sums[at.near][16 * at.far + 8 * low + lane() / 4] = sum;
    });
  }
}

// result = phi(q) S, and this warp's part of phi(q) z.
template <typename T>
__device__ __forceinline__ void read_state(const ChunkDecays<T>& decays, const Step& step, const WarpState<T>& state,
                                           ForwardMemory<T>& s, ForwardResult<T>& result) {
  const Wide<typename ForwardMemory<T>::Loaded> q(s.tile(s.kQ, step));
  unroll<T::kHigh, 2, 4>([&](int m, int t, int i) { result[m][t][i] = 0; });
  unroll<T::kSteps>([&](int d) {
    uint32_t of_state[T::kParts][4];
    unroll<4>([&](int i) {
      const float(&pair)[4] = state.S[0][d][i % 2];
      uint32_t parts[T::kParts];
      split(pair[i / 2 * 2], pair[i / 2 * 2 + 1], parts);
      unroll<T::kParts>([&](int part) { of_state[part][i] = parts[part]; });
    });
    unroll<T::kHigh>([&](int m) {
      uint32_t of_q[T::kParts][4];
      q.template load<false>(m, d, of_q);
      multiply_square(of_q, of_state, result[m]);
    });
  });
  uint32_t of_z[T::kParts][4];
  unroll<2>([&](int t) {
    uint32_t parts[T::kParts];
    split(state.z[t][0], state.z[t][1], parts);
    unroll<T::kParts>([&](int part) { of_z[part][t] = parts[part]; });
  });
  unroll<T::kHigh>([&](int m) {
    uint32_t of_q[T::kParts][4];
    float sums[4] = {};  // the same in every column
    q.template load<false>(m, warp(), of_q);
    multiply_half(of_q, of_z, 0, sums);
    if (lane() % 4 == 0)
      unroll<2>([&](int low) { s.state_sums[warp()][16 * m + fragment_row(0, low)] = sums[2 * low]; });
  });
  if constexpr (T::kDecayed)
    unroll<T::kHigh, 2, 4>(
        [&](int m, int t, int i) { result[m][t][i] *= decays.of_row[16 * m + fragment_row(0, i / 2)]; });
}

// A thread for each row: 1 / den.
template <typename T>
__device__ __forceinline__ void find_inverse(const Scan& scan, const ChunkDecays<T>& decays, const Step& step,
                                             ForwardMemory<T>& s) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= T::kChunk) return;
  float den = 0;
  unroll<T::kWarps>([&](int w) { den += s.state_sums[w][row]; });
  den *= weight_of_row<T>(decays, row);
  if (step.chunk.has_columns) unroll<T::kHigh>([&](int n) { den += 16 * n <= row ? s.score_sums[n][row] : 0; });
  s.inverse[row] = scan.shape.normalize ? 1 / (den + static_cast<float>(scan.eps)) : 1;
}

// result += scores v
template <typename T>
__device__ __forceinline__ void read_chunk(const Step& step, ForwardMemory<T>& s, ForwardResult<T>& result) {
  const Wide<typename ForwardMemory<T>::Loaded> v(s.tile(s.kV, step));
  const Wide<ScoreTile<T>> scores(s.scores);
  unroll<T::kHigh>([&](int n) {
    uint32_t of_v[T::kParts][4];
    v.template load<true>(n, warp(), of_v);
    unroll<T::kHigh>([&](int m) {
      if (m < n) return;
      uint32_t of_scores[T::kMoreParts][4];
      scores.template load<false>(m, n, of_scores);
      multiply_square(of_scores, of_v, result[m]);
    });
  });
}

// y, by way of q's tile, so that rows are stored 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void stage_output(const Step& step, ForwardMemory<T>& s, const ForwardResult<T>& result) {
  auto& to = s.tile(s.kQ, step);
  unroll<T::kHigh, 2>([&](int m, int low) {
    const float inverse = s.inverse[16 * m + fragment_row(0, low)];
    unroll<2>([&](int right) {
      store_pair<T>(to, to.place_of_sums(m, low, warp(), right), result[m][right][2 * low] * inverse,
                    result[m][right][2 * low + 1] * inverse);
    });
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kDepth == 64 ? 3 : 1)
    forward_kernel(const Scan scan, const int stages) {
  auto& s = shared<ForwardMemory<T>>();
  if (threadIdx.x == 0) begin_steps(scan, stages, T::kChunk, s);
  __syncthreads();
  if (!s.work.exists) return;
  WarpState<T> state = {};
  begin_with_state<T>(scan, s, [&] { take_state(s, state); });
  const FeatureMap map = scan.shape.feature_map;
  for (Steps<T, ForwardMemory<T>> steps(scan, s); !steps.ended(); steps.go_on()) {
    const Step& step = steps.step();
    const auto& lines = steps.lines();
    const ChunkDecays<T>& decays = steps.decays();
    const bool has_rows = step.chunk.has_rows, sees = has_rows && step.chunk.has_columns;

    steps.wait();
    form_parts<T>(lines[s.kQ], map, s.tile(s.kQ, step));
    form_parts<T>(lines[s.kK], map, s.tile(s.kK, step));
    if (T::kParts > 1) form_parts<T>(lines[s.kV], FeatureMap::Identity, s.tile(s.kV, step));
    __syncthreads();
    steps.look_ahead();

    ForwardResult<T> result;
    if (sees) form_all_scores(decays, step, s);
    if (has_rows) read_state(decays, step, state, s, result);
    __syncthreads();
    if (has_rows) find_inverse(scan, decays, step, s);
    if (sees) read_chunk(step, s, result);
    if (step.fades) fade(decays, state);
    if (step.joins_columns) {
      const auto& k = s.tile(s.kK, step);
      join_state(decays, s.tile(s.kV, step), k, k, state);
    }
    __syncthreads();
    if (!has_rows) continue;
    stage_output(step, s, result);
    __syncthreads();
    store_lines<T>(lines[s.kY], s.tile(s.kQ, step));
  }
  end_with_state<T>(scan, s, [&] { give_state(state, s); });
}

}  // namespace

void forward_on_tensor_cores(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  with_traits(scan, dtype, [&](auto traits) {
    using T = decltype(traits);
    run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
      launch_steps<T, ForwardMemory<T>>(phase, blocks, stream, forward_kernel<T>);
    });
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
