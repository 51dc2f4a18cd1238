// The keyed permutation: a Feistel network over num_bits bits, repeated until the value is below the size.
#include <algorithm>
#include <bit>

#include "datakit.h"

namespace {

// The finalizer of SplitMix64 (Steele et al. 2014): every input bit moves every output bit.
uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

uint64_t mask(int num_bits) { return (uint64_t{1} << num_bits) - 1; }

// One pass of the network: the halves swap places, and with them their widths, every round.
uint64_t encrypt(const uint64_t* keys, int64_t num_rounds, int num_bits, uint64_t value) {
  int left_bits = num_bits / 2;
  int right_bits = num_bits - left_bits;
  uint64_t left = value >> right_bits;
  uint64_t right = value & mask(right_bits);
  for (int64_t round = 0; round < num_rounds; ++round) {
    const uint64_t mixed = left ^ (mix(right ^ keys[round]) & mask(left_bits));
    left = right;
    right = mixed;
    std::swap(left_bits, right_bits);
  }
  return left << right_bits | right;
}

}  // namespace

void dk_permute(const dk_place* places, int64_t num_places, int64_t num_rounds, uint64_t* elements) {
  for (int64_t i = 0; i < num_places; ++i) {
    const dk_place& place = places[i];
    const int num_bits = std::max(2, static_cast<int>(std::bit_width(place.size - 1)));
    uint64_t value = place.position;
    do {
      value = encrypt(place.keys, num_rounds, num_bits, value);
    } while (value >= place.size);
    elements[i] = value;
  }
}
