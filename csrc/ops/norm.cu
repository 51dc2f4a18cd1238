// RMSNorm and LayerNorm on CUDA: a kernel by the row's length, kernels for rows of any length, the sum of the weights'
// gradients.
#include <type_traits>

#include "norm.cuh"

namespace {

constexpr int kMaxBlocks = 6;  // the largest Shape::kBlocks

// Rows of any length, one block a row, element by element.
constexpr int kLongThreads = 512;

template <class T, bool kCenters>
__global__ void __launch_bounds__(kLongThreads)
    forward_long(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* y, NumberOf<T>* numbers,
                 int64_t num_rows, int64_t num_cols, NumberOf<T> eps) {
  using Number = NumberOf<T>;
  int phase = 0;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const int64_t start = row * num_cols;
    const T* const values = residual == nullptr ? x : sum;
    Number mean = 0, squares = 0;
    if (residual != nullptr)
      for (int64_t i = start + threadIdx.x; i < start + num_cols; i += kLongThreads)
        round_to(sum[i], to_number(x[i]) + to_number(residual[i]));
    if constexpr (kCenters) {
      for (int64_t i = start + threadIdx.x; i < start + num_cols; i += kLongThreads) mean += to_number(values[i]);
      mean = sum_over_row<kLongThreads>(mean, phase) / num_cols;
    }
    for (int64_t i = start + threadIdx.x; i < start + num_cols; i += kLongThreads)
      squares += (to_number(values[i]) - mean) * (to_number(values[i]) - mean);
    const Number k = rsqrt(sum_over_row<kLongThreads>(squares, phase) / num_cols + eps);
    if (threadIdx.x == 0) {
      if constexpr (kCenters) numbers[2 * row] = mean;
      numbers[kCenters ? 2 * row + 1 : row] = k;
    }
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads) {
      Number out = (to_number(values[start + i]) - mean) * k * to_number(weight[i]);
      if constexpr (kCenters) out += to_number(bias[i]);
      round_to(y[start + i], out);
    }
  }
}

template <class T, bool kCenters>
__global__ void __launch_bounds__(kLongThreads)
    backward_long(const T* __restrict__ dy, const T* __restrict__ dsum, const T* __restrict__ x,
                  const T* __restrict__ weight, const NumberOf<T>* __restrict__ numbers, T* __restrict__ dx,
                  NumberOf<T>* __restrict__ partials, int64_t num_rows, int64_t num_cols) {
  using Number = NumberOf<T>;
  constexpr int kNumbers = kCenters ? 2 : 1;
  Number* const partial = partials + blockIdx.x * kNumbers * num_cols;  // a column is always the same thread's
  for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads)
    for (int n = 0; n < kNumbers; ++n) partial[n * num_cols + i] = 0;
  int phase = 0;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const int64_t start = row * num_cols;
    const Number mean = kCenters ? numbers[2 * row] : Number{0}, k = numbers[kNumbers * row + kNumbers - 1];
    Number dots[kNumbers] = {};
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads) {
      const Number g = to_number(dy[start + i]) * to_number(weight[i]);
      dots[0] += g * (to_number(x[start + i]) - mean);
      if constexpr (kCenters) dots[1] += g;
    }
    sum_over_row<kLongThreads>(dots, phase);
    const Number c = dots[0] * k * k / num_cols;
    Number shift = 0;
    if constexpr (kCenters) shift = dots[1] / num_cols;
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads) {
      const Number centered = to_number(x[start + i]) - mean, g = to_number(dy[start + i]);
      const Number other = dsum == nullptr ? Number{0} : to_number(dsum[start + i]);
      round_to(dx[start + i], k * (g * to_number(weight[i]) - shift - c * centered) + other);
      partial[i] += g * centered * k;
      if constexpr (kCenters) partial[num_cols + i] += g;
    }
  }
}

// The weights' gradients from the partial sums of the blocks: 32 columns a block, 32 sums a column, in a fixed order.
template <class Number>
__global__ void __launch_bounds__(1024)
    add_partials(const Number* __restrict__ partials, Number* __restrict__ total, int num_partials, int64_t num_cols) {
  __shared__ Number sums[32][33];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  Number sum = 0;
  if (col < num_cols)
#pragma unroll 8
    for (int block = threadIdx.y; block < num_partials; block += 32) sum += partials[block * num_cols + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= num_cols) return;
  for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
  total[col] = sum;
}

// Calls body with the smallest shape that holds a row, or with nullptr if none does. LayerNorm has two sums a column to
// keep, so its rows take twice the threads.
template <class T, bool kCenters, class Body>
int with_shape(int64_t num_cols, bool aligned, Body body) {
  constexpr int kSize = kPackSize<T>;
  const auto fits = [&](auto shape) { return num_cols <= decltype(shape)::kMaxCols; };
  if (!aligned || num_cols % kSize != 0) {
    if (Shape<T, kCenters, 1, 32, 4> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, 1, 256, 4> shape; fits(shape)) return body(shape);
    return body(nullptr);
  }
  if (Shape<T, kCenters, kSize, 32, 1> shape; fits(shape)) return body(shape);
  if constexpr (kCenters) {
    if (Shape<T, kCenters, kSize, 128, 1> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 256, 1> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 256, 2> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 512, 2> shape; fits(shape)) return body(shape);
  } else {
    if (Shape<T, kCenters, kSize, 32, 4> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 256, 1> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 256, 2> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 256, 4> shape; fits(shape)) return body(shape);
    if (Shape<T, kCenters, kSize, 512, 4> shape; fits(shape)) return body(shape);
  }
  return body(nullptr);
}

// Calls body with the dtype's type and true_type for LayerNorm, false_type for RMSNorm.
template <class Body>
int with_norm(int dtype, int norm, Body body) {
  return with_dtype(dtype, [&](auto element) {
    switch (norm) {
      case OP_RMSNORM: return body(element, std::false_type{});
      case OP_LAYERNORM: return body(element, std::true_type{});
      default: return static_cast<int>(OP_BAD_ARGUMENT);
    }
  });
}

// Asks for shared memory beyond what every kernel has; false if the device has less.
template <class Kernel>
bool may_use_shared_memory(Kernel* kernel, int num_bytes) {
  if (num_bytes <= 48 << 10) return true;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes) == cudaSuccess) return true;
  cudaGetLastError();  // which this was
  return false;
}

template <class S>
constexpr bool kIsLong = false;
template <>
constexpr bool kIsLong<decltype(nullptr)> = true;

}  // namespace

int op_add_norm_forward_cuda(int dtype, int norm, const void* x, const void* residual, const void* weight,
                             const void* bias, void* sum, void* y, void* numbers, int64_t num_rows, int64_t num_cols,
                             double eps, void* stream) {
  if (num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  if (num_rows == 0) return 0;
  return with_norm(dtype, norm, [&](auto element, auto centers) {
    using T = decltype(element);
    constexpr bool kCenters = decltype(centers)::value;
    const auto launch = [&](auto shape) {
      using S = decltype(shape);
      const auto queue = static_cast<cudaStream_t>(stream);
      const auto from = static_cast<const T*>(x), other = static_cast<const T*>(residual);
      const auto scale = static_cast<const T*>(weight), shift = static_cast<const T*>(bias);
      const auto added = static_cast<T*>(sum), to = static_cast<T*>(y);
      const auto small = static_cast<NumberOf<T>>(eps);
      constexpr int64_t kMaxGrid = 1 << 30;
      if constexpr (kIsLong<S>) {
        const auto grid = static_cast<unsigned>(num_rows < kMaxGrid ? num_rows : kMaxGrid);
        forward_long<T, kCenters><<<grid, kLongThreads, 0, queue>>>(
            from, other, scale, shift, added, to, static_cast<NumberOf<T>*>(numbers), num_rows, num_cols, small);
      } else {
        const int64_t blocks = (num_rows + S::kRows - 1) / S::kRows;
        const auto grid = static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
        forward<S><<<grid, S::block(), 0, queue>>>(from, other, scale, shift, added, to,
                                                   static_cast<typename S::Numbers*>(numbers), num_rows,
                                                   static_cast<int>(num_cols), small);
      }
      return launch_status();
    };
    return with_shape<T, kCenters>(num_cols, are_aligned(x, residual, weight, bias, sum, y), launch);
  });
}

int64_t op_add_norm_partials_cuda(int64_t num_rows) {
  const int64_t most = static_cast<int64_t>(kMaxBlocks) * num_multiprocessors();
  return num_rows < most ? num_rows : most;
}

int op_add_norm_backward_cuda(int dtype, int norm, const void* dy, const void* dsum, const void* sum,
                              const void* weight, const void* numbers, void* dx, void* dweights, void* partials,
                              int64_t num_rows, int64_t num_cols, void* stream) {
  if (num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  return with_norm(dtype, norm, [&](auto element, auto centers) {
    using T = decltype(element);
    using Number = NumberOf<T>;
    constexpr bool kCenters = decltype(centers)::value;
    const auto queue = static_cast<cudaStream_t>(stream);
    const auto sums = static_cast<Number*>(partials);
    int num_partials = 0;
    const auto launch = [&](auto shape) {
      using S = decltype(shape);
      const auto gradient = static_cast<const T*>(dy), other = static_cast<const T*>(dsum);
      const auto from = static_cast<const T*>(sum), scale = static_cast<const T*>(weight);
      const auto to = static_cast<T*>(dx);
      if constexpr (!kIsLong<S>) {
        if (may_use_shared_memory(backward<S>, S::kMemory)) {
          const int64_t blocks = (num_rows + S::kRows - 1) / S::kRows;
          const int64_t most = static_cast<int64_t>(S::kBlocks) * num_multiprocessors();
          num_partials = static_cast<int>(blocks < most ? blocks : most);
          backward<S><<<num_partials, S::block(), S::kMemory, queue>>>(
              gradient, other, from, scale, static_cast<const typename S::Numbers*>(numbers), to, sums, num_rows,
              static_cast<int>(num_cols));
          return launch_status();
        }
      }
      num_partials = static_cast<int>(op_add_norm_partials_cuda(num_rows));
      backward_long<T, kCenters><<<num_partials, kLongThreads, 0, queue>>>(
          gradient, other, from, scale, static_cast<const Number*>(numbers), to, sums, num_rows, num_cols);
      return launch_status();
    };
    if (num_rows > 0)
      if (const int status = with_shape<T, kCenters>(num_cols, are_aligned(dy, dsum, sum, weight, dx), launch);
          status != 0)
        return status;
    const int64_t width = num_cols * (kCenters ? 2 : 1);
    const auto grid = static_cast<unsigned>((width + 31) / 32);
    add_partials<Number><<<grid, dim3(32, 32), 0, queue>>>(sums, static_cast<Number*>(dweights), num_partials, width);
    return launch_status();
  });
}
