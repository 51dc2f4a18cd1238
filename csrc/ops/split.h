// A split master: an fp32 number as the bf16 that it rounds to, to nearest and ties to even, and its low 16 bits.
//
// Read as a signed number, the low bits added to the bf16 above them are the fp32 again, but for numbers halfway between
// two bf16, of which one bit would be missing. So such a number first goes one unit toward the bf16 that it rounds to.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define SPLIT_INLINE __device__ __forceinline__
#else
#define SPLIT_INLINE static inline
#endif

// The bits of the fp32; `high` are those of the bf16.
SPLIT_INLINE uint32_t joined(uint16_t high, int16_t low) {
  return (static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low));
}

// The bits of the fp32, or of its neighbour if it is halfway between two bf16; the low 16 of them are the low half.
SPLIT_INLINE uint32_t not_halfway(uint32_t bits) {
  const uint32_t is_halfway = (bits & 0xffffu) == 0x8000u, goes_up = bits >> 16 & 1;  // to the even one
  return bits + is_halfway * (2 * goes_up - 1);
}
