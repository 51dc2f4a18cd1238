// RoPE with QK-norm on the CPU: tokens are cut over threads.
#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "heads.h"

static constexpr int64_t kGrain = 1 << 18;  // elements

static int64_t num_elements(const op_heads& heads) {
  return heads.num_tokens * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size;
}

int op_rope_forward(int dtype, const op_heads* heads, const void* qkv, void* out, int64_t out_stride,
                    int num_threads) {
  if (!is_dtype(dtype) || !heads_are_valid(*heads)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  parallel(heads->num_tokens, num_elements(*heads), kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.rope_forward(dtype, *heads, qkv, out, out_stride, begin, end);
  });
  return 0;
}

int64_t op_rope_partials(const op_heads* heads) { return num_row_blocks(heads->num_tokens); }

int op_rope_backward(int dtype, const op_heads* heads, const op_head_gradients* gradients, const void* qkv, void* dqkv,
                     void* dweights, void* partials, int num_threads) {
  if (!is_dtype(dtype) || !heads_are_valid(*heads)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const bool has_weights = heads->q_weight != nullptr;
  const int64_t num_tokens = heads->num_tokens, block_tokens = rows_a_block(num_tokens);
  const int64_t num_blocks = num_row_blocks(num_tokens), sum_bytes = 2 * heads->head_size * number_bytes(dtype);
  parallel(num_blocks, num_elements(*heads), kGrain, num_threads, [=, &use](int64_t begin_block, int64_t end_block) {
    for (int64_t block = begin_block; block < end_block; ++block) {
      void* const sums = has_weights ? at(partials, block * sum_bytes) : nullptr;
      if (has_weights) std::memset(sums, 0, sum_bytes);
      const int64_t begin = block * block_tokens, end = std::min(num_tokens, begin + block_tokens);
      use.rope_backward(dtype, *heads, *gradients, has_weights ? qkv : nullptr, dqkv, sums, begin, end);
    }
  });
  if (has_weights) add_partials(dtype, partials, num_blocks, 2 * heads->head_size, dweights, kGrain, num_threads);
  return 0;
}
