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

template <typename acc_t>
MEMCHECK_INLINE void pool_block(const CompressedAttentionPooling& p, Dtype dtype, const PooledBlock& block,
                                const PoolScratch<acc_t>& scratch) {
  const int64_t D = p.shape.D;
  const int64_t columns = padded_columns(D);
  const int64_t begin = block.j * p.shape.factor;
  const int64_t end = std::min(p.shape.T, begin + p.shape.factor);
  scratch.sum.start(columns);
  int64_t tiles = 0;
  for (int64_t t = begin; t < end; t += kTileRows) {
    const int64_t rows = end - t < kTileRows ? end - t : kTileRows;
    const auto x = view_rows(dtype, rows_at(dtype, block.from, block.b, block.head, t), rows, D, scratch.rows);
    fill_zero(scratch.tile, columns);
    for (int64_t row = 0; row < rows; ++row) add(columns, x.row(row), scratch.tile);
    add(columns, scratch.tile, scratch.sum.chunk);
    if (++tiles % kTileRows == 0) scratch.sum.end_chunk(columns);
  }
  scratch.sum.end_chunk(columns);
  for (int64_t i = 0; i < columns; ++i) scratch.sum.total[i] /= static_cast<acc_t>(end - begin);
  store_rows(dtype, rows_at(dtype, block.to, block.b, block.head, block.j), 1, D, scratch.sum.total, columns);
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

}  // namespace

int64_t pool_tasks(const CompressedAttentionShape& shape) {
  return 2 * shape.B * shape.Hkv * shape.C;
}

std::vector<double> pool_work(const CompressedAttentionShape& shape) {
  std::vector<double> work;
  for (int64_t index = 0; index < pool_tasks(shape); ++index)
    work.push_back(static_cast<double>(std::min(shape.factor, shape.T - index % shape.C * shape.factor)));
  return work;
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
