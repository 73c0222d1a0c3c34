// y[M, N] = Σ_groups scales · (sum over the group's inputs), for a panel of outputs and all rows.
//
// A row's result depends on that row and the weight alone: every sum runs over the inputs in one
// order, run after run, whatever the other rows are. Integer sums of a segment are exact.
#pragma once

#include "matmul/few_rows.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kRowsPerSweep = 96;  // so few that their y stays in the cache

inline constexpr int kWordsPerAsk = 8;  // words of x between two prefetches

// Adds a segment to y: f32[R, kColumns], for R rows of x from `row` on. Prefetches meanwhile:
// otherwise memory would idle until the next chunk is decoded.
template <Arithmetic A, int R>
inline void add_segment(const Product& p, const Group* groups, const Place& place,
                        const Word* panel, int64_t start, int64_t row, Prefetch& ahead, Float* y) {
  constexpr int kWide = kWordsOfX<A>;
  const int64_t stride = p.how.inputs / kPerWord<A> * kWide;
  const uint32_t* words = p.words<A>(row, start);
  static_assert(kSliceWords<A> % kWordsPerAsk == 0);
  typename Sums<A>::Vector sums[R][kVectors] = {};
  const int64_t inputs = p.inputs_from(start, p.segment<A>());
  for (int64_t i = 0; i < inputs / kPerWord<A>; ++i) {
    if (i % kWordsPerAsk == 0) ahead.ask();
    Word weights[kVectors];
    SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) weights[v] = panel[i * kVectors + v];
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const auto values = Sums<A>::read(words + r * stride + i * kWide);
      SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = Sums<A>::add(sums[r][v], weights[v], values);
      }
    }
  }
  const RowsOfX<A> x(p, place, row);
  by_points(p.w, [&](auto points) SPECJAX_LAMBDA {
    Float zeros[kVectors];
    SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) zeros[v] = at_zero<points>(p.w, groups[v]);
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      SPECJAX_UNROLL for (int v = 0; v < kVectors; ++v) {
        Float& to = y[r * kVectors + v];
        to = scaled<A, points>(groups[v], zeros[v], sums[r][v], x, r, to);
      }
    }
  });
}

template <Arithmetic A, int R>
inline void add_rows(const Product& p, const Group* groups, const Place& place, const Word* panel,
                     int64_t start, int64_t row, int64_t rows, Prefetch& ahead, Float* y) {
  if constexpr (R > 1) {
    if (rows < R) return add_rows<A, R - 1>(p, groups, place, panel, start, row, rows, ahead, y);
  }
  add_segment<A, R>(p, groups, place, panel, start, row, ahead, y);
}

template <Arithmetic A>
inline constexpr int kPanelRows = kRows / kPerSum<A>;  // of a portion

// Adds a chunk for `m` rows from `first` on, in even portions of at most kPanelRows.
template <Arithmetic A, Kind kind>
inline void add_chunk(const Product& p, int64_t column, Groups& groups, int64_t chunk,
                      int64_t first, int64_t m, Prefetch& ahead, Float* y) {
  alignas(64) Word panel[2 * kRunWords<A> * kVectors];
  ahead.begin_chunk();
  groups.ask<A>(kVectors, chunk + 1);
  decode_chunk<A, kind>(p.w, column, chunk, panel);
  constexpr int R = kPanelRows<A>;
  const int64_t portions = (m + R - 1) / R;
  const int64_t rest = m % portions, segments = kRun<A> / p.segment<A>();
  for (int64_t s = 0; s < 2 * segments; ++s) {  // in the order in which FewRows ends them
    const int64_t run = in_nibbles(kind) ? s % 2 : s >= segments;
    const int64_t i = (in_nibbles(kind) ? s / 2 : s - run * segments) * p.segment<A>();
    const int64_t start = run_start<A>(p.w, chunk, run) + i;
    if (start >= p.how.k) continue;
    Group group[kVectors];
    const Place place = Place::of<A>(p, start);
    for (int v = 0; v < kVectors; ++v) group[v] = groups.read(v, place.group);
    const int64_t word = run * kRunWords<A> + i / kPerWord<A>;
    const Word* weights = panel + word * kVectors;
    int64_t row = 0;
    for (int64_t portion = 0; portion < portions; ++portion) {
      const int64_t count = m / portions + (portion < rest);
      Float* sums = y + row * kVectors;
      add_rows<A, R>(p, group, place, weights, start, first + row, count, ahead, sums);
      row += count;
    }
  }
}

// Writes y[first … first + m - 1, the panel's columns].
template <Arithmetic A, Kind kind>
inline void multiply_many(const Product& p, int64_t column, int64_t first, int64_t m, float* y) {
  alignas(64) Float sums[kRowsPerSweep * kVectors];
  std::memset(sums, 0, m * kVectors * sizeof(Float));
  Groups groups(p.w, column);
  const int64_t portions = (m + kPanelRows<A> - 1) / kPanelRows<A>;
  const int64_t asks = portions * 2 * kRunWords<A> / kWordsPerAsk;
  Prefetch ahead(p.w, column, kColumns, chunk_bytes<A>(kind), asks);
  for (int64_t chunk = 0; chunk < p.how.inputs / (2 * kRun<A>); ++chunk) {
    add_chunk<A, kind>(p, column, groups, chunk, first, m, ahead, sums);
  }
  const int64_t columns = p.w.n - column < kColumns ? p.w.n - column : kColumns;
  for (int64_t row = 0; row < m; ++row) {
    std::memcpy(y + (first + row) * p.w.n + column, sums + row * kVectors, columns * sizeof(float));
  }
}

template <Arithmetic A, Kind kind>
inline void multiply(const Product& p, int64_t m, int64_t column, float* y) {
  if (p.how.way == Way::kFewRows) {
    return multiply_few<A, kind, few_rows(A, kind)>(p, column, m, y);
  }
  const int64_t sweeps = (m + kRowsPerSweep - 1) / kRowsPerSweep;
  for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
    const int64_t first = m * sweep / sweeps, next = m * (sweep + 1) / sweeps;
    multiply_many<A, kind>(p, column, first, next - first, y);
  }
}

template <Arithmetic A>
inline void multiply(const Product& p, int64_t m, int64_t column, float* y) {
  constexpr bool integers = is_integer(A), floats = A == Arithmetic::kFloat32;
  if constexpr (A != Arithmetic::kInteger16 || !kHasBf16) {
    if (p.w.kind == Kind::kInt4) return multiply<A, Kind::kInt4>(p, m, column, y);
    if (p.w.kind == Kind::kMxfp4) return multiply<A, Kind::kMxfp4>(p, m, column, y);
  }
  if constexpr (integers || floats) {
    if (p.w.kind == Kind::kInt8) return multiply<A, Kind::kInt8>(p, m, column, y);
  }
  if constexpr (A == Arithmetic::kInteger16 || floats) {
    if (p.w.kind == Kind::kNestedInt8) return multiply<A, Kind::kNestedInt8>(p, m, column, y);
  }
  if constexpr (!integers) {
    if (p.w.kind == Kind::kBfloat16) return multiply<A, Kind::kBfloat16>(p, m, column, y);
    if (p.w.kind == Kind::kBfloat12) return multiply<A, Kind::kBfloat12>(p, m, column, y);
  }
  if constexpr (floats) multiply<A, Kind::kFloat32>(p, m, column, y);
}

// Products that an instruction set makes no faster than the one below it are compiled for that one.
inline void multiply_columns(const Weight& w, const Preparation& how, const Prepared& x, int64_t m,
                             int64_t column, float* y) {
  const Product p{w, how, x};
  const auto is = [&](Arithmetic arithmetic) { return how.arithmetic == arithmetic; };
#if defined(SPECJAX_BELOW)
  if (!is_own(how.arithmetic)) {
    return SPECJAX_BELOW::kernels.multiply_columns(w, how, x, m, column, y);
  }
#endif
  if constexpr (is_own(Arithmetic::kInteger)) {
    if (is(Arithmetic::kInteger)) multiply<Arithmetic::kInteger>(p, m, column, y);
    if (is(Arithmetic::kInteger16)) multiply<Arithmetic::kInteger16>(p, m, column, y);
  }
  if constexpr (is_own(Arithmetic::kFloat32)) {
    if (is(Arithmetic::kFloat32)) multiply<Arithmetic::kFloat32>(p, m, column, y);
  }
  if constexpr (is_own(Arithmetic::kBfloat16) && kHasBf16) {
    if (is(Arithmetic::kBfloat16)) multiply<Arithmetic::kBfloat16>(p, m, column, y);
  }
}

// Whether vectors multiply codes of 4 bits faster as bfloat16. With tiles, a few rows of integers
// are faster, and the others have the bits of these (amx.h).
#if defined(__AMX_INT8__)
inline constexpr bool k4BitsAsBfloat16 = false;
#else
inline constexpr bool k4BitsAsBfloat16 = kHasBf16;
#endif

inline Preparation preparation(const Weight& w, const Input& x, int levels) {
  Preparation how{};
  how.levels = levels;
  how.rows = x.m;
  how.k = x.k;
  how.columns = kColumns;
  const bool wide = x.bfloat16 && w.quantized() && !(k4BitsAsBfloat16 && has_4_bits(w.kind));
  const bool bfloat16 = kHasBf16 && x.bfloat16 && (w.nibbles() || w.halves());
  how.arithmetic = levels != 0 ? Arithmetic::kInteger
                   : wide      ? Arithmetic::kInteger16
                   : bfloat16  ? Arithmetic::kBfloat16
                               : Arithmetic::kFloat32;
  how.swap_pairs = w.nibbles();
  const int64_t run = how.arithmetic == Arithmetic::kFloat32 ? kRun<Arithmetic::kFloat32> : 128;
  how.inputs = (w.inputs + 2 * run - 1) / (2 * run) * (2 * run);
  const bool integers = is_integer(how.arithmetic);
  if (integers || w.has_points()) how.sum_size = w.group_size < run ? w.group_size : run;
  if (integers) how.group_size = levels != 0 ? w.group_size : how.sum_size;
  const int64_t few = few_rows(how.arithmetic, w.kind), portions = (x.m + few - 1) / few;
  if (!w.interleaved || portions > few_portions(how.arithmetic) || portions == 0) return how;
  how.way = Way::kFewRows;
  how.columns = kFewColumns;
  how.portion = (x.m + portions - 1) / portions;
  how.depth = words_of(how.arithmetic, kSliceInputs);
  return how;
}

}  // namespace specjax::SPECJAX_ISA
