// The kernels of RMSNorm for rows that a block holds; the formulas are in rmsnorm.inc.
//
// A row stays on the chip between its sum and its result, so each tensor moves through memory once: in registers in the
// forward, in shared memory in the backward. A short row is a warp's, eight rows a block; a longer one a block's. A
// shape depends on the columns alone, so the result of a row does not depend on the number of rows.
//
// The backward's grid is as large as fits on the device at once. A block walks over rows and keeps its part of the
// weight gradient in registers. Memory must not wait for that arithmetic: while a row is worked on, the next is copied
// to shared memory, past the registers. (Rows loaded ahead into registers do not fit beside the sums: what spills waits
// for its load, and so do all that follow.) Every thread copies what it will read, so no barrier guards the copies.
#pragma once

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
  // The backward's shared memory: the weight; the three tensors of the rows under way, and their roots, one a warp.
  static constexpr int kStages = 2, kBlockThreads = kThreads * kRows, kWarps = kBlockThreads / 32;
  static constexpr int kNumSlots = kStages * 3 * kPacks * kBlockThreads;
  static constexpr int kMemory =
      static_cast<int>((kPacks * kThreads + kNumSlots) * sizeof(Row) + kStages * kWarps * sizeof(Number));
  static_assert(kRows * kMaxCols * sizeof(Number) <= kNumSlots * sizeof(Row), "the rows' sums fit into the slots");
  static dim3 block() { return dim3(kRowThreads, kRows); }
};

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

// Global to shared memory past the registers, in groups; only the thread that copied may read after its wait. What is
// shorter than such a copy can be (one bf16) goes the ordinary way.
template <class Value>
__device__ __forceinline__ void start_copy(Value* to, const Value* from) {
  constexpr int kBytes = sizeof(Value);
  const auto place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
  else if constexpr (kBytes >= 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(place), "l"(from), "n"(kBytes) : "memory");
  else
    *to = *from;
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wait_for_all_but() {  // the last groups
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// The sum over a row's threads, returned to all of them. Calls that follow one another alternate `phase`: then one
// barrier is enough, for a warp can be at most one call ahead.
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
    forward(const typename S::Element* __restrict__ x, const typename S::Element* __restrict__ residual,
            const typename S::Element* __restrict__ weight, typename S::Element* __restrict__ sum,
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
    if (residual != nullptr) {
      typename S::Row others[S::kNumPacks];
#pragma unroll
      for (int j = 0; j < S::kNumPacks; ++j)
        others[j] = load_pack<S>(residual + row * num_cols, j * S::kThreads + threadIdx.x, num_cols);
#pragma unroll
      for (int j = 0; j < S::kNumPacks; ++j) {
        Number added[S::kElements];
#pragma unroll
        for (int e = 0; e < S::kElements; ++e) added[e] = values[j].get(e) + others[j].get(e);
        values[j].set(added);
        store_pack<S>(sum + row * num_cols, j * S::kThreads + threadIdx.x, num_cols, values[j]);
      }
    }
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
__global__ void __launch_bounds__(S::kBlockThreads, S::kBlocks)
    backward(const typename S::Element* __restrict__ dy, const typename S::Element* __restrict__ dsum,
             const typename S::Element* __restrict__ x, const typename S::Element* __restrict__ weight,
             const typename S::Number* __restrict__ rstd, typename S::Element* __restrict__ dx,
             typename S::Number* __restrict__ partials, int64_t num_rows, int num_cols) {
  using Number = typename S::Number;
  using Row = typename S::Row;
  extern __shared__ __align__(16) unsigned char memory[];
  Row* const weights = reinterpret_cast<Row*>(memory);
  Row* const slots = weights + S::kNumPacks * S::kThreads;
  Number* const roots = reinterpret_cast<Number*>(slots + S::kNumSlots);
  const int thread = threadIdx.y * S::kThreads + threadIdx.x, warp = thread / 32;
  const typename S::Element* const sources[3] = {x, dy, dsum};
  const auto slot = [&](int stage, int tensor, int j) -> Row& {
    return slots[((stage * 3 + tensor) * S::kNumPacks + j) * S::kBlockThreads + thread];
  };
  const auto is_there = [&](int tensor, int j) {
    return sources[tensor] != nullptr && (j * S::kThreads + static_cast<int>(threadIdx.x)) * S::kElements < num_cols;
  };
  const auto start_row = [&](int64_t row, int stage) {
    if (row < num_rows) {
      if (thread % 32 == 0) start_copy(roots + stage * S::kWarps + warp, rstd + row);
      const int64_t start = row * num_cols + static_cast<int>(threadIdx.x) * S::kElements;
#pragma unroll
      for (int n = 0; n < 3 * S::kNumPacks; ++n) {
        const int tensor = n / S::kNumPacks, j = n % S::kNumPacks;
        if (is_there(tensor, j))
          start_copy(&slot(stage, tensor, j), reinterpret_cast<const Row*>(sources[tensor] + start) + j * S::kThreads);
      }
    }
    end_group();
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * S::kRows;
  int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.y;
#pragma unroll
  for (int stage = 0; stage < S::kStages; ++stage) {
    start_row(row + stage * stride, stage);
#pragma unroll
    for (int n = 0; n < 3 * S::kNumPacks; ++n)  // what is never copied reads as 0
      if (!is_there(n / S::kNumPacks, n % S::kNumPacks)) slot(stage, n / S::kNumPacks, n % S::kNumPacks) = Row{};
  }
  for (int pack = thread; pack < S::kNumPacks * S::kThreads; pack += S::kBlockThreads)
    weights[pack] = load_pack<S>(weight, pack, num_cols);
  __syncthreads();
  const Number inverse = Number{1} / num_cols;
  Number sums[S::kNumPacks][S::kElements] = {};
  for (int turn = 0; row < num_rows; row += stride, turn ^= 1) {
    static_assert(S::kStages == 2, "turn counts stages");
    wait_for_all_but<S::kStages - 1>();
    __syncwarp();  // the root is the first lane's copy
    const Number k = roots[turn * S::kWarps + warp];
    Number dot = 0;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const Row value = slot(turn, 0, j), g = slot(turn, 1, j), w = weights[j * S::kThreads + threadIdx.x];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) dot += g.get(e) * w.get(e) * value.get(e);
    }
    const Number c = sum_over_row<Number, S::kThreads>(dot, turn) * k * k * inverse;
    __syncwarp();  // read the slots again: to keep what they hold would take more registers than there are
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const int pack = j * S::kThreads + threadIdx.x;
      const Row value = slot(turn, 0, j), g = slot(turn, 1, j), other = slot(turn, 2, j), w = weights[pack];
      Number out[S::kElements];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) {
        out[e] = k * (g.get(e) * w.get(e) - c * value.get(e)) + other.get(e);
        sums[j][e] += g.get(e) * (value.get(e) * k);
      }
      Row rounded;
      rounded.set(out);
      store_pack<S>(dx + row * num_cols, pack, num_cols, rounded);
    }
    start_row(row + S::kStages * stride, turn);
  }
  // The sums of the block's rows are added in order, and leave in whole lines.
  __syncthreads();
  auto* const all = reinterpret_cast<Pack<Number, S::kElements>*>(slots);
#pragma unroll
  for (int j = 0; j < S::kNumPacks; ++j) all[(threadIdx.y * S::kNumPacks + j) * S::kThreads + threadIdx.x].set(sums[j]);
  __syncthreads();
  const Number* const team_sums = reinterpret_cast<const Number*>(slots);
  for (int col = thread; col < num_cols; col += S::kBlockThreads) {
    Number total = team_sums[col];
#pragma unroll
    for (int turn = 1; turn < S::kRows; ++turn) total += team_sums[turn * S::kMaxCols + col];
    partials[static_cast<int64_t>(blockIdx.x) * num_cols + col] = total;
  }
}

}  // namespace
