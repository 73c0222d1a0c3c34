// Products of a few rows of x with an interleaved weight. Storing a decoded panel would cost more
// than the products, so every word is multiplied as it is decoded. The sums and their order are
// those of panels.
#pragma once

#include "matmul/product.h"

namespace specjax::SPECJAX_ISA {

// Concurrent sums: as many as fit in registers beside the operands.
#if defined(__AVX512BW__) || defined(__aarch64__)
inline constexpr int kFewSums = 16;
#else
inline constexpr int kFewSums = 8;
#endif

// How many rows are few. A product of bytes that takes several instructions needs registers too.
template <Arithmetic A>
constexpr int few_rows(Kind kind) {
  const bool crowded = A == Arithmetic::kInteger && !kHasDot4 && kind <= Kind::kMxfp4;
  return kFewSums / (crowded ? 4 : 2);
}

// Whether m rows of x are multiplied this way.
template <Arithmetic A>
inline bool are_few(const Weight& w, int64_t m) {
  return w.interleaved && m <= few_rows<A>(w.kind);
}

// Prefetch distance in bytes. The hardware's own prefetching stops at the end of every page.
inline constexpr int64_t kAhead = 1 << 14;

// The kLanes outputs from `column` on, for R rows of x.
template <Arithmetic A, Kind kind, int R>
class FewRows {
 public:
  FewRows(const Product& p, int64_t column)
      : p_(p),
        groups_(p.w, column),
        lane_(column % kTileRows * kWordBytes),
        tile_(p.w.data + (column & -kTileRows) * p.w.row_bytes) {}

  SPECJAX_INLINE void multiply(Float* y) {
    const int64_t tile_bytes = p_.w.row_bytes * kTileRows;
    for (int64_t chunk = 0; chunk < p_.how.inputs / (2 * kRun<A>); ++chunk) {
      const uint8_t* from = tile_ + chunk * kChunkBytes;
      const int64_t left = tile_bytes - chunk * kChunkBytes;
      groups_.ask<A>(1, chunk + 1);
      if (kind <= Kind::kInt8 || left >= kChunkBytes) {  // quantized weights have whole chunks
        add_chunk(chunk, from, y);
      } else {
        alignas(64) uint8_t edge[kChunkBytes] = {};
        std::memcpy(edge, from, left);
        add_chunk(chunk, edge, y);
      }
    }
  }

 private:
  using Vector = typename Sums<A>::Vector;
  static constexpr int64_t kWordBytes = 4;
  static constexpr int kChains = Sums<A>::kChains;
  static constexpr int64_t kChunkBytes = chunk_bytes<A>(kind) * kTileRows;
  // Runs that lie in the same words are summed together, if there are registers for both.
  static constexpr bool kSameWords = kind <= Kind::kMxfp4;
  static constexpr int kRuns = kSameWords && 2 * R * kChains <= kFewSums ? 2 : 1;
  static constexpr int kSlices = kRun<A> / kSmallestGroup;
  static constexpr int64_t kRunBytes = kSameWords ? kChunkBytes : kChunkBytes / 2;
  static constexpr int kSliceWords = kRunBytes / kSlices / (kTileRows * kWordBytes);

  // The order in which segments end does not depend on the number of rows. Those of runs that share
  // words alternate.
  SPECJAX_INLINE void add_chunk(int64_t chunk, const uint8_t* from, Float* y) {
    if constexpr (kRuns == 2) {
      add_runs<0>(chunk, from, 0, kSlices, y);
    } else {
      const int64_t length = kSameWords ? p_.segment<A>() / kSmallestGroup : kSlices;
      for (int64_t slice = 0; slice < kSlices; slice += length) {
        add_runs<0>(chunk, from, slice, slice + length, y);
        add_runs<1>(chunk, kSameWords ? from : from + kRunBytes, slice, slice + length, y);
      }
    }
  }

  // Adds slices begin … last - 1 of runs first … first + kRuns - 1. A slice is as long as the
  // smallest group, so no segment ends inside it, and the places of its words are constants.
  template <int first>
  SPECJAX_INLINE void add_runs(int64_t chunk, const uint8_t* from, int64_t begin, int64_t last,
                               Float* y) {
    constexpr int kSliceInputs = kSmallestGroup, kRunStride = kPlane / kPerWord<A>;
    const int64_t segment = p_.segment<A>(), start = run_start<A>(p_.w, chunk, first);
    const uint32_t* x[R];
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) x[r] = p_.words<A>(r, start + begin * kSliceInputs);
    Vector sums[kRuns][R][kChains] = {};
    const auto add = [&](int run, int word, Word value) SPECJAX_LAMBDA {
      if (run < first || run >= first + kRuns) return;  // the words hold both runs
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
        Vector& sum = sums[run - first][r][word & (kChains - 1)];
        sum = Sums<A>::add(sum, value, splat(x[r][(run - first) * kRunStride + word]));
      }
    };
    from += begin * kSliceWords * kTileRows * kWordBytes;
    for (int64_t slice = begin; slice < last; ++slice) {
      SPECJAX_UNROLL for (int i = 0; i < kSliceWords; ++i, from += kTileRows * kWordBytes) {
        if (first == 0 || !kSameWords) __builtin_prefetch(from + kAhead);
        decoder_.decode(first, i, load<Word>(from + lane_), add);
      }
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) x[r] += kSliceInputs / kPerWord<A>;
      const int64_t end = (slice + 1) * kSliceInputs;
      if ((end & (segment - 1)) != 0) continue;
      SPECJAX_UNROLL for (int run = 0; run < kRuns; ++run) {
        end_segment(start + run * kPlane + end - segment, sums[run], y);
      }
    }
  }

  SPECJAX_INLINE void end_segment(int64_t start, Vector (*sums)[kChains], Float* y) {
    const Place place = Place::of<A>(p_, start);
    const Group group = groups_.read(0, place.group);
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      Vector total{};
      SPECJAX_UNROLL for (int chain = 0; chain < kChains; ++chain) {
        total += sums[r][chain];
        sums[r][chain] = Vector{};
      }
      add_scaled<A>(p_, group, place, r, total, y[r]);
    }
  }

  const Product& p_;
  Groups groups_;
  const int64_t lane_;  // bytes between a word of the tile's first row and that of the first output
  const uint8_t* tile_;
  Decoder<A, kind> decoder_;
};

template <Arithmetic A, Kind kind, int R>
inline void multiply_few(const Product& p, int64_t column, int64_t m, float* y) {
  if constexpr (R > 1) {
    if (m < R) return multiply_few<A, kind, R - 1>(p, column, m, y);
  }
  for (int64_t n = column; n < column + kColumns && n < p.w.n; n += kLanes) {
    Float sums[R] = {};
    FewRows<A, kind, R>(p, n).multiply(sums);
    const int64_t outputs = p.w.n - n < kLanes ? p.w.n - n : kLanes;
    for (int r = 0; r < R; ++r) store_some(y + r * p.w.n + n, sums[r], outputs);
  }
}

}  // namespace specjax::SPECJAX_ISA
