// Philox, and boxes of normals: a box is walked as runs of elements with consecutive global indices.
#include "philox.h"

#include <algorithm>

#include "box.h"
#include "kernels.h"
#include "parallel.h"

void op_philox(const uint32_t* counter, const uint32_t* key, uint32_t* random) {
  const Words words = philox(Words{counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  random[0] = words.v0, random[1] = words.v1, random[2] = words.v2, random[3] = words.v3;
}

int op_normal(int dtype, void* out, uint64_t key, int num_dims, const int64_t* box_shape, const int64_t* global_shape,
              const int64_t* box_offset, double std, int num_threads) {
  Box box;
  if (!is_dtype(dtype) || !make_box(num_dims, box_shape, global_shape, box_offset, &box)) return OP_BAD_ARGUMENT;
  if (box.num_elements == 0) return 0;
  const Kernels& use = kernels();
  constexpr int64_t kGrain = 1 << 13;  // elements
  parallel(box.num_elements, box.num_elements, kGrain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t element = begin; element < end;) {
      const int64_t count = std::min(end - element, box.run - element % box.run);
      const auto index = static_cast<uint64_t>(box.index_of(element));
      use.normal_run(dtype, at(out, element * item_bytes(dtype)), key, index, count, std);
      element += count;
    }
  });
  return 0;
}
