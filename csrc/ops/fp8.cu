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

struct Sizes {
  int64_t num_rows, num_cols;
  unsigned parts_down, parts_across;
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

// The rows that are there of eight from `from` on, and zeros for others.
template <class T>
__device__ __forceinline__ void load(Pack<T, kOwn> (&values)[kOwn], const T* from, int64_t num_cols, int num_own) {
  if (num_own == kOwn) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i, from += num_cols) values[i] = *reinterpret_cast<const Pack<T, kOwn>*>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i, from += num_cols)
    values[i] = i < num_own ? *reinterpret_cast<const Pack<T, kOwn>*>(from) : Pack<T, kOwn>{};
}

// Maxima of the rows and columns of a part, as words of one or two.
template <class T>
struct PartMaxima {
  using M = Magnitude<T>;
  static constexpr int kWords = kOwn / M::kPerWord;  // of a thread's rows, and of its columns
  uint32_t rows[kAcross * kWords], columns[kWarps][kAcross * kWords];

  __device__ __forceinline__ void add(const Pack<T, kOwn> (&values)[kOwn]) {
    const int lane = threadIdx.x % 32, pack = threadIdx.x % kAcross;
    uint32_t by_row[kOwn], by_column[kWords];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const uint32_t word = M::of(word_of<T>(values[i], k));
        by_row[i] = k == 0 ? word : M::larger(by_row[i], word);
        by_column[k] = i == 0 ? word : M::larger(by_column[k], word);
      }
    }
    if constexpr (kWords < kOwn) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) {  // two rows a word
        const uint32_t low = __byte_perm(by_row[2 * k], by_row[2 * k + 1], 0x5410);
        by_row[k] = M::larger(low, __byte_perm(by_row[2 * k], by_row[2 * k + 1], 0x7632));
      }
    }
    const int index = reduce_lanes<T, kWords, kAcross / 2>(by_row, lane);
    if (lane % (kAcross / kWords) == 0) rows[threadIdx.x / kAcross * kWords + index] = by_row[0];
    const bool is_upper = lane >= kAcross;
    keep_half<T, kWords / 2>(by_column, kAcross, is_upper);
    uint32_t* const own = columns[threadIdx.x / 32] + pack * kWords + (is_upper ? kWords / 2 : 0);
#pragma unroll
    for (int k = 0; k < kWords / 2; ++k) own[k] = by_column[k];
  }

  // The bits, as a float, of the maximum of a row or column.
  __device__ __forceinline__ uint32_t of(bool is_row, int index) const {
    const int at = index / M::kPerWord;
    uint32_t word = rows[at];
    if (!is_row) {
      word = columns[0][at];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) word = M::larger(word, columns[warp][at]);
    }
    return M::wide(M::kPerWord == 1 ? word : word >> 16 * (index % 2) & 0xffffu);
  }
};

// The bits of the largest of a block, in all its threads.
template <class T>
__device__ __forceinline__ uint32_t largest_of_block(const Pack<T, kOwn> (&values)[kOwn]) {
  __shared__ uint32_t of_warps[kWarps];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
#pragma unroll
    for (int k = 0; k < PartMaxima<T>::kWords; ++k)
      largest = Magnitude<T>::larger(largest, Magnitude<T>::of(word_of<T>(values[i], k)));
  largest = __reduce_max_sync(~0u, Magnitude<T>::folded(largest));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, of_warps[warp]);
  return largest;
}

// Writes the scale of a block into [down, across], whose rows are padded to four; the last of a row writes the padding.
__device__ __forceinline__ void write_block_scale(float* scales, int64_t down, int64_t across, int64_t num_across,
                                                  float scale) {
  float* const row = scales + down * ((num_across + 3) / 4 * 4);
  row[across] = scale;
  if (across == num_across - 1)
    for (int64_t pad = num_across; pad % 4; ++pad) row[pad] = 1.0f;
}

// Writes eight rows of each of a thread's columns, through shared memory, as runs of 128 rows.
//
// Of a column's 16 groups of eight rows, group g is at 2 (g / 2 ^ p % 8) + (g % 2 ^ p / 8), where p = column / 8. For
// example group 5 of column 70, p = 8, is at 2 * 2 + 0. So neither a half warp's writes nor a quarter's reads meet in a
// bank, and the last term is the same for all threads of a read.
__device__ __forceinline__ void write_transposed(uint8_t* out, const uint32_t (&words)[2][kOwn], int64_t first_row,
                                                 int64_t first_col, const Sizes& sizes) {
  __shared__ alignas(16) uint2 columns[kSide * kAcross];
  const int pack = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  uint2* const own = columns + pack * kOwn * kAcross + 2 * (group / 2 ^ pack % 8) + (group % 2 ^ pack / 8);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) own[e * kAcross] = make_uint2(words[0][e], words[1][e]);
  __syncthreads();
  constexpr int kChunks = kAcross / 2, kStep = kThreads / kChunks;  // of 16 rows; columns that all threads read at once
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  constexpr int kSteps = kSide / kStep;
  uint4 rows[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    rows[step] = reinterpret_cast<const uint4*>(columns)[(first + step * kStep) * kChunks + chunk];
    if (step * kStep >= kSide / 2) rows[step] = make_uint4(rows[step].z, rows[step].w, rows[step].x, rows[step].y);
  }
  uint8_t* to = out + (first_col + first) * sizes.num_rows + first_row;
#pragma unroll
  for (int step = 0; step < kSteps; ++step, to += kStep * sizes.num_rows) {
    const int column = first + step * kStep, offset = 2 * kOwn * (chunk ^ column / kOwn % 8);
    if (first_col + column < sizes.num_cols && first_row + offset < sizes.num_rows)
      *reinterpret_cast<uint4*>(to + offset) = rows[step];
  }
}

// The inverses of the scales of a part's rows, and of its columns; the scales go to memory.
struct Inverses {
  alignas(16) float of[2][kSide];

  // Thread t makes the scale of row t, or of column t - 128. `largest_of(is_row, index, place)` are the bits of the
  // largest magnitude of its group, whose scale has an address if this part is the one that writes it.
  template <__nv_fp8_interpretation_t kFormat, class Largest, class Address>
  __device__ __forceinline__ void make(const op_fp8_copy& plain, const op_fp8_copy& transposed, int64_t first_row,
                                       int64_t first_col, const Sizes& sizes, bool pow2, Largest largest_of,
                                       Address address_of) {
    const bool is_row = threadIdx.x < kSide;
    const int index = threadIdx.x % kSide;
    const int64_t place = (is_row ? first_row : first_col) + index;
    if (is_row ? !plain.values || place >= sizes.num_rows : !transposed.values || place >= sizes.num_cols) return;
    const Scale scale = scale_of<kFormat>(largest_of(is_row, index, place), pow2);
    of[!is_row][index] = scale.inverse;
    if (float* const address = address_of(is_row, place)) *address = scale.decoding;
  }

  // Those of eight rows or columns.
  __device__ __forceinline__ void read(float (&inverses)[kOwn], bool of_columns, int first) const {
#pragma unroll
    for (int k = 0; k < kOwn; k += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&of[of_columns][first + k]);
      inverses[k] = four.x, inverses[k + 1] = four.y, inverses[k + 2] = four.z, inverses[k + 3] = four.w;
    }
  }
};

template <class T, __nv_fp8_interpretation_t kFormat, int kScaling>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    cast(const T* __restrict__ x, op_fp8_copy plain, op_fp8_copy transposed, Sizes sizes, bool pow2) {
  constexpr bool kIsOne = kScaling == OP_SCALED_BY_TENSOR || kScaling == OP_SCALED_BY_BLOCK;  // one scale for the part
  const int pack = threadIdx.x % kAcross, group = threadIdx.x / kAcross;
  const unsigned down = blockIdx.x / sizes.parts_across, across = blockIdx.x - down * sizes.parts_across;
  const int64_t first_row = static_cast<int64_t>(down) * kSide, first_col = static_cast<int64_t>(across) * kSide;
  const int64_t row = first_row + group * kOwn, place = row * sizes.num_cols + first_col + pack * kOwn;
  const int64_t rows_left = first_col + pack * kOwn < sizes.num_cols ? sizes.num_rows - row : 0;
  const int num_own = static_cast<int>(max(min(rows_left, int64_t{kOwn}), int64_t{0}));
  Pack<T, kOwn> values[kOwn];
  load(values, x + place, sizes.num_cols, num_own);

  float of_rows[kOwn], of_columns[kOwn];
  if constexpr (kIsOne) {
    uint32_t largest;
    if constexpr (kScaling == OP_SCALED_BY_TENSOR)
      largest = __float_as_uint(*(plain.values ? plain.maxima : transposed.maxima));
    else
      largest = largest_of_block<T>(values);
    const Scale scale = scale_of<kFormat>(largest, pow2);
    of_rows[0] = scale.inverse;
    if (threadIdx.x == 0 && kScaling == OP_SCALED_BY_BLOCK) {
      if (plain.values) write_block_scale(plain.scales, down, across, sizes.parts_across, scale.decoding);
      if (transposed.values) write_block_scale(transposed.scales, across, down, sizes.parts_down, scale.decoding);
    } else if (threadIdx.x == 0 && blockIdx.x == 0) {
      if (plain.values) *plain.scales = scale.decoding;
      if (transposed.values) *transposed.scales = scale.decoding;
    }
  } else {
    __shared__ Inverses inverses;
    if constexpr (kScaling == OP_SCALED_BY_ROW) {
      inverses.make<kFormat>(
          plain, transposed, first_row, first_col, sizes, pow2,
          [&](bool is_row, int, int64_t at) {
            return __float_as_uint((is_row ? plain.maxima : transposed.maxima)[at]);
          },
          [&](bool is_row, int64_t at) -> float* {
            return (is_row ? across : down) == 0 ? (is_row ? plain.scales : transposed.scales) + at : nullptr;
          });
    } else {
      __shared__ PartMaxima<T> maxima;
      maxima.add(values);
      __syncthreads();
      inverses.make<kFormat>(
          plain, transposed, first_row, first_col, sizes, pow2,
          [&](bool is_row, int index, int64_t) { return maxima.of(is_row, index); },
          [&](bool is_row, int64_t at) {
            return is_row ? plain.scales + across * sizes.num_rows + at
                          : transposed.scales + down * sizes.num_cols + at;
          });
    }
    __syncthreads();
    inverses.read(of_rows, false, group * kOwn);
    inverses.read(of_columns, true, pack * kOwn);
  }

  // Four rows at a time: a row's two words go to memory, four rows of a column are a word of the transposed copy.
  uint8_t* to = static_cast<uint8_t*>(plain.values) + place;
  uint32_t words[2][kOwn];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[4][kOwn];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < kOwn; ++e) v[i][e] = values[4 * half + i].get(e) * (kIsOne ? of_rows[0] : 1.0f);
    if (plain.values) {
#pragma unroll
      for (int i = 0; i < 4; ++i, to += sizes.num_cols) {
        const float f = kIsOne ? 1.0f : of_rows[4 * half + i];
        const uint2 both = make_uint2(four<kFormat>(v[i][0] * f, v[i][1] * f, v[i][2] * f, v[i][3] * f),
                                      four<kFormat>(v[i][4] * f, v[i][5] * f, v[i][6] * f, v[i][7] * f));
        if (4 * half + i < num_own) *reinterpret_cast<uint2*>(to) = both;
      }
    }
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const float f = kIsOne ? 1.0f : of_columns[e];
      words[half][e] = four<kFormat>(v[0][e] * f, v[1][e] * f, v[2][e] * f, v[3][e] * f);
    }
  }
  if (transposed.values) write_transposed(static_cast<uint8_t*>(transposed.values), words, first_row, first_col, sizes);
}

template <class T, __nv_fp8_interpretation_t kFormat>
constexpr auto cast_of(int scaling) {
  return scaling == OP_SCALED_BY_TENSOR ? cast<T, kFormat, OP_SCALED_BY_TENSOR>
         : scaling == OP_SCALED_BY_ROW  ? cast<T, kFormat, OP_SCALED_BY_ROW>
         : scaling == OP_SCALED_BY_TILE ? cast<T, kFormat, OP_SCALED_BY_TILE>
                                        : cast<T, kFormat, OP_SCALED_BY_BLOCK>;
}

template <class T>
constexpr auto cast_of(int format, int scaling) {
  return format == OP_E4M3 ? cast_of<T, __NV_E4M3>(scaling) : cast_of<T, __NV_E5M2>(scaling);
}

}  // namespace

int op_fp8_cast_cuda(int dtype, int format, int scaling, int is_pow2, const void* x, const op_fp8_copy* plain,
                     const op_fp8_copy* transposed, int64_t num_rows, int64_t num_cols, void* stream) {
  const bool are_given = scaling == OP_SCALED_BY_TENSOR || scaling == OP_SCALED_BY_ROW;
  if (format != OP_E4M3 && format != OP_E5M2) return OP_BAD_ARGUMENT;
  if (!fp8_sizes_are_valid(scaling, num_rows, num_cols, transposed->values != nullptr)) return OP_BAD_ARGUMENT;
  if (!are_aligned(x, plain->values, transposed->values)) return OP_BAD_ARGUMENT;
  for (const op_fp8_copy* copy : {plain, transposed})
    if (copy->values && (!copy->scales || (copy->maxima != nullptr) != are_given)) return OP_BAD_ARGUMENT;
  const int64_t down = (num_rows + kSide - 1) / kSide, across = (num_cols + kSide - 1) / kSide;
  if (down > INT32_MAX || across > INT32_MAX / down) return OP_BAD_ARGUMENT;
  const Sizes sizes{num_rows, num_cols, static_cast<unsigned>(down), static_cast<unsigned>(across)};
  const auto run = [&](auto element) {
    using T = decltype(element);
    const unsigned num_parts = sizes.parts_down * sizes.parts_across;
    cast_of<T>(format, scaling)<<<num_parts, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), *plain, *transposed, sizes, is_pow2 != 0);
    return launch_status();
  };
  switch (dtype) {
    case OP_F32: return run(float{});
    case OP_BF16: return run(Bf16{});
    case OP_F16: return run(Half{});
    default: return OP_BAD_ARGUMENT;
  }
}
