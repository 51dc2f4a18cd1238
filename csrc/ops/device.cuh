// What the CUDA kernels share: storage types and the arithmetic they are computed in, packs of 16 bytes, launch errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ops.h"

using Bf16 = __nv_bfloat16;
using Half = __half;

template <class T>
struct Arithmetic {
  using Number = float;
};
template <>
struct Arithmetic<double> {
  using Number = double;
};
template <class T>
using NumberOf = typename Arithmetic<T>::Number;

__device__ __forceinline__ double to_number(double value) { return value; }
__device__ __forceinline__ float to_number(float value) { return value; }
__device__ __forceinline__ float to_number(Bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_number(Half value) { return __half2float(value); }
__device__ __forceinline__ void round_to(double& out, double value) { out = value; }
__device__ __forceinline__ void round_to(float& out, float value) { out = value; }
__device__ __forceinline__ void round_to(Bf16& out, float value) { out = __float2bfloat16_rn(value); }
__device__ __forceinline__ void round_to(Half& out, float value) { out = __float2half_rn(value); }

// Neighbouring elements that one thread loads and stores at once, at most 16 bytes an access.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  T v[kSize];
  __device__ __forceinline__ NumberOf<T> get(int e) const { return to_number(v[e]); }
  __device__ __forceinline__ void set(const NumberOf<T> (&values)[kSize]) {
#pragma unroll
    for (int e = 0; e < kSize; ++e) round_to(v[e], values[e]);
  }
};

// Eight bf16 or halves as four words: as eight elements, the compiler takes a register for each.
template <>
struct alignas(16) Pack<Bf16, 8> {
  uint32_t words[4];
  __device__ __forceinline__ float get(int e) const {
    return __uint_as_float(e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xffff0000u);
  }
  __device__ __forceinline__ void set(const float (&values)[8]) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[e], values[e + 1]);
      words[e / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

template <>
struct alignas(16) Pack<Half, 8> {
  uint32_t words[4];
  __device__ __forceinline__ float get(int e) const {
    const __half2& pair = reinterpret_cast<const __half2&>(words[e / 2]);
    return e % 2 == 0 ? __low2float(pair) : __high2float(pair);
  }
  __device__ __forceinline__ void set(const float (&values)[8]) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const __half2 pair = __floats2half2_rn(values[e], values[e + 1]);
      words[e / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

template <class T>
constexpr int kPackSize = 16 / sizeof(T);

template <class... Pointers>
bool are_aligned(Pointers... pointers) {  // to 16 bytes
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

// Calls body with a value of the storage type; returns its result.
template <class Body>
int with_dtype(int dtype, Body body) {
  switch (dtype) {
    case OP_F64: return body(double{});
    case OP_F32: return body(float{});
    case OP_BF16: return body(Bf16{});
    case OP_F16: return body(Half{});
    default: return OP_BAD_ARGUMENT;
  }
}

inline int launch_status() { return static_cast<int>(cudaGetLastError()); }

int num_multiprocessors();  // of the current device
