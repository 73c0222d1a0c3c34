// A parallel loop on the thread pool of the XLA program that calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace specjax {

// Calls work(i) once for every 0 <= i < count, in any order; returns when all are done.
//
// The caller takes part, so nothing waits for a pool that is busy elsewhere: at the end it waits
// only for threads that did begin. One that begins later finds the loop closed.
template <typename Work>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Loop {
    std::atomic<int64_t> next{0}, running{0};
    std::atomic<bool> closed{false};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const auto loop = std::make_shared<Loop>();
  const Work* shared = &work;
  const auto take = [count](Loop& state, const Work& each) {
    for (int64_t i; (i = state.next.fetch_add(1)) < count;) each(i);
  };
  for (int64_t h = 0; h < helpers; ++h) {
    pool.Schedule([loop, shared, take] {
      loop->running.fetch_add(1);
      if (!loop->closed.load()) take(*loop, *shared);
      loop->running.fetch_sub(1);
    });
  }
  take(*loop, work);
  loop->closed.store(true);
  while (loop->running.load() != 0) std::this_thread::yield();
}

}  // namespace specjax
