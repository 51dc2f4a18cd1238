// RMSNorm on the CPU: rows are cut over threads.
#include <algorithm>
#include <cstring>

#include "blocks.h"

static constexpr int64_t kGrain = 1 << 18;  // elements

// The pointer `bytes` further, if it is there.
static const void* at_if_any(const void* pointer, int64_t bytes) { return pointer ? at(pointer, bytes) : nullptr; }

int op_add_rmsnorm_forward(int dtype, const void* x, const void* residual, const void* weight, void* sum, void* y,
                           void* rstd, int64_t num_rows, int64_t num_cols, double eps, int num_threads) {
  if (!is_dtype(dtype) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), root_bytes = number_bytes(dtype);
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    const int64_t bytes = begin * row_bytes;
    use.rmsnorm_forward(dtype, at(x, bytes), at_if_any(residual, bytes), weight, residual ? at(sum, bytes) : nullptr,
                        at(y, bytes), at(rstd, begin * root_bytes), end - begin, num_cols, eps);
  });
  return 0;
}

int64_t op_add_rmsnorm_partials(int64_t num_rows) { return num_row_blocks(num_rows); }

int op_add_rmsnorm_backward(int dtype, const void* dy, const void* dsum, const void* x, const void* weight,
                            const void* rstd, void* dx, void* dweight, void* partials, int64_t num_rows,
                            int64_t num_cols, int num_threads) {
  if (!is_dtype(dtype) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), root_bytes = number_bytes(dtype);
  const int64_t block_rows = rows_a_block(num_rows), num_partials = op_add_rmsnorm_partials(num_rows);
  parallel(num_partials, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin_block, int64_t end_block) {
    for (int64_t block = begin_block; block < end_block; ++block) {
      const int64_t begin = block * block_rows, end = std::min(num_rows, begin + block_rows);
      const int64_t bytes = begin * row_bytes;
      void* const total = at(partials, block * num_cols * root_bytes);
      std::memset(total, 0, num_cols * root_bytes);
      use.rmsnorm_backward(dtype, at(dy, bytes), at_if_any(dsum, bytes), at(x, bytes), weight,
                           at(rstd, begin * root_bytes), at(dx, bytes), total, end - begin, num_cols);
    }
  });
  add_partials(dtype, partials, num_partials, num_cols, dweight, kGrain, num_threads);
  return 0;
}
