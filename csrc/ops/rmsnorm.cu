// RMSNorm on CUDA; the formulas stand in rmsnorm.inc.
//
// A row stays in registers between its sum and its result, so forward moves 2 and backward 3 tensors through memory and
// no more. A short row is a warp's, eight rows a block; a longer one a block's; a row that no shape holds is read
// twice. The backward's grid is as large as fits on the device at once; a block walks over rows, loads the next row
// before it waits for the sum of this one, and keeps its part of the weight gradient in registers. A shape depends on
// the columns alone, so the result of a row does not depend on the number of rows.
#include "device.cuh"

namespace {

// kRowThreads threads a row, each with kPacks packs of kSize elements.
template <class T, int kSize, int kRowThreads, int kPacks>
struct Shape {
  using Element = T;
  using Number = NumberOf<T>;
  using Row = Pack<T, kSize>;
  static constexpr int kElements = kSize, kThreads = kRowThreads, kNumPacks = kPacks;
  static constexpr int kRows = kRowThreads == 32 ? 8 : 1;  // a block
  // how many blocks of the backward fit on a multiprocessor
  static constexpr int kBlocks = kRowThreads > 256 ? 1 : kPacks > 2 ? 2 : kPacks > 1 ? 3 : 4;
  static constexpr int kMaxCols = kSize * kRowThreads * kPacks;
  static dim3 block() { return dim3(kRowThreads, kRows); }
};

constexpr int kMaxBlocks = 4;  // the largest Shape::kBlocks

template <class S>
__device__ __forceinline__ typename S::Row load_pack(const typename S::Element* row, int pack, int num_cols) {
  typename S::Row loaded{};
  if (pack * S::kElements < num_cols) loaded = reinterpret_cast<const typename S::Row*>(row)[pack];
  return loaded;
}

template <class S>
__device__ __forceinline__ void store_pack(typename S::Element* row, int pack, int num_cols,
                                           const typename S::Row& value) {
  if (pack * S::kElements < num_cols) reinterpret_cast<typename S::Row*>(row)[pack] = value;
}

// The sum over a row's threads, given to all of them. Calls that follow one another alternate `phase`: then one barrier
// is enough, for a warp can be at most one call ahead.
template <class Number, int kThreads>
__device__ __forceinline__ Number sum_over_row(Number value, int phase) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    __shared__ Number sums[2][kWarps];
    if (threadIdx.x % 32 == 0) sums[phase][threadIdx.x / 32] = value;
    __syncthreads();
    value = sums[phase][threadIdx.x % kWarps];
#pragma unroll
    for (int lane = kWarps / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  }
  return value;
}

template <class S>
__global__ void __launch_bounds__(S::kThreads* S::kRows)
    forward(const typename S::Element* __restrict__ x, const typename S::Element* __restrict__ weight,
            typename S::Element* __restrict__ y, typename S::Number* __restrict__ rstd, int64_t num_rows, int num_cols,
            typename S::Number eps) {
  using Number = typename S::Number;
  int phase = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.y; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * S::kRows, phase ^= 1) {
    typename S::Row values[S::kNumPacks];
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j)
      values[j] = load_pack<S>(x + row * num_cols, j * S::kThreads + threadIdx.x, num_cols);
    Number squares = 0;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j)
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) squares += values[j].get(e) * values[j].get(e);
    const Number k = rsqrt(sum_over_row<Number, S::kThreads>(squares, phase) / num_cols + eps);
    if (threadIdx.x == 0) rstd[row] = k;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const int pack = j * S::kThreads + threadIdx.x;
      const typename S::Row w = load_pack<S>(weight, pack, num_cols);
      Number out[S::kElements];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) out[e] = values[j].get(e) * k * w.get(e);
      values[j].set(out);
      store_pack<S>(y + row * num_cols, pack, num_cols, values[j]);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads* S::kRows, S::kBlocks)
    backward(const typename S::Element* __restrict__ dy, const typename S::Element* __restrict__ x,
             const typename S::Element* __restrict__ weight, const typename S::Number* __restrict__ rstd,
             typename S::Element* __restrict__ dx, typename S::Number* __restrict__ partials, int64_t num_rows,
             int num_cols) {
  using Number = typename S::Number;
  __shared__ typename S::Row weights[S::kMaxCols / S::kElements];  // in registers they would not fit
  for (int pack = threadIdx.y * S::kThreads + threadIdx.x; pack < S::kMaxCols / S::kElements;
       pack += S::kThreads * S::kRows)
    weights[pack] = load_pack<S>(weight, pack, num_cols);
  __syncthreads();
  typename S::Row next_x[S::kNumPacks], next_dy[S::kNumPacks];
  Number next_k = 0, sums[S::kNumPacks][S::kElements] = {};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * S::kRows;
  const auto load_next = [&](int64_t row) {
    next_k = rstd[row];
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      next_x[j] = load_pack<S>(x + row * num_cols, j * S::kThreads + threadIdx.x, num_cols);
      next_dy[j] = load_pack<S>(dy + row * num_cols, j * S::kThreads + threadIdx.x, num_cols);
    }
  };
  int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.y;
  if (row < num_rows) load_next(row);
  for (int phase = 0; row < num_rows; row += stride, phase ^= 1) {
    typename S::Row this_x[S::kNumPacks], this_dy[S::kNumPacks];
    const Number k = next_k;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) this_x[j] = next_x[j], this_dy[j] = next_dy[j];
    if (row + stride < num_rows) load_next(row + stride);
    Number dot = 0;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const typename S::Row w = weights[j * S::kThreads + threadIdx.x];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) dot += this_dy[j].get(e) * w.get(e) * this_x[j].get(e);
    }
    const Number c = sum_over_row<Number, S::kThreads>(dot, phase) * k * k / num_cols;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const int pack = j * S::kThreads + threadIdx.x;
      const typename S::Row w = weights[pack];
      Number out[S::kElements];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) {
        const Number value = this_x[j].get(e), g = this_dy[j].get(e);
        out[e] = k * (g * w.get(e) - c * value);
        sums[j][e] += g * value * k;
      }
      this_x[j].set(out);
      store_pack<S>(dx + row * num_cols, pack, num_cols, this_x[j]);
    }
  }
  // Rows of one block add their sums one after the other, so that the order is fixed.
  Number* const partial = partials + static_cast<int64_t>(blockIdx.x) * num_cols;
  for (int turn = 0; turn < S::kRows; ++turn) {
    if (threadIdx.y == turn) {
#pragma unroll
      for (int j = 0; j < S::kNumPacks; ++j)
#pragma unroll
        for (int e = 0; e < S::kElements; ++e) {
          const int col = (j * S::kThreads + threadIdx.x) * S::kElements + e;
          if (col < num_cols) partial[col] = (turn == 0 ? Number{0} : partial[col]) + sums[j][e];
        }
    }
    __syncthreads();
  }
}

// Rows of any length, one block a row, element by element.
constexpr int kLongThreads = 512;

template <class T>
__global__ void __launch_bounds__(kLongThreads)
    forward_long(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y,
                 NumberOf<T>* __restrict__ rstd, int64_t num_rows, int64_t num_cols, NumberOf<T> eps) {
  using Number = NumberOf<T>;
  int phase = 0;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x, phase ^= 1) {
    const int64_t start = row * num_cols;
    Number squares = 0;
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads)
      squares += to_number(x[start + i]) * to_number(x[start + i]);
    const Number k = rsqrt(sum_over_row<Number, kLongThreads>(squares, phase) / num_cols + eps);
    if (threadIdx.x == 0) rstd[row] = k;
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads)
      round_to(y[start + i], to_number(x[start + i]) * k * to_number(weight[i]));
  }
}

template <class T>
__global__ void __launch_bounds__(kLongThreads)
    backward_long(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ weight,
                  const NumberOf<T>* __restrict__ rstd, T* __restrict__ dx, NumberOf<T>* __restrict__ partials,
                  int64_t num_rows, int64_t num_cols) {
  using Number = NumberOf<T>;
  Number* const partial = partials + blockIdx.x * num_cols;  // a column is always the same thread's
  for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads) partial[i] = 0;
  int phase = 0;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x, phase ^= 1) {
    const int64_t start = row * num_cols;
    const Number k = rstd[row];
    Number dot = 0;
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads)
      dot += to_number(dy[start + i]) * to_number(weight[i]) * to_number(x[start + i]);
    const Number c = sum_over_row<Number, kLongThreads>(dot, phase) * k * k / num_cols;
    for (int64_t i = threadIdx.x; i < num_cols; i += kLongThreads) {
      const Number value = to_number(x[start + i]), g = to_number(dy[start + i]);
      round_to(dx[start + i], k * (g * to_number(weight[i]) - c * value));
      partial[i] += g * value * k;
    }
  }
}

// The weight gradient from the partial sums of the blocks: 32 columns a block, 32 sums a column, in a fixed order.
template <class Number>
__global__ void __launch_bounds__(1024)
    add_partials(const Number* __restrict__ partials, Number* __restrict__ total, int num_partials, int64_t num_cols) {
  __shared__ Number sums[32][33];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  Number sum = 0;
  if (col < num_cols)
    for (int block = threadIdx.y; block < num_partials; block += 32) sum += partials[block * num_cols + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= num_cols) return;
  for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
  total[col] = sum;
}

// Calls body with the smallest shape that holds a row, or with nullptr if none does.
template <class T, class Body>
int with_shape(int64_t num_cols, bool aligned, Body body) {
  constexpr int kSize = kPackSize<T>;
  if (aligned && num_cols % kSize == 0) {
    if (num_cols <= Shape<T, kSize, 32, 1>::kMaxCols) return body(Shape<T, kSize, 32, 1>{});
    if (num_cols <= Shape<T, kSize, 32, 4>::kMaxCols) return body(Shape<T, kSize, 32, 4>{});
    if (num_cols <= Shape<T, kSize, 256, 1>::kMaxCols) return body(Shape<T, kSize, 256, 1>{});
    if (num_cols <= Shape<T, kSize, 256, 2>::kMaxCols) return body(Shape<T, kSize, 256, 2>{});
    if (num_cols <= Shape<T, kSize, 256, 4>::kMaxCols) return body(Shape<T, kSize, 256, 4>{});
    if (num_cols <= Shape<T, kSize, 512, 4>::kMaxCols) return body(Shape<T, kSize, 512, 4>{});
  } else {
    if (num_cols <= Shape<T, 1, 32, 4>::kMaxCols) return body(Shape<T, 1, 32, 4>{});
    if (num_cols <= Shape<T, 1, 256, 4>::kMaxCols) return body(Shape<T, 1, 256, 4>{});
  }
  return body(nullptr);
}

template <class S>
constexpr bool kIsLong = false;
template <>
constexpr bool kIsLong<decltype(nullptr)> = true;

}  // namespace

int op_rmsnorm_forward_cuda(int dtype, const void* x, const void* weight, void* y, void* rstd, int64_t num_rows,
                            int64_t num_cols, double eps, void* stream) {
  if (num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  if (num_rows == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto shape) {
      using S = decltype(shape);
      const auto queue = static_cast<cudaStream_t>(stream);
      const auto from = static_cast<const T*>(x), scale = static_cast<const T*>(weight);
      const auto to = static_cast<T*>(y);
      const auto roots = static_cast<NumberOf<T>*>(rstd);
      const auto small = static_cast<NumberOf<T>>(eps);
      constexpr int64_t kMaxGrid = 1 << 30;
      if constexpr (kIsLong<S>) {
        const auto grid = static_cast<unsigned>(num_rows < kMaxGrid ? num_rows : kMaxGrid);
        forward_long<T><<<grid, kLongThreads, 0, queue>>>(from, scale, to, roots, num_rows, num_cols, small);
      } else {
        const int64_t blocks = (num_rows + S::kRows - 1) / S::kRows;
        const auto grid = static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
        forward<S><<<grid, S::block(), 0, queue>>>(from, scale, to, roots, num_rows, static_cast<int>(num_cols), small);
      }
      return launch_status();
    };
    return with_shape<T>(num_cols, are_aligned(x, weight, y), launch);
  });
}

int64_t op_rmsnorm_partials_cuda(int64_t num_rows) {
  const int64_t most = static_cast<int64_t>(kMaxBlocks) * num_multiprocessors();
  return num_rows < most ? num_rows : most;
}

int op_rmsnorm_backward_cuda(int dtype, const void* dy, const void* x, const void* weight, const void* rstd, void* dx,
                             void* dweight, void* partials, int64_t num_rows, int64_t num_cols, void* stream) {
  if (num_rows < 0 || num_cols <= 0) return OP_BAD_ARGUMENT;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using Number = NumberOf<T>;
    const auto queue = static_cast<cudaStream_t>(stream);
    const auto sums = static_cast<Number*>(partials);
    int num_partials = 0;
    const auto launch = [&](auto shape) {
      using S = decltype(shape);
      const auto gradient = static_cast<const T*>(dy), from = static_cast<const T*>(x);
      const auto scale = static_cast<const T*>(weight);
      const auto roots = static_cast<const Number*>(rstd);
      const auto to = static_cast<T*>(dx);
      if constexpr (kIsLong<S>) {
        num_partials = static_cast<int>(op_rmsnorm_partials_cuda(num_rows));
        backward_long<T>
            <<<num_partials, kLongThreads, 0, queue>>>(gradient, from, scale, roots, to, sums, num_rows, num_cols);
      } else {
        const int64_t blocks = (num_rows + S::kRows - 1) / S::kRows;
        const int64_t most = static_cast<int64_t>(S::kBlocks) * num_multiprocessors();
        num_partials = static_cast<int>(blocks < most ? blocks : most);
        backward<S><<<num_partials, S::block(), 0, queue>>>(gradient, from, scale, roots, to, sums, num_rows,
                                                            static_cast<int>(num_cols));
      }
      return launch_status();
    };
    if (num_rows > 0)
      if (const int status = with_shape<T>(num_cols, are_aligned(dy, x, weight, dx), launch); status != 0)
        return status;
    const auto grid = static_cast<unsigned>((num_cols + 31) / 32);
    add_partials<Number><<<grid, dim3(32, 32), 0, queue>>>(sums, static_cast<Number*>(dweight), num_partials, num_cols);
    return launch_status();
  });
}
