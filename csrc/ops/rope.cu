// RoPE with QK-norm on CUDA; the formulas are in rope.inc.
//
// A block takes kHeads neighbouring heads of q, of k or of v, and walks over tokens; blocks of one token follow one
// another, so that they share the token's turns in the cache. Some lanes (a power of two, at most a warp) hold a head:
// each has a pack of its first half and the pack of its second half that turns with it, so a head is read once and
// stays in registers, and sums over a head are shuffles. Heads that are not made of whole, aligned packs, and longer
// ones, take a warp a head and one element at a time. Which form runs depends on no number of tokens, and the result of
// a token on no other token.
#include "rope.cuh"

namespace {

// A lane's part of a head: a pack of each half.
template <class T>
struct Part {
  static constexpr int kSize = kPackSize<T>;
  using Number = NumberOf<T>;
  using Values = Pack<T, kSize>;
  Values a, b;
  __device__ __forceinline__ void load(const T* head, int lane, int half) {
    a = *reinterpret_cast<const Values*>(head + lane * kSize);
    b = *reinterpret_cast<const Values*>(head + half + lane * kSize);
  }
  __device__ __forceinline__ void store(T* head, int lane, int half) const {
    *reinterpret_cast<Values*>(head + lane * kSize) = a;
    *reinterpret_cast<Values*>(head + half + lane * kSize) = b;
  }
};

// A lane's cosines and sines of a token.
template <class T>
struct Turn {
  using Number = NumberOf<T>;
  static constexpr int kSize = kPackSize<T>;
  using Values = Pack<Number, kSize>;
  Values cosine, sine;
  __device__ __forceinline__ void load(const Number* turns, int lane, int half) {
    cosine = *reinterpret_cast<const Values*>(turns + lane * kSize);
    sine = *reinterpret_cast<const Values*>(turns + half + lane * kSize);
  }
};

template <class T, int kHeads, bool kNorm>
__global__ void __launch_bounds__(kThreads) rope_forward(const Rope<T> rope) {
  using Number = NumberOf<T>;
  constexpr int kSize = kPackSize<T>;
  const Block block = block_of<kHeads>(rope);
  const int half = rope.head_size / 2, lanes = 1 << rope.lane_bits, lane = threadIdx.x & (lanes - 1);
  const bool in_head = lane * kSize < half;
  const int tokens = kThreads >> rope.lane_bits;  // at once
  Part<T> weight{};
  if (kNorm && in_head) weight.load(rope.weights[block.kind], lane, half);
  for (int64_t start = static_cast<int64_t>(blockIdx.y) * tokens; start < rope.num_tokens;
       start += static_cast<int64_t>(gridDim.y) * tokens) {
    const int64_t token = start + (threadIdx.x >> rope.lane_bits);
    const bool is_on = in_head && token < rope.num_tokens;
    Part<T> x[kHeads] = {};
    Turn<T> turn{};
    if (is_on) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        if (h < block.count) x[h].load(head_at(rope, block, token, h), lane, half);
      if (rope.turns) turn.load(rope.turns + token * rope.head_size, lane, half);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      Number a[kSize], b[kSize], k = 1;
#pragma unroll
      for (int e = 0; e < kSize; ++e) a[e] = x[h].a.get(e), b[e] = x[h].b.get(e);
      if (kNorm) {
        Number squares = 0;
#pragma unroll
        for (int e = 0; e < kSize; ++e) squares += a[e] * a[e] + b[e] * b[e];
        k = rsqrt(sum_over_lanes(squares, lanes) / rope.head_size + rope.eps);
#pragma unroll
        for (int e = 0; e < kSize; ++e) a[e] *= k * weight.a.get(e), b[e] *= k * weight.b.get(e);
      }
      if (rope.turns)
#pragma unroll
        for (int e = 0; e < kSize; ++e) turn_pair(a[e], b[e], turn.cosine.get(e), turn.sine.get(e));
      if (is_on && h < block.count) {
        x[h].a.set(a), x[h].b.set(b);
        x[h].store(rope.to + token * rope.to_stride + static_cast<int64_t>(block.place + h) * rope.head_size, lane,
                   half);
      }
    }
  }
}

// Adds the sums of a block's threads that hold the same elements, in a fixed order, into its row of the partials.
template <class T>
__device__ __forceinline__ void store_sums(const Rope<T>& rope, const NumberOf<T> (&sums)[2][kPackSize<T>]) {
  using Number = NumberOf<T>;
  constexpr int kSize = kPackSize<T>;
  __shared__ Number shared[kThreads][2 * kSize + 1];
#pragma unroll
  for (int e = 0; e < 2 * kSize; ++e) shared[threadIdx.x][e] = sums[e / kSize][e % kSize];
  __syncthreads();
  const int half = rope.head_size / 2, lanes = 1 << rope.lane_bits;
  Number* const partial =
      rope.partials + (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * rope.head_size;
  for (int i = threadIdx.x; i < rope.head_size; i += kThreads) {
    const int in_half = i % half, column = in_half % kSize + (i < half ? 0 : kSize);
    Number sum = 0;
    for (int thread = in_half / kSize; thread < kThreads; thread += lanes) sum += shared[thread][column];
    partial[i] = sum;
  }
}

template <class T, int kHeads, bool kNorm>
__global__ void __launch_bounds__(kThreads, kNorm ? 2 : 3) rope_backward(const Rope<T> rope) {
  using Number = NumberOf<T>;
  constexpr int kSize = kPackSize<T>;
  const Block block = block_of<kHeads>(rope);
  const bool is_turned = rope.turns && block.kind < 2, is_normed = kNorm && block.kind < 2;
  const int half = rope.head_size / 2, lanes = 1 << rope.lane_bits, lane = threadIdx.x & (lanes - 1);
  const bool in_head = lane * kSize < half;
  const int tokens = kThreads >> rope.lane_bits;
  Part<T> weight{};
  if (is_normed && in_head) weight.load(rope.weights[block.kind], lane, half);
  Number sums[2][kSize] = {};
  for (int64_t start = static_cast<int64_t>(blockIdx.y) * tokens; start < rope.num_tokens;
       start += static_cast<int64_t>(gridDim.y) * tokens) {
    const int64_t token = start + (threadIdx.x >> rope.lane_bits);
    const bool is_on = in_head && token < rope.num_tokens;
    const int64_t row = token * rope.to_stride + static_cast<int64_t>(block.place) * rope.head_size;
    Part<T> dy[kHeads] = {}, x[kHeads] = {};
    Turn<T> turn{};
    if (is_on) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        if (h < block.count) {
          dy[h].load(head_at(rope, block, token, h), lane, half);
          if (is_normed) x[h].load(rope.x + row + h * rope.head_size, lane, half);
        }
      if (is_turned) turn.load(rope.turns + token * rope.head_size, lane, half);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (block.kind < 2) {
        Number a[kSize], b[kSize];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          a[e] = dy[h].a.get(e), b[e] = dy[h].b.get(e);
          if (is_turned) turn_pair(a[e], b[e], turn.cosine.get(e), -turn.sine.get(e));
        }
        if (kNorm) {
          Number squares = 0, dot = 0;
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            const Number x_a = x[h].a.get(e), x_b = x[h].b.get(e);
            squares += x_a * x_a + x_b * x_b;
            dot += a[e] * weight.a.get(e) * x_a + b[e] * weight.b.get(e) * x_b;
          }
          const Number k = rsqrt(sum_over_lanes(squares, lanes) / rope.head_size + rope.eps);
          const Number c = sum_over_lanes(dot, lanes) * k * k / rope.head_size;
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            const Number x_a = x[h].a.get(e), x_b = x[h].b.get(e);
            sums[0][e] += a[e] * x_a * k, sums[1][e] += b[e] * x_b * k;
            a[e] = k * (a[e] * weight.a.get(e) - c * x_a), b[e] = k * (b[e] * weight.b.get(e) - c * x_b);
          }
        }
        dy[h].a.set(a), dy[h].b.set(b);
      }
      if (is_on && h < block.count) dy[h].store(rope.to + row + h * rope.head_size, lane, half);
    }
  }
  if (kNorm) store_sums<T>(rope, sums);
}

// dweights [2, head_size] of the rows of partials, q's first: 32 columns a block, 32 sums a column, in a fixed order.
template <class Number>
__global__ void __launch_bounds__(1024) add_weight_partials(const Number* __restrict__ partials, Number* dweights,
                                                            int q_rows, int k_rows, int head_size) {
  __shared__ Number sums[32][33];
  const int col = blockIdx.x * 32 + threadIdx.x, first = blockIdx.y == 0 ? 0 : q_rows;
  const int rows = blockIdx.y == 0 ? q_rows : k_rows;
  Number sum = 0;
  if (col < head_size)
    for (int row = threadIdx.y; row < rows; row += 32)
      sum += partials[static_cast<int64_t>(first + row) * head_size + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= head_size) return;
  for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
  dweights[blockIdx.y * head_size + col] = sum;
}

constexpr int kForwardHeads = 4, kBackwardHeads = 4, kNormBackwardHeads = 2;  // a block

int groups_of(int64_t num_heads, int heads) { return static_cast<int>((num_heads + heads - 1) / heads); }

// How many blocks walk over the tokens of each group of heads. With weights each has its own sums, so they are few.
constexpr int kSumBlocks = 6;  // a multiprocessor

unsigned blocks_a_group(const op_heads& heads, int64_t tokens_a_block, int num_groups, bool has_sums) {
  const int64_t blocks = (heads.num_tokens + tokens_a_block - 1) / tokens_a_block;
  const int64_t few = kSumBlocks * num_multiprocessors() / num_groups, most = has_sums ? few + 1 : 65535;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

template <class T>
Rope<T> rope_of(const op_heads& heads, bool has_weights) {
  Rope<T> rope{};
  rope.num_tokens = heads.num_tokens;
  rope.head_size = static_cast<int>(heads.head_size);
  rope.num_heads[0] = static_cast<int>(heads.num_heads);
  rope.num_heads[1] = rope.num_heads[2] = static_cast<int>(heads.num_kv_heads);
  while ((kPackSize<T> << rope.lane_bits) < rope.head_size / 2) ++rope.lane_bits;
  rope.turns = static_cast<const NumberOf<T>*>(heads.turns);
  if (has_weights) {
    rope.weights[0] = static_cast<const T*>(heads.q_weight);
    rope.weights[1] = static_cast<const T*>(heads.k_weight);
  }
  rope.eps = static_cast<NumberOf<T>>(heads.eps);
  return rope;
}

// Whether heads are whole packs in aligned places, and no longer than a warp's lanes hold.
template <class T, class... Strides>
bool takes_packs(const Rope<T>& rope, bool aligned, Strides... strides) {
  return aligned && rope.head_size % (2 * kPackSize<T>) == 0 && rope.lane_bits <= 5 &&
         ((strides % kPackSize<T> == 0) && ...);
}

}  // namespace

int op_rope_forward_cuda(int dtype, const op_heads* heads, const void* qkv, void* out, int64_t out_stride,
                         void* stream) {
  if (!heads_are_valid(*heads)) return OP_BAD_ARGUMENT;
  if (heads->num_tokens == 0 || heads->num_heads + heads->num_kv_heads == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const bool has_weights = heads->q_weight != nullptr;
    Rope<T> rope = rope_of<T>(*heads, has_weights);
    const auto packed = static_cast<const T*>(qkv);
    const int64_t row = (heads->num_heads + 2 * heads->num_kv_heads) * heads->head_size;
    for (int kind = 0; kind < 2; ++kind) {
      rope.from[kind] = packed + (kind == 0 ? 0 : heads->num_heads * heads->head_size);
      rope.from_token_stride[kind] = row, rope.from_head_stride[kind] = heads->head_size;
    }
    rope.to = static_cast<T*>(out), rope.to_stride = out_stride;
    const auto queue = static_cast<cudaStream_t>(stream);
    const bool aligned = are_aligned(qkv, out, heads->turns, heads->q_weight, heads->k_weight);
    const bool in_packs = takes_packs(rope, aligned, out_stride);
    const int size = in_packs ? kForwardHeads : 1;
    const int groups = groups_of(heads->num_heads, size) + groups_of(heads->num_kv_heads, size);
    const int64_t tokens = in_packs ? kThreads >> rope.lane_bits : kWarps;
    const dim3 grid(groups, blocks_a_group(*heads, tokens, groups, false));
    const auto packs = has_weights ? rope_forward<T, kForwardHeads, true> : rope_forward<T, kForwardHeads, false>;
    const auto any = has_weights ? rope_forward_any<T, true> : rope_forward_any<T, false>;
    const auto run = in_packs ? packs : any;
    run<<<grid, kThreads, 0, queue>>>(rope);
    return launch_status();
  });
}

int64_t op_rope_partials_cuda(const op_heads* heads) {  // of the form with the smallest groups and a row a warp
  const int64_t groups = heads->num_heads + 2 * heads->num_kv_heads;
  return kWarps * (kSumBlocks * static_cast<int64_t>(num_multiprocessors()) + groups);
}

int op_rope_backward_cuda(int dtype, const op_heads* heads, const op_head_gradients* gradients, const void* qkv,
                          void* dqkv, void* dweights, void* partials, void* stream) {
  if (!heads_are_valid(*heads)) return OP_BAD_ARGUMENT;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    using Number = NumberOf<T>;
    const bool has_weights = heads->q_weight != nullptr;
    Rope<T> rope = rope_of<T>(*heads, has_weights);
    const op_head_gradients& g = *gradients;
    const void* const from[3] = {g.dq, g.dk, g.dv};
    const int64_t token_strides[3] = {g.q_token_stride, g.k_token_stride, g.v_token_stride};
    const int64_t head_strides[3] = {g.q_head_stride, g.k_head_stride, g.v_head_stride};
    for (int kind = 0; kind < 3; ++kind) {
      rope.from[kind] = static_cast<const T*>(from[kind]);
      rope.from_token_stride[kind] = token_strides[kind], rope.from_head_stride[kind] = head_strides[kind];
    }
    rope.to = static_cast<T*>(dqkv);
    rope.to_stride = (heads->num_heads + 2 * heads->num_kv_heads) * heads->head_size;
    rope.x = has_weights ? static_cast<const T*>(qkv) : nullptr;
    rope.partials = static_cast<Number*>(partials);
    const auto queue = static_cast<cudaStream_t>(stream);
    const bool aligned = are_aligned(g.dq, g.dk, g.dv, dqkv, rope.x, heads->turns, heads->q_weight, heads->k_weight);
    const bool in_packs = takes_packs(rope, aligned, g.q_token_stride, g.q_head_stride, g.k_token_stride,
                                      g.k_head_stride, g.v_token_stride, g.v_head_stride);
    const int size = !in_packs ? 1 : has_weights ? kNormBackwardHeads : kBackwardHeads;
    const int q_groups = groups_of(heads->num_heads, size), k_groups = groups_of(heads->num_kv_heads, size);
    const int groups = q_groups + 2 * k_groups;
    const int64_t tokens = in_packs ? kThreads >> rope.lane_bits : kWarps;
    const unsigned blocks = blocks_a_group(*heads, tokens, groups > 0 ? groups : 1, has_weights);
    if (blocks > 0 && groups > 0) {
      const auto packs =
          has_weights ? rope_backward<T, kNormBackwardHeads, true> : rope_backward<T, kBackwardHeads, false>;
      const auto any = has_weights ? rope_backward_any<T, true> : rope_backward_any<T, false>;
      const auto run = in_packs ? packs : any;
      run<<<dim3(groups, blocks), kThreads, 0, queue>>>(rope);
      if (const int status = launch_status(); status != 0) return status;
    }
    if (!has_weights) return 0;
    const int rows = static_cast<int>(blocks) * (in_packs ? 1 : kWarps);
    const dim3 grid(static_cast<unsigned>((heads->head_size + 31) / 32), 2);
    add_weight_partials<Number><<<grid, dim3(32, 32), 0, queue>>>(
        rope.partials, static_cast<Number*>(dweights), q_groups * rows, k_groups * rows, rope.head_size);
    return launch_status();
  });
}
