#include "granules.h"

#include <algorithm>
#include <cstring>
#include <optional>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../calls.h"
#include "block_io.h"
#include "../hashing/xxh3.h"
#include "crc64.h"

namespace ckptkit {
namespace {

// What was just verified is in the cache; where it goes is not, and need not be read into it to be overwritten.
void copy_past_cache(uint8_t* target, const uint8_t* source, uint64_t size) {
#if defined(__SSE2__)
  constexpr uint64_t kPastCache = 64 << 10;  // copies of this size and more would only push other things out of the cache
  if (size >= kPastCache) {
    const uint64_t head = -reinterpret_cast<uintptr_t>(target) % 64;
    std::memcpy(target, source, head);
    uint64_t at = head;
    for (; at + 64 <= size; at += 64) {
      for (int i = 0; i < 64; i += 16) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + at + i), value);
      }
    }
    _mm_sfence();
    std::memcpy(target + at, source + at, size - at);
    return;
  }
#endif
  std::memcpy(target, source, size);
}

}  // namespace

Wanted::Wanted(const ck_range* ranges, uint64_t num_ranges, const ck_chunks* chunks, const uint64_t* places)
    : ranges_(ranges), num_ranges_(num_ranges), chunks_(chunks), places_(places) {
  reach_.reserve(num_ranges);
  for (uint64_t i = 0; i < num_ranges; ++i) {
    const uint64_t end = ranges[i].offset_bytes + ranges[i].size_bytes;
    reach_.push_back(i ? std::max(reach_.back(), end) : end);
  }
}

bool Wanted::fits(uint64_t size_bytes) const {
  for (uint64_t i = 0; i < num_ranges_; ++i) {
    const uint64_t end = ranges_[i].offset_bytes + ranges_[i].size_bytes;
    if (end < ranges_[i].offset_bytes || end > size_bytes) return false;
    if (i && ranges_[i].offset_bytes < ranges_[i - 1].offset_bytes) return false;
  }
  return true;
}

uint64_t Wanted::place(const uint8_t* data, uint64_t start, uint64_t stop, const uint64_t* checksums) const {
  std::optional<Summer> summer;
  if (chunks_ != nullptr) summer.emplace(*chunks_, has_carryless());
  for (uint64_t at = start; at < stop; at += kGranule) {
    const uint64_t until = std::min(stop, at + kGranule);
    if (checksums != nullptr && hashing::xxh3_64(data + (at - start), until - at) != checksums[(at - start) / kGranule])
      return at / kGranule;
    copy(data + (at - start), at, until, summer ? &*summer : nullptr);
  }
  return kNoGranule;
}

void Wanted::copy(const uint8_t* data, uint64_t start, uint64_t stop, Summer* summer) const {
  for (uint64_t i = std::upper_bound(reach_.begin(), reach_.end(), start) - reach_.begin();
       i < num_ranges_ && ranges_[i].offset_bytes < stop; ++i) {
    const uint64_t from = std::max(start, ranges_[i].offset_bytes);
    const uint64_t until = std::min(stop, ranges_[i].offset_bytes + ranges_[i].size_bytes);
    if (from >= until) continue;
    auto* const target = static_cast<uint8_t*>(ranges_[i].target) + (from - ranges_[i].offset_bytes);
    copy_past_cache(target, data + (from - start), until - from);
    if (summer != nullptr) summer->add(data + (from - start), places_[i] + (from - ranges_[i].offset_bytes), until - from);
  }
}

}  // namespace ckptkit

uint64_t ck_place(const void* data, uint64_t offset_bytes, uint64_t size_bytes, const ck_range* ranges,
                  uint64_t num_ranges, const uint64_t* checksums, const ck_chunks* chunks, const uint64_t* places) {
  return without_throw(ckptkit::kNoGranule - 1, [&] {
    const ckptkit::Wanted wanted(ranges, num_ranges, chunks, places);
    return wanted.place(static_cast<const uint8_t*>(data), offset_bytes, offset_bytes + size_bytes, checksums);
  });
}
