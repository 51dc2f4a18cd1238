// Work that does not depend on its order, on several threads.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

// Calls work(i) for each i in [0, count), on up to num_threads threads, this one among them.
template <typename Work>
void for_each_number(int64_t count, int64_t num_threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto loop = [&] {
    for (int64_t i; (i = next++) < count;) work(i);
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(num_threads, count); ++i) {
    try {
      helpers.emplace_back(loop);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that run do all of it
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  loop();
  for (auto& helper : helpers) helper.join();
}
