// Casts to fp8 on CUDA: one pass that reads x once and writes it, its transposed copy and their scales.
//
// A block has a part of 128 x 128 values in registers: thread t those of rows 8 (t / 16) to + 7 and of columns
// 8 (t % 16) to + 7. So maxima of tiles and blocks need no second read, and eight rows of a column are two words of the
// transposed copy. Shared memory holds that copy alone, 16 KiB, from where whole runs of a part's rows are written.
#include "fp8.cuh"
#include "fp8.h"

namespace {

constexpr int kSide = kFp8Group, kThreads = 256, kWarps = kThreads / 32;
constexpr int kOwn = 8, kAcross = kSide / kOwn;  // rows and columns of a thread; threads along a side

enum class Groups { kGiven, kTiles, kBlocks };  // kGiven: the maxima are in memory

struct Sizes {
  int64_t num_rows, num_cols, parts_down, parts_across;
};

template <class T>
__device__ __forceinline__ uint32_t word_of(const Pack<T, kOwn>& pack, int k) {
  return pack.words[k];
}
template <>
__device__ __forceinline__ uint32_t word_of(const Pack<float, kOwn>& pack, int k) {
  return __float_as_uint(pack.v[k]);
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint32_t four(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kFormat);
  return low | high << 16;
}

// Leaves the maxima over two lanes in the first half of `words` in one, and those of the second half in the other.
template <class T, int kHalf>
__device__ __forceinline__ void keep_half(uint32_t* words, int mask, bool is_upper) {
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const uint32_t own = is_upper ? words[k + kHalf] : words[k], other = is_upper ? words[k] : words[k + kHalf];
    words[k] = Magnitude<T>::larger(own, __shfl_xor_sync(~0u, other, mask));
  }
}

// Leaves the maximum over lanes that differ in the bits up to `kMask` in words[0]: of the word whose index is returned.
// For example four words over 16 lanes take 2 + 1 + 1 + 1 exchanges.
template <class T, int kCount, int kMask>
__device__ __forceinline__ int reduce_lanes(uint32_t* words, int lane) {
  if constexpr (kMask == 0) {
    return 0;
  } else if constexpr (kCount == 1) {
    words[0] = Magnitude<T>::larger(words[0], __shfl_xor_sync(~0u, words[0], kMask));
    return reduce_lanes<T, 1, kMask / 2>(words, lane);
  } else {
    const bool is_upper = lane & kMask;
    keep_half<T, kCount / 2>(words, kMask, is_upper);
    return (is_upper ? kCount / 2 : 0) + reduce_lanes<T, kCount / 2, kMask / 2>(words, lane);
  }
}

// Maxima of the rows and columns of a part, as words of one or two.
template <class T>
struct PartMaxima {
  static constexpr int kWords = kOwn / Magnitude<T>::kPerWord;  // of a thread's rows, and of its columns
  uint32_t rows[kAcross * kWords], columns[kWarps][kAcross * kWords];

  __device__ __forceinline__ void add_rows(const Pack<T, kOwn> (&values)[kOwn], int group, int lane) {
    uint32_t words[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      words[i] = Magnitude<T>::of(word_of<T>(values[i], 0));
#pragma unroll
      for (int k = 1; k < kWords; ++k)
        words[i] = Magnitude<T>::larger(words[i], Magnitude<T>::of(word_of<T>(values[i], k)));
    }
    if constexpr (kWords < kOwn) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) {  // two rows a word
        const uint32_t low = __byte_perm(words[2 * k], words[2 * k + 1], 0x5410);
        words[k] = Magnitude<T>::larger(low, __byte_perm(words[2 * k], words[2 * k + 1], 0x7632));
      }
    }
    const int index = reduce_lanes<T, kWords, kAcross / 2>(words, lane);
    if (lane % (kAcross / kWords) == 0) rows[group * kWords + index] = words[0];
  }

  __device__ __forceinline__ void add_columns(const Pack<T, kOwn> (&values)[kOwn], int pack, int warp, int lane) {
    uint32_t words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      words[k] = Magnitude<T>::of(word_of<T>(values[0], k));
#pragma unroll
      for (int i = 1; i < kOwn; ++i)
        words[k] = Magnitude<T>::larger(words[k], Magnitude<T>::of(word_of<T>(values[i], k)));
    }
    const bool is_upper = lane >= kAcross;
    keep_half<T, kWords / 2>(words, kAcross, is_upper);
#pragma unroll
    for (int k = 0; k < kWords / 2; ++k) columns[warp][pack * kWords + (is_upper ? kWords / 2 : 0) + k] = words[k];
  }

  // The bits, as a float, of the maximum of a row or column.
  __device__ __forceinline__ uint32_t of(bool is_row, int index) const {
    constexpr int kPerWord = Magnitude<T>::kPerWord;
    uint32_t word = is_row ? rows[index / kPerWord] : columns[0][index / kPerWord];
    if (!is_row) {
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp)
        word = Magnitude<T>::larger(word, columns[warp][index / kPerWord]);
    }
    return Magnitude<T>::wide(kPerWord == 1 ? word : word >> 16 * (index % 2) & 0xffffu);
  }
};

// Writes the scale of a block into [down, across], whose rows are padded to four; the last of a row writes the padding.
__device__ __forceinline__ void write_block_scale(float* scales, int64_t down, int64_t across, int64_t num_across,
                                                  float scale) {
  float* const row = scales + down * ((num_across + 3) / 4 * 4);
  row[across] = scale;
  if (across == num_across - 1)
    for (int64_t pad = num_across; pad % 4; ++pad) row[pad] = 1.0f;
}

template <class T, __nv_fp8_interpretation_t kFormat, Groups kGroups>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    cast(const T* __restrict__ x, op_fp8_copy plain, op_fp8_copy transposed, Sizes sizes, bool by_row, bool pow2) {
  __shared__ alignas(16) uint2 columns[kSide * kAcross];  // groups of eight rows of a column: g is at g ^ (column / 8)
  __shared__ float inverses[2][kSide];                    // of rows, and of columns
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pack = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  const int64_t down = blockIdx.x / sizes.parts_across, across = blockIdx.x % sizes.parts_across;
  const int64_t first_row = down * kSide, first_col = across * kSide;
  const int64_t row = first_row + group * kOwn, col = first_col + pack * kOwn;
  const int64_t num_own = col < sizes.num_cols ? sizes.num_rows - row : 0;  // rows that are there, or more
  Pack<T, kOwn> values[kOwn] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    if (i < num_own) values[i] = *reinterpret_cast<const Pack<T, kOwn>*>(x + (row + i) * sizes.num_cols + col);

  const bool is_row = threadIdx.x < kSide;  // of the scale that the thread makes
  const int index = threadIdx.x % kSide;
  const int64_t place = (is_row ? first_row : first_col) + index;
  const float* const given = is_row ? plain.maxima : transposed.maxima;
  float* const scales = is_row ? plain.scales : transposed.scales;
  const bool has_scale =
      is_row ? plain.values && place < sizes.num_rows : transposed.values && place < sizes.num_cols;
  float of_block = 0;
  if constexpr (kGroups == Groups::kGiven) {
    if (has_scale) {
      const int64_t at = by_row ? place : 0;
      const Scale scale = scale_of<kFormat>(__float_as_uint(given[at]), pow2);
      inverses[!is_row][index] = scale.inverse;
      if ((is_row ? across : down) == 0 && (by_row || place == 0)) scales[at] = scale.decoding;
    }
  } else if constexpr (kGroups == Groups::kTiles) {
    __shared__ PartMaxima<T> maxima;
    if (plain.values) maxima.add_rows(values, group, lane);
    if (transposed.values) maxima.add_columns(values, pack, warp, lane);
    __syncthreads();
    if (has_scale) {
      const Scale scale = scale_of<kFormat>(maxima.of(is_row, index), pow2);
      inverses[!is_row][index] = scale.inverse;
      scales[(is_row ? across * sizes.num_rows : down * sizes.num_cols) + place] = scale.decoding;
    }
  } else {
    __shared__ uint32_t maxima[kWarps];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int k = 0; k < PartMaxima<T>::kWords; ++k)
        largest = Magnitude<T>::larger(largest, Magnitude<T>::of(word_of<T>(values[i], k)));
    largest = __reduce_max_sync(~0u, Magnitude<T>::folded(largest));
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < kWarps; ++other) largest = max(largest, maxima[other]);
    const Scale scale = scale_of<kFormat>(largest, pow2);
    of_block = scale.inverse;
    if (threadIdx.x == 0) {
      if (plain.values) write_block_scale(plain.scales, down, across, sizes.parts_across, scale.decoding);
      if (transposed.values) write_block_scale(transposed.scales, across, down, sizes.parts_down, scale.decoding);
    }
  }
  if constexpr (kGroups != Groups::kBlocks) __syncthreads();

  if (plain.values) {
    auto* const to = static_cast<uint8_t*>(plain.values) + row * sizes.num_cols + col;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float inverse = kGroups == Groups::kBlocks ? of_block : inverses[0][group * kOwn + i];
      float v[kOwn];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) v[e] = values[i].get(e) * inverse;
      if (i < num_own)
        *reinterpret_cast<uint2*>(to + i * sizes.num_cols) =
            make_uint2(four<kFormat>(v[0], v[1], v[2], v[3]), four<kFormat>(v[4], v[5], v[6], v[7]));
    }
  }
  if (transposed.values == nullptr) return;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const float inverse = kGroups == Groups::kBlocks ? of_block : inverses[1][pack * kOwn + e];
    float v[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] = values[i].get(e) * inverse;
    columns[(pack * kOwn + e) * kAcross + (group ^ pack)] =
        make_uint2(four<kFormat>(v[0], v[1], v[2], v[3]), four<kFormat>(v[4], v[5], v[6], v[7]));
  }
  __syncthreads();
  // 16 rows a thread, eight threads a column: what is at 2 k and 2 k + 1 are the groups (2 k) ^ p and (2 k + 1) ^ p.
  const int chunk = threadIdx.x % (kAcross / 2);
#pragma unroll
  for (int column = threadIdx.x / (kAcross / 2); column < kSide; column += kThreads / (kAcross / 2)) {
    const int p = column / kOwn;
    const uint4 both = *reinterpret_cast<const uint4*>(&columns[column * kAcross + 2 * chunk]);
    const int64_t to_row = first_row + (chunk ^ p / 2) * 2 * kOwn, to_col = first_col + column;
    if (to_col < sizes.num_cols && to_row < sizes.num_rows)
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(transposed.values) + to_col * sizes.num_rows + to_row) =
          p % 2 ? make_uint4(both.z, both.w, both.x, both.y) : both;
  }
}

template <class T, __nv_fp8_interpretation_t kFormat>
constexpr auto cast_of(int scaling) {
  return scaling == OP_SCALED_BY_TILE    ? cast<T, kFormat, Groups::kTiles>
         : scaling == OP_SCALED_BY_BLOCK ? cast<T, kFormat, Groups::kBlocks>
                                         : cast<T, kFormat, Groups::kGiven>;
}

template <class T>
constexpr auto cast_of(int format, int scaling) {
  return format == OP_E4M3 ? cast_of<T, __NV_E4M3>(scaling) : cast_of<T, __NV_E5M2>(scaling);
}

}  // namespace

int op_fp8_cast_cuda(int dtype, int format, int scaling, int is_pow2, const void* x, const op_fp8_copy* plain,
                     const op_fp8_copy* transposed, int64_t num_rows, int64_t num_cols, void* stream) {
  const bool by_row = scaling == OP_SCALED_BY_ROW, are_given = by_row || scaling == OP_SCALED_BY_TENSOR;
  if (format != OP_E4M3 && format != OP_E5M2) return OP_BAD_ARGUMENT;
  if (!fp8_sizes_are_valid(scaling, num_rows, num_cols, transposed->values != nullptr)) return OP_BAD_ARGUMENT;
  if (!are_aligned(x, plain->values, transposed->values)) return OP_BAD_ARGUMENT;
  for (const op_fp8_copy* copy : {plain, transposed})
    if (copy->values && (!copy->scales || (copy->maxima != nullptr) != are_given)) return OP_BAD_ARGUMENT;
  const Sizes sizes{num_rows, num_cols, (num_rows + kSide - 1) / kSide, (num_cols + kSide - 1) / kSide};
  const int64_t num_parts = sizes.parts_down * sizes.parts_across;
  if (num_parts > INT32_MAX) return OP_BAD_ARGUMENT;
  const auto run = [&](auto element) {
    using T = decltype(element);
    cast_of<T>(format, scaling)<<<static_cast<unsigned>(num_parts), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), *plain, *transposed, sizes, by_row, is_pow2 != 0);
    return launch_status();
  };
  switch (dtype) {
    case OP_F32: return run(float{});
    case OP_BF16: return run(Bf16{});
    case OP_F16: return run(Half{});
    default: return OP_BAD_ARGUMENT;
  }
}
