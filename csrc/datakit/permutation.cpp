// The keyed permutation: a Feistel network over num_bits bits, repeated until the value is below the size.
#include <algorithm>
#include <bit>
#include <charconv>
#include <iterator>

#include "../hashing/xxh3.h"
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
uint64_t encrypt(const uint64_t* keys, int num_bits, uint64_t value) {
  int left_bits = num_bits / 2;
  int right_bits = num_bits - left_bits;
  uint64_t left = value >> right_bits;
  uint64_t right = value & mask(right_bits);
  for (int round = 0; round < DK_NUM_ROUNDS; ++round) {
    const uint64_t mixed = left ^ (mix(right ^ keys[round]) & mask(left_bits));
    left = right;
    right = mixed;
    std::swap(left_bits, right_bits);
  }
  return left << right_bits | right;
}

uint64_t element_at(const uint64_t* keys, uint64_t size, uint64_t position) {
  const int num_bits = std::max(2, static_cast<int>(std::bit_width(size - 1)));
  uint64_t value = position;
  do {
    value = encrypt(keys, num_bits, value);
  } while (value >= size);
  return value;
}

}  // namespace

void dk_permute(const dk_place* places, int64_t num_places, uint64_t* elements) {
  for (int64_t i = 0; i < num_places; ++i) {
    const dk_place& place = places[i];
    elements[i] = element_at(place.keys, place.size, place.position);
  }
}

void dk_elements(const dk_epochs* epochs, const int64_t* sources, const int64_t* numbers, int64_t count,
                 int64_t* elements) {
  for (int64_t i = 0; i < count; ++i) {
    const dk_epochs& source = epochs[sources[i]];
    char name[240];
    char* end = std::copy_n(source.before, source.before_bytes, name);
    end = std::to_chars(end, std::end(name), numbers[i] / source.size).ptr;
    end = std::copy_n(source.after, source.after_bytes, end);
    uint64_t keys[DK_NUM_ROUNDS];
    for (int round = 0; round < DK_NUM_ROUNDS; ++round) keys[round] = hashing::xxh3_64_short(name, end - name, round);
    elements[i] = static_cast<int64_t>(element_at(keys, source.size, numbers[i] % source.size));
  }
}
