// Prefetching of a cache.
//
// One head's entries are short and far apart, so the hardware does not foresee them. The entries of
// all heads are contiguous. A thread that will read all heads of a block therefore asks for them in
// the order of memory: one share while it works on each head of the block before. Everything else
// is asked for one step ahead.
#pragma once

#include <algorithm>

#include "common/prefetch.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

inline int64_t head_bytes(const Attention& a) {
  return a.cached == Cached::kFloat32    ? 4 * a.e
         : a.cached == Cached::kBfloat16 ? 2 * a.e
         : a.cached == Cached::kCodes8   ? a.e
                                         : a.e / 2;
}

inline int64_t head_lines(const Attention& a) { return (head_bytes(a) + kLine - 1) / kLine; }

// Memory to prefetch, a few lines at a time, because bursts of prefetches wait for each other.
class Ahead {
 public:
  Ahead() = default;  // prefetches nothing

  // For a step that calls `ask` so many times.
  Ahead(const Attention& a, const AttentionAhead& steps, int64_t times) {
    const int64_t bytes = head_bytes(a), stride = a.kv_heads * bytes;
    for (const Cache* cache : {&a.keys, &a.values}) {
      const auto block = [&](const AttentionStep& step) {
        const int64_t slot = a.first_slot(step.task->batch_row) + step.block * kAttentionBlock;
        return static_cast<const uint8_t*>(cache->data) + slot * stride;
      };
      if (steps.next != nullptr) {
        const AttentionStep& step = *steps.next;
        add({block(step) + step.task->head * bytes, stride, slots(step), head_lines(a)});
      }
      if (steps.later != nullptr) {
        const AttentionStep& step = *steps.later;
        const int64_t share = slots(step) * bytes, row = kRowLines * kLine;
        add({block(step) + step.task->head * share, row, (share + row - 1) / row, kRowLines});
      }
    }
    at_once_ = (lines_ + times - 1) / std::max<int64_t>(times, 1);
  }

  // Prefetches the share of so many calls.
  SPECJAX_INLINE void ask(int64_t times = 1) {
    due_ += times * at_once_;
    while (due_ > 0 && current_ < count_) {
      Region& region = regions_[current_];
      for (int64_t i = 0; i < region.lines; ++i) __builtin_prefetch(region.at + i * kLine, 0, 2);
      due_ -= region.lines;
      region.at += region.stride;
      if (--region.rows == 0) ++current_;
    }
  }

 private:
  struct Region {
    const uint8_t* at;
    int64_t stride, rows, lines;  // lines: of a row
  };

  static constexpr int64_t kRowLines = 8;  // of contiguous memory

  // The slots in use of the step's block.
  static int64_t slots(const AttentionStep& step) {
    return step.task->end(step.block) - step.block * kAttentionBlock;
  }

  void add(const Region& region) {
    regions_[count_++] = region;
    lines_ += region.rows * region.lines;
  }

  Region regions_[4];
  unsigned current_ = 0, count_ = 0;
  int64_t lines_ = 0, at_once_ = 0, due_ = 0;
};

}  // namespace specjax::SPECJAX_ISA
