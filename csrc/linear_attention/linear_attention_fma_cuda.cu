#include "linear_attention/linear_attention_fma_tiles_cuda.cuh"

// Scans by fused multiply-adds in the accumulation type: of float64 and float32, and of 16-bit types that tensor cores
// do not suit. A block has one tile of the width. kGeneral: the general form, else the plain one.

namespace memcheck {
namespace linear_cuda {

namespace {

// The weights that decays give to the positions of a chunk; 1 if there are no decays.
template <typename acc_t, int kLines, bool kGeneral>
struct ChunkDecays {};
template <typename acc_t, int kLines>
struct ChunkDecays<acc_t, kLines, true> {
  double decay[kLines];
  double kept;         // the product of all decays of the chunks so far
  acc_t into[kLines];  // of a query and the state before the chunk: the product up to its position
  acc_t out[kLines];   // of a key and the state behind the chunk: the product after its position
  acc_t all;           // the product of all
};

// kLines of a chunk: as many as a tile has columns, or half as many if a deep state leaves no room for more, and in the
// general form.
template <typename acc_t, int kLines, bool kGeneral>
struct alignas(16) ScanShared : ChunkDecays<acc_t, kLines, kGeneral> {
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

// Whether GradQ finds 1 / den and g.y: in the plain form, if a block has all columns of the result.
template <typename acc_t, bool kGeneral>
__device__ __forceinline__ bool grad_q_finds_rows(const Scan& scan) {
  return !kGeneral && scan.shape.D <= kTileSize<acc_t>;
}
template <typename acc_t, bool kGeneral>
__device__ __forceinline__ bool finds_rows(const Scan& scan) {
  return scan.kind == ScanKind::GradQ && grad_q_finds_rows<acc_t, kGeneral>(scan);
}

// Whether scores and the product with the state have the bias. GradQ that finds it subtracts it in the end.
template <typename acc_t, bool kGeneral>
__device__ __forceinline__ bool subtracts_bias(const Scan& scan) {
  return scan.has_bias() && !finds_rows<acc_t, kGeneral>(scan);
}

// ---- decays

// Products are formed in float64, so that their rounding is that of one number.
template <typename acc_t, int kLines>
__device__ __forceinline__ void load_decays(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                            ScanShared<acc_t, kLines, true>& s) {
  const int line = static_cast<int>(threadIdx.x);
  const int64_t t = chunk.time + line;
  const Range& keys = work.sequence.keys;
  if (line < kLines)
    s.decay[line] = scan.decay && t < keys.end - keys.begin
                        ? *scan.decay.at<acc_t>(work.b(), work.key_head, keys.begin + t)
                        : acc_t(1);
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
__device__ __forceinline__ void form_score_weights(ScanShared<acc_t, kLines, true>& s) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kLines) return;
  double x = 1;
#pragma unroll 1
  for (int row = column; row < kLines; ++row) {
    if (row > column) x *= s.decay[row];
    s.b.row(row)[column] = static_cast<acc_t>(x);
  }
}

// The weights of rows for the state before the chunk, and of columns for the one behind it; null in the plain form.
template <typename acc_t, int kLines, bool kGeneral>
__device__ __forceinline__ const acc_t* row_weights(const Scan& scan, const ScanShared<acc_t, kLines, kGeneral>& s) {
  if constexpr (kGeneral) return scan.rows_are_queries() ? s.into : s.out;
  return nullptr;
}
template <typename acc_t, int kLines, bool kGeneral>
__device__ __forceinline__ const acc_t* column_weights(const Scan& scan, const ScanShared<acc_t, kLines, kGeneral>& s) {
  if constexpr (kGeneral) return scan.rows_are_queries() ? s.out : s.into;
  return nullptr;
}

// Multiplies what the state has given to rows.
template <typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void weigh_rows(const Scan& scan, const ScanShared<acc_t, kLines, true>& s,
                                           Accumulators<acc_t, kThreadRows>& acc) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const acc_t weight = row_weights(scan, s)[thread_y<acc_t>() + kSide<acc_t> * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) acc.out[i][j] *= weight;
    acc.denominator[i] *= weight;
  }
}

// ---- a chunk

// The bias of the queries of a chunk, 0 where no query exists: g.y, or (g.y) / den if g is scaled.
template <bool kGeneral, typename acc_t, int kLines>
__device__ __forceinline__ void load_bias(const Scan& scan, int64_t b, int64_t head, const Lines& queries,
                                          acc_t (&bias)[kLines]) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t parts =
      grad_q_finds_rows<acc_t, kGeneral>(scan) ? 1 : max(int64_t{1}, ceil_div(n.Dv, kTileSize<acc_t>));
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

// Stores the scores in the place of a; 0 where a row does not see a column.
template <typename acc_t, int kLines, bool kGeneral, int kThreadRows>
__device__ __forceinline__ void store_scores(const Scan& scan, const Chunk& chunk,
                                             const acc_t (&scores)[kThreadRows][kThreadRows],
                                             ScanShared<acc_t, kLines, kGeneral>& s) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j) {
      const int column = thread_x<acc_t>() + kSide<acc_t> * j;
      const bool sees = (scan.rows_are_queries() ? column <= row : column >= row) && chunk.columns.has(column);
      const bool biased = subtracts_bias<acc_t, kGeneral>(scan);
      const acc_t bias = biased ? s.bias[scan.rows_are_queries() ? row : column] : acc_t(0);
      acc_t score = sees ? scores[i][j] - bias : acc_t(0);
      if (kGeneral && scan.decay && sees)
        score *= scan.rows_are_queries() ? s.b.row(row)[column] : s.b.row(column)[row];
      s.a.row(row)[column] = score;
    }
  }
}

// ---- rows in memory

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_four(const Scan& scan, const ScanWork& work, int64_t row, const acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  if (!scan.out || column >= scan.width) return;
  scalar_t* to = scan.out.at<scalar_t>(work.b(), work.row_head, row, column);
  write_pack(rounded_pack<scalar_t>(x), to, {scan.out.stride[3], scan.width, scan.out_packed}, column);
}

// Elements (row, column + j) of g, q or k; 0 where none exist.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void load_last(const Scan& scan, const ScanWork& work, int64_t row, acc_t (&x)[4]) {
  const int64_t column = work.part * kTileSize<acc_t> + 4 * thread_x<acc_t>();
  const scalar_t* from = scan.last.at<scalar_t>(work.b(), work.row_head, row, column);
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

// x *= phi'(of q or k)
template <typename acc_t>
__device__ __forceinline__ void multiply_by_derivative(FeatureMap map, const acc_t (&of)[4], acc_t (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (map == FeatureMap::EluPlusOne) x[j] *= elu_plus_one_derivative(of[j], exp_minus_abs(of[j]));
}

// ---- queries

// Calls use(row, i, z) for the thread's rows: z of its four columns. The sums of the chunk's lines are in `lines`, if
// it has any columns.
template <typename acc_t, int kLines, typename Use>
__device__ __forceinline__ void for_sums(const Chunk& chunk, const ChunkTile<acc_t, kLines>& lines, const acc_t* vector,
                                         const Use& use) {
  const int column = 4 * thread_x<acc_t>();
  Four<acc_t> so_far = load_pack<4>(vector + column);
#pragma unroll
  for (int i = 0; i < kLines / kSide<acc_t>; ++i) {
    const int row = thread_y<acc_t>() + kSide<acc_t> * i;
    Four<acc_t> z = so_far;
    if (chunk.has_columns) {
      add_four(load_pack<4>(lines.row(row) + column), z);
      add_four(load_pack<4>(lines.row(kSide<acc_t> * (i + 1) - 1) + column), so_far);
    }
    use(row, i, z);
  }
}

// The product of phi(q) and x, formed by the threads of one y.
template <typename acc_t>
__device__ __forceinline__ acc_t product_with_features(FeatureMap map, const acc_t (&q)[4], const acc_t (&x)[4]) {
  acc_t sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    sum += (map == FeatureMap::EluPlusOne ? elu_plus_one(q[j], exp_minus_abs(q[j])) : q[j]) * x[j];
  return sum_along_x(sum);
}

// GradQ that finds 1 / den stores it, before g is divided by it. x is loaded, and a is free.
template <typename scalar_t, typename acc_t, int kLines>
__device__ __forceinline__ void find_inverses(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                              ScanShared<acc_t, kLines, false>& s) {
  acc_t* inverses = static_cast<acc_t*>(scan.inverse) + query_row(scan.shape, work.b(), work.row_head);
  __syncthreads();
  if (chunk.has_columns) sum_lines(s.x, s.a);
  __syncthreads();
  for_sums(chunk, s.a, s.vector, [&](int line, int, const Four<acc_t>& z) {
    const int64_t row = chunk.rows.first + line;
    acc_t q[4] = {};
    if (chunk.rows.has(line)) load_last<scalar_t>(scan, work, row, q);
    const acc_t denominator = product_with_features(scan.shape.feature_map, q, z.values);
    if (chunk.rows.has(line) && thread_x<acc_t>() == 0)
      inverses[row] = acc_t(1) / (denominator + static_cast<acc_t>(scan.eps));
  });
  __syncthreads();
}

// GradQ that finds g.y stores it and the gradient, from the sums of the queries without bias. b has the sums of x.
template <typename scalar_t, typename acc_t, int kLines, int kThreadRows>
__device__ __forceinline__ void finish_queries(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                               const ScanShared<acc_t, kLines, false>& s,
                                               acc_t (&out)[kThreadRows][4]) {
  const LinearAttentionShape& n = scan.shape;
  const int64_t head = query_row(n, work.b(), work.row_head);
  for_sums(chunk, s.b, s.vector, [&](int line, int i, const Four<acc_t>& z) {
    const int64_t row = chunk.rows.first + line;
    const bool exists = chunk.rows.has(line);
    acc_t q[4] = {};
    if (exists) load_last<scalar_t>(scan, work, row, q);
    const acc_t product = product_with_features(n.feature_map, q, out[i]);
    if (!exists) return;
    if (thread_x<acc_t>() == 0) static_cast<acc_t*>(scan.products)[head + row] = product;
    const acc_t bias = product * static_cast<const acc_t*>(scan.inverse)[head + row];
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i][j] -= bias * z.values[j];
    multiply_by_derivative(n.feature_map, q, out[i]);
    store_four<scalar_t>(scan, work, row, out[i]);
  });
}

// ---- a head

// One head of columns: adds to the rows what the chunk itself and, with the first head, the state gives them; then adds
// the columns to the state.
template <typename scalar_t, typename acc_t, int kLines, bool kGeneral, int kThreadRows>
__device__ __forceinline__ void scan_head(const Scan& scan, const ScanWork& work, const Chunk& chunk, int64_t head,
                                          const BlockState<acc_t>& state, ScanShared<acc_t, kLines, kGeneral>& s,
                                          Accumulators<acc_t, kThreadRows>& acc) {
  constexpr int kSize = kTileSize<acc_t>;
  const bool meet = chunk.has_rows && chunk.has_columns;
  const bool reads_state = chunk.has_rows && head == 0;
  const bool fades = kGeneral && scan.decay && head == 0;
  const int64_t column_head = work.first_column_head + head;
  acc_t scores[kThreadRows][kThreadRows] = {};
  if (chunk.has_columns)
    load_chunk<scalar_t>(scan, scan.x, work.b(), column_head, chunk.columns, work.part * kSize, scan.width, s.x);
  if (scan.has_bias() && scan.kind == ScanKind::GradK && chunk.has_columns)
    load_bias<kGeneral>(scan, work.b(), column_head, chunk.columns, s.bias);
  if constexpr (!kGeneral)
    if (finds_rows<acc_t, kGeneral>(scan) && chunk.has_rows) find_inverses<scalar_t>(scan, work, chunk, s);
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
    if constexpr (kGeneral) {
      if (fades) fade_matrix(s.all, state.row(k));
      if (fades && scan.has_denominator()) fade_vector(s.all, state.sums + k);
    }
    if (chunk.has_columns) {
      add_outer(s.b, s.x, chunk.columns.end, column_weights(scan, s), state.row(k));
      if (scan.has_denominator())
        add_column_sums(s.b, static_cast<const acc_t*>(nullptr), column_weights(scan, s), state.sums + k);
    }
    __syncthreads();
  }
  if constexpr (kGeneral)
    if (reads_state) weigh_rows(scan, s, acc);
  if (meet) {
    __syncthreads();
    if constexpr (kGeneral) {
      if (scan.decay) form_score_weights(s);
      __syncthreads();
    }
    store_scores(scan, chunk, scores, s);
    if (finds_rows<acc_t, kGeneral>(scan)) sum_lines(s.x, s.b);
    __syncthreads();
    add_product(s.a, s.x.row(0), static_cast<int>(ceil_div(chunk.columns.end, 4) * 4), acc.out);
    if (scan.has_denominator()) add_row_dots(s.a, static_cast<const acc_t*>(nullptr), kLines, acc.denominator);
  }
  if constexpr (!kGeneral)
    if (finds_rows<acc_t, kGeneral>(scan) && chunk.has_rows) finish_queries<scalar_t>(scan, work, chunk, s, acc.out);
  if (scan.has_bias() && (chunk.has_columns || fades)) {
    __syncthreads();
    if constexpr (kGeneral)
      if (fades) fade_vector(s.all, s.vector);
    if (chunk.has_columns)
      add_column_sums(s.x, scan.kind == ScanKind::GradK ? s.bias : nullptr, column_weights(scan, s), s.vector);
  }
  __syncthreads();
}

// Subtracts the bias from the product with the state: bias_i (sum of x_j), or the sum of bias_j x_j, over the columns
// before this chunk.
template <typename acc_t, int kLines, bool kGeneral, int kThreadRows>
__device__ __forceinline__ void subtract_bias_of_state(const Scan& scan, const ScanShared<acc_t, kLines, kGeneral>& s,
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

// GradK: a part of phi(k).(grad phi(k)), which the gradient of a decay needs.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_key_product(const Scan& scan, const ScanWork& work, int64_t row, bool exists,
                                                  const acc_t (&out)[4]) {
  const LinearAttentionShape& n = scan.shape;
  acc_t k[4] = {};
  if (exists) load_last<scalar_t>(scan, work, row, k);
  acc_t product = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    product += out[j] * (n.feature_map == FeatureMap::EluPlusOne ? elu_plus_one(k[j], exp_minus_abs(k[j])) : k[j]);
  product = sum_along_x(product);
  acc_t* products = static_cast<acc_t*>(scan.key_products) + (work.b() * n.Hkv + work.key_head) * n.T + row;
  if (exists && thread_x<acc_t>() == 0) products[work.part * n.B * n.Hkv * n.T] = product;
}

template <typename scalar_t, bool kGeneral, typename acc_t>
__device__ __forceinline__ void finish_row(const Scan& scan, const ScanWork& work, int64_t row, bool exists,
                                           acc_t denominator, acc_t (&out)[4]) {
  const LinearAttentionShape& n = scan.shape;
  acc_t* inverses = static_cast<acc_t*>(scan.inverse) + query_row(n, work.b(), work.row_head);
  if constexpr (kGeneral)
    if (scan.key_products != nullptr) store_key_product<scalar_t>(scan, work, row, exists, out);
  if (scan.forms_output()) {
    acc_t inverse = acc_t(1) / (sum_along_x(denominator) + static_cast<acc_t>(scan.eps));
    if (kGeneral && !n.normalize) inverse = 1;
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] *= inverse;
    if (scan.kind == ScanKind::Denominators) {
      acc_t g[4] = {};
      if (exists) load_last<scalar_t>(scan, work, row, g);
      const acc_t product = sum_along_x(out[0] * g[0] + out[1] * g[1] + out[2] * g[2] + out[3] * g[3]);
      acc_t* products = static_cast<acc_t*>(scan.products) + query_row(n, work.b(), work.row_head);
      if (exists && thread_x<acc_t>() == 0) {
        products[work.part * n.B * n.H * n.S + row] = product;
        if (work.part == 0) inverses[row] = inverse;
      }
    }
  } else if (scan.kind != ScanKind::GradV && exists && scan.out) {
    acc_t x[4];
    load_last<scalar_t>(scan, work, row, x);
    multiply_by_derivative(n.feature_map, x, out);
  }
  if (exists) store_four<scalar_t>(scan, work, row, out);
}

template <typename scalar_t, typename acc_t, int kLines, bool kGeneral>
__device__ __forceinline__ void scan_chunk(const Scan& scan, const ScanWork& work, const Chunk& chunk,
                                           const BlockState<acc_t>& state, ScanShared<acc_t, kLines, kGeneral>& s) {
  constexpr int kThreadRows = kLines / kSide<acc_t>;
  Accumulators<acc_t, kThreadRows> acc = {};
  if constexpr (kGeneral) load_decays(scan, work, chunk, s);
  if (chunk.has_rows && subtracts_bias<acc_t, kGeneral>(scan)) {
    if (scan.kind == ScanKind::GradQ) {
      load_bias<kGeneral>(scan, work.b(), work.row_head, chunk.rows, s.bias);
      __syncthreads();
    }
    subtract_bias_of_state(scan, s, acc.out);
    __syncthreads();
  }
  const int64_t heads = chunk.has_columns ? work.column_heads : 0;
  for (int64_t head = 0; head < max(heads, int64_t{1}); ++head) {
    Chunk of_head = chunk;
    of_head.has_columns = chunk.has_columns && head < heads;
    scan_head<scalar_t>(scan, work, of_head, head, state, s, acc);
  }
  if (!chunk.has_rows || finds_rows<acc_t, kGeneral>(scan)) return;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int line = thread_y<acc_t>() + kSide<acc_t> * i;
    finish_row<scalar_t, kGeneral>(scan, work, chunk.rows.first + line, chunk.rows.has(line), acc.denominator[i],
                                   acc.out[i]);
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
  acc_t* vector = scan.forms_output() ? state.sums : state.vector;
  const int64_t first = scan.forms_output() ? 0 : work.part * kSize;
  const int64_t count = scan.forms_output() ? padded : kSize;
  const int64_t length = scan.forms_output() ? scan.depth : scan.width;
  for (int64_t i = threadIdx.x; i < count; i += kThreads<acc_t>) move_sum(vector[i], first + i, first + i < length);
  __syncthreads();
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void start_state(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  const bool from_zero = scan.phase == ScanPhase::Sums;
  const bool from_slot = !from_zero && !work.is_whole();
  const StateSlot<scalar_t> slot = from_slot ? slot_of<scalar_t>(scan, work, work.segment) : StateSlot<scalar_t>{};
  for_state(
      scan, work, state,
      [&](acc_t& to, int64_t k, int64_t column, bool exists) {
        acc_t x = 0;
        if (exists && from_slot) x = slot.read(slot.at(k, column));
        if (exists && !from_slot && !from_zero) x = initial_element<acc_t>(scan, work, k, column);
        to = x;
      },
      [&](acc_t& to, int64_t i, bool exists) {
        acc_t x = 0;
        if (exists && from_slot) x = slot.read(slot.sum_at(i));
        if (exists && !from_slot && !from_zero) x = initial_sum<acc_t>(scan, work, i);
        to = x;
      });
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void store_segment(const Scan& scan, const ScanWork& work, const BlockState<acc_t>& state) {
  const StateSlot<scalar_t> slot = slot_of<scalar_t>(scan, work, work.segment);
  const bool stores_sums = !scan.forms_output() || scan.parts_have_slots() || work.part == 0;
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool exists) {
        if (exists) slot.write(slot.at(k, column), from);
      },
      [&](acc_t& from, int64_t i, bool exists) {
        if (exists && stores_sums) slot.write(slot.sum_at(i), from);
      });
}

// The state behind the scan, as far as it is wanted. Every block has its own part of GradK's vector.
template <typename acc_t>
__device__ __forceinline__ void store_last_state(const Scan& scan, const ScanWork& work,
                                                 const BlockState<acc_t>& state) {
  for_state(
      scan, work, state,
      [&](acc_t& from, int64_t k, int64_t column, bool exists) {
        if (exists && scan.new_m) *scan.new_m.at<acc_t>(work.sequence.index, work.key_head, k, column) = from;
      },
      [&](acc_t& from, int64_t i, bool exists) {
        if (!exists || !scan.new_z || (scan.forms_output() && work.part > 0)) return;
        *scan.new_z.at<acc_t>(work.sequence.index, work.key_head, 0, i) = scan.kind == ScanKind::GradK ? -from : from;
      });
}

// ---- a block

// Scans for a work that exists, from its first state to its last one.
template <typename scalar_t, typename acc_t, int kLines, bool kGeneral>
__device__ __forceinline__ void run_work(const Scan& scan, ScanShared<acc_t, kLines, kGeneral>& s) {
  constexpr int kSize = kTileSize<acc_t>;
  acc_t* memory = scan.depth > kLinearAttentionDeepest
                      ? static_cast<acc_t*>(scan.deep) + blockIdx.x * linear_attention_block_state(scan.depth, kSize)
                      : reinterpret_cast<acc_t*>(&s + 1);
  const BlockState<acc_t> state{memory, memory + ceil_div(scan.depth, kSize) * kSize * kTileStride<acc_t>, s.vector};
  const ScanWork& work = s.work;
  const ScanRanges& ranges = s.ranges;
  const int sums = ranges.column_chunks(kLines);
  const int steps = sums + ranges.row_chunks(kLines);
  start_state<scalar_t>(scan, work, state);
  for (int i = 0; i <= steps; ++i) {
    // Not causal, the state is complete before the rows.
    if (i == (scan.shape.causal ? steps : sums) && work.stores_state(scan)) store_last_state(scan, work, state);
    if (i == steps) break;
    const Chunk chunk = chunk_of(scan, work.sequence, i < sums ? ranges.columns : ranges.rows, i < sums ? i : i - sums,
                                 i < sums, kLines);
    if (kGeneral || chunk.has_rows || chunk.has_columns) scan_chunk<scalar_t>(scan, work, chunk, state, s);
  }
  if (scan.phase != ScanPhase::Sums) return;
  store_segment<scalar_t>(scan, work, state);
  if constexpr (kGeneral)
    if (scan.decay && work.part == 0 && threadIdx.x == 0) kept_of<acc_t>(scan, work, work.segment) = s.kept;
}

// A block takes one work, or some in turns.
template <typename scalar_t, int kLines, bool kGeneral>
__device__ __forceinline__ void scan_block(const Scan& scan, int64_t parts, int64_t works) {
  using acc_t = acc_type<scalar_t>;
  auto& s = shared<ScanShared<acc_t, kLines, kGeneral>>();
  if (threadIdx.x == 0) s.index = blockIdx.x;
  for (;;) {
    if (threadIdx.x == 0) {
      s.work = scan_work(scan, s.index, parts);
      s.ranges = ranges_of(scan, s.work);
      s.index += gridDim.x;
      if constexpr (kGeneral) s.kept = 1;
    }
    __syncthreads();
    if (s.work.exists) run_work<scalar_t>(scan, s);
    const bool is_last = s.index >= works;
    __syncthreads();
    if (is_last) break;
  }
}

template <typename scalar_t, int kLines>
__global__ void __launch_bounds__(kThreads<acc_type<scalar_t>>, kBlocksAtOnce<acc_type<scalar_t>>)
    scan_kernel(const Scan scan, int64_t parts, int64_t works) {
  scan_block<scalar_t, kLines, false>(scan, parts, works);
}

template <typename scalar_t, int kLines>
__global__ void __launch_bounds__(kThreads<acc_type<scalar_t>>, kBlocksAtOnce<acc_type<scalar_t>>)
    general_scan_kernel(const Scan scan, int64_t parts, int64_t works) {
  scan_block<scalar_t, kLines, true>(scan, parts, works);
}

// ---- launches

template <typename scalar_t, int kLines, bool kGeneral>
void launch_chunks(const Scan& scan, int64_t blocks, size_t state_bytes, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const int64_t parts = std::max<int64_t>(1, ceil_div(scan.width, kTileSize<acc_t>));
  const int64_t works = blocks * parts;
  const bool in_turns = scan.depth > kLinearAttentionDeepest && scan.shape.sequences;
  const int64_t launched = in_turns ? std::min(works, kLinearAttentionDeepBlocks) : works;
  const Launch with{name_of(scan.kind, false), launched, dim3(kThreads<acc_t>),
                    sizeof(ScanShared<acc_t, kLines, kGeneral>) + state_bytes, stream};
  if constexpr (kGeneral)
    launch(with, general_scan_kernel<scalar_t, kLines>, scan, parts, works);
  else
    launch(with, scan_kernel<scalar_t, kLines>, scan, parts, works);
}

// In chunks of a tile's lines, or of half as many if the GPU's shared memory has no room for more beside a deep state.
// The general form always takes the latter, so that its bits are the same on every GPU.
template <typename scalar_t>
void launch_scan(const Scan& scan, int64_t blocks, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kTileSize<acc_t>;
  const auto bytes_of_state = [](int64_t depth) { return linear_attention_block_state(depth, kSize) * sizeof(acc_t); };
  const size_t state_bytes = scan.depth > kLinearAttentionDeepest ? 0 : bytes_of_state(scan.depth);
  static_assert(sizeof(ScanShared<acc_t, kSize / 2, true>) + bytes_of_state(kLinearAttentionDeepest) <=
                kSharedBytesEverywhere);
  if (!scan.shape.is_plain()) {
    launch_chunks<scalar_t, kSize / 2, true>(scan, blocks, state_bytes, stream);
  } else if (fits_in_a_block(sizeof(ScanShared<acc_t, kSize, false>) + state_bytes)) {
    launch_chunks<scalar_t, kSize, false>(scan, blocks, state_bytes, stream);
  } else {
    launch_chunks<scalar_t, kSize / 2, false>(scan, blocks, state_bytes, stream);
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
