// A parallel loop on the thread pool of the XLA program that calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace specjax {

// Numbers to be dealt out, in equal ranges of neighbours, one per thread.
class Ranges {
 public:
  Ranges(int64_t count, int64_t threads) : ranges_(threads) {
    for (int64_t t = 0; t < threads; ++t) {
      ranges_[t].next = count * t / threads;
      ranges_[t].end = count * (t + 1) / threads;
    }
  }

  // Calls work(i) for all that is left: first thread `thread`'s own range, in order, as memory is
  // read fastest; then what the other threads have not taken yet.
  template <typename Work>
  void take(int64_t thread, const Work& work) {
    const auto threads = static_cast<int64_t>(ranges_.size());
    for (int64_t t = 0; t < threads; ++t) {
      Range& range = ranges_[(thread + t) % threads];
      for (int64_t i; (i = range.next.fetch_add(1)) < range.end;) work(i);
    }
  }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  std::vector<Range> ranges_;
};

// Calls work(i) once for every 0 <= i < count, in any order; returns when all are done.
//
// The caller takes part, so nothing waits for a pool that is busy elsewhere: at the end it waits
// only for threads that did begin. One that begins later finds the loop closed.
template <typename Work>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Loop {
    Loop(int64_t count, int64_t threads) : ranges(count, threads) {}

    Ranges ranges;
    std::atomic<int64_t> running{0};
    std::atomic<bool> closed{false};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const auto loop = std::make_shared<Loop>(count, helpers + 1);
  const Work* shared = &work;
  for (int64_t h = 1; h <= helpers; ++h) {
    pool.Schedule([loop, shared, h] {
      loop->running.fetch_add(1);
      if (!loop->closed.load()) loop->ranges.take(h, *shared);
      loop->running.fetch_sub(1);
    });
  }
  loop->ranges.take(0, work);
  loop->closed.store(true);
  while (loop->running.load() != 0) std::this_thread::yield();
}

}  // namespace specjax
