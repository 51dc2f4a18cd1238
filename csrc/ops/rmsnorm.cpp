// RMSNorm on the CPU: rows are cut over threads.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

static constexpr int64_t kGrain = 1 << 18;  // elements

int op_rmsnorm_forward(int dtype, const void* x, const void* weight, void* y, void* rstd, int64_t num_rows,
                       int64_t num_cols, double eps, int num_threads) {
  if (!is_dtype(dtype) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), number_bytes = dtype == OP_F64 ? 8 : 4;
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.rmsnorm_forward(dtype, at(x, begin * row_bytes), weight, at(y, begin * row_bytes),
                        at(rstd, begin * number_bytes), end - begin, num_cols, eps);
  });
  return 0;
}

// The weight gradient is a sum over rows. Rows are cut into blocks by their number alone, each block has a partial sum
// of its own, and these are added in order: so the bits do not depend on the number of threads.
constexpr int64_t kMinBlockRows = 32, kMaxBlocks = 64;

static int64_t rows_a_block(int64_t num_rows) {
  return std::max(kMinBlockRows, (num_rows + kMaxBlocks - 1) / kMaxBlocks);
}

int64_t op_rmsnorm_partials(int64_t num_rows) {
  return (num_rows + rows_a_block(num_rows) - 1) / rows_a_block(num_rows);
}

template <class Number>
static void add_partials(const Number* partials, int64_t num_partials, int64_t num_cols, Number* total, int64_t begin,
                         int64_t end) {
  std::fill(total + begin, total + end, Number{0});
  for (int64_t block = 0; block < num_partials; ++block)
    for (int64_t i = begin; i < end; ++i) total[i] += partials[block * num_cols + i];
}

int op_rmsnorm_backward(int dtype, const void* dy, const void* x, const void* weight, const void* rstd, void* dx,
                        void* dweight, void* partials, int64_t num_rows, int64_t num_cols, int num_threads) {
  if (!is_dtype(dtype) || num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), number_bytes = dtype == OP_F64 ? 8 : 4;
  const int64_t block_rows = rows_a_block(num_rows), num_partials = op_rmsnorm_partials(num_rows);
  parallel(num_partials, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin_block, int64_t end_block) {
    for (int64_t block = begin_block; block < end_block; ++block) {
      const int64_t begin = block * block_rows, end = std::min(num_rows, begin + block_rows);
      void* const sum = at(partials, block * num_cols * number_bytes);
      std::memset(sum, 0, num_cols * number_bytes);
      use.rmsnorm_backward(dtype, at(dy, begin * row_bytes), at(x, begin * row_bytes), weight,
                           at(rstd, begin * number_bytes), at(dx, begin * row_bytes), sum, end - begin, num_cols);
    }
  });
  parallel(num_cols, num_partials * num_cols, kGrain, num_threads, [=](int64_t begin, int64_t end) {
    if (dtype == OP_F64)
      add_partials(static_cast<const double*>(partials), num_partials, num_cols, static_cast<double*>(dweight), begin,
                   end);
    else
      add_partials(static_cast<const float*>(partials), num_partials, num_cols, static_cast<float*>(dweight), begin,
                   end);
  });
  return 0;
}
