// Reads of byte ranges of open files. What the page cache has is copied at once; the rest is read on several threads: a
// disk is fast, and a file system far away is bearable, only so.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "../calls.h"
#include "datakit.h"
#include "threads.h"

namespace {

// Copies as much of a range's beginning as the page cache has, and returns its bytes.
int64_t read_cached(const dk_read& read) {
#ifdef RWF_NOWAIT
  const iovec whole{read.target, static_cast<size_t>(read.num_bytes)};
  return std::max<int64_t>(0, preadv2(static_cast<int>(read.descriptor), &whole, 1, read.offset, RWF_NOWAIT));
#else
  return 0;
#endif
}

// Reads a range from byte `done` of it on; 0, or a negative errno.
int64_t read_rest(const dk_read& read, int64_t done) {
  auto* target = static_cast<char*>(read.target);
  while (done < read.num_bytes) {
    const ssize_t count = pread(static_cast<int>(read.descriptor), target + done, read.num_bytes - done, read.offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) return -ENODATA;
    done += count;
  }
  return 0;
}

}  // namespace

static int64_t read_files(const dk_read* reads, int64_t num_reads, int num_threads, int64_t* failed) {
  struct Rest {
    int64_t number, done, code;
  };
  std::vector<Rest> rests;  // what is not cached
  for (int64_t i = 0; i < num_reads; ++i) {
    const int64_t done = read_cached(reads[i]);
    if (done < reads[i].num_bytes) rests.push_back({i, done, 0});
  }
  std::atomic<bool> failing{false};
  const auto count = static_cast<int64_t>(rests.size()), reads_a_thread = int64_t{4};
  for_each_number(count, std::min<int64_t>(num_threads, count / reads_a_thread), [&](int64_t i) {
    if (failing) return;
    rests[i].code = read_rest(reads[rests[i].number], rests[i].done);
    if (rests[i].code) failing = true;
  });
  for (const Rest& rest : rests) {
    if (!rest.code) continue;
    *failed = rest.number;
    return rest.code;
  }
  return 0;
}

int64_t dk_read_files(const dk_read* reads, int64_t num_reads, int num_threads, int64_t* failed) {
  *failed = 0;
  return without_throw(int64_t{-ENOMEM}, [&] { return read_files(reads, num_reads, num_threads, failed); });
}
