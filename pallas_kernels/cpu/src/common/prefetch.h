// Prefetching of a weight.
//
// The rows of a panel are read side by side, one chunk of each at a time. These are too many
// streams for the hardware to foresee, and memory is read fastest from end to end. So several
// chunks are fetched together: while they are read, the next ones are asked for row by row. The
// next ones are the same rows' next chunks or, at the end, the first chunks of the next panel. The
// interleaved rows of a tile count as one row that is as long as all of them.
#pragma once

#include "common/simd.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int64_t kLine = 64;
// Bytes fetched together, at most: twice as many and x must stay in the second-level cache.
inline constexpr int64_t kFetchBytes = 1 << 17;

class Prefetch {
 public:
  // For `rows` rows from `row` on, `chunk_bytes` of each at a time. `ask` is called `asks` times
  // per chunk.
  SPECJAX_INLINE Prefetch(const Weight& w, int64_t row, int64_t rows, int64_t chunk_bytes,
                          int64_t asks)
      : lines_((rows * chunk_bytes + asks * kLine - 1) / (asks * kLine)),
        rows_(w.interleaved ? (rows + kTileRows - 1) / kTileRows : rows),
        row_bytes_(w.interleaved ? w.row_bytes * kTileRows : w.row_bytes),
        first_(w.data + (w.interleaved ? row & -kTileRows : row) * w.row_bytes) {
    if (w.interleaved) chunk_bytes *= kTileRows;
    const int64_t chunks = (row_bytes_ + chunk_bytes - 1) / chunk_bytes;
    const int64_t fetches = (rows_ * row_bytes_ + kFetchBytes - 1) / kFetchBytes;
    chunks_ = (chunks + fetches - 1) / fetches;
    fetch_bytes_ = fetches == 1 ? row_bytes_ : chunks_ * chunk_bytes;
  }

  SPECJAX_INLINE void begin_chunk() {
    if (--chunks_left_ > 0) return;
    chunks_left_ = chunks_;
    start_ += fetch_bytes_;
    if (start_ >= row_bytes_) start_ = 0, first_ += rows_ * row_bytes_;
    line_ = first_ + start_, end_ = line_ + fetch_bytes_;
    rows_left_ = rows_;
  }

  // Asks for an even share of the lines to fetch, while some are left.
  SPECJAX_INLINE void ask() {
    if (rows_left_ == 0) return;
    for (int64_t i = 0; i < lines_; ++i) __builtin_prefetch(line_ + i * kLine);
    line_ += lines_ * kLine;
    if (__builtin_expect(line_ < end_, 1)) return;
    line_ += row_bytes_ - fetch_bytes_, end_ += row_bytes_;
    --rows_left_;
  }

 private:
  const int64_t lines_, rows_, row_bytes_;
  int64_t chunks_, fetch_bytes_;  // fetched together: chunks, and bytes of a row
  // What is fetched next: where it begins in the rows from `first_` on, and what is left of it.
  const uint8_t *first_, *line_ = nullptr, *end_ = nullptr;
  int64_t start_ = 0, chunks_left_ = 0, rows_left_ = 0;
};

}  // namespace specjax::SPECJAX_ISA
