// XXH3 stripes in portable C++, and with NEON where that is every processor's.
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__aarch64__)
struct Lanes {
  uint64x2_t pair[4];

  explicit Lanes(const uint64_t* from) {
    for (int i = 0; i < 4; ++i) pair[i] = vld1q_u64(from + 2 * i);
  }
  void add(const uint8_t* stripe, const uint8_t* secret) {
    for (int i = 0; i < 4; ++i) {
      const uint64x2_t value = load(stripe + 16 * i), keyed = veorq_u64(value, load(secret + 16 * i));
      pair[i] = vaddq_u64(pair[i], vextq_u64(value, value, 1));
      pair[i] = vmlal_u32(pair[i], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
    }
  }
  void scramble(const uint8_t* secret) {
    const uint32x2_t prime = vdup_n_u32(0x9E3779B1U);
    for (int i = 0; i < 4; ++i) {
      const uint64x2_t mixed = veorq_u64(pair[i], vshrq_n_u64(pair[i], 47)), keyed = veorq_u64(mixed, load(secret + 16 * i));
      const uint64x2_t high = vmull_u32(vshrn_n_u64(keyed, 32), prime);
      pair[i] = vaddq_u64(vmull_u32(vmovn_u64(keyed), prime), vshlq_n_u64(high, 32));
    }
  }
  void store(uint64_t* to) const {
    for (int i = 0; i < 4; ++i) vst1q_u64(to + 2 * i, pair[i]);
  }
  static void copy(const uint8_t* stripe, uint8_t* target) { std::memcpy(target, stripe, 64); }
  static void end_of_copies() {}

  static uint64x2_t load(const uint8_t* from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }
};
#else
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
#endif

}  // namespace

#define STRIPES xxh3_stripes_base
#include "xxh3_stripes.inc"
