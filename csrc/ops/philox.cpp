// Philox, and boxes of normals: a box is walked as runs of elements with consecutive global indices.
#include "philox.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

void op_philox(const uint32_t* counter, const uint32_t* key, uint32_t* random) {
  const Words words = philox(Words{counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  random[0] = words.v0, random[1] = words.v1, random[2] = words.v2, random[3] = words.v3;
}

int op_normal(int dtype, void* out, uint64_t key, int num_dims, const int64_t* box_shape, const int64_t* global_shape,
              const int64_t* box_offset, double std, int num_threads) {
  if (!is_dtype(dtype) || num_dims < 0) return OP_BAD_ARGUMENT;
  int64_t run = 1, stride = 1, first_index = 0, num_elements = 1;
  int outer_dims = num_dims;  // the dims from here on lie in the box whole, or are the first cut one: one run
  bool whole = true;
  for (int dim = num_dims - 1; dim >= 0; --dim) {
    if (box_shape[dim] < 0 || box_offset[dim] < 0 || box_offset[dim] + box_shape[dim] > global_shape[dim])
      return OP_BAD_ARGUMENT;
    if (whole) run *= box_shape[dim], outer_dims = dim;
    whole = whole && box_shape[dim] == global_shape[dim];
    first_index += box_offset[dim] * stride;
    num_elements *= box_shape[dim];
    stride *= global_shape[dim];
  }
  if (num_elements == 0) return 0;
  std::vector<int64_t> strides(outer_dims);  // of the global tensor
  stride = 1;
  for (int dim = num_dims - 1; dim >= 0; --dim) {
    if (dim < outer_dims) strides[dim] = stride;
    stride *= global_shape[dim];
  }
  const Kernels& use = kernels();
  constexpr int64_t kGrain = 1 << 13;  // elements
  parallel(num_elements, num_elements, kGrain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t element = begin; element < end;) {
      int64_t row = element / run, index = first_index + element % run;
      for (int dim = outer_dims - 1; dim >= 0; --dim) {
        index += row % box_shape[dim] * strides[dim];
        row /= box_shape[dim];
      }
      const int64_t count = std::min(end - element, run - element % run);
      use.normal_run(dtype, at(out, element * item_bytes(dtype)), key, static_cast<uint64_t>(index), count, std);
      element += count;
    }
  });
  return 0;
}
