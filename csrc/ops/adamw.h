// The numbers of one AdamW step, computed once, in double.
#pragma once

#include "ops.h"
#include "split.h"

inline bool fits(int dtype, const op_adamw_step& step) {
  if (dtype == OP_F64) return step.moments == OP_F64 && !step.is_split;
  if (step.is_split && step.published == OP_F16) return false;
  return dtype == OP_F32 && (step.moments == OP_F32 || step.moments == OP_BF16);
}

struct AdamwNumbers {
  double gradient_share, beta2, square_share, decay, step_size, inverse_root, eps;
  bool has_bf16_moments, is_split, publishes_half;
};

AdamwNumbers adamw_numbers(const op_adamw_step& step);
