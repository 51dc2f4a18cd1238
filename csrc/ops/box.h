// A box of a tensor: its elements in row-major order, and the flat index that each has in the whole tensor.
#pragma once

#include <stdint.h>

#include "ops.h"

#ifdef __CUDACC__
#define BOX_INLINE __host__ __device__ __forceinline__
#else
#define BOX_INLINE inline
#endif

constexpr int kMaxDims = 8;

// Runs of elements whose indices in the whole tensor are neighbours too, and the dims that count the runs.
struct Box {
  int64_t num_elements, run, first_index;
  int num_outer;
  int64_t shape[kMaxDims], strides[kMaxDims];  // of the outer dims; strides in the whole tensor

  // The index in the whole tensor of an element of the box.
  BOX_INLINE int64_t index_of(int64_t element) const {
    int64_t row = element / run, index = first_index + element % run;
    for (int dim = num_outer - 1; dim >= 0; --dim) {
      index += row % shape[dim] * strides[dim];
      row /= shape[dim];
    }
    return index;
  }
};

// Returns whether the box lies in the whole tensor, and has no more dims than there is room for.
inline bool make_box(int num_dims, const int64_t* shape, const int64_t* whole, const int64_t* offset, Box* box) {
  if (num_dims < 0 || num_dims > kMaxDims) return false;
  *box = Box{1, 1, 0, num_dims, {}, {}};
  int64_t stride = 1;
  bool is_run = true;  // the dims so far lie in the box whole, so that they and the next one are one run
  for (int dim = num_dims - 1; dim >= 0; --dim) {
    if (shape[dim] < 0 || offset[dim] < 0 || offset[dim] + shape[dim] > whole[dim]) return false;
    if (is_run) box->run *= shape[dim], box->num_outer = dim;
    is_run = is_run && shape[dim] == whole[dim];
    box->shape[dim] = shape[dim], box->strides[dim] = stride;
    box->first_index += offset[dim] * stride;
    box->num_elements *= shape[dim];
    stride *= whole[dim];
  }
  return true;
}
