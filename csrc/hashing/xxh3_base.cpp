// XXH3 stripes in portable C++.
#include <cstdint>
#include <cstring>

namespace {

inline uint64_t read64(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

struct Lanes {
  uint64_t lane[8];

  explicit Lanes(const uint64_t* from) { std::memcpy(lane, from, sizeof lane); }
  void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t value = read64(stripe + 8 * i), keyed = value ^ read64(secret + 8 * i);
      lane[i ^ 1] += value;
      lane[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
  }
  void scramble(const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) lane[i] = (lane[i] ^ (lane[i] >> 47) ^ read64(secret + 8 * i)) * 0x9E3779B1U;
  }
  void store(uint64_t* to) const { std::memcpy(to, lane, sizeof lane); }
  static void copy(const uint8_t* stripe, uint8_t* target) { std::memcpy(target, stripe, 64); }
  static void end_of_copies() {}
};

}  // namespace

#define STRIPES xxh3_stripes_base
#include "xxh3_stripes.inc"
