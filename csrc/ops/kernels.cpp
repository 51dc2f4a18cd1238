// Chooses the instruction set of the CPU loops at run time.
#include "kernels.h"

#include <algorithm>
#include <atomic>

#include "../cpu.h"

namespace {

std::atomic<int> limit{OP_SIMD_AVX512};

}  // namespace

int op_simd() { return std::min(cpu::widest_simd(), limit.load()); }

void op_limit_simd(int simd) { limit = simd; }

const Kernels& kernels() {
#if defined(__x86_64__)
  if (op_simd() == OP_SIMD_AVX512) return kernels_avx512;
  if (op_simd() == OP_SIMD_AVX2) return kernels_avx2;
#endif
  return kernels_base;
}
