// What the arguments of the ops of fp8 must keep.
#pragma once

#include "ops.h"

constexpr int64_t kFp8Group = 128;  // values of a tile, and of a block's sides

// Sizes of x; those of a transposed copy too, if it is asked for.
inline bool fp8_sizes_are_valid(int scaling, int64_t num_rows, int64_t num_cols, bool is_transposed) {
  if (scaling < OP_SCALED_BY_TENSOR || scaling > OP_SCALED_BY_BLOCK || num_rows <= 0 || num_cols <= 0) return false;
  const bool in_groups = scaling == OP_SCALED_BY_TILE || scaling == OP_SCALED_BY_BLOCK;
  const int64_t of_columns = in_groups ? kFp8Group : 16, of_rows = scaling == OP_SCALED_BY_TILE ? kFp8Group : 16;
  return num_cols % of_columns == 0 && (!is_transposed || num_rows % of_rows == 0);
}
