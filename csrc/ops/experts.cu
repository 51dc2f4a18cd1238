// Rows of experts on CUDA. A block walks down rows or tokens, its threads along the columns, a pack of 16 bytes each;
// rows that are not whole, aligned packs take one element at a time. Nothing depends on the order in which blocks run.
#include "activation.cuh"
#include "device.cuh"
#include "experts.h"

namespace {

constexpr int kMaxThreads = 256, kWarp = 32;
constexpr int kRowsABlock = 1024, kScanThreads = 1024;  // of the sort

int64_t num_sort_blocks(int64_t num_rows) { return num_rows > 0 ? (num_rows + kRowsABlock - 1) / kRowsABlock : 1; }

// The experts of a block's rows, in shared memory; returns how many rows there are.
__device__ int load_experts(const int64_t* experts, int64_t num_rows, int64_t first, int64_t (&numbers)[kRowsABlock]) {
  const int64_t left = num_rows - first;
  const int count = left < kRowsABlock ? static_cast<int>(left) : kRowsABlock;
  for (int i = threadIdx.x; i < count; i += blockDim.x) numbers[i] = experts[first + i];
  __syncthreads();
  return count;
}

// partials[expert][block] = how many of the block's rows are of the expert. A thread counts for one expert.
__global__ void __launch_bounds__(kMaxThreads)
    count_rows(const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t* partials) {
  __shared__ int64_t numbers[kRowsABlock];
  const int count = load_experts(experts, num_rows, blockIdx.x * int64_t{kRowsABlock}, numbers);
  for (int64_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += numbers[i] == expert;
    partials[expert * gridDim.x + blockIdx.x] = sum;
  }
}

// Each number of partials becomes the sum of those before it: where the first row of the expert and block goes. One
// block, of whose threads each has neighbouring numbers.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts(int64_t* partials, int64_t num_experts, int64_t num_blocks, int64_t* counts) {
  __shared__ int64_t sums[kScanThreads];
  const int64_t total = num_experts * num_blocks, size = (total + kScanThreads - 1) / kScanThreads;
  const int thread = threadIdx.x;
  const int64_t begin = thread * size < total ? thread * size : total, end = begin + size < total ? begin + size : total;
  int64_t own = 0;
  for (int64_t i = begin; i < end; ++i) own += partials[i];
  sums[thread] = own;
  __syncthreads();
  for (int width = 1; width < kScanThreads; width *= 2) {
    const int64_t before = thread >= width ? sums[thread - width] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  int64_t place = sums[thread] - own;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t value = partials[i];
    partials[i] = place;
    place += value;
  }
  __syncthreads();
  for (int64_t expert = thread; expert < num_experts; expert += kScanThreads) {
    const int64_t next = expert + 1 < num_experts ? partials[(expert + 1) * num_blocks] : sums[kScanThreads - 1];
    counts[expert] = next - partials[expert * num_blocks];
  }
}

// A thread writes the rows of one expert in their order.
__global__ void __launch_bounds__(kMaxThreads)
    place_rows(const int64_t* experts, int64_t num_rows, int64_t num_experts, const int64_t* partials, int64_t* rows) {
  __shared__ int64_t numbers[kRowsABlock];
  const int64_t first = blockIdx.x * int64_t{kRowsABlock};
  const int count = load_experts(experts, num_rows, first, numbers);
  for (int64_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    int64_t place = partials[expert * gridDim.x + blockIdx.x];
    for (int i = 0; i < count; ++i)
      if (numbers[i] == expert) rows[place++] = first + i;
  }
}

// `num_units`: of 16 bytes, or of one element, a row.
template <class Unit>
__global__ void __launch_bounds__(kMaxThreads)
    gather_rows(const Unit* __restrict__ x, const int64_t* __restrict__ rows, const int32_t* used,
                Unit* __restrict__ out, int64_t num_rows, int64_t num_units, int64_t per_token) {
  num_rows = used_rows(num_rows, used);
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const Unit* const from = x + rows[row] / per_token * num_units;
    for (int64_t i = threadIdx.x; i < num_units; i += blockDim.x) out[row * num_units + i] = from[i];
  }
}

__global__ void __launch_bounds__(kMaxThreads)
    invert_rows(const int64_t* __restrict__ rows, const int32_t* used, int64_t* __restrict__ places,
                int64_t num_rows) {
  num_rows = used_rows(num_rows, used);
  for (int64_t place = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; place < num_rows;
       place += int64_t{gridDim.x} * blockDim.x)
    places[rows[place]] = place;
}

template <class T, int kSize>
__global__ void __launch_bounds__(kMaxThreads)
    combine_rows(const T* __restrict__ y, const int64_t* __restrict__ places, T* __restrict__ out, int64_t num_tokens,
                 int64_t num_packs, int64_t per_token) {
  using Values = Pack<T, kSize>;
  for (int64_t token = blockIdx.x; token < num_tokens; token += gridDim.x)
    for (int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x) {
      NumberOf<T> sums[kSize] = {};
      for (int64_t k = 0; k < per_token; ++k) {
        const int64_t place = places[token * per_token + k];
        if (place < 0) continue;
        const Values values = reinterpret_cast<const Values*>(y)[place * num_packs + pack];
#pragma unroll
        for (int e = 0; e < kSize; ++e) sums[e] += values.get(e);
      }
      Values sum;
      sum.set(sums);
      reinterpret_cast<Values*>(out)[token * num_packs + pack] = sum;
    }
}

template <class T, int kSize>
__global__ void __launch_bounds__(kMaxThreads)
    weighted_swiglu_forward(const T* __restrict__ x, const NumberOf<T>* __restrict__ weights, const int32_t* used,
                            T* __restrict__ y, int64_t num_rows, int64_t num_packs) {
  using Number = NumberOf<T>;
  using Values = Pack<T, kSize>;
  num_rows = used_rows(num_rows, used);
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const Number weight = weights[row];
    const Values* const from = reinterpret_cast<const Values*>(x) + row * 2 * num_packs;
    for (int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x) {
      const Values gate = from[pack], up = from[num_packs + pack];
      Number products[kSize];
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const Number value = gate.get(e);
        products[e] = Swiglu<Number>::product(value, up.get(e), sigmoid(value)) * weight;
      }
      Values product;
      product.set(products);
      reinterpret_cast<Values*>(y)[row * num_packs + pack] = product;
    }
  }
}

// The sum over the threads of a block, in a fixed order; for thread 0. All threads call it.
template <class Number>
__device__ Number block_sum(Number value) {
  __shared__ Number sums[kMaxThreads / kWarp];
  for (int width = kWarp / 2; width > 0; width /= 2) value += __shfl_down_sync(0xffffffffu, value, width);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  Number total = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) total += sums[warp];
  __syncthreads();  // before the next row writes
  return total;
}

// Each element is read before it is written, by the same thread: dx may be x, and y dy.
template <class T, int kSize>
__global__ void __launch_bounds__(kMaxThreads)
    weighted_swiglu_backward(const T* dy, const T* x, const NumberOf<T>* __restrict__ weights, const int32_t* used,
                             T* dx, NumberOf<T>* __restrict__ dweights, T* y, int64_t num_rows, int64_t num_packs) {
  using Number = NumberOf<T>;
  using Values = Pack<T, kSize>;
  num_rows = used_rows(num_rows, used);
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const Number weight = weights[row];
    const int64_t first = row * 2 * num_packs;
    Number dweight = 0;
    for (int64_t pack = threadIdx.x; pack < num_packs; pack += blockDim.x) {
      Values product = reinterpret_cast<const Values*>(dy)[row * num_packs + pack];
      Values gate = reinterpret_cast<const Values*>(x)[first + pack];
      Values up = reinterpret_cast<const Values*>(x)[first + num_packs + pack];
      Number products[kSize], gradients[kSize], up_gradients[kSize];
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const Number gradient = product.get(e);
        products[e] = gradient * weight, gradients[e] = gate.get(e), up_gradients[e] = up.get(e);
        const Number s = sigmoid(gradients[e]);
        Swiglu<Number>::gradient(products[e], gradients[e], up_gradients[e], s);
        dweight += gradient * products[e];
        products[e] *= weight;
      }
      product.set(products), gate.set(gradients), up.set(up_gradients);
      reinterpret_cast<Values*>(y)[row * num_packs + pack] = product;
      reinterpret_cast<Values*>(dx)[first + pack] = gate;
      reinterpret_cast<Values*>(dx)[first + num_packs + pack] = up;
    }
    const Number total = block_sum(dweight);
    if (threadIdx.x == 0) dweights[row] = total;
  }
}

unsigned num_threads_for(int64_t num_items) {  // whole warps
  unsigned threads = kWarp;
  while (threads < kMaxThreads && threads < num_items) threads *= 2;
  return threads;
}

unsigned num_blocks_for(int64_t num_rows) { return static_cast<unsigned>(num_rows < 1 << 20 ? num_rows : 1 << 20); }

template <class Unit>
int gather(const void* x, const int64_t* rows, const int32_t* used, void* out, int64_t num_rows, int64_t num_units,
           int64_t per_token, void* stream) {
  gather_rows<<<num_blocks_for(num_rows), num_threads_for(num_units), 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const Unit*>(x), rows, used, static_cast<Unit*>(out), num_rows, num_units, per_token);
  return launch_status();
}

}  // namespace

int op_sort_rows_cuda(int dtype, const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t* rows,
                      int64_t* counts, int64_t* partials, void* stream) {
  const int64_t num_blocks = num_sort_blocks(num_rows);
  if (!sorted_rows_are_valid(dtype, num_rows, num_experts) || num_blocks > INT32_MAX) return OP_BAD_ARGUMENT;
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = static_cast<unsigned>(num_blocks), threads = num_threads_for(num_experts);
  count_rows<<<blocks, threads, 0, on>>>(experts, num_rows, num_experts, partials);
  scan_counts<<<1, kScanThreads, 0, on>>>(partials, num_experts, num_blocks, counts);
  place_rows<<<blocks, threads, 0, on>>>(experts, num_rows, num_experts, partials, rows);
  return launch_status();
}

int64_t op_sort_rows_partials_cuda(int64_t num_rows) { return num_sort_blocks(num_rows); }

int op_gather_rows_cuda(int dtype, const void* x, const int64_t* rows, const int32_t* used, void* out,
                        int64_t num_rows, int64_t num_cols, int64_t per_token, void* stream) {
  if (!rows_are_valid(num_rows, num_cols, per_token)) return OP_BAD_ARGUMENT;
  if (num_rows == 0 || num_cols == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if (are_aligned(x, out) && num_cols % kPackSize<T> == 0)
      return gather<uint4>(x, rows, used, out, num_rows, num_cols / kPackSize<T>, per_token, stream);
    return gather<T>(x, rows, used, out, num_rows, num_cols, per_token, stream);
  });
}

int op_combine_rows_cuda(int dtype, const void* y, const int64_t* rows, const int32_t* used, int64_t* places,
                         void* out, int64_t num_rows, int64_t num_tokens, int64_t num_cols, int64_t per_token,
                         void* stream) {
  if (!rows_are_valid(num_tokens, num_cols, per_token) || num_rows < 0) return OP_BAD_ARGUMENT;
  if (num_tokens == 0 || num_cols == 0) return 0;
  const auto on = static_cast<cudaStream_t>(stream);
  if (const auto status = cudaMemsetAsync(places, -1, num_tokens * per_token * sizeof(int64_t), on)) return status;
  if (num_rows > 0)
    invert_rows<<<num_blocks_for((num_rows + kMaxThreads - 1) / kMaxThreads), kMaxThreads, 0, on>>>(rows, used, places,
                                                                                                    num_rows);
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool in_packs = are_aligned(y, out) && num_cols % kPackSize<T> == 0;
    const int64_t num_packs = in_packs ? num_cols / kPackSize<T> : num_cols;
    const auto run = in_packs ? combine_rows<T, kPackSize<T>> : combine_rows<T, 1>;
    run<<<num_blocks_for(num_tokens), num_threads_for(num_packs), 0, on>>>(
        static_cast<const T*>(y), places, static_cast<T*>(out), num_tokens, num_packs, per_token);
    return launch_status();
  });
}

int op_weighted_swiglu_forward_cuda(int dtype, const void* x, const void* weights, const int32_t* used, void* y,
                                    int64_t num_rows, int64_t num_cols, void* stream) {
  if (!rows_are_valid(num_rows, num_cols, 1)) return OP_BAD_ARGUMENT;
  if (num_rows == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool in_packs = are_aligned(x, y) && num_cols % kPackSize<T> == 0;
    const int64_t num_packs = in_packs ? num_cols / kPackSize<T> : num_cols;
    const auto run = in_packs ? weighted_swiglu_forward<T, kPackSize<T>> : weighted_swiglu_forward<T, 1>;
    run<<<num_blocks_for(num_rows), num_threads_for(num_packs), 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), static_cast<const NumberOf<T>*>(weights), used, static_cast<T*>(y), num_rows,
        num_packs);
    return launch_status();
  });
}

int op_weighted_swiglu_backward_cuda(int dtype, const void* dy, const void* x, const void* weights,
                                     const int32_t* used, void* dx, void* dweights, void* y, int64_t num_rows,
                                     int64_t num_cols, void* stream) {
  if (!rows_are_valid(num_rows, num_cols, 1)) return OP_BAD_ARGUMENT;
  if (num_rows == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool in_packs = are_aligned(dy, x, dx, y) && num_cols % kPackSize<T> == 0;
    const int64_t num_packs = in_packs ? num_cols / kPackSize<T> : num_cols;
    const auto run = in_packs ? weighted_swiglu_backward<T, kPackSize<T>> : weighted_swiglu_backward<T, 1>;
    run<<<num_blocks_for(num_rows), num_threads_for(num_packs), 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const NumberOf<T>*>(weights), used,
        static_cast<T*>(dx), static_cast<NumberOf<T>*>(dweights), static_cast<T*>(y), num_rows, num_packs);
    return launch_status();
  });
}
