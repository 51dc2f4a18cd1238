// CRC-64: eight tables a word in portable C++, 128 bytes a turn where the CPU multiplies without carry.
#include "crc64.h"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../cpu.h"

namespace ckptkit {
namespace {

constexpr uint64_t kPolynomial = 0x9A6C9329AC4BC9B5ULL;  // of CRC-64/NVME, bits reversed
constexpr uint64_t kOne = uint64_t{1} << 63;

constexpr uint64_t times_x(uint64_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

constexpr uint64_t multiply_bits(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  for (; a != 0; a <<= 1, b = times_x(b)) product ^= a & kOne ? b : 0;
  return product;
}

constexpr uint64_t power_of_x(uint64_t exponent) {
  uint64_t product = kOne;
  for (uint64_t square = kOne >> 1; exponent != 0; exponent >>= 1, square = multiply_bits(square, square))
    if (exponent & 1) product = multiply_bits(product, square);
  return product;
}

// [k][b]: the CRC of byte b and k zero bytes.
constexpr auto make_tables() {
  std::array<std::array<uint64_t, 256>, 8> tables{};
  for (uint64_t byte = 0; byte < 256; ++byte) {
    uint64_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}
constexpr auto kTables = make_tables();

// [k]: x^(8 * 2^k).
constexpr auto make_shifts() {
  std::array<uint64_t, 60> shifts{power_of_x(8)};
  for (size_t k = 1; k < shifts.size(); ++k) shifts[k] = multiply_bits(shifts[k - 1], shifts[k - 1]);
  return shifts;
}
constexpr auto kShifts = make_shifts();

uint64_t of_word(uint64_t word) {  // the CRC of its eight bytes: the word times x^64
  uint64_t crc = 0;
  for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 255];
  return crc;
}

uint64_t append(uint64_t crc, const uint8_t* data, size_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    crc = of_word(crc ^ word);
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
#define CARRYLESS __attribute__((target("pclmul,sse4.1")))
using Words = __m128i;  // a low word and a high one

CARRYLESS inline Words of_words(uint64_t low, uint64_t high) {
  return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}
CARRYLESS inline Words load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const Words*>(from)); }
CARRYLESS inline Words plus(Words a, Words b) { return _mm_xor_si128(a, b); }
CARRYLESS inline Words product_of_low(Words a, Words b) { return _mm_clmulepi64_si128(a, b, 0x00); }
CARRYLESS inline Words product_of_high(Words a, Words b) { return _mm_clmulepi64_si128(a, b, 0x11); }
CARRYLESS inline uint64_t low_word(Words words) { return static_cast<uint64_t>(_mm_cvtsi128_si64(words)); }
CARRYLESS inline uint64_t high_word(Words words) { return static_cast<uint64_t>(_mm_extract_epi64(words, 1)); }
#elif defined(__aarch64__)
#define CARRYLESS __attribute__((target("+aes")))
using Words = uint64x2_t;

CARRYLESS inline Words of_words(uint64_t low, uint64_t high) { return Words{low, high}; }
CARRYLESS inline Words load(const uint8_t* from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }
CARRYLESS inline Words plus(Words a, Words b) { return veorq_u64(a, b); }
CARRYLESS inline Words product_of_low(Words a, Words b) {
  return vreinterpretq_u64_p128(vmull_p64(vgetq_lane_u64(a, 0), vgetq_lane_u64(b, 0)));
}
CARRYLESS inline Words product_of_high(Words a, Words b) {
  return vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(a), vreinterpretq_p64_u64(b)));
}
CARRYLESS inline uint64_t low_word(Words words) { return vgetq_lane_u64(words, 0); }
CARRYLESS inline uint64_t high_word(Words words) { return vgetq_lane_u64(words, 1); }
#endif

#if defined(CARRYLESS)
// Of 128 bits the low word weighs x^64 more; a product of words is one x too much, which the constants make up for.
template <uint64_t kBits>
CARRYLESS inline Words times_power(Words value) {
  constexpr uint64_t low = power_of_x(kBits + 63), high = power_of_x(kBits - 1);
  const Words powers = of_words(low, high);
  return plus(product_of_low(value, powers), product_of_high(value, powers));
}

CARRYLESS uint64_t crc64_carryless(const uint8_t* data, size_t size) {
  constexpr size_t kLanes = 8, kTurn = 16 * kLanes;
  Words all = load(data);
  if (size < 2 * kTurn) {
    data += 16, size -= 16;
  } else {
    Words lanes[kLanes];
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = load(data + 16 * i);
    for (data += kTurn, size -= kTurn; size >= kTurn; data += kTurn, size -= kTurn)
      for (size_t i = 0; i < kLanes; ++i) lanes[i] = plus(times_power<8 * kTurn>(lanes[i]), load(data + 16 * i));
    all = lanes[0];
    for (size_t i = 1; i < kLanes; ++i) all = plus(times_power<128>(all), lanes[i]);
  }
  for (; size >= 16; data += 16, size -= 16) all = plus(times_power<128>(all), load(data));
  return append(of_word(of_word(low_word(all)) ^ high_word(all)), data, size);
}

CARRYLESS uint64_t multiply_carryless(uint64_t a, uint64_t b) {
  const Words product = product_of_low(of_words(a, 0), of_words(b, 0));
  const uint64_t low = low_word(product), high = high_word(product);
  return of_word(low << 1) ^ (high << 1 | low >> 63);
}
#endif

}  // namespace

bool has_carryless() { return cpu::has_carryless(); }

uint64_t crc64(const uint8_t* data, size_t size, bool carryless) {
#if defined(CARRYLESS)
  if (carryless && size >= 16) return crc64_carryless(data, size);
#endif
  static_cast<void>(carryless);
  return append(0, data, size);
}

uint64_t crc64_multiply(uint64_t a, uint64_t b, bool carryless) {
#if defined(CARRYLESS)
  if (carryless) return multiply_carryless(a, b);
#endif
  static_cast<void>(carryless);
  return multiply_bits(a, b);
}

uint64_t crc64_shift(uint64_t bytes) {
  uint64_t product = kOne;
  for (size_t k = 0; bytes != 0; ++k, bytes >>= 1)
    if (bytes & 1) product = crc64_multiply(product, kShifts[k]);
  return product;
}

}  // namespace ckptkit
