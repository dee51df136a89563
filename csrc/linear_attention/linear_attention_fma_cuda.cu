#include "linear_attention/linear_attention_fma_tiles_cuda.cuh"

// Scans by fused multiply-adds in the accumulation type: of float64 and float32, and of 16-bit types that tensor cores
// do not suit. A block has one tile of the width.
//
// A chunk has as many lines as a tile has columns, or half as many: if a deep state leaves no room for more, and if the
// scan is not plain, so that its bits are the same on every GPU. Only kernels of half as many have decays.

namespace memcheck {
namespace linear_cuda {

namespace {

template <typename acc_t, int kLines>
constexpr bool kHasDecays = kLines < kTileSize<acc_t>;

// The weights that decays give to the positions of a chunk.
template <typename acc_t, int kLines, bool = kHasDecays<acc_t, kLines>>
struct ChunkDecays {};
template <typename acc_t, int kLines>
struct ChunkDecays<acc_t, kLines, true> {
  double decay[kLines];
  double kept;         // the product of all decays of the chunks so far
  acc_t into[kLines];  // of a query and the state before the chunk: the product up to its position
  acc_t out[kLines];   // of a key and the state behind the chunk: the product after its position
  acc_t all;           // the product of all
};

template <typename acc_t, int kLines>
struct alignas(16) ScanShared : ChunkDecays<acc_t, kLines> {
  ChunkTile<acc_t, kLines> a, b, x;  // scores replace a
  acc_t vector[kTileSize<acc_t>];    // with a bias: the sum of x_j, or of bias_j x_j
  acc_t bias[kLines];                // of rows or columns of the chunk
  ScanWork work;
  ScanRanges ranges;
  int64_t index;  // of the next work
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

// Whether scores and the product with the state have the bias. GradQ that finds it subtracts it in the end.
__device__ __forceinline__ bool subtracts_bias(const Scan& scan) {
  return scan.has_bias() && !scan.finds_rows;
}

// ---- decays

// Products are formed in float64, so that their rounding is that of one number.
template <typename acc_t, int kLines>
__device__ __forceinline__ void load_decays(const Scan& scan, const Chunk& chunk, ScanShared<acc_t, kLines>& s) {
  const int line = static_cast<int>(threadIdx.x);
  const int64_t t = chunk.time + line;
  const Span& keys = s.work.sequence.keys;
  if (line < kLines)
    s.decay[line] = t < keys.end - keys.begin ? scan.decay.at<acc_t>(s.work.b(), s.work.key_head, keys.begin + t) : 1;
  __syncthreads();
  if (line < kLines) {
    double into = 1;
    double out = 1;
#pragma unroll 1
    for (int i = 0; i < kLines; ++i) (i <= line ? into : out) *= s.decay[i];
    s.into[line] = static_cast<acc_t>(into);
    s.out[line] = static_cast<acc_t>(out);
    if (line == kLines - 1) {
      s.all = static_cast<acc_t>(into);
      s.kept *= into;
    }
  }
  __syncthreads();
}

// In the place of b: row i of a query, column j of a key has the product of the decays from j + 1 to i.
template <typename acc_t, int kLines>
__device__ __forceinline__ void form_score_weights(ScanShared<acc_t, kLines>& s) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kLines) return;
  double x = 1;
#pragma unroll 1
  for (int row = column; row < kLines; ++row) {
    if (row > column) x *= s.decay[row];
    s.b.row(row)[column] = static_cast<acc_t>(x);
  }
}

// The weights of columns for the state behind the chunk, null without decays.
template <typename acc_t, int kLines>
__device__ __forceinline__ const acc_t* column_weights(const Scan& scan, const ScanShared<acc_t, kLines>& s) {
  if constexpr (kHasDecays<acc_t, kLines>)
    if (scan.decay) return scan.rows_are_queries() ? s.out : s.into;
  return nullptr;
}

// Multiplies what the state before the chunk has given to rows.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void weigh_rows(const Scan& scan, const ScanShared<acc_t, kLines>& s,
                                           Accumulators<acc_t, kThreadRows>& acc) {
  unroll<kThreadRows>([&](int i) {
    const acc_t weight = (scan.rows_are_queries() ? s.into : s.out)[thread_y<acc_t>() + kSide<acc_t> * i];
    unroll<4>([&](int j) { acc.out[i][j] *= weight; });
    acc.denominator[i] *= weight;
  });
}

// ---- a chunk

// The bias of the queries of a chunk, 0 where no query exists: g.y, or (g.y) / den if g is scaled.
template <typename acc_t, int kLines>
__device__ __forceinline__ void load_bias(const Scan& scan, int64_t b, int64_t head, const Lines& queries,
                                          acc_t (&bias)[kLines]) {
  const int line = static_cast<int>(threadIdx.x);
  if (line >= kLines) return;
  const int64_t row = query_row(scan.shape, b, head) + queries.first + line;
  acc_t sum = 0;
  if (queries.has(line))
    for (int64_t part = 0; part < scan.query_parts; ++part) sum += scan.product_at<acc_t>(part, row);
  if (scan.a.scaled && queries.has(line)) sum *= scan.inverse_at<acc_t>(row);
  bias[line] = sum;
}

// Stores the scores in the place of a; 0 where a row does not see a column.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void store_scores(const Scan& scan, const Chunk& chunk,
                                             const acc_t (&scores)[kThreadRows][kThreadRows],
                                             ScanShared<acc_t, kLines>& s) {
  const bool forwards = scan.rows_are_queries();
  unroll<kThreadRows>([&](int i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    unroll<kThreadRows>([&](int j) {
      const int column = thread_x<acc_t>() + kSide<acc_t> * j;
      const bool sees = (forwards ? column <= row : column >= row) && chunk.columns.has(column);
      const acc_t bias = subtracts_bias(scan) ? s.bias[forwards ? row : column] : acc_t(0);
      acc_t score = sees ? scores[i][j] - bias : acc_t(0);
      if (kHasDecays<acc_t, kLines> && scan.decay && sees)
        score *= forwards ? s.b.row(row)[column] : s.b.row(column)[row];
      s.a.row(row)[column] = score;
    });
  });
}

// ---- rows in memory

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_four(const Scan& scan, const ScanWork& work, int64_t row, const acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  if (!scan.out.x || column >= scan.width) return;
  scalar_t* to = scan.out.x.at<scalar_t>(work.b(), work.row_head, row, column);
  write_pack(rounded_pack<scalar_t>(x), to, {scan.out.x.stride[3], scan.width, scan.out.in_packs}, column);
}

// Elements (row, column + j) of g, q or k; 0 where none exist.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void load_last(const Scan& scan, const ScanWork& work, int64_t row, acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  const scalar_t* from = scan.last.x.at<scalar_t>(work.b(), work.row_head, row, column);
  Pack<scalar_t, 4> pack = {};
  if (scan.last.in_packs) {
    if (column < scan.width) pack = load_pack<4>(from);
  } else {
    unroll<4>([&](int j) {
      if (column + j < scan.width) pack.values[j] = from[j * scan.last.x.stride[3]];
    });
  }
  unroll<4>([&](int j) { x[j] = to_acc(pack.values[j]); });
}

// The product of x and y over the columns of a row, formed by the threads of one y.
template <typename acc_t>
__device__ __forceinline__ acc_t row_product(const acc_t (&x)[4], const acc_t (&y)[4]) {
  acc_t sum = 0;
  unroll<4>([&](int j) { sum += x[j] * y[j]; });
  return sum_along_x(sum);
}

// The same with phi(x).
template <typename acc_t>
__device__ __forceinline__ acc_t product_with_features(FeatureMap map, const acc_t (&x)[4], const acc_t (&y)[4]) {
  acc_t features[4];
  unroll<4>([&](int j) { features[j] = feature(map, x[j]); });
  return row_product(features, y);
}

// x *= phi'(of q or k)
template <typename acc_t>
__device__ __forceinline__ void multiply_by_derivative(FeatureMap map, const acc_t (&of)[4], acc_t (&x)[4]) {
  unroll<4>([&](int j) {
    if (map == FeatureMap::EluPlusOne) x[j] *= elu_plus_one_derivative(of[j], exp_minus_abs(of[j]));
  });
}

// ---- queries

// Calls use(row, i, z) for the thread's rows: z of its four columns. The sums of the chunk's lines are in `lines`, if
// it has any columns.
template <typename acc_t, int kLines, typename Use>
__device__ __forceinline__ void for_sums(const Chunk& chunk, const ChunkTile<acc_t, kLines>& lines, const acc_t* vector,
                                         const Use& use) {
  const int column = 4 * thread_x<acc_t>();
  Four<acc_t> so_far = load_pack<4>(vector + column);
  unroll<kLines / kSide<acc_t>>([&](int i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    Four<acc_t> z = so_far;
    if (chunk.has_columns) {
      add_four(load_pack<4>(lines.row(row) + column), z);
      add_four(load_pack<4>(lines.row(kSide<acc_t> * (i + 1) - 1) + column), so_far);
    }
    use(row, i, z);
  });
}

// GradQ that finds 1 / den stores it, before g is divided by it. x is loaded, and a is free.
template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void find_inverses(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                              ScanShared<acc_t, kLines>& s) {
  __syncthreads();
  if (chunk.has_columns) sum_lines(s.x, s.a);
  __syncthreads();
  for_sums(chunk, s.a, s.vector, [&](int line, int, const Four<acc_t>& z) {
    const int64_t row = chunk.rows.first + line;
    acc_t q[4] = {};
    if (chunk.rows.has(line)) load_last<scalar_t>(scan, work, row, q);
    const acc_t denominator = product_with_features(scan.shape.feature_map, q, z.values);
    if (chunk.rows.has(line) && thread_x<acc_t>() == 0)
      scan.inverse_at<acc_t>(query_row(scan.shape, work.b(), work.row_head) + row) =
          acc_t(1) / (denominator + static_cast<acc_t>(scan.eps));
  });
  __syncthreads();
}

// GradQ that finds g.y stores it and the gradient, from the sums of the queries without bias. b has the sums of x.
template <typename scalar_t, typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void finish_queries(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                               const ScanShared<acc_t, kLines>& s, acc_t (&out)[kThreadRows][4]) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t head = query_row(n, work.b(), work.row_head);
  for_sums(chunk, s.b, s.vector, [&](int line, int i, const Four<acc_t>& z) {
    const int64_t row = chunk.rows.first + line;
    const bool exists = chunk.rows.has(line);
    acc_t q[4] = {};
    if (exists) load_last<scalar_t>(scan, work, row, q);
    const acc_t product = product_with_features(n.feature_map, q, out[i]);
    if (!exists) return;
    if (thread_x<acc_t>() == 0) scan.product_at<acc_t>(0, head + row) = product;
    const acc_t bias = product * scan.inverse_at<acc_t>(head + row);
    unroll<4>([&](int j) { out[i][j] -= bias * z.values[j]; });
    multiply_by_derivative(n.feature_map, q, out[i]);
    store_four<scalar_t>(scan, work, row, out[i]);
  });
}

// ---- a head

// Adds to the rows what the columns of their own chunk give them.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void add_own_columns(const Scan& scan, const Chunk& chunk,
                                                const acc_t (&scores)[kThreadRows][kThreadRows], int columns,
                                                ScanShared<acc_t, kLines>& s, Accumulators<acc_t, kThreadRows>& acc) {
  __syncthreads();
  if constexpr (kHasDecays<acc_t, kLines>) {
    if (scan.decay) form_score_weights(s);
    __syncthreads();
  }
  store_scores(scan, chunk, scores, s);
  if (scan.finds_rows) sum_lines(s.x, s.b);
  __syncthreads();
  add_product(s.a, s.x.row(0), static_cast<int>(ceil_div(columns, 4) * 4), acc.out);
  constexpr const acc_t* kOnes = nullptr;
  if (scan.has_denominator()) add_row_dots(s.a, kOnes, kLines, acc.denominator);
}

// One head of columns: adds to the rows what the chunk itself and, with the first head, the state gives them; then adds
// the columns to the state.
template <typename scalar_t, typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void scan_head(const Scan& scan, const Chunk& chunk, int64_t head,
                                          const BlockState<acc_t>& state, ScanShared<acc_t, kLines>& s,
                                          Accumulators<acc_t, kThreadRows>& acc) {
  constexpr int kSize = kTileSize<acc_t>;
  constexpr const acc_t* kNoWeights = nullptr;
  const ScanWork& work = s.work;
  const bool meet = chunk.has_rows && chunk.has_columns;
  const bool reads_state = chunk.has_rows && head == 0;
  const int columns = chunk.has_columns ? chunk.columns.end : 0;
  const int64_t column_head = work.first_column_head + head;
  acc_t fade = 1;
  if constexpr (kHasDecays<acc_t, kLines>)
    if (scan.decay && head == 0) fade = s.all;
  const bool changes_state = columns > 0 || (kHasDecays<acc_t, kLines> && scan.decay && head == 0);
  acc_t scores[kThreadRows][kThreadRows] = {};
  if (chunk.has_columns)
    load_chunk<scalar_t>(scan, scan.x, work.b(), column_head, chunk.columns, work.part * kSize, scan.width, s.x);
  if (scan.has_bias() && scan.kind == ScanKind::GradK && chunk.has_columns)
    load_bias(scan, work.b(), column_head, chunk.columns, s.bias);
  if (chunk.has_rows && scan.finds_rows) find_inverses<scalar_t>(scan, work, chunk, s);
  for (int64_t k = 0; k < scan.depth; k += kSize) {
    const int depth = static_cast<int>(min(int64_t{kSize}, ceil_div(scan.depth - k, 4) * 4));
    if (reads_state || meet)
      load_chunk<scalar_t>(scan, scan.a, work.b(), work.row_head, chunk.rows, k, scan.depth, s.a);
    if (chunk.has_columns) load_chunk<scalar_t>(scan, scan.b, work.b(), column_head, chunk.columns, k, scan.depth, s.b);
    __syncthreads();
    if (meet) add_scores(s.a, s.b, depth, scores);
    if (reads_state) {
      add_product(s.a, state.row(k), depth, acc.out);
      if (scan.has_denominator()) add_row_dots(s.a, state.sums + k, kSize, acc.denominator);
      __syncthreads();
    }
    if (changes_state) {
      add_outer(s.b, s.x, columns, column_weights(scan, s), fade, state.row(k));
      if (scan.has_denominator())
        add_column_sums(s.b, columns, column_weights(scan, s), kNoWeights, fade, state.sums + k);
    }
    __syncthreads();
  }
  if constexpr (kHasDecays<acc_t, kLines>)
    if (scan.decay && reads_state) weigh_rows(scan, s, acc);
  if (meet) add_own_columns(scan, chunk, scores, columns, s, acc);
  if (scan.finds_rows && chunk.has_rows) finish_queries<scalar_t>(scan, work, chunk, s, acc.out);
  if (scan.has_bias() && changes_state) {
    __syncthreads();
    add_column_sums(s.x, columns, column_weights(scan, s), scan.kind == ScanKind::GradK ? s.bias : nullptr, fade,
                    s.vector);
  }
  __syncthreads();
}

// Subtracts the bias from the product with the state: bias_i (sum of x_j), or the sum of bias_j x_j, over the columns
// before this chunk.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void subtract_bias_of_state(const Scan& scan, const ScanShared<acc_t, kLines>& s,
                                                       acc_t (&out)[kThreadRows][4]) {
  unroll<kThreadRows>([&](int i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    const acc_t weight = scan.kind == ScanKind::GradQ ? s.bias[row] : acc_t(1);
    unroll<4>([&](int j) { out[i][j] -= weight * s.vector[4 * thread_x<acc_t>() + j]; });
  });
}

// ---- results

// GradK: a part of phi(k).(grad phi(k)), which the gradient of a decay needs.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_key_product(const Scan& scan, const ScanWork& work, int64_t row, bool exists,
                                                  const acc_t (&out)[4]) {
  acc_t k[4] = {};
  if (exists) load_last<scalar_t>(scan, work, row, k);
  const acc_t product = product_with_features(scan.shape.feature_map, k, out);
  if (exists && thread_x<acc_t>() == 0)
    scan.key_product_at<acc_t>(work.part, key_row(scan.shape, work.b(), work.key_head) + row) = product;
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void finish_row(const Scan& scan, const ScanWork& work, int64_t row, bool exists,
                                           acc_t denominator, acc_t (&out)[4]) {
  const LinearAttentionShape& n = scan.shape;
  if (scan.forms_output()) {
    acc_t inverse = acc_t(1) / (sum_along_x(denominator) + static_cast<acc_t>(scan.eps));
    if (!n.normalize) inverse = 1;
    unroll<4>([&](int j) { out[j] *= inverse; });
    if (scan.kind == ScanKind::Denominators) {
      acc_t g[4] = {};
      if (exists) load_last<scalar_t>(scan, work, row, g);
      const acc_t product = row_product(out, g);
      const int64_t query = query_row(n, work.b(), work.row_head) + row;
      if (exists && thread_x<acc_t>() == 0) {
        scan.product_at<acc_t>(work.part, query) = product;
        if (work.part == 0) scan.inverse_at<acc_t>(query) = inverse;
      }
    }
  } else if (scan.kind != ScanKind::GradV && exists && scan.out.x) {
    acc_t x[4];
    load_last<scalar_t>(scan, work, row, x);
    multiply_by_derivative(n.feature_map, x, out);
  }
  if (exists) store_four<scalar_t>(scan, work, row, out);
}

template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void scan_chunk(const Scan& scan, const Chunk& chunk, const BlockState<acc_t>& state,
                                           ScanShared<acc_t, kLines>& s) {
  constexpr int kThreadRows = kLines / kSide<acc_t>;
  const ScanWork& work = s.work;
  Accumulators<acc_t, kThreadRows> acc = {};
  if constexpr (kHasDecays<acc_t, kLines>)
    if (scan.decay) load_decays(scan, chunk, s);
  if (chunk.has_rows && subtracts_bias(scan)) {
    if (scan.kind == ScanKind::GradQ) {
      load_bias(scan, work.b(), work.row_head, chunk.rows, s.bias);
      __syncthreads();
    }
    subtract_bias_of_state(scan, s, acc.out);
    __syncthreads();
  }
  const int64_t heads = chunk.has_columns ? work.column_heads : 0;
  for (int64_t head = 0; head < max(heads, int64_t{1}); ++head) {
    Chunk of_head = chunk;
    of_head.has_columns = chunk.has_columns && head < heads;
    scan_head<scalar_t>(scan, of_head, head, state, s, acc);
  }
  if (!chunk.has_rows || scan.finds_rows) return;
  unroll<kThreadRows>([&](int i) {
    const int line = thread_y<acc_t>() + kSide<acc_t> * i;
    const int64_t row = chunk.rows.first + line;
    const bool exists = chunk.rows.has(line);
    if constexpr (kHasDecays<acc_t, kLines>)
      if (scan.key_products != nullptr) store_key_product<scalar_t>(scan, work, row, exists, acc.out[i]);
    finish_row<scalar_t>(scan, work, row, exists, acc.denominator[i], acc.out[i]);
  });
}

// ---- a block

// Calls move(k, column, number) for the numbers of the block's state, and move_sum(i, number) for those of its vector.
// Unrolled, these loops take registers that the scan then spills.
template <typename acc_t, typename Move, typename MoveSum>
__device__ __forceinline__ void for_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state,
                                          const Move& move, const MoveSum& move_sum) {
  constexpr int kSize = kTileSize<acc_t>;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < scan.depth * kSize; i += kThreads<acc_t>) {
    const int64_t column = work.part * kSize + i % kSize;
    if (column < scan.width) move(i / kSize, column, state.row(i / kSize)[i % kSize]);
  }
  acc_t* vector = scan.forms_output() ? state.sums : state.vector;
  const int64_t first = scan.forms_output() ? 0 : work.part * kSize;
  const int64_t count = scan.forms_output() ? scan.depth : min(scan.width - first, int64_t{kSize});
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count; i += kThreads<acc_t>) move_sum(first + i, vector[i]);
  __syncthreads();
}

// Scans for a work that exists, from its first state to its last one.
template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void run_work(const Scan& scan, ScanShared<acc_t, kLines>& s) {
  constexpr int kSize = kTileSize<acc_t>;
  const int64_t numbers = linear_attention_block_state(scan.depth, kSize);
  acc_t* memory = scan.depth > kLinearAttentionDeepest ? static_cast<acc_t*>(scan.deep) + blockIdx.x * numbers
                                                       : reinterpret_cast<acc_t*>(&s + 1);
  const BlockState<acc_t> state{memory, memory + ceil_div(scan.depth, kSize) * kSize * kTileStride<acc_t>, s.vector};
  const ScanWork& work = s.work;
  const int sums = s.ranges.column_chunks(kLines);
  const int steps = sums + s.ranges.row_chunks(kLines);
  const auto each = [&](const auto& move, const auto& move_sum) { for_state(scan, work, state, move, move_sum); };
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < numbers; i += kThreads<acc_t>) memory[i] = 0;
  if (threadIdx.x < kSize) s.vector[threadIdx.x] = 0;
  __syncthreads();
  if (scan.phase == ScanPhase::Results) load_state<scalar_t>(scan, work, each);
  for (int i = 0; i < steps; ++i) {
    const bool summing = i < sums;
    const Span& range = summing ? s.ranges.columns : s.ranges.rows;
    const Chunk chunk = chunk_of(scan, work.sequence, range, summing ? i : i - sums, summing, kLines);
    if (scan.decay || chunk.has_rows || chunk.has_columns) scan_chunk<scalar_t>(scan, chunk, state, s);
  }
  if (work.stores_state(scan)) store_state<scalar_t>(scan, work, each);
  if constexpr (kHasDecays<acc_t, kLines>)
    if (scan.decay && scan.phase == ScanPhase::Sums && work.part == 0 && threadIdx.x == 0)
      kept_of<acc_t>(scan, work, work.segment) = static_cast<acc_t>(s.kept);
}

// A block takes one work, or some in turns.
template <typename scalar_t, int kLines>
__global__ void __launch_bounds__(kThreads<acc_type<scalar_t>>, kBlocksAtOnce<acc_type<scalar_t>>)
    scan_kernel(const Scan scan, int64_t works) {
  using acc_t = acc_type<scalar_t>;
  auto& s = shared<ScanShared<acc_t, kLines>>();
  if (threadIdx.x == 0) s.index = blockIdx.x;
  for (;;) {
    if (threadIdx.x == 0) {
      s.work = scan_work(scan, s.index);
      s.ranges = ranges_of(scan, s.work);
      s.index += gridDim.x;
      if constexpr (kHasDecays<acc_t, kLines>) s.kept = 1;
    }
    __syncthreads();
    if (s.work.exists) run_work<scalar_t>(scan, s);
    const bool is_last = s.index >= works;
    __syncthreads();
    if (is_last) break;
  }
}

// ---- launches

template <typename scalar_t, int kLines>
void launch_chunks(const Scan& scan, int64_t blocks, size_t state_bytes, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const int64_t works = blocks * scan.parts();
  const bool in_turns = scan.depth > kLinearAttentionDeepest && scan.shape.sequences;
  const int64_t launched = in_turns ? std::min(works, kLinearAttentionDeepBlocks) : works;
  const size_t bytes = sizeof(ScanShared<acc_t, kLines>) + state_bytes;
  launch({name_of(scan.kind, false), launched, dim3(kThreads<acc_t>), bytes, stream}, scan_kernel<scalar_t, kLines>,
         scan, works);
}

template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTileSize<acc_t>;
  const auto bytes_of_state = [](int64_t depth) { return linear_attention_block_state(depth, kSize) * sizeof(acc_t); };
  const size_t state_bytes = scan.depth > kLinearAttentionDeepest ? 0 : bytes_of_state(scan.depth);
  static_assert(sizeof(ScanShared<acc_t, kSize / 2>) + bytes_of_state(kLinearAttentionDeepest) <=
                kSharedBytesEverywhere);
  if (scan.shape.is_plain() && fits_in_a_block(sizeof(ScanShared<acc_t, kSize>) + state_bytes))
    launch_chunks<scalar_t, kSize>(scan, blocks, state_bytes, stream);
  else
    launch_chunks<scalar_t, kSize / 2>(scan, blocks, state_bytes, stream);
}

}  // namespace

void scan_by_fma(const Scan& scan, Dtype dtype, cudaStream_t stream) {
  run_phases(scan, dtype, stream, [&](const Scan& phase, int64_t blocks) {
    with_device_type(dtype, [&](auto scalar) { launch_scan<decltype(scalar)>(phase, blocks, stream); });
  });
}

}  // namespace linear_cuda
}  // namespace memcheck
