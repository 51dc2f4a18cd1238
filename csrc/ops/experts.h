// What the arguments of the ops of experts must keep; shared by the CPU and the CUDA kernels.
#pragma once

#include "ops.h"

static inline bool sorted_rows_are_valid(int dtype, int64_t num_rows, int64_t num_experts) {
  return dtype == OP_I64 && num_rows >= 0 && num_experts > 0;
}

// How many of `num_rows` rows an op takes.
#ifdef __CUDACC__
__host__ __device__
#endif
static inline int64_t used_rows(int64_t num_rows, const int32_t* used) {
  return used != nullptr && *used < num_rows ? *used : num_rows;
}

static inline bool rows_are_valid(int64_t num_rows, int64_t num_cols, int64_t per_token) {
  return num_rows >= 0 && num_cols >= 0 && per_token > 0;
}
