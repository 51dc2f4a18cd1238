// XXH3 stripes with AVX2: eight 64-bit lanes in two registers.
#include <immintrin.h>

#include <cstdint>

namespace {

struct Lanes {
  __m256i half[2];

  explicit Lanes(const uint64_t* from) {
    for (int i = 0; i < 2; ++i) half[i] = load(from + 4 * i);
  }
  void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 2; ++i) {
      const __m256i value = load(stripe + 32 * i), keyed = _mm256_xor_si256(value, load(secret + 32 * i));
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      half[i] = _mm256_add_epi64(_mm256_add_epi64(half[i], swapped), product);
    }
  }
  void scramble(const uint8_t* secret) {
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(0x9E3779B1U));
    for (int i = 0; i < 2; ++i) {
      const __m256i mixed = _mm256_xor_si256(half[i], _mm256_srli_epi64(half[i], 47));
      const __m256i keyed = _mm256_xor_si256(mixed, load(secret + 32 * i));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
      half[i] = _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64(high, 32));
    }
  }
  void store(uint64_t* to) const {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * i), half[i]);
  }

  static void copy(const uint8_t* stripe, uint8_t* target) {
    for (int i = 0; i < 2; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32 * i), load(stripe + 32 * i));
  }
  static void end_of_copies() { _mm_sfence(); }

  static __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
};

}  // namespace

#define STRIPES xxh3_stripes_avx2
#include "xxh3_stripes.inc"
