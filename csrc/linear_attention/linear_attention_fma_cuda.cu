#include "linear_attention/linear_attention_fma_tiles_cuda.cuh"

// Scans by fused multiply-adds in the accumulation type: of float64 and float32, and of 16-bit types that tensor cores
// do not suit. A block has one tile of the width.

namespace memcheck {
namespace linear_cuda {

namespace {

// kLines of a chunk: as many as a tile has columns, or half as many if a deep state leaves no room for more.
template <typename acc_t, int kLines>
struct alignas(16) ScanShared {
  ChunkTile<acc_t, kLines> a, b, x;  // scores replace a
  acc_t vector[kTileSize<acc_t>];    // with a bias: the sum of x_j, or of bias_j x_j
  acc_t bias[kLines];                // of rows or columns of the chunk
  ScanWork work;
  ScanRanges ranges;
};

// The state of a block: rows that are kTileStride apart, the sum of b_j after them, and the vector in shared memory.
template <typename acc_t>
struct BlockState {
  acc_t* matrix;
  acc_t* sums;
  acc_t* vector;

  __device__ __forceinline__ acc_t* row(int64_t i) const { return matrix + i * kTileStride<acc_t>; }
};

// What a thread has of kThreadRows lines of a chunk.
template <typename acc_t, int kThreadRows>
struct Accumulators {
  acc_t out[kThreadRows][4];  // rows y + kSide i, columns 4 x + j
  acc_t denominator[kThreadRows];
};

// The bias of the queries of a chunk, 0 where no query exists: g.y, or (g.y) / den if g is scaled.
template <typename acc_t, int kLines>
__device__ __forceinline__ void load_bias(const Scan& scan, int64_t b, int64_t head, const Lines& queries,
                                          acc_t (&bias)[kLines]) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t parts = max(int64_t{1}, ceil_div(n.Dv, kTileSize<acc_t>));
  const int line = static_cast<int>(threadIdx.x);
  if (line >= kLines) return;
  acc_t sum = 0;
  const acc_t* from = static_cast<const acc_t*>(scan.products) + query_row(n, b, head) + queries.first + line;
  if (queries.has(line))
    for (int64_t part = 0; part < parts; ++part) sum += from[part * n.B * n.H * n.S];
  if (scan.a.scaled && queries.has(line))
    sum *= static_cast<const acc_t*>(scan.inverse)[query_row(n, b, head) + queries.first + line];
  bias[line] = sum;
}

// ---- a chunk

// Stores the scores in the place of a; 0 where a row does not see a column.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void store_scores(const Scan& scan, const Chunk& chunk,
                                             const acc_t (&scores)[kThreadRows][kThreadRows],
                                             ScanShared<acc_t, kLines>& s) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j) {
      const int column = thread_x<acc_t>() + kSide<acc_t> * j;
      const bool sees = (scan.rows_are_queries() ? column <= row : column >= row) && chunk.columns.has(column);
      const acc_t bias = !scan.has_bias() ? acc_t(0) : s.bias[scan.rows_are_queries() ? row : column];
      s.a.row(row)[column] = sees ? scores[i][j] - bias : acc_t(0);
    }
  }
}

// One head of columns: adds to the rows what the chunk itself and, with the first head, the state gives them; then adds
// the columns to the state.
template <typename scalar_t, typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void scan_head(const Scan& scan, const ScanWork& work, const Chunk& chunk, int64_t head,
                                          const BlockState<acc_t>& state, ScanShared<acc_t, kLines>& s,
                                          Accumulators<acc_t, kThreadRows>& acc) {
  constexpr int kSize = kTileSize<acc_t>;
  const bool meet = chunk.has_rows && chunk.has_columns;
  const bool reads_state = chunk.has_rows && head == 0;
  const int64_t column_head = work.first_column_head + head;
  acc_t scores[kThreadRows][kThreadRows] = {};
  if (chunk.has_columns)
    load_chunk<scalar_t>(scan, scan.x, work.b, column_head, chunk.columns, work.part * kSize, scan.width, s.x);
  if (scan.has_bias() && scan.kind == ScanKind::GradK && chunk.has_columns)
    load_bias(scan, work.b, column_head, chunk.columns, s.bias);
  for (int64_t k = 0; k < scan.depth; k += kSize) {
    const int depth = static_cast<int>(min(int64_t{kSize}, ceil_div(scan.depth - k, 4) * 4));
    if (reads_state || meet) load_chunk<scalar_t>(scan, scan.a, work.b, work.row_head, chunk.rows, k, scan.depth, s.a);
    if (chunk.has_columns) load_chunk<scalar_t>(scan, scan.b, work.b, column_head, chunk.columns, k, scan.depth, s.b);
    __syncthreads();
    if (meet) add_scores(s.a, s.b, depth, scores);
    if (reads_state) {
      add_product(s.a, state.row(k), depth, acc.out);
      if (scan.has_denominator()) add_row_dots(s.a, state.sums + k, kSize, acc.denominator);
      __syncthreads();
    }
    if (chunk.has_columns) {
      add_outer(s.b, s.x, chunk.columns.end, state.row(k));
      if (scan.has_denominator()) add_column_sums(s.b, static_cast<const acc_t*>(nullptr), state.sums + k);
    }
    __syncthreads();
  }
  if (meet) {
    __syncthreads();
    store_scores(scan, chunk, scores, s);
    __syncthreads();
    add_product(s.a, s.x.row(0), static_cast<int>(ceil_div(chunk.columns.end, 4) * 4), acc.out);
    if (scan.has_denominator()) add_row_dots(s.a, static_cast<const acc_t*>(nullptr), kLines, acc.denominator);
  }
  if (scan.has_bias() && chunk.has_columns) {
    __syncthreads();
    add_column_sums(s.x, scan.kind == ScanKind::GradK ? s.bias : nullptr, s.vector);
  }
  __syncthreads();
}

// Subtracts the bias from the product with the state: bias_i (sum of x_j), or the sum of bias_j x_j, over the columns
// before this chunk.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void subtract_bias_of_state(const Scan& scan, const ScanShared<acc_t, kLines>& s,
                                                       acc_t (&out)[kThreadRows][4]) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    const acc_t weight = scan.kind == ScanKind::GradQ ? s.bias[row] : acc_t(1);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i][j] -= weight * s.vector[4 * thread_x<acc_t>() + j];
  }
}

// ---- results

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_four(const Scan& scan, const ScanWork& work, int64_t row, const acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  if (!scan.out || column >= scan.width) return;
  scalar_t* to = scan.out.at<scalar_t>(work.b, work.row_head, row, column);
  write_pack(rounded_pack<scalar_t>(x), to, {scan.out.stride[3], scan.width, scan.out_packed}, column);
}

// Elements (row, column + j) of g, q or k; 0 where none exist.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void load_last(const Scan& scan, const ScanWork& work, int64_t row, acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  const scalar_t* from = scan.last.at<scalar_t>(work.b, work.row_head, row, column);
  Pack<scalar_t, 4> pack = {};
  if (scan.last_packed) {
    if (column < scan.width) pack = load_pack<4>(from);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (column + j < scan.width) pack.values[j] = from[j * scan.last.stride[3]];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = to_acc(pack.values[j]);
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void finish_row(const Scan& scan, const ScanWork& work, int64_t row, bool exists,
                                           acc_t denominator, acc_t (&out)[4]) {
  const LinearAttentionShape& n = scan.shape;
  acc_t* inverses = static_cast<acc_t*>(scan.inverse) + query_row(n, work.b, work.row_head);
  if (scan.has_denominator()) {
    const acc_t inverse = acc_t(1) / (sum_along_x(denominator) + static_cast<acc_t>(scan.eps));
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= inverse;
    if (scan.kind == ScanKind::Denominators) {
      acc_t g[4] = {};
      if (exists) load_last<scalar_t>(scan, work, row, g);
      const acc_t product = sum_along_x(out[0] * g[0] + out[1] * g[1] + out[2] * g[2] + out[3] * g[3]);
      acc_t* products = static_cast<acc_t*>(scan.products) + query_row(n, work.b, work.row_head);
      if (exists && thread_x<acc_t>() == 0) {
        products[work.part * n.B * n.H * n.S + row] = product;
        if (work.part == 0) inverses[row] = inverse;
      }
    }
  } else if (scan.kind != ScanKind::GradV && exists && scan.out) {
    acc_t x[4];
    load_last<scalar_t>(scan, work, row, x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n.feature_map == FeatureMap::EluPlusOne) out[j] *= elu_plus_one_derivative(x[j], exp_minus_abs(x[j]));
  }
  if (exists) store_four<scalar_t>(scan, work, row, out);
}

template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void scan_chunk(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                           const BlockState<acc_t>& state, ScanShared<acc_t, kLines>& s) {
  constexpr int kThreadRows = kLines / kSide<acc_t>;
  Accumulators<acc_t, kThreadRows> acc = {};
  if (chunk.has_rows && scan.has_bias()) {
    if (scan.kind == ScanKind::GradQ) {
      load_bias(scan, work.b, work.row_head, chunk.rows, s.bias);
      __syncthreads();
    }
    subtract_bias_of_state(scan, s, acc.out);
    __syncthreads();
  }
  const int64_t heads = chunk.has_columns ? work.column_heads : 0;
  for (int64_t head = 0; head < max(heads, int64_t{1}); ++head) {
    const Chunk of_head{chunk.rows, chunk.columns, chunk.has_rows, chunk.has_columns && head < heads};
    scan_head<scalar_t>(scan, work, of_head, head, state, s, acc);
  }
  if (!chunk.has_rows) return;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int line = thread_y<acc_t>() + kSide<acc_t> * i;
    finish_row<scalar_t>(scan, work, chunk.rows.first + line, chunk.rows.has(line), acc.denominator[i], acc.out[i]);
  }
}

// ---- states

// Calls move(element, k, column, exists) for the elements of the block's state, and move_sum(element, i, exists) for
// those of its vector.
template <typename acc_t, typename Move, typename MoveSum>
__device__ __forceinline__ void for_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state,
                                          const Move& move, const MoveSum& move_sum) {
  constexpr int kSize = kTileSize<acc_t>;
  const int64_t padded = ceil_div(scan.depth, kSize) * kSize;
  for (int64_t i = threadIdx.x; i < padded * kSize; i += kThreads<acc_t>) {
    const int64_t k = i / kSize;
    const int64_t column = work.part * kSize + i % kSize;
    move(state.row(k)[i % kSize], k, column, k < scan.depth && column < scan.width);
  }
  acc_t* vector = scan.has_denominator() ? state.sums : state.vector;
  const int64_t first = scan.has_denominator() ? 0 : work.part * kSize;
  const int64_t count = scan.has_denominator() ? padded : kSize;
  const int64_t length = scan.has_denominator() ? scan.depth : scan.width;
  for (int64_t i = threadIdx.x; i < count; i += kThreads<acc_t>) move_sum(vector[i], first + i, first + i < length);
  __syncthreads();
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void start_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  const bool from_slot = scan.phase == ScanPhase::Pieces;
  const StateSlot<scalar_t> slot = from_slot ? slot_of<scalar_t>(scan, work, work.piece) : StateSlot<scalar_t>{};
  for_state(
      scan, work, state,
      [&](acc_t& to, int64_t k, int64_t column, bool exists) {
        acc_t x = 0;
        if (exists && from_slot) x = slot.read(slot.at(k, column));
        if (exists && scan.m) x = *scan.m.at<acc_t>(work.b, work.key_head, k, column);
        to = x;
      },
      [&](acc_t& to, int64_t i, bool exists) {
        acc_t x = 0;
        if (exists && from_slot) x = slot.read(slot.sum_at(i));
        if (exists && scan.z) x = *scan.z.at<acc_t>(work.b, work.key_head, 0, i);
        to = x;
      });
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_segment(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  const StateSlot<scalar_t> slot = slot_of<scalar_t>(scan, work, work.piece);
  const bool stores_sums = !scan.has_denominator() || scan.parts_have_slots() || work.part == 0;
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool exists) {
        if (exists) slot.write(slot.at(k, column), from);
      },
      [&](acc_t& from, int64_t i, bool exists) {
        if (exists && stores_sums) slot.write(slot.sum_at(i), from);
      });
}

template <typename acc_t>
__device__ __forceinline__ void store_new_state(const Scan& scan, const ScanWork& work,
                                                const BlockState<acc_t>& state) {
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool exists) {
        if (exists) *scan.new_m.at<acc_t>(work.b, work.key_head, k, column) = from;
      },
      [&](acc_t& from, int64_t i, bool exists) {
        if (exists && work.part == 0) *scan.new_z.at<acc_t>(work.b, work.key_head, 0, i) = from;
      });
}

// ---- a block

template <typename scalar_t, int kLines>
__global__ void __launch_bounds__(kThreads<acc_type<scalar_t>>, kBlocksAtOnce<acc_type<scalar_t>>)
    scan_kernel(const Scan scan, int64_t parts) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTileSize<acc_t>;
  auto& s = shared<ScanShared<acc_t, kLines>>();
  if (threadIdx.x == 0) {
    s.work = scan_work(scan, blockIdx.x, parts);
    s.ranges = ranges_of(scan, s.work);
  }
  __syncthreads();
  const ScanWork& work = s.work;
  const ScanRanges& ranges = s.ranges;
  acc_t* memory = scan.depth > kLinearAttentionDeepest
                      ? static_cast<acc_t*>(scan.deep) + blockIdx.x * linear_attention_block_state(scan.depth, kSize)
                      : reinterpret_cast<acc_t*>(&s + 1);
  const BlockState<acc_t> state{memory, memory + ceil_div(scan.depth, kSize) * kSize * kTileStride<acc_t>, s.vector};
  const int sums = ranges.column_chunks(kLines);
  const int steps = sums + ranges.row_chunks(kLines);
  start_state<scalar_t>(scan, work, state);
  for (int i = 0; i <= steps; ++i) {
    if (i == sums && scan.phase == ScanPhase::Sums) store_segment<scalar_t>(scan, work, state);
    if (i == sums && scan.new_m && work.row_head % scan.shape.group() == 0) store_new_state(scan, work, state);
    if (i == steps) break;
    const Chunk chunk =
        chunk_of(scan, i < sums ? ranges.columns : ranges.rows, i < sums ? i : i - sums, i < sums, kLines);
    if (chunk.has_rows || chunk.has_columns) scan_chunk<scalar_t>(scan, work, chunk, state, s);
  }
}

// ---- launches

template <typename scalar_t, int kLines>
void launch_chunks(const Scan& scan, int64_t blocks, size_t state_bytes, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const int64_t parts = std::max<int64_t>(1, ceil_div(scan.width, kTileSize<acc_t>));
  const Launch with{name_of(scan.kind, false), dim3(static_cast<unsigned>(blocks * parts)), dim3(kThreads<acc_t>),
                    sizeof(ScanShared<acc_t, kLines>) + state_bytes, stream};
  launch(with, scan_kernel<scalar_t, kLines>, scan, parts);
}

// In chunks of a tile's lines, or of half as many if the GPU's shared memory has no room for more beside a deep state.
template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTileSize<acc_t>;
  const auto bytes_of_state = [](int64_t depth) { return linear_attention_block_state(depth, kSize) * sizeof(acc_t); };
  const size_t state_bytes = scan.depth > kLinearAttentionDeepest ? 0 : bytes_of_state(scan.depth);
  static_assert(sizeof(ScanShared<acc_t, kSize / 2>) + bytes_of_state(kLinearAttentionDeepest) <=
                kSharedBytesEverywhere);
  if (fits_in_a_block(sizeof(ScanShared<acc_t, kSize>) + state_bytes)) {
    launch_chunks<scalar_t, kSize>(scan, blocks, state_bytes, stream);
  } else {
    launch_chunks<scalar_t, kSize / 2>(scan, blocks, state_bytes, stream);
  }
}

}  // namespace

void scan_by_fma(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    with_device_type(dtype, [&](auto scalar) { launch_scan<decltype(scalar)>(phase, blocks, stream); });
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
