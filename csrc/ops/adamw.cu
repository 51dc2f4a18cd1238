// AdamW and squared norms on CUDA: one launch walks the chunks of all intervals, one block a chunk.
//
// AdamW reads gradient, moments and master and writes the last three, and the 16-bit weight, once. It takes the roundings
// of adamw.inc in their order, none of them fused, so that its bits are the CPU's. A sum of squares has the same order
// with and without packs, so its bits depend on the values of the interval alone.
#include "adamw.h"
#include "device.cuh"
#include "masters.cuh"

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double over(double a, double b) { return __ddiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double root(double a) { return __dsqrt_rn(a); }

// A chunk's elements, and the numbers of the step in the arithmetic's type. Master is int16_t where it is split.
template <class Number, class Moment, class Master, class Weight>
struct Chunk {
  const Number* gradient;
  Moment *exp_avg, *exp_avg_sq;
  Master* master;
  Weight* published;
  int count;
  Number scale, keep, gradient_share, beta2, square_share, step_size, inverse_root, eps;

  __device__ __forceinline__ void update(Number unscaled, Number& m, Number& v, Number& p) const {
    const Number g = times(unscaled, scale);
    m = plus(m, times(gradient_share, minus(g, m)));
    v = plus(times(beta2, v), times(times(square_share, g), g));
    p = minus(times(p, keep), over(times(step_size, m), plus(times(root(v), inverse_root), eps)));
  }
};

template <class Number, class Moment, class Master, class Weight>
__device__ __forceinline__ auto chunk_of(const op_interval& interval, const op_chunk& chunk,
                                         const AdamwNumbers& numbers, double factor) {
  Chunk<Number, Moment, Master, Weight> made;
  made.gradient = global<const Number>(interval.gradient, chunk.begin);
  made.exp_avg = global<Moment>(interval.exp_avg, chunk.begin);
  made.exp_avg_sq = global<Moment>(interval.exp_avg_sq, chunk.begin);
  made.master = global<Master>(interval.master, chunk.begin);
  made.published = interval.published ? static_cast<Weight*>(interval.published) + chunk.begin : nullptr;
  made.count = static_cast<int>(chunk.end - chunk.begin);
  made.scale = static_cast<Number>(factor);
  made.keep = interval.decays ? static_cast<Number>(numbers.decay) : Number{1};
  made.gradient_share = static_cast<Number>(numbers.gradient_share);
  made.beta2 = static_cast<Number>(numbers.beta2);
  made.square_share = static_cast<Number>(numbers.square_share);
  made.step_size = static_cast<Number>(numbers.step_size);
  made.inverse_root = static_cast<Number>(numbers.inverse_root);
  made.eps = static_cast<Number>(numbers.eps);
  return made;
}

// Updates packs of kSize elements, from element `begin` on; a thread has two under way at once.
template <int kSize, class Number, class Moment, class Master, class Weight>
__device__ __forceinline__ void update_packs(const Chunk<Number, Moment, Master, Weight>& chunk, int begin, int num_packs) {
  using Elements = Pack<Number, kSize>;
  using Moments = Pack<Moment, kSize>;
  const auto gradient = reinterpret_cast<const Elements*>(chunk.gradient + begin);
  const auto exp_avg = reinterpret_cast<Moments*>(chunk.exp_avg + begin);
  const auto exp_avg_sq = reinterpret_cast<Moments*>(chunk.exp_avg_sq + begin);
  const auto master = chunk.master + begin;
  const auto published = chunk.published ? global<Weight>(chunk.published, begin) : nullptr;
  const auto weights = [=](int pack) { return published ? published + pack * kSize : nullptr; };
  for (int first = threadIdx.x; first < num_packs; first += 2 * kThreads) {
    Elements g[2];
    Moments m[2], v[2];
    Number p[2][kSize];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int pack = first + j * kThreads;
      if (pack >= num_packs) break;
      g[j] = gradient[pack], m[j] = exp_avg[pack], v[j] = exp_avg_sq[pack];
      load_masters(master + pack * kSize, weights(pack), p[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int pack = first + j * kThreads;
      if (pack >= num_packs) break;
      Number first_moments[kSize], second_moments[kSize];
#pragma unroll
      for (int e = 0; e < kSize; ++e) first_moments[e] = m[j].get(e), second_moments[e] = v[j].get(e);
#pragma unroll
      for (int e = 0; e < kSize; ++e) chunk.update(g[j].v[e], first_moments[e], second_moments[e], p[j][e]);
      m[j].set(first_moments), v[j].set(second_moments);
      exp_avg[pack] = m[j], exp_avg_sq[pack] = v[j];
      store_masters(master + pack * kSize, weights(pack), p[j]);
    }
  }
}

template <class Number, class Moment, class Master, class Weight>
__global__ void __launch_bounds__(kThreads, 4)
    adamw(const op_interval* __restrict__ intervals, const op_chunk* __restrict__ chunks, AdamwNumbers numbers,
          const double* __restrict__ factor, const float* __restrict__ is_bad) {
  constexpr int kSize = kPackSize<Number>;
  const bool is_good = !(*is_bad > 0);
  const op_chunk bounds = chunks[blockIdx.x];
  const auto chunk = chunk_of<Number, Moment, Master, Weight>(intervals[bounds.interval], bounds, numbers, *factor);
  if (!is_good) return;
  int done = 0;
  constexpr size_t kMomentBytes = sizeof(Moment) * kSize;
  if (is_aligned(chunk.gradient, 16) && is_aligned(chunk.exp_avg, kMomentBytes) &&
      is_aligned(chunk.exp_avg_sq, kMomentBytes) && is_aligned(chunk.master, sizeof(Master) * kSize) && is_aligned(chunk.published, sizeof(Weight) * kSize)) {
    update_packs<kSize>(chunk, 0, chunk.count / kSize);
    done = chunk.count / kSize * kSize;
  }
  update_packs<1>(chunk, done, chunk.count - done);
}

// The sum of the block's values, in one order; thread 0 has it.
__device__ __forceinline__ double sum_over_block(double value) {
  __shared__ double sums[kThreads / 32];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) value += sums[warp];
  return value;
}

template <class Number>
__global__ void __launch_bounds__(kThreads) sum_squares(const op_interval* __restrict__ intervals,
                                                        const op_chunk* __restrict__ chunks,
                                                        double* __restrict__ partials) {
  constexpr int kSize = kPackSize<Number>, kAtOnce = 4;
  using Elements = Pack<Number, kSize>;
  const op_chunk chunk = chunks[blockIdx.x];
  const auto values = global<const Number>(intervals[chunk.interval].gradient, chunk.begin);
  const int count = static_cast<int>(chunk.end - chunk.begin), num_packs = (count + kSize - 1) / kSize;
  const bool in_packs = is_aligned(values, 16);
  double sums[kSize] = {};
  for (int first = threadIdx.x; first < num_packs; first += kAtOnce * kThreads) {
    Elements loaded[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int begin = (first + j * kThreads) * kSize;
      if (in_packs && begin + kSize <= count) {
        loaded[j] = *reinterpret_cast<const Elements*>(values + begin);
      } else {
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          if (begin + e < count) loaded[j].v[e] = values[begin + e];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const double value = loaded[j].v[e];
        sums[e] = fma(value, value, sums[e]);
      }
  }
  double sum = sums[0];
#pragma unroll
  for (int e = 1; e < kSize; ++e) sum += sums[e];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_chunks(const op_interval* __restrict__ intervals, const double* __restrict__ partials,
               double* __restrict__ out) {
  const op_interval& interval = intervals[blockIdx.x];
  double sum = 0;
  for (int64_t chunk = interval.first_chunk + threadIdx.x; chunk < interval.end_chunk; chunk += kThreads)
    sum += partials[chunk];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) out[interval.row] = sum;
}

}  // namespace

int op_adamw_cuda(int dtype, const op_interval* intervals, const op_chunk* chunks, int64_t num_chunks,
                  const op_adamw_step* step, const double* factor, const float* is_bad, void* stream) {
  if (!fits(dtype, *step) || num_chunks < 0 || num_chunks > INT32_MAX) return OP_BAD_ARGUMENT;
  if (num_chunks == 0) return 0;
  const bool is_bf16 = step->moments == OP_BF16, is_half = step->published == OP_F16;
  const auto run = dtype == OP_F64  ? adamw<double, double, double, Bf16>
                   : step->is_split ? (is_bf16 ? adamw<float, Bf16, int16_t, Bf16> : adamw<float, float, int16_t, Bf16>)
                   : is_half        ? (is_bf16 ? adamw<float, Bf16, float, Half> : adamw<float, float, float, Half>)
                   : is_bf16        ? adamw<float, Bf16, float, Bf16>
                                    : adamw<float, float, float, Bf16>;
  run<<<static_cast<unsigned>(num_chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      intervals, chunks, adamw_numbers(*step), factor, is_bad);
  return launch_status();
}

int op_squared_norms_cuda(int dtype, const op_interval* intervals, int64_t num_intervals, const op_chunk* chunks,
                          int64_t num_chunks, double* partials, double* out, void* stream) {
  if ((dtype != OP_F64 && dtype != OP_F32) || num_intervals < 0 || num_intervals > INT32_MAX || num_chunks < 0 ||
      num_chunks > INT32_MAX)
    return OP_BAD_ARGUMENT;
  if (num_intervals == 0) return 0;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (num_chunks > 0) {
    const auto run = dtype == OP_F64 ? sum_squares<double> : sum_squares<float>;
    run<<<static_cast<unsigned>(num_chunks), kThreads, 0, queue>>>(intervals, chunks, partials);
    if (const int status = launch_status(); status != 0) return status;
  }
  add_chunks<<<static_cast<unsigned>(num_intervals), kThreads, 0, queue>>>(intervals, partials, out);
  return launch_status();
}
