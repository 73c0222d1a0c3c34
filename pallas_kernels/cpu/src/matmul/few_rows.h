// Products of a few rows of x with an interleaved weight. Storing a decoded panel would cost more
// than the products, so every word is multiplied as it is decoded. The sums and their order are
// those of panels.
//
// The rows of a portion stand together in x (types.h), so that one register and constants reach all
// of their words.
#pragma once

#include "matmul/product.h"

namespace specjax::SPECJAX_ISA {

// Concurrent sums, as many as fit in registers beside the operands; rows of a portion; and up to
// how many portions of floats this is faster than panels; for bytes one portion.
#if defined(__AVX512BW__)
inline constexpr int kFewSums = 24, kFewRows = 12, kFewPortions = 2;
#elif defined(__aarch64__)
inline constexpr int kFewSums = 16, kFewRows = 8, kFewPortions = 1;
#else
inline constexpr int kFewSums = 8, kFewRows = 4, kFewPortions = 2;
#endif

template <Arithmetic A>
inline constexpr int kSliceWords = kSliceInputs / kPerWord<A>;  // of a weight

// A product of bytes that takes several instructions needs registers too.
constexpr int few_rows(Arithmetic arithmetic, Kind kind) {
  const bool crowded = arithmetic == Arithmetic::kInteger && !kHasDot4 && in_nibbles(kind);
  return crowded ? kFewRows / 2 : kFewRows;
}

constexpr int few_portions(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kInteger ? 1 : kFewPortions;
}

// Vectors of outputs that are multiplied side by side: they share every word of x. Sums of floats
// always need two, because a product waits for the previous one of its sum. Those of integers take
// two while both runs of both have registers, but for one row, which shares no word: memory is read
// fastest from end to end, in one stream.
template <Arithmetic A, Kind kind>
constexpr int vectors_beside(int rows) {
  const int most = few_rows(A, kind) * kFewSums / kFewRows;
  return is_integer(A) && (rows == 1 || 4 * rows * kPerSum<A> > most) ? 1 : 2;
}

// Outputs that a thread multiplies at a time: whole tiles, and so few that all threads end
// together.
inline constexpr int64_t kFewColumns = 2 * kLanes > kTileRows ? 2 * kLanes : kTileRows;

// Prefetch distances in bytes: the first for each vector beside another. The hardware's own
// prefetching stops at the end of every page. Lines are asked for into the second-level cache,
// which can wait for more of them at a time than the first-level one, and again shortly before they
// are read: so far ahead they would push one another out of the first-level cache.
inline constexpr int64_t kAhead = 1 << 14, kShortlyAhead = 1 << 11;

// Chunks of a weight that all portions multiply before the next ones are read.
inline constexpr int64_t kFewChunks = 4;

// V vectors of outputs from `column` on, for the R rows of the portion that begins at row `row`.
template <Arithmetic A, Kind kind, int R, int V>
class FewRows {
 public:
  FewRows(const Product& p, int64_t column, int64_t row)
      : p_(p),
        groups_(p.w, column),
        row_(row),
        x_(p.words<A>(row, 0)),
        read_(read_bytes(p)),
        unread_(kTiles * p.w.row_bytes * kTileRows - read_) {
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      // Where there are no more outputs, the first ones stand in.
      const int64_t n = column + v * kLanes < p.w.n ? column + v * kLanes : column;
      n_[v] = n;
      if (kind == Kind::kBfloat12) escapes_[v] = Escapes(p.w, n);
      lane_[v] = n % kTileRows * kWordBytes;
      tile_[v] = p.w.data + (n & -kTileRows) * p.w.row_bytes;
    }
  }

  // Adds chunks first … last - 1.
  SPECJAX_INLINE void add(int64_t first, int64_t last, Float (*y)[V]) {
    const int64_t tile_bytes = p_.w.row_bytes * kTileRows;
    for (Escapes& escapes : escapes_) escapes.seek(run_start<A>(p_.w, first, 0));
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t offset = chunk * kChunkBytes, left = tile_bytes - offset;
      groups_.ask<A>(V, chunk + 2);
      ahead_ = ahead(left);
      left_ = read_ - offset;
      const uint8_t* from[V];
      alignas(64) uint8_t edge[V][kWholeChunks ? 1 : kChunkBytes];
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
        from[v] = tile_[v] + offset;
        if (!kWholeChunks && left < kChunkBytes && p_.how.k % kSliceInputs != 0) {
          std::memset(edge[v], 0, sizeof edge[v]);
          std::memcpy(edge[v], from[v], left);
          from[v] = edge[v];
        }
        from[v] += lane_[v];
        if constexpr (kind == Kind::kBfloat12) {
          palettes_[v] = palette_of(p_.w, n_[v], run_start<A>(p_.w, chunk, 0));
        }
      }
      add_chunk(chunk, from, y);
    }
  }

 private:
  using Vector = typename Sums<A>::Vector;
  using Decode = Decoder<A, kind>;
  static constexpr int64_t kWordBytes = 4, kTileWordBytes = kTileRows * kWordBytes;
  static constexpr int64_t kChunkBytes = chunk_bytes<A>(kind) * kTileRows;
  static constexpr bool kWholeChunks = kind <= Kind::kInt8;
  static constexpr int64_t kTiles = (V * kLanes + kTileRows - 1) / kTileRows;
  // Runs that lie in the same words are summed together, if there are registers for both.
  static constexpr bool kSameWords = Decode::kRuns == 2;
  static constexpr int kRuns = kSameWords && 2 * R * V * kPerSum<A> <= kFewSums ? 2 : 1;
  static constexpr int64_t kRunBytes = kSameWords ? kChunkBytes : kChunkBytes / 2;
  static constexpr int kSlices = kRun<A> / kSliceInputs, kDepth = kSliceWords<A> * kWordsOfX<A>;
  static constexpr int kSliceLines = kRunBytes / kSlices / kTileWordBytes;

  // The order in which segments end does not depend on the number of rows. Those of runs that share
  // words alternate.
  SPECJAX_INLINE void add_chunk(int64_t chunk, const uint8_t* const* from, Float (*y)[V]) {
    constexpr int64_t kApart = kSameWords ? kPlane : kRun<A>;
    const int64_t start = run_start<A>(p_.w, chunk, 0);
    const int64_t first = p_.inputs_from(start, kRun<A>) / kSliceInputs;  // slices of the runs
    const int64_t second = p_.inputs_from(start + kApart, kRun<A>) / kSliceInputs;
    if constexpr (kRuns == 2) {
      if (second == 0) return add_runs<0, 1>(start, from, 0, 0, first, y);
      add_runs<0, 2>(start, from, 0, 0, kSlices, y);
    } else if constexpr (kSameWords) {
      const int64_t length = p_.segment<A>() / kSliceInputs;
      for (int64_t slice = 0; slice < first; slice += length) {
        const int64_t end = slice + length;
        add_runs<0, 1>(start, from, 0, slice, end < first ? end : first, y);
        add_runs<1, 1>(start + kApart, from, 0, slice, end < second ? end : second, y);
      }
    } else {
      add_runs<0, 1>(start, from, 0, 0, first, y);
      add_runs<0, 1>(start + kApart, from, kRunBytes, 0, second, y);
    }
  }

  // Adds slices begin … last - 1 of runs first … first + kCount - 1: the first of them begins at
  // input `start` and at byte `offset` of the chunk. The places of a slice's words are constants.
  template <int first, int kCount>
  SPECJAX_INLINE void add_runs(int64_t start, const uint8_t* const* chunk, int64_t offset,
                               int64_t begin, int64_t last, Float (*y)[V]) {
    constexpr int kWide = kWordsOfX<A>, kRunStride = kPlane / kPerWord<A> * kWide * R;
    const int64_t segment = p_.segment<A>();
    const uint32_t* x = x_ + (start / kPerWord<A> * kWide + begin * kDepth) * R;
    const uint8_t* from[V];
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      from[v] = chunk[v] + offset + begin * kSliceLines * kTileWordBytes;
    }
    Vector sums[kCount][R][V] = {};
    for (int64_t slice = begin; slice < last; ++slice, x += kDepth * R) {
      const int64_t shortly = shortly_ahead(left_ - offset - slice * kSliceLines * kTileWordBytes);
      if (kind == Kind::kBfloat12 && escapes_before(start + (slice + 1) * kSliceInputs)) {
        add_with_escapes(start + slice * kSliceInputs, x, sums[0]);
        SPECJAX_UNROLL for (int v = 0; v < V; ++v) step_over<kSliceLines>(from[v], shortly, true);
      } else {
        SPECJAX_UNROLL for (int line = 0; line < kSliceLines; line += Decode::kLines) {
          typename Decode::Stored stored[V];
          SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
            stored[v] = read(from[v], v);
            step_over<Decode::kLines>(from[v], shortly, first == 0 || !kSameWords);
          }
          SPECJAX_UNROLL for (int i = 0; i < Decode::kWords; ++i) {
            SPECJAX_UNROLL for (int run = 0; run < kCount; ++run) {
              const int word = line / Decode::kLines * Decode::kWords + i;
              const uint32_t* words = x + run * kRunStride + word * kWide;
              add_word<first>(run, i, stored, words, sums[run]);
            }
          }
        }
      }
      const int64_t end = (slice + 1) * kSliceInputs;
      if ((end & (segment - 1)) != 0 && slice + 1 < last) continue;
      SPECJAX_UNROLL for (int run = 0; run < kCount; ++run) {
        end_segment(start + run * kPlane + ((end - 1) & -segment), sums[run], y);
      }
    }
  }

  SPECJAX_INLINE typename Decode::Stored read(const uint8_t* from, int v) const {
    if constexpr (kind == Kind::kBfloat12) {
      return {{load<Word>(from), load<Word>(from + kTileWordBytes),
               load<Word>(from + 2 * kTileWordBytes)},
              palettes_[v]};
    } else if constexpr (kind == Kind::kNestedInt8) {
      return {load<Word>(from), load<Word>(from + to_rest())};
    } else {
      return load<Word>(from);
    }
  }

  // Steps over kCount lines. `ask`: prefetches those that the first portion reads later.
  template <int kCount>
  SPECJAX_INLINE void step_over(const uint8_t*& from, int64_t shortly, bool ask) const {
    SPECJAX_UNROLL for (int i = 0; i < kCount; ++i, from += kTileWordBytes) {
      if (!ask || row_ != 0) continue;
      ask_for(from, shortly);
      if constexpr (kind == Kind::kNestedInt8) ask_for(from + to_rest(), shortly);
    }
  }

  SPECJAX_INLINE void ask_for(const uint8_t* from, int64_t shortly) const {
    __builtin_prefetch(from + ahead_, 0, 2);
    __builtin_prefetch(from + shortly);
  }

  // The bytes of a tile up to its last line that is read. Padding follows.
  static int64_t read_bytes(const Product& p) {
    const int64_t inputs = p.inputs_from(0, p.how.inputs), rest = inputs % kPlanePair;
    if (!kSameWords) return inputs * (kChunkBytes / (2 * kRun<A>));
    return (inputs / kPlanePair * kPlane + (rest < kPlane ? rest : kPlane)) * kTileRows;
  }

  // How far ahead lines are asked for once more where `left` bytes of a tile will be read.
  SPECJAX_INLINE int64_t shortly_ahead(int64_t left) const {
    return left > kShortlyAhead ? kShortlyAhead : kShortlyAhead + unread_;
  }

  // How far ahead lines are prefetched where `left` bytes of a tile are left. Lines of padding are
  // not read, so that those of short tiles are asked for whole tiles ahead.
  SPECJAX_INLINE int64_t ahead(int64_t left) const {
    constexpr int64_t kDistance = V * kAhead;
    const int64_t tile = p_.w.row_bytes * kTileRows, step = kTiles * tile;
    if (step <= kDistance) return (kDistance + step - 1) / step * step;
    return kDistance + (left <= kDistance ? step - tile : 0);  // the next tiles lie behind all
  }

  // Bytes from a weight's first plane to the other one.
  SPECJAX_INLINE int64_t to_rest() const { return p_.w.rest - p_.w.data; }

  SPECJAX_INLINE bool escapes_before(int64_t input) const {
    bool found = false;
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) found |= escapes_[v].before(input);
    return found;
  }

  // Adds the slice from input `start` on, from memory, where its escapes have been written.
  SPECJAX_INLINE void add_with_escapes(int64_t start, const uint32_t* x, Vector (*sums)[V]) {
    constexpr int kPairs = kSliceInputs / 2;
    Word pairs[V][kPairs];
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      decode_blocks<false>(p_.w, n_[v], start, kSliceInputs, escapes_[v], pairs[v], 1);
    }
    for (int i = 0; i < kDepth; ++i) {
      Word weights[V];
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
        weights[v] = A == Arithmetic::kFloat32 ? half_of(pairs[v][i / 2], i % 2) : pairs[v][i];
      }
      add_products(weights, x + i, sums);
    }
  }

  // Multiplies word `i` of run first + run of `stored` by the words of x at `words`.
  template <int first>
  SPECJAX_INLINE void add_word(int run, int i, const typename Decode::Stored* stored,
                               const uint32_t* words, Vector (*sums)[V]) {
    Word weights[V];
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      weights[v] = decoder_.word(first + run, i, stored[v]);
    }
    add_products(weights, words, sums);
  }

  SPECJAX_INLINE void add_products(const Word* weights, const uint32_t* words, Vector (*sums)[V]) {
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const auto value = Sums<A>::read(words + r * kDepth);
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
        sums[r][v] = Sums<A>::add(sums[r][v], weights[v], value);
      }
    }
  }

  SPECJAX_INLINE void end_segment(int64_t start, Vector (*sums)[V], Float (*y)[V]) {
    const Place place = Place::of<A>(p_, start);
    const RowsOfX<A> x(p_, place, row_);
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      const Group group = groups_.read(v, place.group);
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
        by_points(p_.w, [&](auto points) SPECJAX_LAMBDA {
          const Float zero = at_zero<points>(p_.w, group);
          y[r][v] = scaled<A, points>(group, zero, sums[r][v], x, r, y[r][v]);
        });
        sums[r][v] = Vector{};
      }
    }
  }

  const Product& p_;
  Groups groups_;
  const int64_t row_;
  const uint32_t* const x_;
  const int64_t read_, unread_;  // bytes of a tile; bytes from there to the next tiles
  int64_t n_[V];                 // the first output of a vector
  int64_t lane_[V];  // bytes between a word of the tile's first row and that of the first output
  const uint8_t* tile_[V];
  int64_t ahead_, left_;  // bytes: prefetched ahead; of the tile, read from the chunk on
  Decode decoder_;
  const uint8_t* palettes_[V];
  Escapes escapes_[V];
};

// Adds chunks first … last - 1 for the R rows from `row` on. Out of line: it is called
// for two sizes of portions, and is most of what there is to compile.
template <Arithmetic A, Kind kind, int R, int V>
[[gnu::noinline]] void add_portion(const Product& p, int64_t column, int64_t row, int64_t first,
                                   int64_t last, Float (*y)[V]) {
  FewRows<A, kind, R, V>(p, column, row).add(first, last, y);
}

// R: the rows of a portion. The last portion may have one less.
template <Arithmetic A, Kind kind, int R>
inline void multiply_few(const Product& p, int64_t column, int64_t m, float* y) {
  if constexpr (R > 1) {
    if (p.how.portion < R) return multiply_few<A, kind, R - 1>(p, column, m, y);
  }
  constexpr int V = vectors_beside<A, kind>(R);
  const int64_t chunks = p.how.inputs / (2 * kRun<A>);
  const int64_t block = m > R ? kFewChunks : chunks;
  for (int64_t n = column; n < column + kFewColumns && n < p.w.n; n += V * kLanes) {
    Float sums[few_portions(A) * R][V] = {};
    for (int64_t chunk = 0; chunk < chunks; chunk += block) {
      const int64_t last = chunk + block < chunks ? chunk + block : chunks;
      for (int64_t row = 0; row < m; row += R) {
        if (m - row >= R) {
          add_portion<A, kind, R, V>(p, n, row, chunk, last, sums + row);
        } else if constexpr (R > 1 && few_portions(A) > 1) {
          add_portion<A, kind, R - 1, V>(p, n, row, chunk, last, sums + row);
        }
      }
    }
    for (int v = 0; v < V; ++v) {
      const int64_t first = n + v * kLanes, left = p.w.n - first;
      const int64_t outputs = left < kLanes ? left : kLanes;
      for (int64_t r = 0; r < m && left > 0; ++r)
        store_some(y + r * p.w.n + first, sums[r][v], outputs);
    }
  }
}

}  // namespace specjax::SPECJAX_ISA
