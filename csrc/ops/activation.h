// What the arguments of an activation must keep; shared by the CPU and the CUDA kernels.
#pragma once

#include "ops.h"

static inline int64_t num_parts(int activation) { return activation == OP_SWIGLU ? 2 : 1; }

static inline bool activation_is_valid(int activation, int64_t num_rows, int64_t num_cols) {
  return (activation == OP_SWIGLU || activation == OP_GELU) && num_rows >= 0 && num_cols >= 0;
}
