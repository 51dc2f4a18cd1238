// Dropout on CUDA: one block a (sample, position), a thread takes whole groups of four features where they are aligned.
#include "device.cuh"
#include "dropout_mask.h"

namespace {

constexpr int kThreads = 256;

template <class Number>
__device__ __forceinline__ Number drop_or_scale(Number value, uint32_t word, uint32_t threshold, Number scale) {
  return word >= threshold ? value * scale : Number{0};
}

// x starts at a whole group, and kGroups groups of four make a pack.
template <class T, int kGroups>
__global__ void __launch_bounds__(kThreads)
    dropout_groups(const T* __restrict__ x, T* __restrict__ y, int64_t num_samples, int64_t num_features, MaskKey key,
                   uint64_t first_sample, uint32_t first_position, uint64_t first_feature) {
  using Features = Pack<T, 4 * kGroups>;
  const auto scale = static_cast<NumberOf<T>>(key.scale);
  const uint32_t position = first_position + blockIdx.x;
  for (int64_t sample = blockIdx.y; sample < num_samples; sample += gridDim.y) {
    const int64_t start = (sample * gridDim.x + blockIdx.x) * num_features;
    const auto from = reinterpret_cast<const Features*>(x + start);
    const auto to = reinterpret_cast<Features*>(y + start);
    for (int64_t pack = threadIdx.x; pack < num_features / (4 * kGroups); pack += blockDim.x) {
      Features values = from[pack];
      NumberOf<T> out[4 * kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const auto index = static_cast<uint32_t>(first_feature / 4 + pack * kGroups + group);
        const Words words = mask_words(key, first_sample + sample, position, index);
        const int e = 4 * group;
        out[e] = drop_or_scale(values.get(e), words.v0, key.threshold, scale);
        out[e + 1] = drop_or_scale(values.get(e + 1), words.v1, key.threshold, scale);
        out[e + 2] = drop_or_scale(values.get(e + 2), words.v2, key.threshold, scale);
        out[e + 3] = drop_or_scale(values.get(e + 3), words.v3, key.threshold, scale);
      }
      values.set(out);
      to[pack] = values;
    }
  }
}

// Any start and any number of features: each element makes its whole group's block.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_features(const T* __restrict__ x, T* __restrict__ y, int64_t num_samples, int64_t num_features, MaskKey key,
                     uint64_t first_sample, uint32_t first_position, uint64_t first_feature) {
  const auto scale = static_cast<NumberOf<T>>(key.scale);
  const uint32_t position = first_position + blockIdx.x;
  for (int64_t sample = blockIdx.y; sample < num_samples; sample += gridDim.y) {
    const int64_t start = (sample * gridDim.x + blockIdx.x) * num_features;
    for (int64_t i = threadIdx.x; i < num_features; i += blockDim.x) {
      const uint64_t feature = first_feature + i;
      const Words words = mask_words(key, first_sample + sample, position, static_cast<uint32_t>(feature / 4));
      const uint32_t low = feature % 2 == 0 ? words.v0 : words.v1, high = feature % 2 == 0 ? words.v2 : words.v3;
      const uint32_t word = feature % 4 < 2 ? low : high;
      round_to(y[start + i], drop_or_scale(to_number(x[start + i]), word, key.threshold, scale));
    }
  }
}

}  // namespace

int op_dropout_cuda(int dtype, const void* x, void* y, int64_t num_samples, int64_t num_positions, int64_t num_features,
                    const op_mask* mask, void* stream) {
  if (!mask_is_valid(*mask, num_samples, num_positions, num_features) || num_positions > INT32_MAX)
    return OP_BAD_ARGUMENT;
  if (num_samples == 0 || num_positions == 0 || num_features == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kGroups = kPackSize<T> > 4 ? kPackSize<T> / 4 : 1;
    const dim3 grid(static_cast<unsigned>(num_positions),
                    static_cast<unsigned>(num_samples < 65535 ? num_samples : 65535));
    const auto queue = static_cast<cudaStream_t>(stream);
    const auto first_position = static_cast<uint32_t>(mask->first_position);
    const bool in_groups = mask->first_feature % 4 == 0 && num_features % (4 * kGroups) == 0 && are_aligned(x, y);
    const int64_t items = in_groups ? num_features / (4 * kGroups) : num_features;
    const auto threads = static_cast<unsigned>(items < kThreads ? (items + 31) / 32 * 32 : kThreads);
    const auto run = in_groups ? dropout_groups<T, kGroups> : dropout_features<T>;
    run<<<grid, threads, 0, queue>>>(static_cast<const T*>(x), static_cast<T*>(y), num_samples, num_features,
                                     mask_key(*mask), mask->first_sample, first_position, mask->first_feature);
    return launch_status();
  });
}
