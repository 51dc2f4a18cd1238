// Pages of mapped shards, asked for before they are read: single reads of a disk one after the other become many at once.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "datakit.h"

namespace {

constexpr int64_t num_samples = 4;  // pieces of a batch that are looked at
constexpr int64_t few_faults = 8;   // pages that were waited for since the last batch, or more
constexpr int num_batches = 16;     // are asked for after one that was cold

std::atomic<int64_t> last_faults{0};
std::atomic<int> num_left{0};

struct Pages {
  char* begin;
  size_t num_bytes;
};

Pages pages_of(const dk_piece& piece) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = static_cast<uintptr_t>(piece.tokens);
  const uintptr_t begin = start / page * page;
  return {reinterpret_cast<char*>(begin), start + piece.num_tokens * piece.bytes_a_token - begin};
}

bool is_in_memory(const dk_piece& piece) {
  const Pages pages = pages_of(piece);
  unsigned char is_there = 1;
  return mincore(pages.begin, 1, &is_there) != 0 || (is_there & 1);
}

// Whether pages were waited for of late: the kernel does not say of others' files what is in memory.
bool has_waited() {
  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) return false;
  return usage.ru_majflt - last_faults.exchange(usage.ru_majflt) >= few_faults;
}

}  // namespace

int64_t dk_ask_ahead(const dk_piece* pieces, int64_t num_pieces) {
  bool is_cold = has_waited();
  const int64_t step = std::max<int64_t>(1, num_pieces / num_samples);
  for (int64_t i = 0; i < num_pieces && !is_cold; i += step) is_cold = !is_in_memory(pieces[i]);
  if (is_cold) {
    num_left = num_batches;
  } else if (num_left <= 0) {
    return 0;
  } else {
    --num_left;
  }
  for (int64_t i = 0; i < num_pieces; ++i) {
    const Pages pages = pages_of(pieces[i]);
    madvise(pages.begin, pages.num_bytes, MADV_WILLNEED);
  }
  return 1;
}
