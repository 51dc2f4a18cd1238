// XXH3, 64 bits: short inputs, the merge of long ones, and the choice of the instruction set.
#include "xxh3.h"

#include <cstring>

#include "../cpu.h"

namespace hashing {
namespace {

constexpr size_t kPiece = 256 * kBlockBytes;  // that a reader gets at once: a part of a core's L2 cache

uint64_t read32(const uint8_t* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t read64(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t rotate_left(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

uint64_t multiply_and_fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t xxh64_avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime64_2;
  hash = (hash ^ (hash >> 29)) * kPrime64_3;
  return hash ^ (hash >> 32);
}

uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ULL;
  return hash ^ (hash >> 32);
}

uint64_t mix16(const uint8_t* data, const uint8_t* secret, uint64_t seed) {
  return multiply_and_fold(read64(data) ^ (read64(secret) + seed), read64(data + 8) ^ (read64(secret + 8) - seed));
}

uint64_t hash_up_to_16(const uint8_t* data, size_t size, uint64_t seed) {
  if (size > 8) {
    const uint64_t low = read64(data) ^ ((read64(kSecret + 24) ^ read64(kSecret + 32)) + seed);
    const uint64_t high = read64(data + size - 8) ^ ((read64(kSecret + 40) ^ read64(kSecret + 48)) - seed);
    return avalanche(size + __builtin_bswap64(low) + high + multiply_and_fold(low, high));
  }
  if (size >= 4) {
    const uint64_t joined = read32(data + size - 4) + (read32(data) << 32);
    seed ^= static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32;
    uint64_t hash = joined ^ ((read64(kSecret + 8) ^ read64(kSecret + 16)) - seed);
    hash ^= rotate_left(hash, 49) ^ rotate_left(hash, 24);
    hash *= 0x9FB21C651E98DF25ULL;
    hash ^= (hash >> 35) + size;
    hash *= 0x9FB21C651E98DF25ULL;
    return hash ^ (hash >> 28);
  }
  if (size > 0) {
    const uint64_t joined = static_cast<uint64_t>(data[0]) << 16 | static_cast<uint64_t>(data[size >> 1]) << 24 |
                            data[size - 1] | static_cast<uint64_t>(size) << 8;
    return xxh64_avalanche(joined ^ ((read32(kSecret) ^ read32(kSecret + 4)) + seed));
  }
  return xxh64_avalanche(seed ^ read64(kSecret + 56) ^ read64(kSecret + 64));
}

uint64_t hash_up_to_128(const uint8_t* data, size_t size, uint64_t seed) {
  uint64_t hash = size * kPrime64_1;
  for (size_t pair = (size - 1) / 32 + 1; pair-- > 0;) {
    hash += mix16(data + 16 * pair, kSecret + 32 * pair, seed);
    hash += mix16(data + size - 16 * (pair + 1), kSecret + 32 * pair + 16, seed);
  }
  return avalanche(hash);
}

uint64_t hash_up_to_240(const uint8_t* data, size_t size, uint64_t seed) {
  uint64_t hash = size * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) hash += mix16(data + 16 * i, kSecret + 16 * i, seed);
  hash = avalanche(hash);
  for (size_t i = 8; i < size / 16; ++i) hash += mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3, seed);
  return avalanche(hash + mix16(data + size - 16, kSecret + 136 - 17, seed));
}

decltype(&xxh3_stripes_base) stripes_for(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return xxh3_stripes_avx512;
  if (simd == Simd::avx2) return xxh3_stripes_avx2;
#endif
  static_cast<void>(simd);
  return xxh3_stripes_base;
}

uint64_t hash_long(const uint8_t* data, size_t size, Simd simd, uint8_t* target, const Reader* reader) {
  uint64_t lanes[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const auto stripes = stripes_for(simd);
  const auto hash = [&](size_t start, size_t part, bool is_end) {
    uint8_t* const to = target != nullptr ? target + start : nullptr;
    stripes(data + start, part, lanes, to, is_end);
    if (reader != nullptr) reader->read(reader->context, data + start, part);
  };
  size_t done = 0;
  for (; reader != nullptr && size - done > kPiece; done += kPiece) hash(done, kPiece, false);
  hash(done, size - done, true);
  uint64_t merged = size * kPrime64_1;
  for (int i = 0; i < 8; i += 2) {
    const uint8_t* const secret = kSecret + 11 + 8 * i;
    merged += multiply_and_fold(lanes[i] ^ read64(secret), lanes[i + 1] ^ read64(secret + 8));
  }
  return avalanche(merged);
}

}  // namespace

Simd best_simd() { return static_cast<Simd>(cpu::widest_simd()); }

uint64_t xxh3_64(const void* data, size_t size, Simd simd, void* target, const Reader* reader) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  if (size > 240) return hash_long(bytes, size, simd, static_cast<uint8_t*>(target), reader);
  if (target != nullptr) std::memcpy(target, data, size);
  if (reader != nullptr) reader->read(reader->context, bytes, size);
  return xxh3_64_short(data, size, 0);
}

uint64_t xxh3_64_short(const void* data, size_t size, uint64_t seed) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
  if (size <= 16) return hash_up_to_16(bytes, size, seed);
  if (size <= 128) return hash_up_to_128(bytes, size, seed);
  return hash_up_to_240(bytes, size, seed);
}

uint64_t xxh3_64(const void* data, size_t size) { return xxh3_64(data, size, best_simd()); }

}  // namespace hashing
