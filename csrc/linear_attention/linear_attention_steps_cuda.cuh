#pragma once

#include "linear_attention/linear_attention_tiles_cuda.cuh"

// The steps of a scan on tensor cores: which rows and columns a block takes at once, how they are loaded, the weights
// that decays give them, and the states with which a block begins and ends.
//
// While a step is computed, the tiles of the next one are on their way, if a block may have shared memory for both.
//
// With decays, a weight is a power of two whose exponent is a difference of sums of logarithms over the chunk, never
// above 0. The product of a whole chunk's decays multiplies the state once for each chunk, so its errors add up: it is
// formed in float64.

namespace memcheck {
namespace linear_cuda {

// Rows and columns of a chunk, of one head. Query heads of a group follow one another: their rows see the same columns,
// or as columns they are seen by the same rows.
struct Step {
  Chunk chunk;
  int number;  // of the chunk
  int head, heads;
  int64_t row_head, column_head;
  bool takes_rows, takes_columns;     // in the first step of their head
  bool finishes_rows, joins_columns;  // in the last one
  bool fades;                         // where columns of the chunk first join: the state is multiplied by its decays
  int row_stage, column_stage;        // where their tiles are
};

// Lines of a tensor that belong to a tile.
template <typename scalar_t>
struct TensorLines {
  scalar_t* first;  // the element in column 0 of line 0
  int64_t line_stride, column_stride;
  int columns;
  int begin, end;  // those that exist
  bool in_packs;   // may be read or written 16 bytes at a time
  bool taken;      // else the tile stays as it is

  MEMCHECK_INLINE bool has(int line) const {
    return static_cast<unsigned>(line - begin) < static_cast<unsigned>(end - begin);
  }
};

// A tensor of the block's row of the batch, for which form_step forms the lines of a step.
template <typename scalar_t>
struct StepTensor {
  scalar_t* data;  // null if there is none
  int64_t head_stride, line_stride, column_stride;
  int columns;
  bool in_packs;
};

// The weights that decays give to the positions of a chunk.
template <typename T, bool kDecayed = T::kDecayed>
struct ChunkDecays {};
template <typename T>
struct alignas(16) ChunkDecays<T, true> {
  float2 logs[T::kChunk];      // sums of logarithms to base 2 up to a position: a number, and what rounding left out
  float of_row[T::kChunk];     // between a row and the state before the chunk
  float of_column[T::kChunk];  // between a column and the state behind it
  float all;                   // the product of all decays
};

template <typename T>
struct StagedState {
  float matrix[T::kDepth][T::kDepth + 4];  // (depth,width)
};

// What a block has in shared memory, beside what its kernel, Memory, adds to it: tiles of kRowTensors tensors of rows,
// then those of columns. A second stage is behind all. Memory has names for its tensors and then its results, and
// note_tensors(scan) notes each.
template <typename Memory, typename T, int kRowTensors_, int kTensors_, int kResults_>
struct StepMemory {
  using scalar = typename T::scalar;
  using Loaded = Tile<T::kChunk, T::kDepth, T::kParts>;
  static constexpr int kRowTensors = kRowTensors_;
  static constexpr int kTensors = kTensors_;
  static constexpr int kResults = kResults_;

  struct alignas(256) Stage {
    Loaded tile[kTensors];
  };

  alignas(16) float vector[T::kDepth];                // of the state, before and after the scan
  ChunkDecays<T> decays[2];                           // of this chunk and the next one
  TensorLines<scalar> lines[3][kTensors + kResults];  // of this step and the next two
  Step steps[3];
  StepTensor<scalar> tensors[kTensors + kResults];
  ScanWork work;
  ScanRanges ranges;
  double kept;  // the product of the decays so far
  int summed_chunks, chunks, stages;
  Stage first_stage;

  // Before and after the scan it lies where tiles and what a kernel adds are in between.
  __device__ __forceinline__ StagedState<T>& state() { return *reinterpret_cast<StagedState<T>*>(&first_stage); }
  static constexpr size_t bytes(int stages) {
    return std::max(sizeof(Memory) + (stages - 1) * sizeof(Stage),
                    sizeof(StepMemory) - sizeof(Stage) + sizeof(StagedState<T>));
  }
  __device__ __forceinline__ Loaded& tile(int tensor, const Step& step) {
    const int stage = tensor < kRowTensors ? step.row_stage : step.column_stage;
    return (stage == 0 ? &first_stage : reinterpret_cast<Stage*>(static_cast<Memory*>(this) + 1))->tile[tensor];
  }
  __device__ __forceinline__ void note(int tensor, const ScanTensor& of) {
    const Strided<4>& x = of.x;
    tensors[tensor] = {x ? x.at<scalar>(work.b(), 0, 0, 0) : nullptr,
                       x.stride[1],
                       x.stride[2],
                       x.stride[3],
                       static_cast<int>(of.columns),
                       of.in_packs};
  }
};

// ---- which rows and columns

// One thread calls it.
template <typename Memory>
__device__ __forceinline__ void begin_steps(const Scan& scan, int stages, int chunk_size, Memory& s) {
  s.work = scan_work(scan, blockIdx.x);
  s.ranges = ranges_of(scan, s.work);
  s.summed_chunks = s.ranges.column_chunks(chunk_size);
  s.chunks = s.summed_chunks + s.ranges.row_chunks(chunk_size);
  s.stages = stages;
  s.kept = 1;
  s.note_tensors(scan);
  Step& none = s.steps[2];
  none = {};
  none.number = -1;
}

// The step of the next head, or of the next chunk.
template <typename Memory>
__device__ __forceinline__ Step step_after(const Scan& scan, const Memory& s, Step step, int chunk_size) {
  const bool queries = scan.rows_are_queries();
  if (step.number >= s.chunks) return step;
  if (++step.head >= step.heads) {
    const bool summing = ++step.number < s.summed_chunks;
    step.chunk = chunk_of(scan, s.work.sequence, summing ? s.ranges.columns : s.ranges.rows,
                          summing ? step.number : step.number - s.summed_chunks, summing, chunk_size);
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
  // Of one stage or two.
  if (step.takes_rows) step.row_stage = s.stages - 1 - step.row_stage;
  if (step.takes_columns) step.column_stage = s.stages - 1 - step.column_stage;
  return step;
}

// Forms step i, and its lines: a lane those of each tensor. One warp calls it.
template <typename T, typename Memory>
__device__ __forceinline__ void form_step(const Scan& scan, int i, Memory& s) {
  if (lane() == 0) s.steps[i] = step_after(scan, s, s.steps[(i + 2) % 3], T::kChunk);
  __syncwarp();
  const int tensor = lane();
  if (tensor < Memory::kTensors + Memory::kResults) {
    const Step& step = s.steps[i];
    const auto& x = s.tensors[tensor];
    const bool is_result = tensor >= Memory::kTensors, of_rows = is_result || tensor < Memory::kRowTensors;
    const Lines& lines = of_rows ? step.chunk.rows : step.chunk.columns;
    const int64_t head = of_rows ? step.row_head : step.column_head;
    const bool exists = x.data != nullptr;
    s.lines[i][tensor] = {exists ? x.data + head * x.head_stride + lines.first * x.line_stride : nullptr,
                          x.line_stride,
                          x.column_stride,
                          x.columns,
                          exists ? lines.begin : 0,
                          exists ? lines.end : 0,
                          x.in_packs,
                          is_result ? step.finishes_rows
                          : of_rows ? step.takes_rows
                                    : step.takes_columns};
  }
  __syncwarp();
}

// ---- from memory to tiles, and back. A thread has the same pack of every 16th line. Lines are passed by value: those
// in shared memory would be read again after every store.

template <typename T>
struct OwnPacks {
  static constexpr int kCount = T::kHigh;
  int line = static_cast<int>(threadIdx.x) / (T::kDepth / 8);
  int pack = static_cast<int>(threadIdx.x) % (T::kDepth / 8);

  __device__ __forceinline__ int line_of(int i) const { return line + 16 * i; }
};

// Begins to load lines; zeros where nothing exists. They have arrived for this thread after cp_async_wait.
template <typename T, typename Of>
__device__ __forceinline__ void request_lines(const TensorLines<typename T::scalar> lines, Of& tile) {
  using scalar_t = typename T::scalar;
  if (!lines.taken) return;
  const OwnPacks<T> own;
  const uint32_t place = Of::place(own.line, own.pack);
  const int column = 8 * own.pack;
  if (lines.in_packs) {
    const scalar_t* from = lines.first + own.line * lines.line_stride + column;
    unroll<OwnPacks<T>::kCount>([&](int i) {
      unroll<T::kPacks>([&](int part) {
        const int further = part * T::kPackElements;
        const bool exists = lines.has(own.line_of(i)) && column + further < lines.columns;
        cp_async_16(&tile.pack(part, Of::square(place, i, 0)), from + further, exists);
      });
      from += 16 * lines.line_stride;
    });
    return;
  }
#pragma unroll 1
  for (int i = 0; i < T::kPacks * OwnPacks<T>::kCount; ++i) {
    const int line = own.line_of(i / T::kPacks), part = i % T::kPacks, first = column + part * T::kPackElements;
    const scalar_t* from = lines.first + line * lines.line_stride + first * lines.column_stride;
    const RowLayout layout{lines.column_stride, lines.columns, false};
    const Pack<scalar_t> pack = read_pack(from, layout, first, lines.has(line));
    __builtin_memcpy(&tile.pack(part, Of::square(place, i / T::kPacks, 0)), pack.values, sizeof(pack));
  }
}

// Replaces what this thread loaded by phi of it, or leaves the values, in parts; zeros where nothing exists. scale: of
// each of its lines, or null.
template <typename T, typename Of>
__device__ __forceinline__ void form_parts(const TensorLines<typename T::scalar> lines, FeatureMap map, Of& tile,
                                           const float* scale = nullptr) {
  if (!lines.taken || (T::kParts == 1 && map == FeatureMap::Identity && scale == nullptr)) return;
  const OwnPacks<T> own;
  const uint32_t place = Of::place(own.line, own.pack);
  const int columns = lines.columns - 8 * own.pack;
  unroll<OwnPacks<T>::kCount>([&](int i) {
    const uint32_t at = Of::square(place, i, 0);
    float values[8];
    load_values<T>(tile, at, values);
    form_features<T>(map, values);
    uint32_t parts[4][T::kParts];
    unroll<4>([&](int j) {
      const float factor = scale == nullptr ? 1 : scale[i];
      split(values[2 * j] * factor, values[2 * j + 1] * factor, parts[j]);
    });
    const int exist = lines.has(own.line_of(i)) ? columns : 0;
    if (exist < 8) {
      unroll<4, T::kParts>([&](int j, int part) {
        parts[j][part] &= (exist > 2 * j ? 0xffffu : 0) | (exist > 2 * j + 1 ? 0xffff0000u : 0);
      });
    }
    unroll<T::kParts>([&](int part) {
      tile.pack(part, at) = make_uint4(parts[0][part], parts[1][part], parts[2][part], parts[3][part]);
    });
  });
}

// Copies results to memory.
template <typename T, typename Of>
__device__ __forceinline__ void store_lines(const TensorLines<typename T::scalar> lines, Of& tile) {
  using scalar_t = typename T::scalar;
  if (!lines.taken) return;
  const OwnPacks<T> own;
  const uint32_t place = Of::place(own.line, own.pack);
  const int column = 8 * own.pack;
  const auto store = [&](const RowLayout& layout) {
    scalar_t* to = lines.first + own.line * lines.line_stride + column * layout.stride;
    unroll<OwnPacks<T>::kCount>([&](int i) {
      unroll<T::kPacks>([&](int part) {
        if (!lines.has(own.line_of(i))) return;
        Pack<scalar_t> pack;
        const int further = part * T::kPackElements;
        __builtin_memcpy(static_cast<void*>(pack.values), &tile.pack(part, Of::square(place, i, 0)), sizeof(pack));
        write_pack(pack, to + further * layout.stride, layout, column + further);
      });
      to += 16 * lines.line_stride;
    });
  };
  // Apart, so that whole packs are stored without branches for other layouts.
  if (lines.in_packs)
    store({1, lines.columns, true});
  else
    store({lines.column_stride, lines.columns, false});
}

// ---- decays

// Two to this power is 0 in float32. In place of a logarithm of -inf, whose difference with another is no number.
constexpr double kLowestExponent = -1024;

// One warp forms the weights of a chunk. A lane has neighbouring positions.
template <typename T, typename Memory>
__device__ __forceinline__ void weigh_chunk(const Scan& scan, const Step& step, Memory& s, ChunkDecays<T>& to) {
  constexpr double kLog2e = 1.44269504088896341;
  constexpr int kCount = T::kChunk / 32;
  const Span& keys = s.work.sequence.keys;
  double sums[kCount], sum = 0, product = 1;
  unroll<kCount>([&](int i) {
    const int64_t t = step.chunk.time + kCount * lane() + i;
    if (t < keys.end - keys.begin) {
      const float given = *scan.decay.given.at<float>(s.work.b(), s.work.key_head, keys.begin + t);
      product *= scan.decay.decay_of(given);
      sum += scan.decay.logarithms ? fmax(given * kLog2e, kLowestExponent) : log2f(given);
    }
    sums[i] = sum;
  });
  double up_to = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, up_to, distance);
    if (lane() >= distance) up_to += before;
    product *= __shfl_xor_sync(~0u, product, distance);
  }
  const double all = __shfl_sync(~0u, up_to, 31);
  unroll<kCount>([&](int i) {
    const int line = kCount * lane() + i;
    const double up_to_line = up_to - sum + sums[i];
    const float high = static_cast<float>(up_to_line);
    to.logs[line] = make_float2(high, static_cast<float>(up_to_line - high));
    const float from_begin = exp2_approximate(high);
    const float to_end = exp2_approximate(static_cast<float>(all - up_to_line));
    to.of_row[line] = scan.rows_are_queries() ? from_begin : to_end;
    to.of_column[line] = scan.rows_are_queries() ? to_end : from_begin;
  });
  if (lane() > 0) return;
  to.all = static_cast<float>(product);
  s.kept *= product;
}

// The product of the decays between two positions of a chunk, of which the key is not later.
template <typename T>
__device__ __forceinline__ float weight_between(const ChunkDecays<T>& decays, int query, int key) {
  if constexpr (!T::kDecayed) return 1.0f;
  if constexpr (T::kDecayed) {
    const float2 up_to_query = decays.logs[query], up_to_key = decays.logs[key];
    return exp2_approximate((up_to_query.x - up_to_key.x) + (up_to_query.y - up_to_key.y));
  }
}

// The weight of what a row reads from the state.
template <typename T>
__device__ __forceinline__ float weight_of_row(const ChunkDecays<T>& decays, int row) {
  if constexpr (T::kDecayed) return decays.of_row[row];
  return 1.0f;
}

// ---- the loop

// The steps of a block. In each of them a kernel
//
//     wait()         for what this thread requested, and forms factors of it; then a barrier
//     look_ahead()   requests the tiles of the next step, if they have a second stage, and forms the step after it
//     ...            computes, and ends where no thread reads tiles of others any more
//     go_on()        requests the tiles of the next step, if there is one stage
template <typename T, typename Memory>
class Steps {
 public:
  __device__ __forceinline__ Steps(const Scan& scan, Memory& s) : scan_(scan), s_(s) {
    if (prepares()) {
      form_step<T>(scan_, 0, s_);
      form_step<T>(scan_, 1, s_);
      weigh(0);
    }
    __syncthreads();
    request(0);
  }
  __device__ __forceinline__ bool ended() const { return step().number >= s_.chunks; }
  __device__ __forceinline__ const Step& step() const { return s_.steps[now_]; }
  __device__ __forceinline__ const Step& next() const { return s_.steps[next_]; }
  __device__ __forceinline__ const auto& lines() const { return s_.lines[now_]; }
  __device__ __forceinline__ const ChunkDecays<T>& decays() const { return s_.decays[step().number & 1]; }

  __device__ __forceinline__ void wait() const { cp_async_wait<0>(); }
  __device__ __forceinline__ void look_ahead() {
    if (s_.stages > 1) request(next_);
    if (!prepares()) return;
    form_step<T>(scan_, after(next_), s_);
    weigh(next_);
  }
  __device__ __forceinline__ void go_on() {
    if (s_.stages == 1) request(next_);
    now_ = next_;
    next_ = after(next_);
  }

 private:
  static __device__ __forceinline__ int after(int i) { return i == 2 ? 0 : i + 1; }
  static __device__ __forceinline__ bool prepares() { return warp() == T::kWarps - 1; }
  __device__ __forceinline__ void request(int i) {
    const Step& step = s_.steps[i];
    if (step.number >= s_.chunks) return;
#pragma unroll 1
    for (int tensor = 0; tensor < Memory::kTensors; ++tensor)
      request_lines<T>(s_.lines[i][tensor], s_.tile(tensor, step));
    cp_async_commit();
  }
  __device__ __forceinline__ void weigh(int i) {
    const Step& step = s_.steps[i];
    if constexpr (T::kDecayed)
      if (step.head == 0 && step.number < s_.chunks) weigh_chunk<T>(scan_, step, s_, s_.decays[step.number & 1]);
  }

  const Scan& scan_;
  Memory& s_;
  int now_ = 0, next_ = 1;  // of the three steps in shared memory
};

// ---- states

// The state of forward and grad_q. A warp has 16 columns of what it computes, in float32 registers.
template <typename T>
struct WarpState {
  float S[1][T::kSteps][2][4];  // the sum of phi(k) v^T, or transposed: rows are the warp's columns of the result
  float z[2][2];                // that of phi(k), of depth 16 warp + 8 t + lane % 4 * 2 + i
};

// The columns of a chunk join the state: rows^T columns, and the sum of k.
template <typename T, typename Of>
__device__ __forceinline__ void join_state(const ChunkDecays<T>& decays, const Of& rows, const Of& columns, const Of& k,
                                           WarpState<T>& state) {
  const float* weights = nullptr;
  if constexpr (T::kDecayed) weights = decays.of_column;
  join<T>(rows, warp(), columns, 0, weights, state.S);
  const Wide<Of> of_k(k);
  float sums[2][4] = {};
  unroll<T::kHigh>([&](int n) {
    uint32_t features[T::kParts][4];
    const auto seen = T::kDecayed ? RowSums<T>::of_weights(weights + 16 * n) : RowSums<T>::of_ones();
    of_k.template load<true>(n, warp(), features);
    unroll<2>([&](int t) { seen.add(features, t, sums[t]); });
  });
  unroll<2, 2>([&](int t, int i) { state.z[t][i] += sums[t][i] + sums[t][2 + i]; });
}

template <typename T>
__device__ __forceinline__ void fade(const ChunkDecays<T>& decays, WarpState<T>& state) {
  if constexpr (T::kDecayed) {
    unroll<T::kSteps, 2, 4>([&](int d, int h, int i) { state.S[0][d][h][i] *= decays.all; });
    unroll<2, 2>([&](int t, int i) { state.z[t][i] *= decays.all; });
  }
}

// Calls move(number, staged) for this thread's numbers of a state: of kTall squares of rows from `row` on and kWide of
// columns. kTransposed: columns are along the depth.
template <bool kTransposed, typename T, int kTall, int kWide, typename Move>
__device__ __forceinline__ void for_state(float (&state)[kTall][kWide][2][4], StagedState<T>& staged, int row,
                                          int column, const Move& move) {
  unroll<kTall, kWide, 2, 4>([&](int r, int c, int half, int i) {
    const int of_row = 16 * (row + r) + fragment_row(0, i / 2);
    const int of_column = 16 * (column + c) + fragment_column(half) + i % 2;
    move(state[r][c][half][i], kTransposed ? staged.matrix[of_column][of_row] : staged.matrix[of_row][of_column]);
  });
}

// Copies the state of forward and grad_q to or from shared memory. Lanes with the same numbers of z copy one of them.
template <typename T, typename Memory>
__device__ __forceinline__ void take_state(Memory& s, WarpState<T>& state) {
  for_state<true>(state.S, s.state(), warp(), 0, [](float& x, float& staged) { x = staged; });
  unroll<2, 2>([&](int t, int i) { state.z[t][i] = s.vector[16 * warp() + fragment_column(t) + i]; });
}
template <typename T, typename Memory>
__device__ __forceinline__ void give_state(WarpState<T>& state, Memory& s) {
  for_state<true>(state.S, s.state(), warp(), 0, [](float& x, float& staged) { staged = x; });
  if (lane() >= 4) return;
  unroll<2, 2>([&](int t, int i) { s.vector[16 * warp() + fragment_column(t) + i] = state.z[t][i]; });
}

// Calls move(k, column, staged) for the elements of the matrix that this thread moves to or from memory, and
// move_sum(i, element) for those of the vector.
template <typename T, typename Memory, typename Move, typename MoveSum>
__device__ __forceinline__ void for_staged(const Scan& scan, Memory& s, const Move& move, const MoveSum& move_sum) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < T::kDepth * T::kDepth; i += T::kThreads) {
    const int k = i / T::kDepth, column = i % T::kDepth;
    if (k < scan.depth && column < scan.width) move(k, column, s.state().matrix[k][column]);
  }
  const int sums = static_cast<int>(scan.forms_output() ? scan.depth : scan.width);
  if (static_cast<int>(threadIdx.x) < sums) move_sum(threadIdx.x, s.vector[threadIdx.x]);
}

// Where a block does not begin with zeros: calls take() when the state is staged.
template <typename T, typename Memory, typename Take>
__device__ __forceinline__ void begin_with_state(const Scan& scan, Memory& s, const Take& take) {
  if (scan.phase == ScanPhase::Sums || (s.work.is_whole() && !scan.m && !scan.z)) return;
  for (int i = static_cast<int>(threadIdx.x); i < T::kDepth * (T::kDepth + 4); i += T::kThreads)
    (&s.state().matrix[0][0])[i] = 0;
  if (threadIdx.x < T::kDepth) s.vector[threadIdx.x] = 0;
  __syncthreads();
  load_state<typename T::scalar>(
      scan, s.work, [&](const auto& move, const auto& move_sum) { for_staged<T>(scan, s, move, move_sum); });
  __syncthreads();
  take();
  __syncthreads();
}

// Where the state is wanted at the end: calls give(), which stages it.
template <typename T, typename Memory, typename Give>
__device__ __forceinline__ void end_with_state(const Scan& scan, Memory& s, const Give& give) {
  if (!s.work.stores_state(scan)) return;
  __syncthreads();
  give();
  __syncthreads();
  store_state<typename T::scalar>(
      scan, s.work, [&](const auto& move, const auto& move_sum) { for_staged<T>(scan, s, move, move_sum); });
  if constexpr (T::kDecayed)
    if (scan.phase == ScanPhase::Sums && threadIdx.x == 0)
      kept_of<float>(scan, s.work, s.work.segment) = static_cast<float>(s.kept);
}

// ---- launches

// Calls run(traits) with those of a scan.
template <typename scalar_t, int kChunk, typename Run>
void with_traits_of(const Scan& scan, const Run& run) {
  const bool narrow = std::max(scan.depth, scan.width) <= 64;
  if (scan.decay)
    narrow ? run(Traits<scalar_t, 64, kChunk, true>()) : run(Traits<scalar_t, 128, kChunk, true>());
  else
    narrow ? run(Traits<scalar_t, 64, kChunk, false>()) : run(Traits<scalar_t, 128, kChunk, false>());
}
template <typename Run>
void with_traits(const Scan& scan, Dtype dtype, const Run& run) {
  if (dtype == Dtype::BFloat16) return with_traits_of<bf16, 64>(scan, run);
  if constexpr (kFloat32OnTensorCores)
    if (dtype == Dtype::Float32) return with_traits_of<float, 32>(scan, run);
  with_traits_of<__half, 32>(scan, run);
}

// Whether a multiprocessor has shared memory for two blocks. It has 1 KiB more than a block may have, and each block
// takes 1 KiB for CUDA.
inline bool two_blocks_fit(size_t shared_bytes) {
  return fits_in_a_block(2 * shared_bytes + (1 << 10));
}

// Queues a kernel of T with 2 stages, where a block has shared memory for them, or 1. A second block hides more than a
// second stage; a kernel of 128 columns has registers for one block alone.
template <typename T, typename Memory, typename Kernel>
void launch_steps(const Scan& scan, int64_t blocks, cudaStream_t stream, Kernel kernel) {
  const bool leaves_one = T::kDepth == 64 && two_blocks_fit(Memory::bytes(1)) && !two_blocks_fit(Memory::bytes(2));
  const int stages = fits_in_a_block(Memory::bytes(2)) && !leaves_one ? 2 : 1;
  launch({name_of(scan.kind, true), blocks, dim3(T::kThreads), Memory::bytes(stages), stream}, kernel, scan, stages);
}

}  // namespace linear_cuda
}  // namespace memcheck
