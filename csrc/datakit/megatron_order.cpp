// The order of Megatron's datasets: shuffles as numpy's RandomState makes them, token counts, and the greedy blend.
//
// A shuffle draws all its numbers before it moves anything, some hundred at a time: memory is asked for long before it
// is changed. The Mersenne Twister is that of Matsumoto and Nishimura, 1998.
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "../calls.h"
#include "datakit.h"

namespace {

constexpr int kWords = 624, kShift = 397;
constexpr int64_t kAtOnce = 256;  // swaps, and lengths asked for ahead
constexpr int64_t kLanes = 4;

typedef double Lanes __attribute__((vector_size(32)));

class Twister {  // state: 624 words, and how many of them are used up
 public:
  explicit Twister(uint32_t* state) : words_(state) {}

  uint32_t next() {
    if (words_[kWords] >= kWords) refill();
    uint32_t word = words_[words_[kWords]++];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680U;
    word ^= (word << 15) & 0xefc60000U;
    return word ^ (word >> 18);
  }

 private:
  void refill() {
    const auto twist = [&](int at, int after, int from) {
      const uint32_t mixed = (words_[at] & 0x80000000U) | (words_[after] & 0x7fffffffU);
      words_[at] = words_[from] ^ (mixed >> 1) ^ (-(mixed & 1U) & 0x9908b0dfU);
    };
    for (int at = 0; at < kWords - kShift; ++at) twist(at, at + 1, at + kShift);
    for (int at = kWords - kShift; at < kWords - 1; ++at) twist(at, at + 1, at + kShift - kWords);
    twist(kWords - 1, 0, kShift - 1);
    words_[kWords] = 0;
  }

  uint32_t* words_;
};

#if defined(__x86_64__)
#define FOR_EACH_SIMD __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_SIMD
#endif

// The first source of those whose weight * sample - count is largest. Rounded as written: no multiply-add is fused
// (-ffp-contract=off).
FOR_EACH_SIMD int64_t most_wanted(const Lanes* weights, const Lanes* counts,
                                                                      int64_t num_blocks, double sample) {
  Lanes best = weights[0] * sample - counts[0], other = best;
  for (int64_t block = 1; block < num_blocks; block += 2) {
    const int64_t second = std::min(block + 1, num_blocks - 1);
    const Lanes one = weights[block] * sample - counts[block], two = weights[second] * sample - counts[second];
    best = one > best ? one : best;
    other = two > other ? two : other;
  }
  best = other > best ? other : best;
  const double most = std::max(std::max(best[0], best[1]), std::max(best[2], best[3]));
  for (int64_t block = 0;; ++block) {
    const Lanes found = weights[block] * sample - counts[block];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (found[lane] == most) return block * kLanes + lane;
    }
  }
}

}  // namespace

void dk_shuffle(uint32_t* state, uint32_t* values, int64_t num_values) {
  Twister twister(state);
  uint32_t drawn[kAtOnce];
  for (int64_t top = num_values - 1; top >= 1;) {
    const int64_t count = std::min(kAtOnce, top);
    for (int64_t number = 0; number < count;) {  // a number that is too large is drawn over
      const uint32_t last = static_cast<uint32_t>(top - number);
      drawn[number] = twister.next() & (~uint32_t{0} >> std::countl_zero(last));
      number += drawn[number] <= last;
    }
    for (int64_t number = 0; number < count; ++number) __builtin_prefetch(values + drawn[number], 1);
    for (int64_t number = 0; number < count; ++number) std::swap(values[top - number], values[drawn[number]]);
    top -= count;
  }
}

int64_t dk_token_starts(const int32_t* documents, int64_t num_places, const int32_t* lengths, int64_t first,
                        int64_t stride, int64_t* starts) {
  int64_t total = 0;
  for (int64_t place = 0; place < num_places; ++place) {
    if (place % stride == 0) *starts++ = total;
    const int64_t ahead = std::min(place + kAtOnce / 4, num_places - 1);
    __builtin_prefetch(lengths + (documents[ahead] - first));
    total += lengths[documents[place] - first];
  }
  *starts = total;
  return total;
}

int dk_greedy_blend(const double* weights, int64_t num_sources, int64_t num_samples, int64_t stride, uint16_t* sources,
                    int64_t* counts) {
  const int64_t num_blocks = (num_sources + kLanes - 1) / kLanes;
  if (num_sources < 1 || num_samples < 0 || stride < 1) return -EINVAL;
  if (!std::all_of(weights, weights + num_sources, [](double weight) { return std::isfinite(weight); })) return -EINVAL;
  return without_throw(-ENOMEM, [&] {
    std::vector<Lanes> weight(num_blocks), count(num_blocks);
    for (int64_t source = num_sources; source < num_blocks * kLanes; ++source) {
      count[source / kLanes][source % kLanes] = std::numeric_limits<double>::infinity();
    }
    for (int64_t source = 0; source < num_sources; ++source) {
      weight[source / kLanes][source % kLanes] = weights[source];
    }
    const auto note = [&] {
      for (int64_t source = 0; source < num_sources; ++source) {
        *counts++ = static_cast<int64_t>(count[source / kLanes][source % kLanes]);
      }
    };
    for (int64_t sample = 0; sample < num_samples; ++sample) {
      if (sample % stride == 0) note();
      const double place = std::max(static_cast<double>(sample), 1.0);
      const int64_t source = most_wanted(weight.data(), count.data(), num_blocks, place);
      sources[sample] = static_cast<uint16_t>(source);
      count[source / kLanes][source % kLanes] += 1.0;
    }
    note();
    return 0;
  });
}
