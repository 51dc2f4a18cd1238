// Granules of a file in memory: verified, then handed out to the ranges that want them.
#pragma once

#include <cstdint>
#include <vector>

#include "ckptkit.h"
#include "sums.h"

namespace ckptkit {

inline constexpr uint64_t kNoGranule = ~uint64_t{0};

// Ranges of a file, sorted by offset, and where their bytes go: into memory, and if `chunks` is not null into sums, those of
// the bytes of chunks that begin at `places`, one for each range.
class Wanted {
 public:
  Wanted(const ck_range* ranges, uint64_t num_ranges, const ck_chunks* chunks, const uint64_t* places);

  // Whether the ranges are sorted and end within a file of this size.
  bool fits(uint64_t size_bytes) const;

  // Where the last of the ranges ends; there is one.
  uint64_t stop() const { return reach_.back(); }

  // Copies out what the ranges want of `data`, the file's bytes [start, stop) from a granule's begin. Each granule is
  // first compared with its checksum, if `checksums` (of these granules) is not null: returns the first that differs, of
  // which and after which nothing was copied, or kNoGranule.
  uint64_t place(const uint8_t* data, uint64_t start, uint64_t stop, const uint64_t* checksums) const;

 private:
  void copy(const uint8_t* data, uint64_t start, uint64_t stop, Summer* summer) const;

  const ck_range* ranges_;
  uint64_t num_ranges_;
  const ck_chunks* chunks_;
  const uint64_t* places_;
  std::vector<uint64_t> reach_;  // how far the ranges up to and including this one go
};

}  // namespace ckptkit
