// Dropout on the CPU: rows (one sample, one position) are cut over threads.
#include "kernels.h"
#include "parallel.h"

int op_dropout(int dtype, const void* x, void* y, int64_t num_samples, int64_t num_positions, int64_t num_features,
               const op_mask* mask, int num_threads) {
  if (!is_dtype(dtype) || !mask_is_valid(*mask, num_samples, num_positions, num_features)) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  const MaskKey key = mask_key(*mask);
  const uint64_t first_sample = mask->first_sample, first_position = mask->first_position;
  const uint64_t first_feature = mask->first_feature;
  const int64_t row_bytes = num_features * item_bytes(dtype), num_rows = num_samples * num_positions;
  constexpr int64_t kGrain = 1 << 16;  // elements
  parallel(num_rows, num_rows * num_features, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      use.dropout_row(dtype, at(x, row * row_bytes), at(y, row * row_bytes), key, first_sample + row / num_positions,
                      static_cast<uint32_t>(first_position + row % num_positions), first_feature, num_features);
  });
  return 0;
}
