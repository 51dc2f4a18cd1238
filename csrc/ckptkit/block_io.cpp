// Reused aligned buffers and threads over jobs.
#include "block_io.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "ckptkit.h"
#include "../calls.h"
#include "../hashing/xxh3.h"
#include "../mapped/mapped.h"

namespace ckptkit {
namespace {

std::mutex store_mutex;
std::vector<uint8_t*>& store() {
  static auto* const blocks = new std::vector<uint8_t*>;  // never destroyed: threads may outlive static destructors
  return *blocks;
}

}  // namespace

BlockBuffer::BlockBuffer() : data_(nullptr) {
  {
    const std::lock_guard lock(store_mutex);
    if (!store().empty()) {
      data_ = store().back();
      store().pop_back();
      return;
    }
  }
  // On huge pages the kernel pins four for a direct write of a block, not 2,048.
  constexpr uint64_t kHugePage = 2u << 20;
  void* const memory = mmap(nullptr, kBlock + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  data_ = static_cast<uint8_t*>(memory) + (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
  madvise(data_, kBlock, MADV_HUGEPAGE);  // a wish: small pages do as well
}

BlockBuffer::~BlockBuffer() {
  if (data_ == nullptr) return;
  const std::lock_guard lock(store_mutex);
  store().push_back(data_);
}

int run_jobs(uint64_t num_jobs, int num_threads, const std::function<int(uint64_t, uint8_t*)>& job) {
  std::atomic<uint64_t> next{0};
  std::atomic<int> failure{0};
  const auto work = [&] {
    const BlockBuffer buffer;
    if (buffer.data() == nullptr) {
      failure = -ENOMEM;
      return;
    }
    for (uint64_t index; failure == 0 && (index = next++) < num_jobs;) {
      const int result = without_throw(-ENOMEM, [&] { return job(index, buffer.data()); });
      int none = 0;
      if (result < 0) failure.compare_exchange_strong(none, result);
    }
  };
  std::vector<std::thread> helpers;
  for (uint64_t i = 1; i < std::min<uint64_t>(std::max(num_threads, 1), num_jobs); ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that run do all jobs
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  work();
  for (auto& helper : helpers) helper.join();
  return failure;
}

}  // namespace ckptkit

uint64_t ck_xxh3_64(const void* data, uint64_t size_bytes, int simd, void* target) {
  using namespace hashing;
  return xxh3_64(data, size_bytes, simd < 0 ? best_simd() : static_cast<Simd>(simd), target);
}

int ck_best_simd() { return static_cast<int>(hashing::best_simd()); }

int ck_checksums(const void* data, uint64_t size_bytes, uint64_t* checksums) {
  using namespace ckptkit;
  const void* const address = mapped::read([&] {
    const auto* const begin = static_cast<const uint8_t*>(data);
    for (uint64_t start = 0; start < size_bytes; start += kGranule)
      checksums[start / kGranule] = hashing::xxh3_64(begin + start, std::min(kGranule, size_bytes - start));
  });
  return address == nullptr ? 0 : mapped::unread(address);
}

int ck_copy_many(const ck_copy* copies, uint64_t num_copies) {
  const void* const address = mapped::read([&] {
    for (uint64_t i = 0; i < num_copies; ++i)
      __builtin_memcpy(copies[i].target, copies[i].source, copies[i].size_bytes);
  });
  return address == nullptr ? 0 : mapped::unread(address);
}

uint64_t ck_unread() { return reinterpret_cast<uint64_t>(mapped::last_unread()); }
