// What the block writer and the block reader share: sizes, reused aligned buffers, threads over jobs.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace ckptkit {

inline constexpr uint64_t kGranule = 1 << 20;      // bytes under one checksum
inline constexpr uint64_t kBlock = 8 * kGranule;   // bytes of one I/O request
inline constexpr uint64_t kDirectAlignment = 4096; // of file offsets, sizes and memory under O_DIRECT

inline uint64_t granules_of(uint64_t size_bytes) { return (size_bytes + kGranule - 1) / kGranule; }

// Makes a system call again when a signal ended it before it did anything.
template <typename Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// One kBlock of aligned memory, on huge pages if there are any, taken from a process-wide store and given back to
// it: page faults are paid once, and as many blocks exist as threads ever ran at the same time. data() is null when
// memory is short.
class BlockBuffer {
 public:
  BlockBuffer();
  ~BlockBuffer();
  BlockBuffer(const BlockBuffer&) = delete;
  BlockBuffer& operator=(const BlockBuffer&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

// Runs job(index, buffer) for every index on up to num_threads threads, each with a buffer of its own. A job returns 0 or
// a negative errno; after the first failure no further job starts, and that failure is returned.
int run_jobs(uint64_t num_jobs, int num_threads, const std::function<int(uint64_t, uint8_t*)>& job);

}  // namespace ckptkit
