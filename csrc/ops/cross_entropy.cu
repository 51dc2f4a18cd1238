// Cross-entropy on CUDA: a block walks over a row, several packs of each thread under way at once.
//
// The sums of a row are made in one read: a thread keeps the largest element that it saw and the sum of exponentials
// below that (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and threads are joined in a
// fixed order, so the bits of a row depend on the row and its alignment alone. Elements before the first multiple of 16
// bytes and behind the last one are taken one by one.
#include <cfloat>

#include "device.cuh"
#include "logits.h"

namespace {

constexpr int kMaxThreads = 512, kUnroll = 4;

template <class Number>
constexpr Number kLowest = Number(sizeof(Number) == 8 ? -DBL_MAX : -FLT_MAX);

__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float exponential(float x) {  // of x <= 0; smaller than normal numbers are, it is 0
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// The maximum is that of numbers; a NaN is left to the sum.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// Some elements' maximum, and the sum of exp(element - maximum).
template <class Number>
struct Running {
  Number maximum = kLowest<Number>, sum = 0;

  template <int kCount>
  __device__ __forceinline__ void add(const Number (&values)[kCount]) {
    Number top = maximum;
#pragma unroll
    for (int e = 0; e < kCount; ++e) top = larger(top, values[e]);
    sum *= exponential(maximum - top);
    maximum = top;
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum += exponential(values[e] - top);
  }

  __device__ __forceinline__ void join(Number other_maximum, Number other_sum) {
    const Number top = larger(maximum, other_maximum);
    sum = sum * exponential(maximum - top) + other_sum * exponential(other_maximum - top);
    maximum = top;
  }

  __device__ __forceinline__ void join_lanes() {  // all lanes of the warp hold the result
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      const Number other_maximum = __shfl_xor_sync(~0u, maximum, lane), other_sum = __shfl_xor_sync(~0u, sum, lane);
      join(other_maximum, other_sum);
    }
  }
};

// The true elements of a row: `head` of them up to the first whole pack, `num_packs` packs, and the rest.
template <class T>
struct Row {
  using Packed = Pack<T, kPackSize<T>>;
  T* x;
  int size, head, num_packs;
  int label;  // where the label is, -1 if it is not one of them

  __device__ Row(const op_logits& logits, int64_t row) {
    x = static_cast<T*>(logits.values) + row * logits.row_stride;
    size = static_cast<int>(logits.num_true);
    const auto before = static_cast<int>((16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T));
    head = before < size ? before : size;
    num_packs = (size - head) / kPackSize<T>;
    const int64_t place = logits.labels[row] - logits.first_token;
    label = place >= 0 && place < size ? static_cast<int>(place) : -1;
  }

  __device__ __forceinline__ Packed* packs() const { return reinterpret_cast<Packed*>(x + head); }

  __device__ __forceinline__ static Packed packed(NumberOf<T> value) {  // the same number in all places
    NumberOf<T> values[kPackSize<T>];
#pragma unroll
    for (int e = 0; e < kPackSize<T>; ++e) values[e] = value;
    Packed made;
    made.set(values);
    return made;
  }

  // body(i) for this thread's share of the elements that are in no pack.
  template <class Body>
  __device__ __forceinline__ void for_rest(Body body) const {
    const int first_behind = head + num_packs * kPackSize<T>;
    for (int i = threadIdx.x; i < size - num_packs * kPackSize<T>; i += blockDim.x)
      body(i < head ? i : first_behind + i - head);
  }
};

template <class T>
__global__ void __launch_bounds__(kMaxThreads) forward(const op_logits logits, NumberOf<T>* __restrict__ sums) {
  using Number = NumberOf<T>;
  constexpr int kSize = kPackSize<T>;
  __shared__ Number maxima[kMaxThreads / 32], totals[kMaxThreads / 32];
  const int stride = blockDim.x;
  const auto nothing = Row<T>::packed(-INFINITY);
  for (int64_t number = blockIdx.x; number < logits.num_rows; number += gridDim.x) {
    const Row<T> row(logits, number);
    const auto packs = row.packs();
    Number label = 0;
    if (threadIdx.x == 0 && row.label >= 0) label = to_number(row.x[row.label]);
    Running<Number> own;
    for (int first = threadIdx.x; first < row.num_packs; first += kUnroll * stride) {
      typename Row<T>::Packed loaded[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        loaded[j] = nothing;
        if (first + j * stride < row.num_packs) loaded[j] = packs[first + j * stride];
      }
      Number values[kUnroll * kSize];
#pragma unroll
      for (int e = 0; e < kUnroll * kSize; ++e) values[e] = loaded[e / kSize].get(e % kSize);
      own.add(values);
    }
    row.for_rest([&](int i) {
      const Number value[1] = {to_number(row.x[i])};
      own.add(value);
    });
    own.join_lanes();
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = own.maximum, totals[threadIdx.x / 32] = own.sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      const bool is_warp = threadIdx.x < blockDim.x / 32;
      Running<Number> whole;
      if (is_warp) whole.maximum = maxima[threadIdx.x], whole.sum = totals[threadIdx.x];
      whole.join_lanes();
      if (threadIdx.x == 0) {
        sums[number] = whole.maximum;
        sums[logits.num_rows + number] = whole.sum;
        sums[2 * logits.num_rows + number] = label;
      }
    }
    __syncthreads();  // before the next row overwrites the warps' sums
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    backward(const op_logits logits, const NumberOf<T>* __restrict__ factors) {
  using Number = NumberOf<T>;
  constexpr int kSize = kPackSize<T>;
  const int stride = blockDim.x;
  const auto zeros = Row<T>::packed(0);
  for (int64_t number = blockIdx.x; number < logits.num_rows; number += gridDim.x) {
    const Row<T> row(logits, number);
    const auto packs = row.packs();
    const Number dloss = factors[2 * logits.num_rows + number];
    const bool is_read = dloss != 0;  // a row without weight is not: zeros in its place make its gradient 0
    const Number maximum = is_read ? factors[number] : 0, scale = is_read ? factors[logits.num_rows + number] : 0;
    const auto gradient = [&](Number value, int place) {
      return exponential(value - maximum) * scale - (place == row.label ? dloss : Number{0});
    };
    for (int first = threadIdx.x; first < row.num_packs; first += kUnroll * stride) {
      typename Row<T>::Packed loaded[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        loaded[j] = zeros;
        if (is_read && first + j * stride < row.num_packs) loaded[j] = packs[first + j * stride];
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int pack = first + j * stride;
        if (pack >= row.num_packs) continue;
        Number out[kSize];
#pragma unroll
        for (int e = 0; e < kSize; ++e) out[e] = gradient(loaded[j].get(e), row.head + pack * kSize + e);
        loaded[j].set(out);
        packs[pack] = loaded[j];
      }
    }
    row.for_rest([&](int i) {
      round_to(row.x[i], gradient(is_read ? to_number(row.x[i]) : Number{0}, i));
    });
    for (int64_t i = logits.num_true + threadIdx.x; i < logits.num_cols; i += blockDim.x)
      round_to(row.x[i], Number{0});
  }
}

template <class Launch>
int launch_rows(int dtype, const op_logits& logits, Launch launch) {
  if (!logits_are_valid(logits)) return OP_BAD_ARGUMENT;
  if (logits.num_rows == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    const int64_t wanted = logits.num_cols / (2 * kPackSize<decltype(element)>) / 32 * 32;  // two packs a thread
    const auto threads = static_cast<unsigned>(wanted < 32 ? 32 : wanted > kMaxThreads ? kMaxThreads : wanted);
    const auto grid = static_cast<unsigned>(logits.num_rows < INT32_MAX ? logits.num_rows : INT32_MAX);
    launch(element, grid, threads);
    return launch_status();
  });
}

}  // namespace

int op_cross_entropy_forward_cuda(int dtype, const op_logits* logits, void* sums, void* stream) {
  return launch_rows(dtype, *logits, [&](auto element, unsigned grid, unsigned threads) {
    using T = decltype(element);
    forward<T><<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*logits, static_cast<NumberOf<T>*>(sums));
  });
}

int op_cross_entropy_backward_cuda(int dtype, const op_logits* logits, const void* factors, void* stream) {
  return launch_rows(dtype, *logits, [&](auto element, unsigned grid, unsigned threads) {
    using T = decltype(element);
    backward<T><<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*logits,
                                                                         static_cast<const NumberOf<T>*>(factors));
  });
}
