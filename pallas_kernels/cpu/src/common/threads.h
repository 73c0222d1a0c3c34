// Parallel loops on the thread pool of the calling XLA program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/ahead.h"
#include "xla/ffi/api/ffi.h"

namespace specjax {

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

// Waits in place: a while without leaving the processor to others.
class Wait {
 public:
  // Whether the while is over.
  bool is_long() const { return turns_ > kPauses + kYields; }

  void turn() {
    if (++turns_ > kPauses) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

 private:
  static constexpr int64_t kPauses = 2000, kYields = 500;  // some 40 and 250 microseconds
  int64_t turns_ = 0;
};

// The caller of a handler and those threads of the pool that help it, for all loops of one call.
//
// Between two loops helpers wait in place, because to wake a thread takes longer than most loops.
// One that has waited for long leaves, for others may need its processor, and is called again for
// the next loop. The caller takes part, so it never waits for a pool that is busy elsewhere: at the
// end of a loop it waits only for helpers that have begun.
class Team {
 public:
  // announced: what memory the loops to come will read. Threads ask for it while they wait.
  explicit Team(xla::ffi::ThreadPool& pool, std::vector<Announced> announced = {})
      : pool_(pool),
        threads_(std::max<int64_t>(1, pool.num_threads())),
        shared_(std::make_shared<Shared>(threads_, std::move(announced))),
        fetch_(shared_->announced, shared_->reached, threads_, 0) {}
  Team(const Team&) = delete;
  ~Team() { shared_->ended.store(true); }

  int64_t threads() const { return threads_; }

  // Begins with the next of the loops that were announced.
  void reach_next() { shared_->reached.fetch_add(1); }

  // Calls work(i) once for every 0 <= i < count, in any order; returns when all are done. Nothing
  // may be thrown, for helpers read the caller's stack: where memory ends, the process does.
  template <typename Work>
  void for_each(int64_t count, const Work& work) noexcept {
    const int64_t threads = threads_for(count);
    if (threads == 1) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    Loop& loop = shared_->loops.emplace_back(count, threads);
    loop.work = &work;
    loop.take = [](Loop& loop, int64_t thread) {
      loop.ranges.take(thread, *static_cast<const Work*>(loop.work));
    };
    shared_->current.store(&loop);
    for (int64_t helper = 1; helper < threads; ++helper) {
      if (!shared_->here[helper].exchange(true)) call(helper);
    }
    loop.take(loop, 0);
    loop.closed.store(true);
    for (Wait wait; loop.running.load() != 0;) {
      if (!fetch_.step()) wait.turn();
    }
  }

  // The range in which for_each deals out number i.
  Range range_of(int64_t count, int64_t i) const {
    const int64_t threads = threads_for(count), thread = i * threads / count;
    const Range range(count, threads, thread);
    return i < range.end ? range : Range(count, threads, thread + 1);
  }

 private:
  struct Loop {
    Loop(int64_t count, int64_t threads) : ranges(count, threads), threads(threads) {}

    Ranges ranges;
    int64_t threads;
    const void* work = nullptr;
    void (*take)(Loop&, int64_t thread) = nullptr;
    std::atomic<int64_t> running{0};
    std::atomic<bool> closed{false};
  };

  struct Shared {
    Shared(int64_t threads, std::vector<Announced> announced)
        : announced(std::move(announced)), here(threads) {}

    // All of them, because a helper may still look at an earlier one.
    std::deque<Loop> loops;
    const std::vector<Announced> announced;
    std::atomic<int64_t> reached{0};      // of them
    std::vector<std::atomic<bool>> here;  // helpers that wait or work
    std::atomic<Loop*> current{nullptr};
    std::atomic<bool> ended{false};
  };

  int64_t threads_for(int64_t count) const {
    return std::max<int64_t>(1, std::min<int64_t>(threads_, count));
  }

  void call(int64_t helper) {
    pool_.Schedule([shared = shared_, threads = threads_, helper]() noexcept {
      const Loop* last = nullptr;
      Fetch fetch(shared->announced, shared->reached, threads, helper);
      for (Wait wait; !shared->ended.load() && !wait.is_long();) {
        Loop* loop = shared->current.load();
        if (loop == last) {
          if (!fetch.step()) wait.turn();
          continue;
        }
        last = loop, wait = Wait();
        loop->running.fetch_add(1);
        if (helper < loop->threads && !loop->closed.load()) loop->take(*loop, helper);
        loop->running.fetch_sub(1);
      }
      shared->here[helper].store(false);
    });
  }

  xla::ffi::ThreadPool& pool_;
  const int64_t threads_;
  const std::shared_ptr<Shared> shared_;
  Fetch fetch_;
};

}  // namespace specjax
