// What kernels that update masters share: roundings that are never fused, pointers out of tables, and the three ways that
// masters are kept: wide ones with a weight of 16 bits beside them or none, and split ones.
#pragma once

#include "device.cuh"
#include "split.h"

namespace {

__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }

// A pointer out of a table, to element `begin`; the compiler does not see by itself that it is into global memory.
template <class T, class Pointer>
__device__ __forceinline__ T* global(Pointer pointer, int64_t begin) {
  __builtin_assume(__isGlobal(pointer));
  return static_cast<T*>(pointer) + begin;
}

template <class Pointer>
__device__ __forceinline__ bool is_aligned(Pointer pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// The masters of a pack; `published` is where its weights are in 16 bits, or null.
template <int kSize, class Number, class Weight>
__device__ __forceinline__ void load_masters(const Number* master, const Weight*, Number (&values)[kSize]) {
  const auto pack = *reinterpret_cast<const Pack<Number, kSize>*>(master);
#pragma unroll
  for (int e = 0; e < kSize; ++e) values[e] = pack.v[e];
}
template <int kSize>
__device__ __forceinline__ void load_masters(const int16_t* master, const Bf16* published, float (&values)[kSize]) {
  const auto low = *reinterpret_cast<const Pack<int16_t, kSize>*>(master);
  const auto high = *reinterpret_cast<const Pack<Bf16, kSize>*>(published);
#pragma unroll
  for (int e = 0; e < kSize; ++e) values[e] = __uint_as_float(joined(__bfloat16_as_ushort(high.v[e]), low.v[e]));
}
template <int kSize, class Weight>
__device__ __forceinline__ void publish(Weight* published, const float (&values)[kSize]) {
  Pack<Weight, kSize> rounded;
  rounded.set(values);
  *reinterpret_cast<Pack<Weight, kSize>*>(published) = rounded;
}
template <int kSize, class Number, class Weight>
__device__ __forceinline__ void store_masters(Number* master, Weight* published, Number (&values)[kSize]) {
  Pack<Number, kSize> pack;
  pack.set(values);
  *reinterpret_cast<Pack<Number, kSize>*>(master) = pack;
  if constexpr (sizeof(Number) == sizeof(float)) {
    if (published) publish(published, values);
  }
}
template <int kSize>
__device__ __forceinline__ void store_masters(int16_t* master, Bf16* published, float (&values)[kSize]) {
  Pack<int16_t, kSize> low;
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
    const uint32_t bits = not_halfway(__float_as_uint(values[e]));
    values[e] = __uint_as_float(bits);
    low.v[e] = static_cast<int16_t>(bits);
  }
  *reinterpret_cast<Pack<int16_t, kSize>*>(master) = low;
  publish(published, values);
}

}  // namespace
