// What will be read of a weight is asked for before.
//
// Rows are read side by side, a chunk of each at a time: too many streams for the hardware to
// foresee, while memory is read fastest from end to end. So some chunks of these rows are a block,
// and while a block is read the next one is asked for row by row: the same rows' next chunks, or
// after the last of them the first chunks of the rows that come next. Rows that are interleaved
// count as one that is as long as all of them.
#pragma once

#include "common/simd.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int64_t kLine = 64;
// Bytes of a block, at most: two blocks and x must stay in the second-level cache.
inline constexpr int64_t kBlockBytes = 1 << 17;

class Prefetch {
 public:
  // For `rows` rows from `row` on, `chunk_bytes` of each at a time, in `steps` steps per chunk.
  SPECJAX_INLINE Prefetch(const Weight& w, int64_t row, int64_t rows, int64_t chunk_bytes,
                          int64_t steps)
      : lines_((rows * chunk_bytes + steps * kLine - 1) / (steps * kLine)),
        rows_(w.interleaved ? (rows + kTile - 1) / kTile : rows),
        row_bytes_(w.interleaved ? w.row_bytes * kTile : w.row_bytes),
        first_(w.data + (w.interleaved ? row & -kTile : row) * w.row_bytes) {
    if (w.interleaved) chunk_bytes *= kTile;
    const int64_t chunks = (row_bytes_ + chunk_bytes - 1) / chunk_bytes;
    const int64_t blocks = (rows_ * row_bytes_ + kBlockBytes - 1) / kBlockBytes;
    chunks_ = (chunks + blocks - 1) / blocks;
    piece_ = blocks == 1 ? row_bytes_ : chunks_ * chunk_bytes;
  }

  SPECJAX_INLINE void begin_chunk() {
    if (--chunks_left_ > 0) return;
    chunks_left_ = chunks_;
    start_ += piece_;
    if (start_ >= row_bytes_) start_ = 0, first_ += rows_ * row_bytes_;
    line_ = first_ + start_, end_ = line_ + piece_;
    rows_left_ = rows_;
  }

  // Asks for as many lines as a step should, while some of the block are left.
  SPECJAX_INLINE void step() {
    if (rows_left_ == 0) return;
    for (int64_t i = 0; i < lines_; ++i) __builtin_prefetch(line_ + i * kLine);
    line_ += lines_ * kLine;
    if (__builtin_expect(line_ < end_, 1)) return;
    line_ += row_bytes_ - piece_, end_ += row_bytes_;
    --rows_left_;
  }

 private:
  const int64_t lines_, rows_, row_bytes_;
  int64_t chunks_, piece_;  // of a block: chunks, and bytes of a row
  // The next block: where it begins in the rows from `first_` on, and what has not been asked for.
  const uint8_t *first_, *line_ = nullptr, *end_ = nullptr;
  int64_t start_ = 0, chunks_left_ = 0, rows_left_ = 0;
};

}  // namespace specjax::SPECJAX_ISA
