// AdamW and squared norms on the CPU: the chunks of all intervals are cut over threads.
#include "adamw.h"

#include <cmath>

#include "kernels.h"
#include "parallel.h"

namespace {

bool is_wide(int dtype) { return dtype == OP_F64 || dtype == OP_F32; }

// body(chunk number) for every chunk.
template <class Body>
void for_chunks(const op_chunk* chunks, int64_t num_chunks, int64_t grain, int num_threads, Body body) {
  int64_t num_elements = 0;
  for (int64_t i = 0; i < num_chunks; ++i) num_elements += chunks[i].end - chunks[i].begin;
  parallel(num_chunks, num_elements, grain, num_threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

}  // namespace

AdamwNumbers adamw_numbers(const op_adamw_step& step) {
  const auto count = static_cast<double>(step.step + 1);
  const double correction1 = 1 - std::pow(step.beta1, count), correction2 = 1 - std::pow(step.beta2, count);
  return {
      .gradient_share = 1 - step.beta1,
      .beta2 = step.beta2,
      .square_share = 1 - step.beta2,
      .decay = 1 - step.lr * step.weight_decay,
      .step_size = step.lr / correction1,
      .inverse_root = 1 / std::sqrt(correction2),
      .eps = step.eps,
      .has_bf16_moments = step.moments == OP_BF16,
      .is_split = step.is_split != 0,
      .publishes_half = step.published == OP_F16,
  };
}

int op_adamw(int dtype, const op_interval* intervals, const op_chunk* chunks, int64_t num_chunks,
             const op_adamw_step* step, const double* factor, const float* is_bad, int num_threads) {
  if (!fits(dtype, *step) || num_chunks < 0) return OP_BAD_ARGUMENT;
  if (*is_bad > 0) return 0;
  const Kernels& use = kernels();
  const AdamwNumbers numbers = adamw_numbers(*step);
  for_chunks(chunks, num_chunks, 1 << 15, num_threads, [=, &use](int64_t i) {
    use.adamw(dtype, intervals[chunks[i].interval], chunks[i].begin, chunks[i].end, numbers, *factor);
  });
  return 0;
}

int op_squared_norms(int dtype, const op_interval* intervals, int64_t num_intervals, const op_chunk* chunks,
                     int64_t num_chunks, double* partials, double* out, int num_threads) {
  if (!is_wide(dtype) || num_intervals < 0 || num_chunks < 0) return OP_BAD_ARGUMENT;
  const Kernels& use = kernels();
  for_chunks(chunks, num_chunks, 1 << 18, num_threads, [=, &use](int64_t i) {
    const op_chunk& chunk = chunks[i];
    const void* const first = at(intervals[chunk.interval].gradient, chunk.begin * item_bytes(dtype));
    partials[i] = use.sum_of_squares(dtype, first, chunk.end - chunk.begin);
  });
  for (int64_t i = 0; i < num_intervals; ++i) {
    double sum = 0;
    for (int64_t chunk = intervals[i].first_chunk; chunk < intervals[i].end_chunk; ++chunk) sum += partials[chunk];
    out[intervals[i].row] = sum;
  }
  return 0;
}
