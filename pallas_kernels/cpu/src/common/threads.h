// A parallel loop on the thread pool of the calling XLA program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace specjax {

// The range of one thread when `count` numbers are divided evenly.
struct Range {
  Range(int64_t count, int64_t threads, int64_t thread)
      : begin(count * thread / threads), end(count * (thread + 1) / threads) {}

  int64_t begin, end;
};

// Numbers to deal out: one range of consecutive numbers per thread.
class Ranges {
 public:
  Ranges(int64_t count, int64_t threads) : ranges_(threads) {
    for (int64_t t = 0; t < threads; ++t) {
      const Range range(count, threads, t);
      ranges_[t].next = range.begin, ranges_[t].end = range.end;
    }
  }

  // Calls work(i) for all numbers that are left: first for the thread's own range, in order, which
  // reads memory fastest; then for what the other threads have not taken yet.
  template <typename Work>
  void take(int64_t thread, const Work& work) {
    const auto threads = static_cast<int64_t>(ranges_.size());
    for (int64_t t = 0; t < threads; ++t) {
      Left& range = ranges_[(thread + t) % threads];
      for (int64_t i; (i = range.next.fetch_add(1)) < range.end;) work(i);
    }
  }

 private:
  struct alignas(64) Left {
    std::atomic<int64_t> next;
    int64_t end;
  };

  std::vector<Left> ranges_;
};

inline int64_t threads_for(const xla::ffi::ThreadPool& pool, int64_t count) {
  return std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), count));
}

// The range in which parallel_for deals out number i.
inline Range range_of(const xla::ffi::ThreadPool& pool, int64_t count, int64_t i) {
  const int64_t threads = threads_for(pool, count), thread = i * threads / count;
  const Range range(count, threads, thread);
  return i < range.end ? range : Range(count, threads, thread + 1);
}

// Calls work(i) once for every 0 <= i < count, in any order; returns when all are done.
//
// The caller takes part, so it never waits for a pool that is busy elsewhere: at the end it waits
// only for threads that have begun. A thread that begins later finds the loop closed.
template <typename Work>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Loop {
    Loop(int64_t count, int64_t threads) : ranges(count, threads) {}

    Ranges ranges;
    std::atomic<int64_t> running{0};
    std::atomic<bool> closed{false};
  };
  const int64_t helpers = threads_for(pool, count) - 1;
  if (helpers == 0) {
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
