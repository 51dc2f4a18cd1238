// What an op_heads must keep; shared by the CPU and the CUDA kernels.
#pragma once

#include "ops.h"

static inline bool heads_are_valid(const op_heads& heads) {
  constexpr int64_t kMost = 1 << 20;
  return heads.num_tokens >= 0 && heads.num_heads >= 0 && heads.num_heads < kMost && heads.num_kv_heads >= 0 &&
         heads.num_kv_heads < kMost && heads.head_size > 0 && heads.head_size < kMost && heads.head_size % 2 == 0 &&
         (heads.q_weight == nullptr) == (heads.k_weight == nullptr);
}
