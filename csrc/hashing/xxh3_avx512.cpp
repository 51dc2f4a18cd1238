// XXH3 stripes with AVX-512: eight 64-bit lanes in one register.
// GCC 12's own header trips these warnings (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

namespace {

struct Lanes {
  __m512i all;

  explicit Lanes(const uint64_t* from) : all(_mm512_loadu_si512(from)) {}
  void add(const uint8_t* stripe, const uint8_t* secret) {
    const __m512i value = _mm512_loadu_si512(stripe), keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2)));
    all = _mm512_add_epi64(_mm512_add_epi64(all, swapped), product);
  }
  void scramble(const uint8_t* secret) {
    const __m512i mixed = _mm512_xor_si512(all, _mm512_srli_epi64(all, 47));
    all = _mm512_mullo_epi64(_mm512_xor_si512(mixed, _mm512_loadu_si512(secret)), _mm512_set1_epi64(0x9E3779B1LL));
  }
  void store(uint64_t* to) const { _mm512_storeu_si512(to, all); }
  static void copy(const uint8_t* stripe, uint8_t* target) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(stripe));
  }
  static void end_of_copies() { _mm_sfence(); }
};

}  // namespace

#define STRIPES xxh3_stripes_avx512
#include "xxh3_stripes.inc"
