// Products by tiles, of two vectors of outputs at a time: they share every load of x.
//
// The sums of a quantized weight end with every segment, where they are scaled. Those of other
// weights run to the end.
//
// These loops are bound by the first-level cache, which another thread may share: a decoded tile
// must still be in it when it is loaded. So a stream decodes only one slice ahead.
#pragma once

#include "matmul/tile_segments.h"
#include "matmul/tile_source.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kPortionsPerPass = 4;  // of rows of x

// Prefetch distance of a stream in lines. It is short because decoded tiles need the cache as well.
inline constexpr int kLinesAhead = 64;

// Writes y[rows of portion `portion`, kLanes outputs from `column` on].
inline void write_portion(const Product& p, int64_t m, int64_t column, int64_t portion,
                          const Float* totals, float* y) {
  const int64_t outputs = p.w.n - column < kLanes ? p.w.n - column : kLanes;
  for (int64_t r = 0; r < p.how.portion && portion * p.how.portion + r < m; ++r) {
    float* to = y + (portion * p.how.portion + r) * p.w.n + column;
    store_some(to, totals[r], outputs);
  }
}

// The base of the two classes below: two vectors of outputs from `column` on. Where there is no
// second one, it is the first one again.
template <Arithmetic A, Kind kind, int kDepth>
class TilePair {
 public:
  TilePair(const Product& p, int64_t column)
      : p_(p),
        slices_(p),
        column_(column),
        beside_(column + kLanes < p.w.n),
        groups_(p.w, column),
        sources_{{p.w, column}, {p.w, column + beside_ * kLanes}} {}

 protected:
  using Source = TileSource<A, kind, kDepth>;
  using Slices = typename Source::Slices;
  using Vector = TileSums<A>;
  static constexpr int kRuns = Slices::kRuns;
  static constexpr bool kSegments = kind <= Kind::kInt8;

  const Product& p_;
  const Slices slices_;
  const int64_t column_;
  const int beside_;
  Groups groups_;
  Source sources_[kSideBySide];
};

// Multiplies one portion. Tile 2 · run + vector holds sums. While a slice is multiplied, the next
// one is decoded, a share after every product.
template <Arithmetic A, Kind kind, int kDepth>
class TileStream : TilePair<A, kind, kDepth> {
  using Pair = TilePair<A, kind, kDepth>;
  using Pair::kRuns, Pair::kSegments, Pair::p_, Pair::slices_, Pair::column_, Pair::beside_,
      Pair::groups_, Pair::sources_;
  using typename Pair::Vector, typename Pair::Slices;

 public:
  using Pair::Pair;

  SPECJAX_INLINE void multiply(int64_t m, float* y) {
    constexpr int kPerChunk = Slices::kPerChunk;
    const int64_t last = slices_.chunks * kPerChunk - 1;
    zero();
    SPECJAX_UNROLL for (int share = 0; share < kSideBySide * kRuns; ++share) read(0, share);
    const uint32_t* x = p_.x.words;
    for (int64_t chunk = 0; chunk < slices_.chunks; ++chunk, x += slices_.chunk_words) {
      groups_.template ask<A>(kSideBySide, chunk + 1);
      for (int64_t s = 0; s < kPerChunk; ++s) {
        const int64_t slice = chunk * kPerChunk + s;
        add(x + s * slices_.words, slice, slice < last ? slice + 1 : last);
        if (kSegments && ((s + 1) & (slices_.per_segment - 1)) == 0) {
          const int64_t end = 2 * chunk * kRun<A> + (s + 1) * Slices::kInputs;
          const int64_t start = end - p_.template segment<A>();
          if (start < p_.how.k) end_segments(start);  // the others are padding
        }
      }
    }
    if constexpr (!kSegments) {
      store_tile<0>(totals_[0], kBytes), store_tile<1>(totals_[1], kBytes);
    }
    for (int v = 0; v <= beside_; ++v) {
      write_portion(p_, m, column_ + v * kLanes, 0, totals_[v], y);
    }
  }

 private:
  static SPECJAX_INLINE void zero() {
    zero_tile<0>(), zero_tile<1>();
    if constexpr (kRuns == 2) zero_tile<2>(), zero_tile<3>();
  }

  // Stores the sums of vector `v`, of both runs.
  template <int v, typename V>
  static SPECJAX_INLINE void store(V* first, V* second) {
    store_tile<v>(first, kBytes);
    if constexpr (kRuns == 2) store_tile<2 + v>(second, kBytes);
  }

  // Reads a share of a slice: half of a vector's lines if they hold two runs, otherwise all of
  // them.
  SPECJAX_INLINE void read(int64_t slice, int share) {
    constexpr int kCount = Slices::kLines / kRuns;
    const int v = share / kRuns, first = share % kRuns * kCount;
    sources_[v].template ask<kCount>(slice * Slices::kLines + first + kLinesAhead);
    const Word*& weights = weights_[slice & 1][v];
    weights = sources_[v].stored(slice);
    if (weights != nullptr) return;
    weights = buffers_[slice & 1][v];
    sources_[v].template read<kCount, kDepth>(slice, first, buffers_[slice & 1][v]);
  }

  SPECJAX_INLINE void add(const uint32_t* x, int64_t slice, int64_t next) {
    const Word *left = weights_[slice & 1][0], *right = weights_[slice & 1][1];
    add_run<0>(x, left, right, next);
    if constexpr (kRuns == 2) {
      add_run<1>(x + slices_.run_words, left + kDepth, right + kDepth, next);
    }
  }

  template <int run>
  SPECJAX_INLINE void add_run(const uint32_t* x, const Word* left, const Word* right,
                              int64_t next) {
    load_tile<4>(x, 4 * kDepth), load_tile<6>(left, kBytes);
    add_product<A, 2 * run, 4, 6, kUnsigned<kind>>();
    read(next, kSideBySide * run);
    load_tile<7>(right, kBytes);
    add_product<A, 2 * run + 1, 4, 7, kUnsigned<kind>>();
    read(next, kSideBySide * run + 1);
  }

  // Ends the segments that begin at input `start` and, in run 1, kPlane inputs later.
  SPECJAX_INLINE void end_segments(int64_t start) {
    const Place places[2] = {Place::of<A>(p_, start), Place::of<A>(p_, start + kPlane)};
    end_segments<0>(0, places);
    end_segments<1>(beside_, places);
    zero();
  }

  // Ends those of one vector. If both vectors ended together, sums and y would lie 4096 bytes
  // apart, and the processor would mistake one address for the other.
  template <int v>
  SPECJAX_INLINE void end_segments(int group_vector, const Place* places) {
    Vector* const sums[2] = {sums_[0], sums_[kRuns - 1]};
    store<v>(sums[0], sums[1]);
    by_points(p_.w, [&](auto points) SPECJAX_LAMBDA {
      add_segments<A, kind, points, kRuns>(p_, groups_, group_vector, places, 0, sums, totals_[v]);
    });
  }

  const Word* weights_[2][kSideBySide];
  alignas(64) Word buffers_[2][kSideBySide][kRuns * kDepth];
  alignas(64) Vector sums_[kRuns][kTileRows];
  alignas(64) Float totals_[kSideBySide][kTileRows] = {};
};

// Multiplies several portions. A chunk is decoded for all of them, and multiplied by two portions
// at a time. Tile 2 · portion + vector holds sums. The high and the low bytes of integers of 16
// bits are two portions, whose sums become one.
template <Arithmetic A, Kind kind, int kDepth>
class TileChunks : TilePair<A, kind, kDepth> {
  using Pair = TilePair<A, kind, kDepth>;
  using Pair::kRuns, Pair::kSegments, Pair::p_, Pair::slices_, Pair::column_, Pair::beside_,
      Pair::groups_, Pair::sources_;
  using typename Pair::Vector, typename Pair::Slices, typename Pair::Source;

 public:
  using Pair::Pair;

  // Multiplies portions `first` … first + portions - 1, an even number.
  void multiply(int64_t m, int64_t first, int64_t portions, float* y) {
    const int64_t length = kSegments ? slices_.per_segment : kPerChunk;
    const int64_t pair_words = 2 * p_.how.portion * kDepth;
    const uint32_t* x = p_.x.words + first * p_.how.portion * kDepth;
    for (int64_t chunk = 0; chunk < slices_.chunks; ++chunk, x += slices_.chunk_words) {
      groups_.template ask<A>(kSideBySide, chunk + 1);
      read(chunk);
      for (int64_t i = 0; i < portions; i += 2) {
        for (int64_t s = 0; s < kPerChunk; s += length) {
          if (2 * chunk * kRun<A> + s * Slices::kInputs >= p_.how.k) break;  // padding
          const uint32_t* from = x + i / 2 * pair_words + s * slices_.words;
          add(from, chunk, s, length, 0, first + i, i);
          if (kRuns == 2) add(from + slices_.run_words, chunk, s, length, 1, first + i, i);
        }
      }
    }
    if constexpr (kSegments) finish();
    for (int v = 0; v <= beside_; ++v) {
      for (int64_t i = 0; i < portions / kPlanes; ++i) {
        write_portion(p_, m, column_ + v * kLanes, first / kPlanes + i, totals_[v][i], y);
      }
    }
  }

 private:
  static constexpr int kPlanes = kWordsOfX<A>;
  static constexpr int kPerChunk = Slices::kPerChunk;
  static constexpr int kChunkWords = kPerChunk * kDepth;  // of a run

  void read(int64_t chunk) {
    const int64_t first = chunk * kPerChunk;
    for (int v = 0; v < kSideBySide; ++v) {
      const bool stored = sources_[v].stored(first + kPerChunk - 1) != nullptr;
      weights_[v] = stored ? sources_[v].stored(first) : buffers_[v];
      for (int s = 0; s < kPerChunk && !stored; ++s) {
        Word* to = buffers_[v] + s * kDepth;
        sources_[v].template read<Slices::kLines, kChunkWords>(first + s, 0, to);
      }
    }
  }

  // Asks for a share of the next chunk, as large as slice `slice` of run `run` is of this one.
  SPECJAX_INLINE void ask(int64_t chunk, int64_t slice, int run) {
    constexpr int kCount = Slices::kLines / kRuns;
    const int64_t place = (chunk + 1) * kPerChunk * kRuns + slice * kRuns + run;
    for (const Source& source : sources_) source.template ask<kCount>(place * kCount);
  }

  // Adds `length` slices of run `run` from slice `s` of the chunk on, for portions `portion` and
  // the next: `i` and the next of those that share what is decoded.
  SPECJAX_INLINE void add(const uint32_t* x, int64_t chunk, int64_t s, int64_t length, int run,
                          int64_t portion, int64_t i) {
    const Word* left = weights_[0] + run * kChunkWords + s * kDepth;
    const Word* right = weights_[1] + run * kChunkWords + s * kDepth;
    begin(i);
    for (int64_t slice = 0; slice < length; ++slice) {
      load_tile<4>(x, 4 * kDepth), load_tile<6>(left, kBytes);
      add_product<A, 0, 4, 6, kUnsigned<kind>>();
      if (i == 0) ask(chunk, s + slice, run);
      load_tile<7>(right, kBytes);
      add_product<A, 1, 4, 7, kUnsigned<kind>>();
      load_tile<5>(x + p_.how.portion * kDepth, 4 * kDepth);
      add_product<A, 2, 5, 6, kUnsigned<kind>>(), add_product<A, 3, 5, 7, kUnsigned<kind>>();
      x += slices_.words, left += kDepth, right += kDepth;
    }
    end(2 * chunk * kRun<A> + s * Slices::kInputs + run * kPlane, run, portion, i);
  }

  SPECJAX_INLINE void begin(int64_t i) {
    if constexpr (kSegments) {
      zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    } else {
      load_tile<0>(totals_[0][i], kBytes), load_tile<1>(totals_[1][i], kBytes);
      load_tile<2>(totals_[0][i + 1], kBytes), load_tile<3>(totals_[1][i + 1], kBytes);
    }
  }

  SPECJAX_INLINE void end(int64_t start, int run, int64_t portion, int64_t i) {
    if constexpr (!kSegments) {
      store_tile<0>(totals_[0][i], kBytes), store_tile<1>(totals_[1][i], kBytes);
      store_tile<2>(totals_[0][i + 1], kBytes), store_tile<3>(totals_[1][i + 1], kBytes);
      return;
    }
    Vector(*sums)[kTileRows] = sums_[turn_][run];
    store_tile<0>(sums[0], kBytes), store_tile<1>(sums[1], kBytes);
    store_tile<2>(sums[2], kBytes), store_tile<3>(sums[3], kBytes);
    if (run < kRuns - 1) return;
    finish();  // tile products take long: meanwhile, the segments before are added
    const Place last = Place::of<A>(p_, start);
    stored_ = {{kRuns == 2 ? Place::of<A>(p_, start - kPlane) : last, last}, portion, i};
    turn_ ^= 1;
  }

  // Adds the segments whose sums are stored, those of both runs.
  SPECJAX_INLINE void finish() {
    if (stored_.portion < 0) return;
    SPECJAX_UNROLL for (int each = 0; each < 2 / kPlanes; ++each) {
      const int64_t portion = stored_.portion / kPlanes + each, i = stored_.i / kPlanes + each;
      for (int v = 0; v < kSideBySide; ++v) add_sums(each, v, portion, i);
    }
  }

  SPECJAX_INLINE void add_sums(int each, int v, int64_t portion, int64_t i) {
    Vector(*of_runs)[4][kTileRows] = sums_[turn_ ^ 1];
    const int tile = each * kSideBySide + v;
    const Vector* const sums[2] = {of_runs[0][tile], of_runs[kRuns - 1][tile]};
    by_points(p_.w, [&](auto points) SPECJAX_LAMBDA {
      add_segments<A, kind, points, kRuns>(p_, groups_, v & beside_, stored_.places,
                                           portion * p_.how.portion, sums, totals_[v][i]);
    });
  }

  struct Stored {
    Place places[2];
    int64_t portion, i;
  };

  const Word* weights_[kSideBySide];
  Stored stored_{{}, -1, 0};
  int turn_ = 0;  // whose sums are stored next
  alignas(64) Word buffers_[kSideBySide][kRuns * kChunkWords];
  alignas(64) Vector sums_[2][kRuns][4][kTileRows];
  alignas(64) Float totals_[kSideBySide][kPortionsPerPass][kTileRows] = {};
};

template <Arithmetic A, Kind kind, int kDepth = kTileWords>
inline void multiply_by_tiles(const Product& p, int64_t m, int64_t first_column, float* y) {
  const TileShapes shapes(p.how.portion, kDepth);
  constexpr int kPlanes = kWordsOfX<A>;
  const int64_t portions = p.how.rows / p.how.portion * kPlanes;
  const int64_t past = first_column + p.how.columns, end = past < p.w.n ? past : p.w.n;
  constexpr int64_t kMost = kPortionsPerPass * kPlanes, kStep = kSideBySide * kLanes;
  for (int64_t first = 0; first < portions; first += kMost) {  // x of these rows stays in the cache
    const int64_t left = portions - first, count = left < kMost ? left : kMost;
    for (int64_t column = first_column; column < end; column += kStep) {
      if constexpr (kPlanes == 1) {
        if (portions == 1) {
          TileStream<A, kind, kDepth>(p, column).multiply(m, y);
          continue;
        }
      }
      TileChunks<A, kind, kDepth>(p, column).multiply(m, first, count, y);
    }
  }
}

}  // namespace specjax::SPECJAX_ISA
