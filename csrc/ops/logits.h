// What an op_logits must keep; shared by the CPU and the CUDA kernels.
#pragma once

#include "ops.h"

static inline bool logits_are_valid(const op_logits& logits) {
  return logits.num_rows >= 0 && logits.num_cols >= 0 && logits.num_cols <= INT32_MAX && logits.num_true >= 0 &&
         logits.num_true <= logits.num_cols && (logits.num_rows < 2 || logits.row_stride >= logits.num_cols);
}
