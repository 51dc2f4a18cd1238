// How an op_mask becomes a Philox key, a threshold and counters; shared by the CPU and the CUDA kernels.
//
// Four neighbouring global features (a group) share one Philox block:
//   counter = (feature / 4, position, low word of sample, high word of sample); an element takes word feature % 4
// and is kept when that word is not below probability * 2^32.
#pragma once

#include "ops.h"
#include "philox.h"

struct MaskKey {
  uint32_t key0, key1, threshold;
  double scale;  // 1 / (1 - probability)
};

// The key is the Philox block of counter (step, layer, site) under the seed: distinct sites get unrelated streams.
static inline MaskKey mask_key(const op_mask& mask) {
  const Words words =
      philox(Words{static_cast<uint32_t>(mask.step), static_cast<uint32_t>(mask.step >> 32), mask.layer, mask.site},
             static_cast<uint32_t>(mask.seed), static_cast<uint32_t>(mask.seed >> 32));
  return MaskKey{words.v0, words.v1, static_cast<uint32_t>(mask.probability * 4294967296.0),
                 1.0 / (1.0 - mask.probability)};
}

static inline bool mask_is_valid(const op_mask& mask, int64_t num_samples, int64_t num_positions,
                                 int64_t num_features) {
  constexpr uint64_t kMaxPositions = 1ull << 32, kMaxFeatures = 1ull << 34;
  return num_samples >= 0 && num_positions >= 0 && num_features >= 0 && mask.probability >= 0 && mask.probability < 1 &&
         mask.first_position <= kMaxPositions &&
         static_cast<uint64_t>(num_positions) <= kMaxPositions - mask.first_position &&
         mask.first_feature <= kMaxFeatures && static_cast<uint64_t>(num_features) <= kMaxFeatures - mask.first_feature;
}

PHILOX_INLINE Words mask_words(const MaskKey& key, uint64_t sample, uint32_t position, uint32_t group) {
  return philox(Words{group, position, static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)}, key.key0,
                key.key1);
}
