// Tokens as they are on disk into int64, one function for each instruction set.
#pragma once

#include <stdint.h>

#include "../hashing/xxh3.h"

// Widens num_tokens tokens of 2 bytes, uint16, or of 4, int32; the source need not be aligned.
using Widen = void (*)(const uint8_t* source, int64_t bytes_a_token, int64_t num_tokens, int64_t* target);

void widen_base(const uint8_t* source, int64_t bytes_a_token, int64_t num_tokens, int64_t* target);
void widen_avx2(const uint8_t* source, int64_t bytes_a_token, int64_t num_tokens, int64_t* target);
void widen_avx512(const uint8_t* source, int64_t bytes_a_token, int64_t num_tokens, int64_t* target);

inline Widen widen_for(hashing::Simd simd) {
#if defined(__x86_64__)
  if (simd == hashing::Simd::avx512) return widen_avx512;
  if (simd == hashing::Simd::avx2) return widen_avx2;
#endif
  static_cast<void>(simd);
  return widen_base;
}
