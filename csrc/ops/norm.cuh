// The kernels of RMSNorm and LayerNorm for rows that a block holds; the formulas are in norm.inc.
//
// A row stays on the chip between its sum and its result, so each tensor moves through memory once: in registers in the
// forward, in shared memory in the backward. A short row is a warp's, eight rows a block; a longer one a block's. A
// shape depends on the columns alone, so the result of a row does not depend on the number of rows.
//
// The backward's grid is as large as fits on the device at once. A block walks over rows and keeps its part of the
// gradients of weight and bias in registers. Memory must not wait for that arithmetic: while a row is worked on, the next is copied
// to shared memory, past the registers. (Rows loaded ahead into registers do not fit beside the sums: what spills waits
// for its load, and so do all that follow.) Every thread copies what it will read, so no barrier guards the copies.
#pragma once

#include "device.cuh"

namespace {

// kRowThreads threads a row, each with kPacks packs of kSize elements. LayerNorm centers its rows, RMSNorm does not.
template <class T, bool kIsLayerNorm, int kSize, int kRowThreads, int kPacks>
struct Shape {
  using Element = T;
  using Number = NumberOf<T>;
  using Row = Pack<T, kSize>;
  static constexpr bool kCenters = kIsLayerNorm;
  static constexpr int kNumbers = kCenters ? 2 : 1;  // a row: rstd, or mean and rstd; as many gradients a column
  using Numbers = Pack<Number, kNumbers>;
  static constexpr int kElements = kSize, kThreads = kRowThreads, kNumPacks = kPacks;
  static constexpr int kRows = kRowThreads == 32 ? 8 : 1;  // a block
  // how many blocks of the backward fit on a multiprocessor
  static constexpr int kBlocks = kRowThreads > 256     ? 1
                                 : kRowThreads == 128 ? 6
                                 : kPacks > 2         ? 2
                                 : kPacks > 1         ? 4 - kNumbers
                                                      : 5 - kNumbers;
  static constexpr int kMaxCols = kSize * kRowThreads * kPacks;
  // The backward's shared memory: the weight; the three tensors of the rows under way, and their numbers, once a warp.
  static constexpr int kStages = 2, kBlockThreads = kThreads * kRows, kWarps = kBlockThreads / 32;
  static constexpr int kNumSlots = kStages * 3 * kPacks * kBlockThreads;
  static constexpr int kMemory =
      static_cast<int>((kPacks * kThreads + kNumSlots) * sizeof(Row) + kStages * kWarps * sizeof(Numbers));
  static_assert(kRows * kMaxCols * sizeof(Numbers) <= kNumSlots * sizeof(Row), "the rows' sums fit into the slots");
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

// Sums of numbers over a row's threads, for all of them. Calls alternate `phase`: then one barrier is enough, for a warp
// can be at most one call ahead.
template <int kThreads, class Number, int kCount>
__device__ __forceinline__ void sum_over_row(Number (&values)[kCount], int& phase) {
  const auto add = [&](int lane) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) values[n] += __shfl_xor_sync(~0u, values[n], lane);
  };
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) add(lane);
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    __shared__ Number sums[2][kWarps][kCount];
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int n = 0; n < kCount; ++n) sums[phase][threadIdx.x / 32][n] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kCount; ++n) values[n] = sums[phase][threadIdx.x % kWarps][n];
#pragma unroll
    for (int lane = kWarps / 2; lane > 0; lane /= 2) add(lane);
    phase ^= 1;
  }
}

template <int kThreads, class Number>
__device__ __forceinline__ Number sum_over_row(Number value, int& phase) {
  Number values[1] = {value};
  sum_over_row<kThreads>(values, phase);
  return values[0];
}

template <class S>
__global__ void __launch_bounds__(S::kThreads* S::kRows)
    forward(const typename S::Element* __restrict__ x, const typename S::Element* __restrict__ residual,
            const typename S::Element* __restrict__ weight, const typename S::Element* __restrict__ bias,
            typename S::Element* __restrict__ sum, typename S::Element* __restrict__ y,
            typename S::Numbers* __restrict__ numbers, int64_t num_rows, int num_cols, typename S::Number eps) {
  using Number = typename S::Number;
  int phase = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.y; row < num_rows;
       row += static_cast<int64_t>(gridDim.x) * S::kRows) {
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
    Number mean = 0;
    if constexpr (S::kCenters) {
      Number total = 0;
#pragma unroll
      for (int j = 0; j < S::kNumPacks; ++j)
#pragma unroll
        for (int e = 0; e < S::kElements; ++e) total += values[j].get(e);
      mean = sum_over_row<S::kThreads>(total, phase) / num_cols;
    }
    Number squares = 0;
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j)
      if (!S::kCenters || (j * S::kThreads + static_cast<int>(threadIdx.x)) * S::kElements < num_cols)
#pragma unroll
        for (int e = 0; e < S::kElements; ++e) squares += (values[j].get(e) - mean) * (values[j].get(e) - mean);
    const Number k = rsqrt(sum_over_row<S::kThreads>(squares, phase) / num_cols + eps);
    if (threadIdx.x == 0) {
      if constexpr (S::kCenters) numbers[row].v[0] = mean;
      numbers[row].v[S::kNumbers - 1] = k;
    }
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const int pack = j * S::kThreads + threadIdx.x;
      const typename S::Row w = load_pack<S>(weight, pack, num_cols);
      typename S::Row b{};
      if constexpr (S::kCenters) b = load_pack<S>(bias, pack, num_cols);
      Number out[S::kElements];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) {
        out[e] = (values[j].get(e) - mean) * k * w.get(e);
        if constexpr (S::kCenters) out[e] += b.get(e);
      }
      values[j].set(out);
      store_pack<S>(y + row * num_cols, pack, num_cols, values[j]);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kBlockThreads, S::kBlocks)
    backward(const typename S::Element* __restrict__ dy, const typename S::Element* __restrict__ dsum,
             const typename S::Element* __restrict__ x, const typename S::Element* __restrict__ weight,
             const typename S::Numbers* __restrict__ numbers, typename S::Element* __restrict__ dx,
             typename S::Number* __restrict__ partials, int64_t num_rows, int num_cols) {
  using Number = typename S::Number;
  using Numbers = typename S::Numbers;
  using Row = typename S::Row;
  extern __shared__ __align__(16) unsigned char memory[];
  Row* const weights = reinterpret_cast<Row*>(memory);
  Row* const slots = weights + S::kNumPacks * S::kThreads;
  Numbers* const row_numbers = reinterpret_cast<Numbers*>(slots + S::kNumSlots);
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
      if (thread % 32 == 0) start_copy(row_numbers + stage * S::kWarps + warp, numbers + row);
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
  Number sums[S::kNumbers][S::kNumPacks][S::kElements] = {};
  int phase = 0;
  for (int turn = 0; row < num_rows; row += stride, turn ^= 1) {
    static_assert(S::kStages == 2, "turn counts stages");
    wait_for_all_but<S::kStages - 1>();
    __syncwarp();  // the row's numbers are the first lane's copy
    const Numbers& mine = row_numbers[turn * S::kWarps + warp];
    const Number mean = S::kCenters ? mine.v[0] : Number{0}, k = mine.v[S::kNumbers - 1];
    Number dots[S::kNumbers] = {};
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const Row value = slot(turn, 0, j), g = slot(turn, 1, j), w = weights[j * S::kThreads + threadIdx.x];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) {
        dots[0] += g.get(e) * w.get(e) * (value.get(e) - mean);
        if constexpr (S::kCenters) dots[1] += g.get(e) * w.get(e);
      }
    }
    sum_over_row<S::kThreads>(dots, phase);
    const Number c = dots[0] * k * k * inverse;
    Number shift = 0;
    if constexpr (S::kCenters) shift = dots[1] * inverse;
    __syncwarp();  // read the slots again: to keep what they hold would take more registers than there are
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j) {
      const int pack = j * S::kThreads + threadIdx.x;
      const Row value = slot(turn, 0, j), g = slot(turn, 1, j), other = slot(turn, 2, j), w = weights[pack];
      Number out[S::kElements];
#pragma unroll
      for (int e = 0; e < S::kElements; ++e) {
        const Number centered = value.get(e) - mean;
        out[e] = k * (g.get(e) * w.get(e) - shift - c * centered) + other.get(e);
        sums[0][j][e] += g.get(e) * (centered * k);
        if constexpr (S::kCenters) sums[1][j][e] += g.get(e);
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
  for (int n = 0; n < S::kNumbers; ++n)
#pragma unroll
    for (int j = 0; j < S::kNumPacks; ++j)
      all[((threadIdx.y * S::kNumbers + n) * S::kNumPacks + j) * S::kThreads + threadIdx.x].set(sums[n][j]);
  __syncthreads();
  const Number* const team_sums = reinterpret_cast<const Number*>(slots);
  Number* const partial = partials + static_cast<int64_t>(blockIdx.x) * S::kNumbers * num_cols;
  for (int n = 0; n < S::kNumbers; ++n)
    for (int col = thread; col < num_cols; col += S::kBlockThreads) {
      Number total = team_sums[n * S::kMaxCols + col];
#pragma unroll
      for (int turn = 1; turn < S::kRows; ++turn)
        total += team_sums[(turn * S::kNumbers + n) * S::kMaxCols + col];
      partial[n * num_cols + col] = total;
    }
}

}  // namespace
