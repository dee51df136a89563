#include "common/cpu_level.h"
#include "compressed_attention/compressed_attention_cpu.h"

// Pooling: the means of keys and values over blocks. A task is one block of one head, of keys or of values.

namespace memcheck::compressed_cpu {
namespace {

template <typename acc_t>
struct PoolScratch {
  acc_t* rows;  // kTileRows x D
  acc_t* tile;  // D, as the next
  SumOfTiles<acc_t> sum;

  PoolScratch(Arena& arena, const CompressedAttentionShape& shape)
      : rows(arena.take<acc_t>(kTileRows * padded_columns(shape.D))),
        tile(arena.take<acc_t>(padded_columns(shape.D))),
        sum(arena, padded_columns(shape.D)) {}
};

struct PooledBlock {
  Strided<4> from, to;
  int64_t b, head, j;
};

MEMCHECK_INLINE PooledBlock pooled_block(const CompressedAttentionPooling& p, int64_t index) {
  const int64_t rows = p.shape.Hkv * p.shape.C;
  const bool of_keys = index < p.shape.B * rows;
  const int64_t of_one = of_keys ? index : index - p.shape.B * rows;
  return {of_keys ? p.k : p.v, of_keys ? p.kc : p.vc, of_one / rows, of_one % rows / p.shape.C, of_one % p.shape.C};
}

// scratch.sum.total (D) = the sum over positions of x[b,head], (.,.,positions,D).
template <typename acc_t>
MEMCHECK_INLINE void sum_positions(Dtype dtype, const Strided<4>& x, int64_t b, int64_t head, Span positions, int64_t D,
                                   const PoolScratch<acc_t>& scratch) {
  const int64_t columns = padded_columns(D);
  scratch.sum.start(columns);
  int64_t tiles = 0;
  for (int64_t t = positions.begin; t < positions.end; t += kTileRows) {
    const int64_t rows = std::min<int64_t>(kTileRows, positions.end - t);
    const auto view = view_rows(dtype, rows_at(dtype, x, b, head, t), rows, D, scratch.rows);
    fill_zero(scratch.tile, columns);
    for (int64_t row = 0; row < rows; ++row) add(columns, view.row(row), scratch.tile);
    add(columns, scratch.tile, scratch.sum.chunk);
    if (++tiles % kTileRows == 0) scratch.sum.end_chunk(columns);
  }
  scratch.sum.end_chunk(columns);
}

template <typename acc_t>
MEMCHECK_INLINE void divide(int64_t columns, int64_t divisor, acc_t* x) {
  for (int64_t i = 0; i < columns; ++i) x[i] /= static_cast<acc_t>(divisor);
}

template <typename acc_t>
MEMCHECK_INLINE void pool_block(const CompressedAttentionPooling& p, Dtype dtype, const PooledBlock& block,
                                const PoolScratch<acc_t>& scratch) {
  const int64_t D = p.shape.D;
  const int64_t begin = block.j * p.shape.factor;
  const Span positions{begin, std::min(p.shape.T, begin + p.shape.factor)};
  sum_positions(dtype, block.from, block.b, block.head, positions, D, scratch);
  divide(padded_columns(D), positions.size(), scratch.sum.total);
  store_rows(dtype, rows_at(dtype, block.to, block.b, block.head, block.j), 1, D, scratch.sum.total, padded_columns(D));
}

template <typename acc_t>
MEMCHECK_INLINE void pool_blocks_body(const CompressedAttentionPooling& p, Dtype dtype, int64_t begin, int64_t end,
                                      const PoolScratch<acc_t>& scratch) {
  for (int64_t index = begin; index < end; ++index) pool_block(p, dtype, pooled_block(p, index), scratch);
}

MEMCHECK_PER_CPU_LEVEL(acc_t, pool_blocks,
                       (const CompressedAttentionPooling& p, Dtype dtype, int64_t begin, int64_t end,
                        const PoolScratch<acc_t>& scratch),
                       (p, dtype, begin, end, scratch))

// ---- blocks that go on from a state: a task is a row of results of one head, of keys or of values

// The tensors of keys or of values, and where a row of results is in them.
struct NewRow {
  Strided<4> x, sum, new_sum, blocks;
  int64_t head;
  CompressedAttentionNewRow row;

  NewRow(const CompressedAttentionExtension& p, int64_t index) : NewRow(p, p.shape.B * p.shape.C, index) {}
  // The mean or the sum.
  MatrixPlace result(Dtype dtype) const {
    return row.complete ? rows_at(dtype, blocks, row.of.to, head, row.of.place + row.j) : of_sum(new_sum, dtype);
  }
  MatrixPlace of_sum(const Strided<4>& x, Dtype dtype) const {
    return rows_at(acc_dtype(dtype), x, row.sequence, head, 0);
  }
  Dtype dtype_of_result(Dtype dtype) const { return row.complete ? dtype : acc_dtype(dtype); }

 private:
  NewRow(const CompressedAttentionExtension& p, int64_t rows, int64_t index)
      : x(index % 2 == 0 ? p.k : p.v),
        sum(index % 2 == 0 ? p.k_sum : p.v_sum),
        new_sum(index % 2 == 0 ? p.new_k_sum : p.new_v_sum),
        blocks(index % 2 == 0 ? p.kc : p.vc),
        head(index / 2 / rows),
        row(p.row(p.sequences, index / 2 % rows)) {}
};

template <typename acc_t>
void extend_row(const CompressedAttentionExtension& p, Dtype dtype, int64_t index, const PoolScratch<acc_t>& scratch) {
  const NewRow at(p, index);
  const int64_t D = p.shape.D, columns = padded_columns(D);
  sum_positions(dtype, at.x, at.row.of.row, at.head, {at.row.begin, at.row.end}, D, scratch);
  if (at.row.j == 0) {
    load_rows(acc_dtype(dtype), at.of_sum(at.sum, dtype), 1, D, scratch.tile, columns);
    add(columns, scratch.tile, scratch.sum.total);
  }
  if (at.row.complete) divide(columns, p.shape.factor, scratch.sum.total);
  store_rows(at.dtype_of_result(dtype), at.result(dtype), 1, D, scratch.sum.total, columns);
}

// Each position, and the sum before the first row, gets its share of the gradient of the row.
template <typename acc_t>
void spread_row(const CompressedAttentionExtension& p, Dtype dtype, int64_t index, const PoolScratch<acc_t>& scratch) {
  const NewRow at(p, index);
  const int64_t D = p.shape.D, columns = padded_columns(D);
  fill_zero(scratch.tile, columns);
  if (at.row.complete ? at.blocks : at.new_sum)
    load_rows(at.dtype_of_result(dtype), at.result(dtype), 1, D, scratch.tile, columns);
  if (at.row.complete) divide(columns, p.shape.factor, scratch.tile);
  if (at.x) {
    const MatrixPlace positions = rows_at(dtype, at.x, at.row.of.row, at.head, at.row.begin);
    store_rows(dtype, positions, at.row.end - at.row.begin, D, scratch.tile, 0);
  }
  if (at.row.j == 0 && at.sum) store_rows(acc_dtype(dtype), at.of_sum(at.sum, dtype), 1, D, scratch.tile, columns);
}

template <typename Run>
void each_new_row(const CompressedAttentionExtension& p, Dtype dtype, const Run& run) {
  with_acc_type(dtype, [&](auto acc) {
    run_with_scratch<PoolScratch<decltype(acc)>>(pool_tasks(p.shape), p,
                                                 [&](int64_t begin, int64_t end, const auto& scratch) {
                                                   for (int64_t i = begin; i < end; ++i) run(i, scratch);
                                                 });
  });
}

}  // namespace

void extend(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t) {
  each_new_row(p, dtype, [&](int64_t i, const auto& scratch) { extend_row(p, dtype, i, scratch); });
}

void extend_backward(const CompressedAttentionExtension& p, Dtype dtype, cudaStream_t) {
  each_new_row(p, dtype, [&](int64_t i, const auto& scratch) { spread_row(p, dtype, i, scratch); });
}

int64_t pool_tasks(const CompressedAttentionShape& shape) {
  return 2 * shape.B * shape.Hkv * shape.C;
}

int64_t pool_scratch_bytes(const CompressedAttentionShape& shape, Dtype dtype) {
  return with_acc_type(dtype, [&](auto acc) { return scratch_bytes<PoolScratch<decltype(acc)>>(shape); });
}

void pool(const CompressedAttentionPooling& p, Dtype dtype) {
  with_acc_type(dtype, [&](auto acc) {
    using acc_t = decltype(acc);
    run_with_scratch<PoolScratch<acc_t>>(pool_tasks(p.shape), p, [&](int64_t begin, int64_t end, const auto& scratch) {
      pool_blocks<acc_t>(p, dtype, begin, end, scratch);
    });
  });
}

}  // namespace memcheck::compressed_cpu
