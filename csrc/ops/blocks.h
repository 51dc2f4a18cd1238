// Sums over rows whose bits do not depend on the number of threads: rows are cut into blocks by their number alone,
// each block has a partial sum of its own, and these are added in order.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "kernels.h"
#include "parallel.h"

constexpr int64_t kMinBlockRows = 32, kMaxBlocks = 64;

inline int64_t rows_a_block(int64_t num_rows) {
  return std::max(kMinBlockRows, (num_rows + kMaxBlocks - 1) / kMaxBlocks);
}

inline int64_t num_row_blocks(int64_t num_rows) {
  return (num_rows + rows_a_block(num_rows) - 1) / rows_a_block(num_rows);
}

// total[i] = the sum of partials[block][i], in the arithmetic of the dtype.
inline void add_partials(int dtype, const void* partials, int64_t num_partials, int64_t num_cols, void* total,
                         int64_t grain, int num_threads) {
  const auto add = [=](const auto* from, auto* to) {
    parallel(num_cols, num_partials * num_cols, grain, num_threads, [=](int64_t begin, int64_t end) {
      std::fill(to + begin, to + end, 0);
      for (int64_t block = 0; block < num_partials; ++block)
        for (int64_t i = begin; i < end; ++i) to[i] += from[block * num_cols + i];
    });
  };
  if (dtype == OP_F64)
    add(static_cast<const double*>(partials), static_cast<double*>(total));
  else
    add(static_cast<const float*>(partials), static_cast<float*>(total));
}
