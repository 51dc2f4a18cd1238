// Cross-entropy on the CPU: rows are cut over threads.
#include "kernels.h"
#include "logits.h"
#include "parallel.h"

static constexpr int64_t kGrain = 1 << 16;  // elements

int op_cross_entropy_forward(int dtype, const op_logits* logits, void* sums, int num_threads) {
  if (!is_dtype(dtype) || !logits_are_valid(*logits)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  parallel(logits->num_rows, logits->num_rows * logits->num_cols, kGrain, num_threads,
           [=, &use](int64_t begin, int64_t end) { use.cross_entropy_forward(dtype, *logits, sums, begin, end); });
  return 0;
}

int op_cross_entropy_backward(int dtype, const op_logits* logits, const void* factors, int num_threads) {
  if (!is_dtype(dtype) || !logits_are_valid(*logits)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  parallel(logits->num_rows, logits->num_rows * logits->num_cols, kGrain, num_threads,
           [=, &use](int64_t begin, int64_t end) { use.cross_entropy_backward(dtype, *logits, factors, begin, end); });
  return 0;
}
