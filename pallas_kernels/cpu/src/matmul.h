// y[m, n] = Σ_groups scales · (sum over the group's inputs), for a panel of outputs and all rows.
//
// A row's result is a function of that row and the weight alone: every sum runs over the inputs in
// one order, run after run, whatever the other rows are; the groups' integer sums are exact.
#pragma once

#include "groups.h"
#include "tiles.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kRowsPerPass = 96;  // rows that share one decoded panel: their y is in cache
inline constexpr int kFewRows = 4;       // rows up to which a panel does not pay
inline constexpr int kSmallestGroup = 32;

// The sum over a segment: of chains that each take every kChains-th word, since a product of floats
// waits for the one before it in its chain; they are added in their order at the end.
template <Arithmetic A>
struct Sums;
template <>
struct Sums<Arithmetic::kInteger> {
  using Vector = Int;
  static constexpr int kChains = 1;
  static Int add(Int sum, Word w, Word x) { return dot4(sum, w, x); }
};
template <>
struct Sums<Arithmetic::kBfloat16> {
  using Vector = Float;
  static constexpr int kChains = 2;
  static Float add(Float sum, Word w, Word x) { return dot2(sum, w, x); }
};
template <>
struct Sums<Arithmetic::kFloat32> {
  using Vector = Float;
  static constexpr int kChains = 2;
  static Float add(Float sum, Word w, Word x) { return fma((Float)w, (Float)x, sum); }
};

// One product of x with a weight, as all functions below see it.
struct Product {
  const Weight& w;
  const Preparation& how;
  const Prepared& x;

  // Inputs per segment: of one run and one group.
  template <Arithmetic A>
  int64_t segment() const {
    return w.quantized() && w.group_size < kRun<A> ? w.group_size : kRun<A>;
  }

  // The words of row `row` from input `start` on.
  template <Arithmetic A>
  const uint32_t* words(int64_t row, int64_t start) const {
    return x.words + (row * how.inputs + start) / kPerWord<A>;
  }
};

// A segment's place among the scales and the sums.
struct Place {
  template <Arithmetic A>
  static Place of(const Product& p, int64_t start) {
    const int segment_bits = __builtin_ctzll(p.segment<A>());  // sizes are powers of two
    const int64_t group = p.w.groups > 1 ? start >> __builtin_ctzll(p.w.group_size) : 0;
    return {group, start >> segment_bits, p.w.groups, p.how.inputs >> segment_bits};
  }

  int64_t group, segment, groups, segments;  // the last two: per row
};

// y += the sums of the segment at `place`, for row `row` of x.
template <Arithmetic A>
SPECJAX_INLINE void add_scaled(const Product& p, const Group& group, const Place& place,
                               int64_t row, typename Sums<A>::Vector sum, Float& y) {
  const int64_t index = row * place.segments + place.segment;
  if constexpr (A == Arithmetic::kInteger) {
    sum -= group.zeros * static_cast<const int32_t*>(p.x.sums)[index];
    y = fma(to_float(sum), group.scale * p.x.scales[row * place.groups + place.group], y);
  } else {
    if (p.w.zeros != nullptr) {  // the decoder has taken the offset away
      const Float zeros = to_float(offset(p.w.kind) - group.zeros);
      sum = fma(zeros, splat(static_cast<const float*>(p.x.sums)[index]), sum);
    }
    y = fma(sum, group.scale, y);
  }
}

// --- Many rows: a decoded panel serves all of them.

inline constexpr int kWordsPerStep = 8;  // of `ahead`

// Adds a segment to y: f32[R, kColumns], for R rows of x from `row` on. Meanwhile `ahead` takes its
// steps, or memory would rest until the next chunk is decoded.
template <Arithmetic A, int R>
inline void add_segment(const Product& p, const Group* groups, const Place& place,
                        const Word* panel, int64_t start, int64_t row, Prefetch& ahead, Float* y) {
  const int64_t stride = p.how.inputs / kPerWord<A>;
  const uint32_t* words = p.words<A>(row, start);
  using Vector = typename Sums<A>::Vector;
  constexpr int kChains = Sums<A>::kChains, kStride = kWordsPerStep * kChains;
  static_assert(kSmallestGroup / kPerWord<A> % kStride == 0);
  Vector totals[R][kVectors];
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) totals[r][v] = Vector{};
  }
  for (int chain = 0; chain < kChains; ++chain) {
    Vector sums[R][kVectors] = {};
    for (int64_t i = chain; i < p.segment<A>() / kPerWord<A>; i += kChains) {
      if (i % kStride == chain) ahead.step();
      Word weights[kVectors];
      SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) weights[v] = panel[i * kVectors + v];
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
        const Word values = splat(words[r * stride + i]);
        SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = Sums<A>::add(sums[r][v], weights[v], values);
        }
      }
    }
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) totals[r][v] += sums[r][v];
    }
  }
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) {
      add_scaled<A>(p, groups[v], place, row + r, totals[r][v], y[r * kVectors + v]);
    }
  }
}

template <Arithmetic A, int R>
inline void add_rows(const Product& p, const Group* groups, const Place& place, const Word* panel,
                     int64_t start, int64_t row, int64_t rows, Prefetch& ahead, Float* y) {
  if constexpr (R > 1) {
    if (rows < R) return add_rows<A, R - 1>(p, groups, place, panel, start, row, rows, ahead, y);
  }
  add_segment<A, R>(p, groups, place, panel, start, row, ahead, y);
}

// The same by tiles, which were shaped for the largest portion: of a smaller one's, the last row is
// the next portion's, and not added.
template <Arithmetic A>
inline void add_tiles(const Product& p, const Group* groups, const Place& place, const Word* panel,
                      int64_t start, int64_t row, int64_t rows, Float* y) {
  alignas(64) typename Sums<A>::Vector sums[kTileRows * kVectors];
  multiply_tiles<A>(p.words<A>(row, start), p.how.inputs / kPerWord<A>, panel,
                    p.segment<A>() / kPerWord<A>, sums);
  for (int64_t r = 0; r < rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = r * kVectors + v;
      add_scaled<A>(p, groups[v], place, row + r, sums[i], y[i]);
    }
  }
}

template <Arithmetic A>
inline constexpr int kPortion = kTiles<A> ? kTileRows : kRows;

// Adds a chunk for `m` rows from `first` on, in even portions of at most kPortion.
template <Arithmetic A, Kind kind>
inline void add_chunk(const Product& p, int64_t column, Groups& groups, int64_t chunk,
                      int64_t first, int64_t m, Prefetch& ahead, Float* y) {
  alignas(64) Word panel[2 * kRunWords<A> * kVectors];
  ahead.begin_chunk();
  decode_chunk<A, kind>(p.w, column, chunk, kTiles<A> ? &ahead : nullptr, panel);
  const int64_t portions = (m + kPortion<A> - 1) / kPortion<A>;
  const int64_t rest = m % portions, segments = kRun<A> / p.segment<A>();
  for (int64_t s = 0; s < 2 * segments; ++s) {  // in the order in which `multiply_vector` ends them
    const int64_t run = kind <= Kind::kMxfp4 ? s % 2 : s >= segments;
    const int64_t i = (kind <= Kind::kMxfp4 ? s / 2 : s - run * segments) * p.segment<A>();
    const int64_t start = run_start<A>(p.w, chunk, run) + i;
    Group group[kVectors];
    const Place place = Place::of<A>(p, start);
    for (int v = 0; v < kVectors; ++v) group[v] = groups.read(v, place.group);
    const Word* part = panel + (run * kRunWords<A> + i / kPerWord<A>) * kVectors;
    int64_t row = 0;
    for (int64_t portion = 0; portion < portions; ++portion) {
      const int64_t count = m / portions + (portion < rest);
      Float* sums = y + row * kVectors;
      if constexpr (kTiles<A>) {
        add_tiles<A>(p, group, place, part, start, first + row, count, sums);
      } else {
        add_rows<A, kRows>(p, group, place, part, start, first + row, count, ahead, sums);
      }
      row += count;
    }
  }
}

// y[first … first + m - 1, the panel's columns].
template <Arithmetic A, Kind kind>
inline void multiply_many(const Product& p, int64_t column, int64_t first, int64_t m, float* y) {
  alignas(64) Float sums[kRowsPerPass * kVectors];
  std::memset(sums, 0, m * kVectors * sizeof(Float));
  Groups groups(p.w, column);
  const int64_t portions = (m + kPortion<A> - 1) / kPortion<A>;
  const TileShapes<A> shapes((m + portions - 1) / portions, p.segment<A>() / kPerWord<A>);
  constexpr int64_t kBytesPerChunk = chunk_bytes<A>(kind);
  // Per slab that is decoded, where products take less time than that; else in `add_segment`.
  const int64_t steps = kTiles<A> ? kVectors * kBytesPerChunk / kBytes
                                  : portions * 2 * kRunWords<A> / kWordsPerStep;
  Prefetch ahead(p.w, column, kColumns, kBytesPerChunk, steps);
  for (int64_t chunk = 0; chunk < p.how.inputs / (2 * kRun<A>); ++chunk) {
    add_chunk<A, kind>(p, column, groups, chunk, first, m, ahead, sums);
  }
  const int64_t columns = p.w.n - column < kColumns ? p.w.n - column : kColumns;
  for (int64_t row = 0; row < m; ++row) {
    std::memcpy(y + (first + row) * p.w.n + column, sums + row * kVectors, columns * sizeof(float));
  }
}

// --- Few rows: decoding would cost more than the products, so nothing is stored in between. The
// same sums in the same order.

template <Arithmetic A, Kind kind, int R>
inline void multiply_vector(const Product& p, int64_t column, Groups& groups, int vector,
                            Float* y) {
  using Vector = typename Sums<A>::Vector;
  constexpr int kChains = Sums<A>::kChains;
  const int64_t stride = p.how.inputs / kPerWord<A>, segment = p.segment<A>();
  const int64_t output = column + vector * kLanes;
  constexpr int kBytesPerChunk = chunk_bytes<A>(kind);
  Prefetch ahead(p.w, output, kLanes, kBytesPerChunk, kBytesPerChunk / kBytes);
  for (int64_t chunk = 0; chunk < p.how.inputs / (2 * kRun<A>); ++chunk) {
    const int64_t starts[2] = {run_start<A>(p.w, chunk, 0), run_start<A>(p.w, chunk, 1)};
    const uint32_t* x[2] = {p.words<A>(0, starts[0]), p.words<A>(0, starts[1])};
    Vector sums[2][R][kChains] = {};
    const auto add = [&](int run, int word, Word value) SPECJAX_LAMBDA {
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
        Vector& sum = sums[run][r][word & (kChains - 1)];
        sum = Sums<A>::add(sum, value, splat(x[run][r * stride + word]));
      }
      const int64_t end = (word + 1) * kPerWord<A>;
      if (end % kSmallestGroup != 0 || (end & (segment - 1)) != 0) return;
      const Place place = Place::of<A>(p, starts[run] + end - segment);
      const Group group = groups.read(vector, place.group);
      SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
        Vector total{};
        SPECJAX_UNROLL for (int chain = 0; chain < kChains; ++chain) {
          total += sums[run][r][chain];
          sums[run][r][chain] = Vector{};
        }
        add_scaled<A>(p, group, place, r, total, y[r]);
      }
    };
    ahead.begin_chunk();
    decode_rows<A, kind>(p.w, output, chunk, &ahead, add);
  }
}

template <Arithmetic A, Kind kind, int R>
inline void multiply_few(const Product& p, int64_t column, int64_t m, float* y) {
  if constexpr (R > 1) {
    if (m < R) return multiply_few<A, kind, R - 1>(p, column, m, y);
  }
  Groups groups(p.w, column);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = p.w.n - column - v * kLanes;
    if (left <= 0) return;
    Float sums[R] = {};
    multiply_vector<A, kind, R>(p, column, groups, v, sums);
    for (int r = 0; r < R; ++r) {
      std::memcpy(y + r * p.w.n + column + v * kLanes, sums + r,
                  (left < kLanes ? left : kLanes) * sizeof(float));
    }
  }
}

template <Arithmetic A, Kind kind>
inline void multiply(const Product& p, int64_t m, int64_t column, float* y) {
  if constexpr (!kTiles<A>) {
    if (m <= kFewRows) return multiply_few<A, kind, kFewRows>(p, column, m, y);
  }
  const int64_t passes = (m + kRowsPerPass - 1) / kRowsPerPass;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = m * pass / passes, next = m * (pass + 1) / passes;
    multiply_many<A, kind>(p, column, first, next - first, y);
  }
}

template <Arithmetic A>
inline void multiply(const Product& p, int64_t m, int64_t column, float* y) {
  constexpr bool integers = A == Arithmetic::kInteger, floats = A == Arithmetic::kFloat32;
  if (p.w.kind == Kind::kInt4) return multiply<A, Kind::kInt4>(p, m, column, y);
  if (p.w.kind == Kind::kMxfp4) return multiply<A, Kind::kMxfp4>(p, m, column, y);
  if constexpr (integers || floats) {
    if (p.w.kind == Kind::kInt8) return multiply<A, Kind::kInt8>(p, m, column, y);
  }
  if constexpr (!integers) {
    if (p.w.kind == Kind::kBfloat16) return multiply<A, Kind::kBfloat16>(p, m, column, y);
  }
  if constexpr (floats) multiply<A, Kind::kFloat32>(p, m, column, y);
}

inline void multiply_panel(const Weight& w, const Preparation& how, const Prepared& x, int64_t m,
                           int64_t panel, float* y) {
  const Product p{w, how, x};
  const int64_t column = panel * kColumns;
  if (how.arithmetic == Arithmetic::kInteger) {
    multiply<Arithmetic::kInteger>(p, m, column, y);
  } else if (how.arithmetic == Arithmetic::kFloat32) {
    multiply<Arithmetic::kFloat32>(p, m, column, y);
  } else if constexpr (kHasBf16) {
    multiply<Arithmetic::kBfloat16>(p, m, column, y);
  }
}

inline Preparation preparation(const Weight& w, const Input& x, int levels) {
  Preparation how{};
  how.levels = levels;
  const bool bfloat16 = kHasBf16 && x.bfloat16 && (w.nibbles() || w.kind == Kind::kBfloat16);
  how.arithmetic = levels != 0 ? Arithmetic::kInteger
                   : bfloat16  ? Arithmetic::kBfloat16
                               : Arithmetic::kFloat32;
  how.swap_pairs = w.nibbles();
  const int64_t run = how.arithmetic == Arithmetic::kFloat32 ? kRun<Arithmetic::kFloat32> : 128;
  how.inputs = (w.inputs + 2 * run - 1) / (2 * run) * (2 * run);
  if (levels != 0) how.group_size = w.group_size;
  if (levels != 0 || w.zeros != nullptr) how.sum_size = w.group_size < run ? w.group_size : run;
  return how;
}

}  // namespace specjax::SPECJAX_ISA
