// Rows of experts on the CPU: sorted by one thread, everything else cut over threads by rows or tokens.
#include "experts.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

static constexpr int64_t kGrain = 1 << 16;  // elements

// A counting sort: `partials` first has how many rows each expert has, then where its next row goes.
int op_sort_rows(int dtype, const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t* rows,
                 int64_t* counts, int64_t* partials, int) {
  if (!sorted_rows_are_valid(dtype, num_rows, num_experts)) return OP_BAD_ARGUMENT;
  std::fill(counts, counts + num_experts, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (experts[row] < 0 || experts[row] >= num_experts) return OP_BAD_ARGUMENT;
    ++counts[experts[row]];
  }
  int64_t place = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    partials[expert] = place;
    place += counts[expert];
  }
  for (int64_t row = 0; row < num_rows; ++row) rows[partials[experts[row]]++] = row;
  return 0;
}

int64_t op_sort_rows_partials(int64_t) { return 1; }

int op_gather_rows(int dtype, const void* x, const int64_t* rows, const int32_t* used, void* out, int64_t num_rows,
                   int64_t num_cols, int64_t per_token, int num_threads) {
  if (!is_dtype(dtype) || !rows_are_valid(num_rows, num_cols, per_token)) return OP_BAD_ARGUMENT;
  const int64_t row_bytes = num_cols * item_bytes(dtype);
  if (row_bytes == 0) return 0;
  num_rows = used_rows(num_rows, used);
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(at(out, row * row_bytes), at(x, rows[row] / per_token * row_bytes), row_bytes);
  });
  return 0;
}

int op_combine_rows(int dtype, const void* y, const int64_t* rows, const int32_t* used, int64_t* places, void* out,
                    int64_t num_rows, int64_t num_tokens, int64_t num_cols, int64_t per_token, int num_threads) {
  if (!is_dtype(dtype) || !rows_are_valid(num_tokens, num_cols, per_token) || num_rows < 0) return OP_BAD_ARGUMENT;
  num_rows = used_rows(num_rows, used);
  std::fill(places, places + num_tokens * per_token, -1);
  for (int64_t place = 0; place < num_rows; ++place) places[rows[place]] = place;
  const Kernels& use = kernels();
  parallel(num_tokens, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.combine_rows(dtype, y, places, out, begin, end, num_cols, per_token);
  });
  return 0;
}

int op_weighted_swiglu_forward(int dtype, const void* x, const void* weights, const int32_t* used, void* y,
                               int64_t num_rows, int64_t num_cols, int num_threads) {
  if (!is_dtype(dtype) || !rows_are_valid(num_rows, num_cols, 1)) return OP_BAD_ARGUMENT;
  num_rows = used_rows(num_rows, used);
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), weight_bytes = number_bytes(dtype);
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.weighted_swiglu_forward(dtype, at(x, 2 * begin * row_bytes), at(weights, begin * weight_bytes),
                                at(y, begin * row_bytes), end - begin, num_cols);
  });
  return 0;
}

int op_weighted_swiglu_backward(int dtype, const void* dy, const void* x, const void* weights, const int32_t* used,
                                void* dx, void* dweights, void* y, int64_t num_rows, int64_t num_cols,
                                int num_threads) {
  if (!is_dtype(dtype) || !rows_are_valid(num_rows, num_cols, 1)) return OP_BAD_ARGUMENT;
  num_rows = used_rows(num_rows, used);
  const Kernels& use = kernels();
  const int64_t row_bytes = num_cols * item_bytes(dtype), weight_bytes = number_bytes(dtype);
  parallel(num_rows, num_rows * num_cols, kGrain, num_threads, [=, &use](int64_t begin, int64_t end) {
    use.weighted_swiglu_backward(dtype, at(dy, begin * row_bytes), at(x, 2 * begin * row_bytes),
                                 at(weights, begin * weight_bytes), at(dx, 2 * begin * row_bytes),
                                 at(dweights, begin * weight_bytes), at(y, begin * row_bytes), end - begin, num_cols);
  });
  return 0;
}
