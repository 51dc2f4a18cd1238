// What this processor offers beyond what every file may use. On aarch64 that is NEON already, so one form is enough there.
#pragma once

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace cpu {

enum { base = 0, avx2 = 1, avx512 = 2 };

inline int widest_simd() {
#if defined(__x86_64__)
  static const int widest = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
      return avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2 : base;
  }();
  return widest;
#else
  return base;
#endif
}

// Whether it multiplies 64-bit polynomials without carry.
inline bool has_carryless() {
#if defined(__x86_64__)
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  }();
  return has;
#elif defined(__aarch64__)
  static const bool has = (getauxval(AT_HWCAP) & HWCAP_PMULL) != 0;
  return has;
#else
  return false;
#endif
}

}  // namespace cpu
