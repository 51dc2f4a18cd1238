// Reads of byte ranges of open files, many at once: a disk is fast, and a file system far away is bearable, only so.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "datakit.h"

namespace {

// Reads one range whole; 0, or a negative errno.
int64_t read_range(const dk_read& read) {
  auto* target = static_cast<char*>(read.target);
  for (int64_t done = 0; done < read.num_bytes;) {
    const ssize_t count = pread(static_cast<int>(read.descriptor), target + done, read.num_bytes - done, read.offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) return -ENODATA;
    done += count;
  }
  return 0;
}

}  // namespace

int64_t dk_read_files(const dk_read* reads, int64_t num_reads, int num_threads, int64_t* failed) {
  std::atomic<int64_t> next{0}, first_failed{num_reads};
  std::vector<int64_t> codes(num_reads);
  const auto loop = [&] {
    for (int64_t i; (i = next++) < num_reads && first_failed == num_reads;) {
      codes[i] = read_range(reads[i]);
      for (int64_t known = first_failed; codes[i] && i < known && !first_failed.compare_exchange_weak(known, i);) {}
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min<int64_t>(num_threads, num_reads); ++i) {
    try {
      helpers.emplace_back(loop);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that run do all reads
    }
  }
  loop();
  for (auto& helper : helpers) helper.join();
  *failed = first_failed;
  return first_failed == num_reads ? 0 : codes[first_failed];
}
