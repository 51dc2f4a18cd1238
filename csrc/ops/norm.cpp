// RMSNorm and LayerNorm on the CPU: rows are cut over threads.
#include <algorithm>
#include <cstring>

#include "blocks.h"

static constexpr int64_t kGrain = 1 << 18;  // elements

// The pointer `bytes` further, if it is there.
static const void* at_if_any(const void* pointer, int64_t bytes) { return pointer ? at(pointer, bytes) : nullptr; }

static bool is_norm(int norm) { return norm == OP_RMSNORM || norm == OP_LAYERNORM; }

// How many numbers a row, and gradients a column, there are.
static int64_t num_numbers(int norm) { return norm == OP_LAYERNORM ? 2 : 1; }

int op_add_norm_forward(int dtype, int norm, const void* x, const void* residual, const void* weight, const void* bias,
                        void* sum, void* y, void* numbers, int64_t num_rows, int64_t num_cols, double eps,
                        int num_threads) {
  if (!is_dtype(dtype) || !is_norm(norm) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), numbers_bytes = num_numbers(norm) * number_bytes(dtype);
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    const int64_t bytes = begin * row_bytes;
    use.norm_forward(dtype, norm, at(x, bytes), at_if_any(residual, bytes), weight, bias,
                     residual ? at(sum, bytes) : nullptr, at(y, bytes), at(numbers, begin * numbers_bytes), end - begin,
                     num_cols, eps);
  });
  return 0;
}

int64_t op_add_norm_partials(int64_t num_rows) { return num_row_blocks(num_rows); }

int op_add_norm_backward(int dtype, int norm, const void* dy, const void* dsum, const void* x, const void* weight,
                         const void* numbers, void* dx, void* dweights, void* partials, int64_t num_rows,
                         int64_t num_cols, int num_threads) {
  if (!is_dtype(dtype) || !is_norm(norm) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), numbers_bytes = num_numbers(norm) * number_bytes(dtype);
  const int64_t block_rows = rows_a_block(num_rows), num_partials = op_add_norm_partials(num_rows);
  parallel(num_partials, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin_block, int64_t end_block) {
    for (int64_t block = begin_block; block < end_block; ++block) {
      const int64_t begin = block * block_rows, end = std::min(num_rows, begin + block_rows);
      const int64_t bytes = begin * row_bytes;
      void* const total = at(partials, block * num_cols * numbers_bytes);
      std::memset(total, 0, num_cols * numbers_bytes);
      use.norm_backward(dtype, norm, at(dy, bytes), at_if_any(dsum, bytes), at(x, bytes), weight,
                        at(numbers, begin * numbers_bytes), at(dx, bytes), total, end - begin, num_cols);
    }
  });
  add_partials(dtype, partials, num_partials, num_numbers(norm) * num_cols, dweights, kGrain, num_threads);
  return 0;
}
