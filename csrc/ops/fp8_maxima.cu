// The largest magnitudes of a tensor, or of its rows and columns: one pass of reads.
#include "fp8.cuh"
#include "fp8.h"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kFlight = 8;  // packs that a thread has on their way at once, of a tensor
constexpr int kPacks = 4;   // of a row, that a lane has: a strip is 32 * kPacks packs wide
constexpr int kStrip = 32 * kPacks, kStripWords = kStrip * 4;
constexpr int kBlocksPerProcessor = 6;

template <class T>
__global__ void __launch_bounds__(kThreads)
    largest_of_all(const uint4* __restrict__ x, int64_t num_packs, uint32_t* __restrict__ maximum) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t largest = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < num_packs; i += kFlight * step) {
    uint4 packs[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) packs[k] = i + k * step < num_packs ? x[i + k * step] : uint4{};
#pragma unroll
    for (int k = 0; k < kFlight; ++k) largest = Magnitude<T>::larger(largest, largest_of<T>(packs[k]));
  }
  largest = __reduce_max_sync(~0u, Magnitude<T>::folded(largest));
  __shared__ uint32_t of_warps[kWarps];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  largest = __reduce_max_sync(~0u, threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) atomicMax(maximum, largest);
}

// A block walks down a strip of columns, each warp over rows of its own: a row's maximum is of a warp, a column's of all
// rows of a block. For example bf16 with 2,048 columns has two strips of 128 packs.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    largest_of_rows_and_columns(const uint4* __restrict__ x, int64_t num_rows, int64_t num_packs, int64_t block_rows,
                                uint32_t* __restrict__ row_maxima, uint32_t* __restrict__ column_maxima) {
  using M = Magnitude<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * kStrip;
  const int64_t first_row = blockIdx.y * block_rows, end_row = min(first_row + block_rows, num_rows);
  uint4 columns[kPacks] = {};
#pragma unroll 2
  for (int64_t row = first_row + warp; row < end_row; row += kWarps) {
    uint4 packs[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t pack = first_pack + 32 * k + lane;
      packs[k] = pack < num_packs ? x[row * num_packs + pack] : uint4{};
    }
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      columns[k].x = M::larger(columns[k].x, M::of(packs[k].x));
      columns[k].y = M::larger(columns[k].y, M::of(packs[k].y));
      columns[k].z = M::larger(columns[k].z, M::of(packs[k].z));
      columns[k].w = M::larger(columns[k].w, M::of(packs[k].w));
      largest = M::larger(largest, largest_of<T>(packs[k]));
    }
    largest = __reduce_max_sync(~0u, M::folded(largest));
    if (lane == 0) atomicMax(row_maxima + row, largest);
  }
  __shared__ uint4 of_warps[kWarps][kStrip];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) of_warps[warp][32 * k + lane] = columns[k];
  __syncthreads();
  const auto* const words = reinterpret_cast<const uint32_t*>(of_warps);
  for (int word = threadIdx.x; word < kStripWords; word += kThreads) {
    uint32_t largest = words[word];
    for (int other = 1; other < kWarps; ++other) largest = M::larger(largest, words[other * kStripWords + word]);
    const int64_t column = (first_pack * 4 + word) * M::kPerWord;
    if (column >= num_packs * 4 * M::kPerWord) break;
#pragma unroll
    for (int half = 0; half < M::kPerWord; ++half)
      atomicMax(column_maxima + column + half, M::wide(M::kPerWord == 1 ? largest : largest >> 16 * half & 0xffffu));
  }
}

template <class T>
int launch(bool by_row, const void* x, uint32_t* maxima, int64_t num_rows, int64_t num_cols, cudaStream_t on) {
  const int64_t num_packs = num_cols / kPackSize<T>, num_blocks = kBlocksPerProcessor * num_multiprocessors();
  const auto* const packs = static_cast<const uint4*>(x);
  if (!by_row) {
    const int64_t most = (num_rows * num_packs + kThreads * kFlight - 1) / (kThreads * kFlight);
    largest_of_all<T><<<static_cast<unsigned>(most < num_blocks ? most : num_blocks), kThreads, 0, on>>>(
        packs, num_rows * num_packs, maxima);
    return launch_status();
  }
  const int64_t strips = (num_packs + kStrip - 1) / kStrip;
  const int64_t most = (num_rows + 4 * kWarps - 1) / (4 * kWarps), wanted = (num_blocks + strips - 1) / strips;
  const int64_t groups = wanted < most ? wanted : most, block_rows = (num_rows + groups - 1) / groups;
  if (strips > INT32_MAX || groups > 65535) return OP_BAD_ARGUMENT;
  largest_of_rows_and_columns<T><<<dim3(static_cast<unsigned>(strips), static_cast<unsigned>(groups)), kThreads, 0, on>>>(
      packs, num_rows, num_packs, block_rows, maxima, maxima + num_rows);
  return launch_status();
}

}  // namespace

int op_fp8_maxima_cuda(int dtype, int scaling, const void* x, float* maxima, int64_t num_rows, int64_t num_cols,
                       void* stream) {
  const bool by_row = scaling == OP_SCALED_BY_ROW;
  if (!by_row && scaling != OP_SCALED_BY_TENSOR) return OP_BAD_ARGUMENT;
  if (!fp8_sizes_are_valid(scaling, num_rows, num_cols, false) || !are_aligned(x)) return OP_BAD_ARGUMENT;
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t count = by_row ? num_rows + num_cols : 1;
  if (const auto status = cudaMemsetAsync(maxima, 0, count * sizeof(float), on)) return status;
  auto* const bits = reinterpret_cast<uint32_t*>(maxima);
  switch (dtype) {
    case OP_F32: return launch<float>(by_row, x, bits, num_rows, num_cols, on);
    case OP_BF16: return launch<Bf16>(by_row, x, bits, num_rows, num_cols, on);
    case OP_F16: return launch<Half>(by_row, x, bits, num_rows, num_cols, on);
    default: return OP_BAD_ARGUMENT;
  }
}
