// Asking for memory before it is needed, while a thread has nothing else to do.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace specjax {

// The range of one thread when `count` numbers are divided evenly.
struct Range {
  Range(int64_t count, int64_t threads, int64_t thread)
      : begin(count * thread / threads), end(count * (thread + 1) / threads) {}

  int64_t begin, end;
};

// The memory that a loop will read. Each of its numbers reads an even share of one part; the parts
// follow one another.
struct Announced {
  struct Part {
    int64_t count = 0;  // numbers
    std::array<const uint8_t*, 2> data = {};
    std::array<int64_t, 2> bytes = {};
  };

  std::array<Part, 3> parts = {};
};

// Asks, a few lines at a time, for what one thread will read in the next loops.
class Fetch {
 public:
  // reached: how many of the announced loops have begun.
  Fetch(const std::vector<Announced>& announced, const std::atomic<int64_t>& reached,
        int64_t threads, int64_t thread)
      : announced_(&announced), reached_(&reached), threads_(threads), thread_(thread) {}

  // Asks for the next lines, if there are any left.
  bool step() {
    const int64_t reached = reached_->load();
    if (loop_ < reached) begin(reached);
    while (next_ == end_) {
      if (loop_ == reached + kLoops - 1) return false;
      begin(loop_ + 1);
    }
    auto& [from, to] = stretches_[next_];
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(from + i * kLineBytes, 0, 2);
    from += kLines * kLineBytes;
    if (from >= to) ++next_;
    return true;
  }

 private:
  static constexpr int64_t kLoops = 2;       // of those that have not begun
  static constexpr int64_t kMost = 1 << 18;  // bytes per loop: a part of the second-level cache
  static constexpr int64_t kLines = 8, kLineBytes = 64;

  // Finds the stretches of memory that the thread will read in a loop.
  void begin(int64_t loop) {
    loop_ = loop, next_ = end_ = 0;
    if (loop >= static_cast<int64_t>(announced_->size())) return;
    const auto& parts = (*announced_)[loop].parts;
    const Range range(parts[0].count + parts[1].count + parts[2].count, threads_, thread_);
    int64_t first = 0, left = kMost;
    for (const Announced::Part& part : parts) {
      const int64_t begin = std::max(range.begin - first, int64_t{0});
      const int64_t end = std::min(range.end - first, part.count);
      first += part.count;
      for (int i = 0; i < 2 && begin < end; ++i) {
        const uint8_t* const from = part.data[i] + part.bytes[i] * begin / part.count;
        const int64_t size = std::min(part.bytes[i] * (end - begin) / part.count, left);
        left -= size;
        if (size > 0) stretches_[end_++] = {from, from + size};
      }
    }
  }

  const std::vector<Announced>* announced_;
  const std::atomic<int64_t>* reached_;
  int64_t threads_, thread_;
  int64_t loop_ = -1;  // of the announced ones: the one that is asked for
  std::array<std::pair<const uint8_t*, const uint8_t*>, 6> stretches_ = {};
  int next_ = 0, end_ = 0;  // of the stretches
};

}  // namespace specjax
