// Cuts work over threads. Threads are started for each call, so small work stays on the caller's.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

// body(begin, end) over [0, count) in equal parts, on at most `num_threads` threads and no more than leave each `grain`
// of the work's `items`: what takes about 60 us, two or three times what it takes to start a thread.
template <class Body>
void parallel(int64_t count, int64_t items, int64_t grain, int num_threads, Body body) {
  const int64_t most = std::max<int64_t>(1, std::min(items / grain, count));
  const int64_t num_parts = std::clamp<int64_t>(num_threads, 1, most);
  std::vector<std::thread> threads;
  int64_t begin = 0;
  try {
    threads.reserve(num_parts - 1);
    for (int64_t part = 1; part < num_parts; ++part) {
      const int64_t end = count * part / num_parts;
      threads.emplace_back(body, begin, end);
      begin = end;
    }
  } catch (const std::system_error&) {  // no more threads to be had: this one does what is left
  } catch (const std::bad_alloc&) {
  }
  body(begin, count);
  for (std::thread& thread : threads) thread.join();
}
