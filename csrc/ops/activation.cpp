// SwiGLU and GELU on the CPU: rows are cut over threads.
#include "activation.h"
#include "kernels.h"
#include "parallel.h"

static constexpr int64_t kGrain = 1 << 16;  // elements

int op_activation_forward(int dtype, int activation, const void* x, void* y, int64_t num_rows, int64_t num_cols,
                          int num_threads) {
  if (!is_dtype(dtype) || !activation_is_valid(activation, num_rows, num_cols)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), packed_bytes = num_parts(activation) * row_bytes;
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.activation_forward(dtype, activation, at(x, begin * packed_bytes), at(y, begin * row_bytes), end - begin,
                           num_cols);
  });
  return 0;
}

int op_activation_backward(int dtype, int activation, const void* dy, const void* x, void* dx, void* y,
                           int64_t num_rows, int64_t num_cols, int num_threads) {
  if (!is_dtype(dtype) || !activation_is_valid(activation, num_rows, num_cols)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), packed_bytes = num_parts(activation) * row_bytes;
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.activation_backward(dtype, activation, at(dy, begin * row_bytes), at(x, begin * packed_bytes),
                            at(dx, begin * packed_bytes), y ? at(y, begin * row_bytes) : nullptr, end - begin,
                            num_cols);
  });
  return 0;
}
