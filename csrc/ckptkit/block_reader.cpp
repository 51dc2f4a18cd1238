// Reads ranges of a file: whole granules, verified before a byte of them is handed out, on several threads.
//
// The granules that the ranges touch are read in blocks through one aligned buffer a thread. Those that the page cache has
// whole are copied from there one by one, if that is asked for: each is still in the processor's cache when it is verified.
// The last granule stays with the handle if it goes on behind the ranges, so that ranges read in ascending order over
// several calls read every granule once. Several threads may read through one handle.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "../calls.h"
#include "block_io.h"
#include "ckptkit.h"
#include "granules.h"

namespace ckptkit {
namespace {

// What the page cache has of a file, known without reading: the file is mapped, and not touched through the mapping.
class CachedPages {
 public:
  CachedPages(const char* path, const struct stat& status) : size_(static_cast<uint64_t>(status.st_size)) {
    // To others than those who may write the file the system says that all of it is there.
    if (size_ == 0 || (status.st_uid != geteuid() && access(path, W_OK) != 0)) return;
    file_ = uninterrupted([&] { return open(path, O_RDONLY | O_CLOEXEC); });
    if (file_ < 0) return;
    void* const mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_, 0);
    pages_ = mapped == MAP_FAILED ? nullptr : static_cast<uint8_t*>(mapped);
  }
  ~CachedPages() {
    if (pages_ != nullptr) munmap(pages_, size_);
    if (file_ >= 0) close(file_);
  }
  CachedPages(const CachedPages&) = delete;
  CachedPages& operator=(const CachedPages&) = delete;

  // Copies bytes [start, stop) of the file, at most a granule from a granule's begin, if all of them are there.
  bool copy(uint8_t* target, uint64_t start, uint64_t stop) const {
    static const uint64_t page = sysconf(_SC_PAGESIZE);
    unsigned char is_there[kGranule / 4096];  // no system has smaller pages
    if (pages_ == nullptr || stop > size_ || mincore(pages_ + start, stop - start, is_there) != 0) return false;
    const uint64_t num_pages = (stop - start + page - 1) / page;
    if (!std::all_of(is_there, is_there + num_pages, [](unsigned char each) { return each & 1; })) return false;
    for (uint64_t at = start; at < stop;) {
      const auto place = static_cast<off_t>(at);
      const ssize_t got = uninterrupted([&] { return pread(file_, target + (at - start), stop - at, place); });
      if (got <= 0) return false;
      at += got;
    }
    return true;
  }

 private:
  uint64_t size_;
  int file_ = -1;
  uint8_t* pages_ = nullptr;
};

struct Kept {  // a granule that was read and verified
  uint64_t granule = kNoGranule;
  std::shared_ptr<uint8_t[]> data;
};

struct Reader {
  int file;
  std::atomic<bool> direct;
  std::unique_ptr<const CachedPages> cached;  // null where the cache is not asked for, or read anyway
  bool again;                                 // whether a granule that is not right is read once more
  std::atomic<uint64_t> num_differed;         // granules that were right then
  std::mutex guard;                           // of what follows
  Kept kept;
};

struct Block {
  uint64_t first_granule;
  uint64_t num_granules;
};

// Reads at least `size` bytes at `offset` into aligned memory that has room for kBlock.
int read_fully(Reader& reader, uint8_t* buffer, uint64_t size, uint64_t offset) {
  for (uint64_t done = 0; done < size;) {
    const bool direct = reader.direct;
    uint64_t wanted = size - done;
    if (direct) wanted = (wanted + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    const auto at = static_cast<off_t>(offset + done);
    const ssize_t got = uninterrupted([&] { return pread(reader.file, buffer + done, wanted, at); });
    if (got > 0) {
      done += got;
      if (done >= size || !direct || done % kDirectAlignment == 0) continue;
    } else if (got == 0) {
      return -ENODATA;
    } else if (errno != EINVAL || !direct) {
      return -errno;
    }
    // Refused at the first read (some file systems accept O_DIRECT at open), or cut short at an unaligned place.
    const int flags = fcntl(reader.file, F_GETFL);
    if (flags < 0 || fcntl(reader.file, F_SETFL, flags & ~O_DIRECT) < 0) return -errno;
    reader.direct = false;
  }
  return 0;
}

// The granules that the ranges touch, ascending, each once, in runs of at most `most`. The kept granule is a run of its own.
std::vector<Block> blocks_of(const ck_range* ranges, uint64_t num_ranges, uint64_t kept_granule, uint64_t most) {
  std::vector<Block> blocks;
  uint64_t next = 0;  // no granule before this one is still to be added
  for (uint64_t i = 0; i < num_ranges; ++i) {
    if (ranges[i].size_bytes == 0) continue;
    const uint64_t last = (ranges[i].offset_bytes + ranges[i].size_bytes - 1) / kGranule;
    for (uint64_t g = std::max(next, ranges[i].offset_bytes / kGranule); g <= last; ++g) {
      const bool joins = !blocks.empty() && g == blocks.back().first_granule + blocks.back().num_granules &&
                         blocks.back().num_granules < most && g != kept_granule && g - 1 != kept_granule;
      if (joins) ++blocks.back().num_granules;
      else blocks.push_back({g, 1});
    }
    next = std::max(next, last + 1);
  }
  return blocks;
}

}  // namespace
}  // namespace ckptkit

using namespace ckptkit;

int ck_reader_open(const char* path, int direct, int from_cache, int again, uint64_t* size_bytes, void** reader) {
  const int flags = O_RDONLY | O_CLOEXEC;
  int file = direct ? uninterrupted([&] { return open(path, flags | O_DIRECT); }) : -1;
  const bool is_direct = file >= 0;
  if (file < 0 && (!direct || errno == EINVAL)) file = uninterrupted([&] { return open(path, flags); });
  if (file < 0) return -errno;
  struct stat status;
  auto* const made = fstat(file, &status) == 0 ? new (std::nothrow) Reader{file, is_direct, {}, again != 0, {}, {}, {}} : nullptr;
  if (made == nullptr) {
    const int failure = errno ? -errno : -ENOMEM;
    close(file);
    return failure;
  }
  if (is_direct && from_cache) made->cached.reset(new (std::nothrow) CachedPages(path, status));
  *size_bytes = static_cast<uint64_t>(status.st_size);
  *reader = made;
  return 0;
}

static int read_ranges(Reader& reader, uint64_t size_bytes, const ck_range* ranges, uint64_t num_ranges,
                       const uint64_t* checksums, const ck_chunks* chunks, const uint64_t* places, int num_threads,
                       uint64_t* bad_granule, uint64_t* read_bytes) {
  const Wanted wanted(ranges, num_ranges, chunks, places);
  if (!wanted.fits(size_bytes)) return -EINVAL;
  constexpr uint64_t kMost = kBlock / kGranule, kFewest = 2;
  const Kept before = [&] {
    const std::lock_guard lock(reader.guard);
    return reader.kept;
  }();
  std::vector<Block> blocks = blocks_of(ranges, num_ranges, before.granule, kMost);
  if (blocks.empty()) return 0;
  const uint64_t num_jobs = 2 * static_cast<uint64_t>(std::max(num_threads, 1));  // so that all threads end at once
  if (blocks.size() < num_jobs) {
    const uint64_t most = std::clamp(blocks.size() * kMost / num_jobs, kFewest, kMost);
    blocks = blocks_of(ranges, num_ranges, before.granule, most);
  }
  const uint64_t last_granule = blocks.back().first_granule + blocks.back().num_granules - 1;
  const uint64_t tail = last_granule * kGranule;
  std::shared_ptr<uint8_t[]> kept;  // null where no later range begins in the last granule
  if (wanted.stop() < std::min(size_bytes, tail + kGranule)) {
    kept.reset(new (std::nothrow) uint8_t[kGranule]);
    if (kept == nullptr) return -ENOMEM;
  }
  std::atomic<uint64_t> total{0}, bad{kNoGranule};

  // Verifies bytes [start, stop) of the file, unless they were before, and hands them out. A granule of a server's file that
  // is not right is read once more, past the page cache, into `again`: nothing from it on was handed out.
  const auto hand_out = [&](const uint8_t* data, uint64_t start, uint64_t stop, bool is_verified, uint8_t* again = nullptr) {
    uint64_t damaged = wanted.place(data, start, stop, is_verified ? nullptr : checksums + start / kGranule);
    while (damaged != kNoGranule && again != nullptr && reader.again) {
      const uint64_t at = damaged * kGranule, until = std::min(stop, at + kGranule);
      posix_fadvise(reader.file, static_cast<off_t>(at), static_cast<off_t>(until - at), POSIX_FADV_DONTNEED);
      if (const int failure = read_fully(reader, again + (at - start), until - at, at)) return failure;
      if (wanted.place(again + (at - start), at, until, checksums + damaged) != kNoGranule) break;
      ++reader.num_differed;
      damaged = until < stop ? wanted.place(again + (until - start), until, stop, checksums + damaged + 1) : kNoGranule;
    }
    if (damaged != kNoGranule) {
      for (uint64_t seen = bad; damaged < seen && !bad.compare_exchange_weak(seen, damaged);) {
      }
      return -EBADMSG;
    }
    if (kept != nullptr && start <= tail && tail < stop) std::memcpy(kept.get(), data + (tail - start), stop - tail);
    return 0;
  };

  const int result = run_jobs(blocks.size(), num_threads, [&](uint64_t index, uint8_t* buffer) {
    const Block block = blocks[index];
    uint64_t start = block.first_granule * kGranule;
    const uint64_t stop = std::min(size_bytes, start + block.num_granules * kGranule);
    if (block.first_granule == before.granule) return hand_out(before.data.get(), start, stop, true);
    while (reader.cached != nullptr && start < stop) {
      const uint64_t end = std::min(stop, start + kGranule);
      if (!reader.cached->copy(buffer, start, end)) break;
      total += end - start;
      if (const int failure = hand_out(buffer, start, end, checksums == nullptr, buffer)) return failure;
      start = end;
    }
    if (start == stop) return 0;
    if (const int failure = read_fully(reader, buffer, stop - start, start)) return failure;
    total += stop - start;
    return hand_out(buffer, start, stop, checksums == nullptr, buffer);
  });
  *read_bytes += total;
  *bad_granule = bad;
  if (result == 0 && kept != nullptr) {
    const std::lock_guard lock(reader.guard);
    reader.kept = {last_granule, std::move(kept)};
  }
  return result;
}

int ck_reader_read(void* handle, uint64_t size_bytes, const ck_range* ranges, uint64_t num_ranges,
                   const uint64_t* checksums, const ck_chunks* chunks, const uint64_t* places, int num_threads,
                   uint64_t* bad_granule, uint64_t* read_bytes) {
  return without_throw(-ENOMEM, [&] {
    return read_ranges(*static_cast<Reader*>(handle), size_bytes, ranges, num_ranges, checksums, chunks, places,
                       num_threads, bad_granule, read_bytes);
  });
}

uint64_t ck_reader_num_differed(void* handle) { return static_cast<Reader*>(handle)->num_differed; }

void ck_reader_close(void* handle) {
  auto* const reader = static_cast<Reader*>(handle);
  close(reader->file);
  delete reader;
}
