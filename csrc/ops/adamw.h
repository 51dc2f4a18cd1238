// The numbers of one AdamW step, computed once, in double.
#pragma once

#include "ops.h"

inline bool is_adamw_dtype(int dtype, int64_t moments) {
  return (dtype == OP_F64 && moments == OP_F64) || (dtype == OP_F32 && (moments == OP_F32 || moments == OP_BF16));
}

struct AdamwNumbers {
  double gradient_share, beta2, square_share, decay, step_size, inverse_root, eps;
  bool has_bf16_moments;
};

AdamwNumbers adamw_numbers(const op_adamw_step& step);
