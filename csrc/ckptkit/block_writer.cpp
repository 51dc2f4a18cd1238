// Writes a file block by block: gather, checksum and write in one pass, on several threads.
//
// Memory that is contiguous and page-aligned goes to the disk without a copy; everything else passes through one aligned
// block a thread. What O_DIRECT cannot write, the bytes after the file's last aligned place, goes through the page cache at
// the end.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "block_io.h"
#include "ckptkit.h"
#include "crc64.h"
#include "sums.h"
#include "../calls.h"
#include "../hashing/xxh3.h"
#include "../mapped/mapped.h"

namespace ckptkit {
namespace {

struct Writer {
  int file;
  uint64_t size_bytes;
  std::atomic<bool> direct;
  std::vector<uint8_t> tail;   // the bytes that wait for the end
  const ck_chunks* chunks;     // whose sums writes add to, or null
  std::atomic<const void*> unread{nullptr};  // what a write could not read of its segments
};

int leave_direct(Writer& writer) {
  const int flags = fcntl(writer.file, F_GETFL);
  if (flags < 0 || fcntl(writer.file, F_SETFL, flags & ~O_DIRECT) < 0) return -errno;
  writer.direct = false;
  return 0;
}

int write_fully(Writer& writer, const uint8_t* data, uint64_t size, uint64_t offset) {
  while (size > 0) {
    const bool direct = writer.direct;
    const ssize_t written = uninterrupted([&] { return pwrite(writer.file, data, size, static_cast<off_t>(offset)); });
    if (written > 0) {
      data += written, offset += written, size -= written;
      if (size == 0 || !direct || written % kDirectAlignment == 0) continue;
    } else if (written == 0) {
      return -EIO;
    } else if (errno != EINVAL || !direct) {
      return -errno;
    }
    // Refused at the first write (some file systems accept O_DIRECT at open), or cut short at an unaligned place.
    if (const int failure = leave_direct(writer); failure < 0) return failure;
  }
  return 0;
}

// The bytes of several segments as one sequence.
class Sequence {
 public:
  Sequence(const ck_segment* segments, uint64_t num_segments) : segments_(segments) {
    ends_.reserve(num_segments);
    for (uint64_t i = 0; i < num_segments; ++i) ends_.push_back(size() + segments[i].size_bytes);
  }
  uint64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // The address of the bytes [start, stop), null if they are in several segments.
  const uint8_t* contiguous(uint64_t start, uint64_t stop) const {
    const size_t i = segment_of(start);
    return stop <= ends_[i] ? address(i, start) : nullptr;
  }

  // Copies the bytes [start, stop) to `buffer`.
  void gather(uint64_t start, uint64_t stop, uint8_t* buffer) const {
    size_t i = segment_of(start);
    for (uint64_t at = start; at < stop; ++i) {
      const uint64_t until = std::min(stop, ends_[i]);
      if (until > at) std::memcpy(buffer + (at - start), address(i, at), until - at);
      at = std::max(at, until);
    }
  }

 private:
  size_t segment_of(uint64_t at) const { return std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin(); }
  const uint8_t* address(size_t i, uint64_t at) const {
    return static_cast<const uint8_t*>(segments_[i].data) + (at - (ends_[i] - segments_[i].size_bytes));
  }
  const ck_segment* segments_;
  std::vector<uint64_t> ends_;
};

// What reads the granules that are hashed: their elements go into the sums of their tensors.
struct Summing {
  Summing(const ck_chunks& chunks, uint64_t begin) : summer(chunks, has_carryless()), offset(begin) {}

  Summer summer;
  uint64_t offset;  // of the next byte in the file

  static void read(void* context, const uint8_t* data, size_t size) {
    auto& self = *static_cast<Summing*>(context);
    self.summer.add(data, self.offset, size);
    self.offset += size;
  }
};

int write_block(Writer& writer, const Sequence& sequence, uint64_t start, uint64_t stop, uint64_t offset,
                uint64_t* checksums, uint8_t* buffer) {
  const uint64_t size = stop - start;
  const uint8_t* const whole = sequence.contiguous(start, stop);
  const bool aligned = reinterpret_cast<uintptr_t>(whole) % kDirectAlignment == 0 && size % kDirectAlignment == 0;
  const bool in_place = whole != nullptr && (aligned || !writer.direct);
  std::optional<Summing> summing;
  if (writer.chunks != nullptr) summing.emplace(*writer.chunks, offset);
  const hashing::Reader summer{Summing::read, summing ? &*summing : nullptr};
  const hashing::Reader* const reader = summing ? &summer : nullptr;
  for (uint64_t done = 0; done < size; done += kGranule) {
    const uint64_t part = std::min(kGranule, size - done);
    const uint8_t* data = sequence.contiguous(start + done, start + done + part);
    uint8_t* target = in_place ? nullptr : buffer + done;
    const void* const address = mapped::read([&] {
      if (data == nullptr) {
        sequence.gather(start + done, start + done + part, target);
        data = target, target = nullptr;
      }
      checksums[done / kGranule] = hashing::xxh3_64(data, part, hashing::best_simd(), target, reader);
    });
    if (address != nullptr) {
      writer.unread = address;
      return -EFAULT;
    }
  }
  if (in_place) return write_fully(writer, whole, size, offset);
  if (!writer.direct) return write_fully(writer, buffer, size, offset);
  const uint64_t tail_size = size % kDirectAlignment;  // of one block at most, the file's last
  if (tail_size > 0) writer.tail.assign(buffer + size - tail_size, buffer + size);
  return write_fully(writer, buffer, size - tail_size, offset);
}

}  // namespace
}  // namespace ckptkit

using namespace ckptkit;

int ck_writer_open(int file, uint64_t size_bytes, int direct, void** writer) {
  bool is_direct = false;
  if (direct) {  // refused by file systems that have no O_DIRECT
    const int flags = fcntl(file, F_GETFL);
    if (flags < 0) return -errno;
    is_direct = fcntl(file, F_SETFL, flags | O_DIRECT) == 0;
  }
  // Reserving blocks lets writes run in parallel (they no longer extend the file) and shows a full disk at once.
  const auto end = static_cast<off_t>(size_bytes);
  if (size_bytes > 0 && uninterrupted([&] { return fallocate(file, 0, 0, end); }) < 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS && errno != EINVAL)
    return -errno;
  auto* const made = new (std::nothrow) Writer{file, size_bytes, is_direct, {}, nullptr};
  if (made == nullptr) return -ENOMEM;
  *writer = made;
  return 0;
}

void ck_writer_sum(void* handle, const ck_chunks* chunks) { static_cast<Writer*>(handle)->chunks = chunks; }

int ck_writer_write(void* handle, uint64_t offset_bytes, const ck_segment* segments, uint64_t num_segments,
                    uint64_t* checksums, int num_threads) {
  auto& writer = *static_cast<Writer*>(handle);
  return without_throw(-ENOMEM, [&] {
    const Sequence sequence(segments, num_segments);
    const uint64_t size = sequence.size(), end = offset_bytes + size;
    if (offset_bytes % kGranule || end > writer.size_bytes || (end % kGranule && end != writer.size_bytes)) return -EINVAL;
    const int result = run_jobs((size + kBlock - 1) / kBlock, num_threads, [&](uint64_t index, uint8_t* buffer) {
      const uint64_t start = index * kBlock, stop = std::min(size, start + kBlock);
      return write_block(writer, sequence, start, stop, offset_bytes + start, checksums + start / kGranule, buffer);
    });
    return result == -EFAULT && writer.unread != nullptr ? mapped::unread(writer.unread) : result;
  });
}

int ck_writer_end(void* handle, int complete) {
  auto* const writer = static_cast<Writer*>(handle);
  int failure = 0;
  if (const uint64_t tail_size = writer->tail.size(); complete && tail_size > 0) {
    failure = leave_direct(*writer);
    if (failure == 0) failure = write_fully(*writer, writer->tail.data(), tail_size, writer->size_bytes - tail_size);
  }
  delete writer;
  return failure;
}
