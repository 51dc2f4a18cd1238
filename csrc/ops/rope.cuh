// What the two forms of RoPE on CUDA share, and the form for any head: a warp each, one element at a time.
#pragma once

#include "device.cuh"
#include "heads.h"

namespace {

constexpr int kThreads = 256;

// What the kernels read and write. `kind` is 0 for q, 1 for k, 2 for v.
template <class T>
struct Rope {
  using Number = NumberOf<T>;
  int64_t num_tokens;
  int num_heads[3], head_size, lane_bits;  // 1 << lane_bits lanes a head
  const Number* turns;
  const T* weights[2];
  Number eps;
  const T* from[3];  // the heads of a kind
  int64_t from_token_stride[3], from_head_stride[3];
  T* to;  // rows of heads, packed
  int64_t to_stride;
  const T* x;  // the backward's: qkv before the norm
  Number* partials;
};

// The heads [first, first + count) of one kind, which a block works on; `place` counts heads from q's first.
struct Block {
  int kind, first, count, place;
};

template <int kHeads, class T>
__device__ __forceinline__ Block block_of(const Rope<T>& rope) {
  int group = blockIdx.x, place = 0, kind = 0;
  for (; kind < 2; ++kind) {
    const int groups = (rope.num_heads[kind] + kHeads - 1) / kHeads;
    if (group < groups) break;
    group -= groups, place += rope.num_heads[kind];
  }
  const int first = group * kHeads, left = rope.num_heads[kind] - first;
  return {kind, first, left < kHeads ? left : kHeads, place + first};
}

template <class T>
__device__ __forceinline__ const T* head_at(const Rope<T>& rope, const Block& block, int64_t token, int head) {
  return rope.from[block.kind] + token * rope.from_token_stride[block.kind] +
         (block.first + head) * rope.from_head_stride[block.kind];
}

// The sum over the lanes of a head, in each of them; all lanes of the warp take part.
template <class Number>
__device__ __forceinline__ Number sum_over_lanes(Number value, int lanes) {
  for (int lane = lanes / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

template <class Number>
__device__ __forceinline__ void turn_pair(Number& a, Number& b, Number cosine, Number sine) {
  const Number before = a;
  a = fma(a, cosine, -(b * sine));
  b = fma(b, cosine, before * sine);
}

// Any head, a warp each, element by element; the warp's lanes keep to their elements, so it may work in place.
constexpr int kWarps = kThreads / 32;

template <class T>
__device__ __forceinline__ NumberOf<T> rstd_of(const Rope<T>& rope, const T* x) {
  NumberOf<T> squares = 0;
  for (int i = threadIdx.x % 32; i < rope.head_size; i += 32) squares += to_number(x[i]) * to_number(x[i]);
  return rsqrt(sum_over_lanes(squares, 32) / rope.head_size + rope.eps);
}

template <class T, bool kNorm>
__global__ void __launch_bounds__(kThreads) rope_forward_any(const Rope<T> rope) {
  using Number = NumberOf<T>;
  const Block block = block_of<1>(rope);
  const int half = rope.head_size / 2;
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / 32; token < rope.num_tokens;
       token += static_cast<int64_t>(gridDim.y) * kWarps) {
    const T* const x = head_at(rope, block, token, 0);
    T* const y = rope.to + token * rope.to_stride + static_cast<int64_t>(block.place) * rope.head_size;
    const Number* const turns = rope.turns ? rope.turns + token * rope.head_size : nullptr;
    const Number k = kNorm ? rstd_of(rope, x) : Number{1};
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      Number a = to_number(x[i]), b = to_number(x[half + i]);
      if (kNorm)
        a *= k * to_number(rope.weights[block.kind][i]), b *= k * to_number(rope.weights[block.kind][half + i]);
      if (turns) turn_pair(a, b, turns[i], turns[half + i]);
      round_to(y[i], a), round_to(y[half + i], b);
    }
  }
}

template <class T, bool kNorm>
__global__ void __launch_bounds__(kThreads) rope_backward_any(const Rope<T> rope) {
  using Number = NumberOf<T>;
  const Block block = block_of<1>(rope);
  const bool is_normed = kNorm && block.kind < 2;
  const int half = rope.head_size / 2;
  const T* const weight = is_normed ? rope.weights[block.kind] : nullptr;
  // a warp has a row of its own, and an element of it is always the same lane's
  Number* const partial =
      kNorm ? rope.partials + ((static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kWarps +
                               threadIdx.x / 32) * rope.head_size
            : nullptr;
  if (kNorm)
    for (int i = threadIdx.x % 32; i < half; i += 32) partial[i] = 0, partial[half + i] = 0;
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / 32; token < rope.num_tokens;
       token += static_cast<int64_t>(gridDim.y) * kWarps) {
    const T* const dy = head_at(rope, block, token, 0);
    const int64_t row = token * rope.to_stride + static_cast<int64_t>(block.place) * rope.head_size;
    const T* const x = is_normed ? rope.x + row : nullptr;
    const Number* const turns = rope.turns && block.kind < 2 ? rope.turns + token * rope.head_size : nullptr;
    const auto turned_back = [&](int i, Number& a, Number& b) {
      a = to_number(dy[i]), b = to_number(dy[half + i]);
      if (turns) turn_pair(a, b, turns[i], -turns[half + i]);
    };
    Number k = 1, c = 0, a, b;
    if (is_normed) {
      Number dot = 0;
      for (int i = threadIdx.x % 32; i < half; i += 32) {
        turned_back(i, a, b);
        dot += a * to_number(weight[i]) * to_number(x[i]) + b * to_number(weight[half + i]) * to_number(x[half + i]);
      }
      k = rstd_of(rope, x);
      c = sum_over_lanes(dot, 32) * k * k / rope.head_size;
    }
    for (int i = threadIdx.x % 32; i < half; i += 32) {
      turned_back(i, a, b);
      if (is_normed) {
        const Number x_a = to_number(x[i]), x_b = to_number(x[half + i]);
        partial[i] += a * x_a * k, partial[half + i] += b * x_b * k;
        a = k * (a * to_number(weight[i]) - c * x_a), b = k * (b * to_number(weight[half + i]) - c * x_b);
      }
      round_to(rope.to[row + i], a), round_to(rope.to[row + half + i], b);
    }
  }
}

}  // namespace
