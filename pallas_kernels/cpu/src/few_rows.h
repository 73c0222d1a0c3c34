// Few rows of x and an interleaved weight: to decode a panel would cost more than the products, so
// what is decoded is multiplied at once. The same sums in the same order as by panels.
#pragma once

#include "product.h"

namespace specjax::SPECJAX_ISA {

// As many as registers hold the sums of: of nibbles, those of both runs at once.
#if defined(__AVX512BW__) || defined(__aarch64__)
constexpr int few_rows(Kind kind) { return kind <= Kind::kMxfp4 ? 4 : 8; }
#else
constexpr int few_rows(Kind kind) { return kind <= Kind::kMxfp4 ? 2 : 4; }
#endif

// Whether m rows of x are multiplied so.
inline bool are_few(const Weight& w, int64_t m) { return w.interleaved && m <= few_rows(w.kind); }

// Bytes that are asked for before they are read: the hardware alone stops at the end of every page.
inline constexpr int64_t kAhead = 1 << 14;

// The kLanes outputs from `column` on, for R rows of x.
template <Arithmetic A, Kind kind, int R>
class FewRows {
 public:
  FewRows(const Product& p, int64_t column)
      : p_(p),
        groups_(p.w, column),
        lane_(column % kTile * kWordBytes),
        tile_(p.w.data + (column & -kTile) * p.w.row_bytes) {}

  SPECJAX_INLINE void multiply(Float* y) {
    const int64_t tile_bytes = p_.w.row_bytes * kTile;
    for (int64_t chunk = 0; chunk < p_.how.inputs / (2 * kRun<A>); ++chunk) {
      const uint8_t* from = tile_ + chunk * kChunkBytes;
      const int64_t left = tile_bytes - chunk * kChunkBytes;
      groups_.ask<A>(1, chunk + 1);
      if (kind <= Kind::kInt8 || left >= kChunkBytes) {  // what is quantized has whole chunks
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
  static constexpr int64_t kChunkBytes = chunk_bytes<A>(kind) * kTile;
  static constexpr int kRuns = kind <= Kind::kMxfp4 ? 2 : 1;  // whose inputs lie in the same words
  static constexpr int kSteps = kRun<A> / kSmallestGroup;
  static constexpr int kStepWords = chunk_bytes<A>(kind) * kRuns / 2 / kSteps / kWordBytes;

  // In steps of the smallest group: it is known where in a step a word is, and that it ends there.
  SPECJAX_INLINE void add_chunk(int64_t chunk, const uint8_t* from, Float* y) {
    const int64_t stride = p_.how.inputs / kPerWord<A>, segment = p_.segment<A>();
    for (int first = 0; first < 2; first += kRuns) {
      int64_t starts[kRuns];
      const uint32_t* x[kRuns];
      SPECJAX_UNROLL for (int run = 0; run < kRuns; ++run) {
        starts[run] = run_start<A>(p_.w, chunk, first + run);
        x[run] = p_.words<A>(0, starts[run]);
      }
      Vector sums[kRuns][R][kChains] = {};
      const auto add = [&](int run, int word, Word value) SPECJAX_LAMBDA {
        SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
          Vector& sum = sums[run][r][word & (kChains - 1)];
          sum = Sums<A>::add(sum, value, splat(x[run][r * stride + word]));
        }
      };
      for (int step = 0; step < kSteps; ++step) {
        SPECJAX_UNROLL for (int i = 0; i < kStepWords; ++i, from += kTile * kWordBytes) {
          __builtin_prefetch(from + kAhead);
          decoder_.decode(0, step * kStepWords + i, load<Word>(from + lane_), add);
        }
        const int64_t end = (step + 1) * kSmallestGroup;
        if ((end & (segment - 1)) != 0) continue;
        SPECJAX_UNROLL for (int run = 0; run < kRuns; ++run) {
          end_segment(starts[run] + end - segment, sums[run], y);
        }
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
  const int64_t lane_;  // bytes from a word of the tile's first row to one of the first output's
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
