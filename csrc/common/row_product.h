#pragma once

#include <cstdint>

#include "common/tile_product.h"

// Products of very few rows with rows of another matrix, which lie along the lanes for it.

namespace memcheck {

constexpr int64_t kFewRowsOfProduct = 4;

// to (M,N) = a b^T for at most kFewRowsOfProduct rows of a and at most 64 of b, which both have padded_columns(K)
// columns, 0 from K on. Rows of `to` are to_stride elements apart, and are written up to the next multiple of
// kTileColumns. Every element is the chains of tile_product. `lanes` is scratch, (padded_columns(K),kTileColumns).
template <typename acc_t>
void row_product(int64_t M, int64_t N, int64_t K, const TileFactor<acc_t>& a, const TileFactor<acc_t>& b, acc_t* lanes,
                 acc_t* to, int64_t to_stride);

}  // namespace memcheck
