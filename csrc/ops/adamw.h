// The numbers of one AdamW step, computed once, in double.
#pragma once

#include "ops.h"

struct AdamwNumbers {
  double gradient_share, beta2, square_share, decay, step_size, inverse_root, eps;
};

AdamwNumbers adamw_numbers(const op_adamw_step& step);
