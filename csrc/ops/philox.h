// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for host and device.
//
// Internal linkage on purpose: this is compiled once for each instruction set, and the linker must not merge the
// copies.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define PHILOX_INLINE static __host__ __device__ __forceinline__
#else
#define PHILOX_INLINE static inline __attribute__((always_inline))
#endif

struct Words {
  uint32_t v0, v1, v2, v3;
};

PHILOX_INLINE Words philox(Words counter, uint32_t key0, uint32_t key1) {
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(counter.v0) * 0xD2511F53u;
    const uint64_t product1 = static_cast<uint64_t>(counter.v2) * 0xCD9E8D57u;
    counter = Words{static_cast<uint32_t>(product1 >> 32) ^ counter.v1 ^ key0, static_cast<uint32_t>(product1),
                    static_cast<uint32_t>(product0 >> 32) ^ counter.v3 ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}
