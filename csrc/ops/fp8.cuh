// What the CUDA kernels of fp8 share: magnitudes, compared as the integers that their bits are, and scales made of the
// largest.
//
// Without its sign bit a number of any of the types is ordered as an integer, infinities and NaN above all others: a NaN
// is never lost, as it would be in a maximum of floats. Two numbers of 16 bits are compared at once.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace {

template <class T>
struct Magnitude {  // of 16 bits: two a word, the first in the low half
  static constexpr int kPerWord = 2;
  static __device__ __forceinline__ uint32_t of(uint32_t word) { return word & 0x7fff7fffu; }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  // The bits of the larger half as a float.
  static __device__ __forceinline__ uint32_t folded(uint32_t word) { return wide(larger(word, word >> 16) & 0xffffu); }
  // The bits of one number as a float.
  static __device__ __forceinline__ uint32_t wide(uint32_t bits);
};
template <>
__device__ __forceinline__ uint32_t Magnitude<Bf16>::wide(uint32_t bits) {
  return bits << 16;
}
template <>
__device__ __forceinline__ uint32_t Magnitude<Half>::wide(uint32_t bits) {
  return __float_as_uint(__half2float(__ushort_as_half(static_cast<uint16_t>(bits))));
}
template <>
struct Magnitude<float> {
  static constexpr int kPerWord = 1;
  static __device__ __forceinline__ uint32_t of(uint32_t word) { return word & 0x7fffffffu; }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static __device__ __forceinline__ uint32_t folded(uint32_t word) { return word; }
  static __device__ __forceinline__ uint32_t wide(uint32_t bits) { return bits; }
};

// The largest magnitude of a pack of four words, as a word of magnitudes.
template <class T>
__device__ __forceinline__ uint32_t largest_of(const uint4& pack) {
  using M = Magnitude<T>;
  return M::larger(M::larger(M::of(pack.x), M::of(pack.y)), M::larger(M::of(pack.z), M::of(pack.w)));
}

// Values are fp8 numbers times `decoding`; `inverse` takes a value to its fp8 number.
struct Scale {
  float decoding, inverse;
};

// The scale of a group whose largest magnitude has these bits as a float. For example 3 = 1.5 * 2^1 has 2^(1 + 1 - 9) in
// e4m3, whose limit is 0.875 * 2^9. A scale is never subnormal: its inverse would be infinite.
template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ Scale scale_of(uint32_t bits, bool pow2) {
  constexpr int kLimitExponent = kFormat == __NV_E4M3 ? 9 : 16;
  if (bits >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u)};
  if (bits == 0) return {1.0f, 1.0f};
  if (!pow2) {
    constexpr float kLimit = kFormat == __NV_E4M3 ? 448.0f : 57344.0f;
    const float decoding = fmaxf(__fdiv_rn(__uint_as_float(bits), kLimit), __uint_as_float(1u << 23));
    return {decoding, __fdiv_rn(1.0f, decoding)};
  }
  const int above = (bits & 0x7fffffu) > 0x600000u;  // more than 1.75, whose half is the 0.875 of the limit
  const int power = max(static_cast<int>(bits >> 23) - 126 - kLimitExponent + above, -126);
  return {__uint_as_float((power + 127) << 23), __uint_as_float((127 - power) << 23)};
}

}  // namespace
