// Chooses the instruction set of the CPU loops at run time.
#include "kernels.h"

#include <algorithm>
#include <atomic>

namespace {

int widest() {
  static const int simd = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
      return OP_SIMD_AVX512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? OP_SIMD_AVX2 : OP_SIMD_BASE;
  }();
  return simd;
}

std::atomic<int> limit{OP_SIMD_AVX512};

}  // namespace

int op_simd() { return std::min(widest(), limit.load()); }

void op_limit_simd(int simd) { limit = simd; }

const Kernels& kernels() {
  switch (op_simd()) {
    case OP_SIMD_AVX512: return kernels_avx512;
    case OP_SIMD_AVX2: return kernels_avx2;
    default: return kernels_base;
  }
}
