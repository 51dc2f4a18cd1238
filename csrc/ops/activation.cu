// SwiGLU and GELU on CUDA; the formulas are in activation_formulas.inc.
//
// A thread reads a pack of 16 bytes of each operand, and keeps its place in the row while it walks down the rows. Both
// kernels are bound by memory alone, so the exponential and the quotient of float are the fast ones, of a few units in
// the last place. Rows that are not whole, aligned packs take one element at a time.
#include "activation.cuh"
#include "activation.h"
#include "device.cuh"

namespace {

constexpr int kThreads = 256;

// num_packs: of a row of y.
template <class T, int kSize, class Activation>
__global__ void __launch_bounds__(kThreads)
    activation_forward(const T* __restrict__ x, T* __restrict__ y, int64_t num_rows, int64_t num_packs) {
  using Number = NumberOf<T>;
  using Values = Pack<T, kSize>;
  constexpr int64_t kParts = Activation::kParts;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pack >= num_packs) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < num_rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const Values* const from = reinterpret_cast<const Values*>(x) + row * kParts * num_packs + pack;
    Values values = from[0];
    const Values up = from[(kParts - 1) * num_packs];
    Number out[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const Number value = values.get(e);
      out[e] = Activation::product(value, up.get(e), sigmoid(Activation::exponent(value)));
    }
    values.set(out);
    reinterpret_cast<Values*>(y)[row * num_packs + pack] = values;
  }
}

// Each element is read before it is written, so dx may be x, and y dy.
template <class T, int kSize, class Activation>
__global__ void __launch_bounds__(kThreads)
    activation_backward(const T* dy, const T* x, T* dx, T* y, int64_t num_rows, int64_t num_packs) {
  using Number = NumberOf<T>;
  using Values = Pack<T, kSize>;
  constexpr int64_t kParts = Activation::kParts;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pack >= num_packs) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < num_rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t place = row * kParts * num_packs + pack, up_place = place + (kParts - 1) * num_packs;
    Values product = reinterpret_cast<const Values*>(dy)[row * num_packs + pack];
    Values values = reinterpret_cast<const Values*>(x)[place], up = reinterpret_cast<const Values*>(x)[up_place];
    Number products[kSize], gradients[kSize], up_gradients[kSize];
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      products[e] = product.get(e), gradients[e] = values.get(e), up_gradients[e] = up.get(e);
      const Number s = sigmoid(Activation::exponent(gradients[e]));
      Activation::gradient(products[e], gradients[e], up_gradients[e], s);
    }
    product.set(products), values.set(gradients), up.set(up_gradients);
    if (y) reinterpret_cast<Values*>(y)[row * num_packs + pack] = product;
    if (kParts == 2) reinterpret_cast<Values*>(dx)[up_place] = up;
    reinterpret_cast<Values*>(dx)[place] = values;
  }
}

// The threads of a block along a row: of four widths the one that leaves the fewest idle.
dim3 block_of(int64_t num_packs) {
  int64_t best = kThreads;
  for (int64_t width = kThreads / 2; width >= 32; width /= 2)
    if ((num_packs + width - 1) / width * width < (num_packs + best - 1) / best * best) best = width;
  return dim3(static_cast<unsigned>(best), static_cast<unsigned>(kThreads / best));
}

// Calls run(whether in packs or by elements, grid, block, rows, packs of a row).
template <class T, class Run>
int launch(int activation, bool aligned, int64_t num_rows, int64_t num_cols, Run run) {
  if (num_rows == 0 || num_cols == 0) return 0;
  if (activation == OP_GELU) num_cols *= num_rows, num_rows = 1;  // rows do not matter to it
  const bool in_packs = aligned && num_cols % kPackSize<T> == 0;
  const int64_t num_packs = in_packs ? num_cols / kPackSize<T> : num_cols;
  const dim3 block = block_of(num_packs);
  const int64_t tiles = (num_packs + block.x - 1) / block.x, groups = (num_rows + block.y - 1) / block.y;
  if (tiles > INT32_MAX) return OP_BAD_ARGUMENT;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(groups < 65535 ? groups : 65535));
  run(in_packs, grid, block, num_rows, num_packs);
  return launch_status();
}

template <class T, int kSize>
constexpr auto forward_of(int activation) {
  return activation == OP_SWIGLU ? activation_forward<T, kSize, Swiglu<NumberOf<T>>>
                                 : activation_forward<T, kSize, Gelu<NumberOf<T>>>;
}

template <class T, int kSize>
constexpr auto backward_of(int activation) {
  return activation == OP_SWIGLU ? activation_backward<T, kSize, Swiglu<NumberOf<T>>>
                                 : activation_backward<T, kSize, Gelu<NumberOf<T>>>;
}

}  // namespace

int op_activation_forward_cuda(int dtype, int activation, const void* x, void* y, int64_t num_rows, int64_t num_cols,
                               void* stream) {
  if (!activation_is_valid(activation, num_rows, num_cols)) return OP_BAD_ARGUMENT;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return launch<T>(activation, are_aligned(x, y), num_rows, num_cols,
                     [&](bool in_packs, dim3 grid, dim3 block, int64_t rows, int64_t packs) {
                       const auto run =
                           in_packs ? forward_of<T, kPackSize<T>>(activation) : forward_of<T, 1>(activation);
                       run<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(
                           static_cast<const T*>(x), static_cast<T*>(y), rows, packs);
                     });
  });
}

int op_activation_backward_cuda(int dtype, int activation, const void* dy, const void* x, void* dx, void* y,
                                int64_t num_rows, int64_t num_cols, void* stream) {
  if (!activation_is_valid(activation, num_rows, num_cols)) return OP_BAD_ARGUMENT;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return launch<T>(activation, are_aligned(dy, x, dx, y), num_rows, num_cols,
                     [&](bool in_packs, dim3 grid, dim3 block, int64_t rows, int64_t packs) {
                       const auto run =
                           in_packs ? backward_of<T, kPackSize<T>>(activation) : backward_of<T, 1>(activation);
                       run<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(
                           static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<T*>(dx),
                           static_cast<T*>(y), rows, packs);
                     });
  });
}
