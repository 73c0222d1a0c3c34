// Adds the sums of tiles to y, a segment of the inputs at a time, scaled by its group's scales.
//
// This takes longer than the products of a small group, so what outputs share is made for all rows
// of a portion at once.
#pragma once

#include "matmul/tile_source.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kSideBySide = 2;  // vectors of outputs

// The sums of a tile: of integers of 16 bits, those of their high or of their low bytes.
template <Arithmetic A>
using TileSums = std::conditional_t<is_integer(A), Int, Float>;

// Vectors from the sums of high bytes to those of low ones.
inline constexpr int kToLow = kSideBySide * kTileRows;

// The sums of x of one segment, for all rows of a portion, as its products need them.
template <Arithmetic A, Kind kind, Points points>
struct SumsOfX {
  // Every integer is so much too large. Zeros differ from output to output.
  static constexpr int kOffset = (points == Points::kMinima ? 0 : offset(kind)) - kTaken<kind>;
  static constexpr bool kOffsets = points != Points::kZeros && kOffset != 0;
  static constexpr bool kMinima = points == Points::kMinima;

  SPECJAX_INLINE void read(const int32_t* sums, const float* x_scales, int64_t rows) {
    if constexpr (!kOffsets && !kMinima) return;
    const __mmask16 own = static_cast<__mmask16>((1u << rows) - 1);
    const Int x = (Int)_mm512_maskz_loadu_epi32(own, sums);
    // Rows that fill the portion up have sums that nothing wrote: unsigned integers may wrap.
    if constexpr (kOffsets) store(offsets, (Word)x * static_cast<uint32_t>(kOffset));
    if constexpr (!kMinima) return;
    const Float value = to_float(x), scale = (Float)_mm512_maskz_loadu_ps(own, x_scales);
    store(values, A == Arithmetic::kInteger16 ? value * scale : value);
  }

  alignas(64) uint32_t offsets[kTileRows];
  alignas(64) float values[kTileRows];
};

// y + the sums of a segment of integers, for row `r` of x. The same as `scaled`, bit for bit.
template <Arithmetic A, Kind kind, Points points>
SPECJAX_INLINE Float add_integers(const Group& group, Word sum,
                                  const SumsOfX<A, kind, points>& of_x, const uint32_t* x_sums,
                                  const float* x_scales, int64_t r, Float y) {
  if constexpr (points == Points::kZeros) {
    sum -= (Word)(group.zeros - kTaken<kind>)*splat(x_sums[r]);
  } else if constexpr (SumsOfX<A, kind, points>::kOffsets) {
    sum -= splat(of_x.offsets[r]);
  }
  const Float value = to_float((Int)sum), x_scale = splat(x_scales[r]);
  if constexpr (A == Arithmetic::kInteger16) {
    y = fma(value * x_scale, group.scale, y);
    if constexpr (points != Points::kMinima) return y;
    return fma(group.minima, splat(of_x.values[r]), y);
  } else if constexpr (points == Points::kMinima) {
    return add_from_smallest(group, value, splat(of_x.values[r]), x_scale, y);
  } else {
    return fma(value, group.scale * x_scale, y);
  }
}

// The same of bfloat16: as `scaled<Arithmetic::kInteger16>`, bit for bit.
template <Kind kind, Points points>
SPECJAX_INLINE Float add_floats(const Group& group, Float sum, const float* x_sums, int64_t r,
                                Float y) {
  if constexpr (points == Points::kZeros) {
    sum = fma(to_float(offset(kind) - group.zeros), splat(x_sums[r]), sum);
  }
  y = fma(sum, group.scale, y);
  return points == Points::kMinima ? fma(group.minima, splat(x_sums[r]), y) : y;
}

// Adds kCount segments to y, in order, for the portion's rows from `first` on. sums[i] are those of
// the segment at places[i].
template <Arithmetic A, Kind kind, Points points, int kCount>
SPECJAX_INLINE void add_segments(const Product& p, Groups& groups, int vector, const Place* places,
                                 int64_t first, const TileSums<A>* const* sums, Float* y) {
  constexpr bool kWide = A == Arithmetic::kInteger16;
  Group of_outputs[kCount];
  const float* x_scales[kCount];
  const void* x_sums[kCount];
  SumsOfX<A, kind, points> of_x[kCount];
  SPECJAX_UNROLL for (int i = 0; i < kCount; ++i) {
    const Place& place = places[i];
    of_outputs[i] = groups.read(vector, place.group);
    x_scales[i] = p.x.scales + (kWide ? place.segment : place.group) * p.how.rows + first;
    x_sums[i] = static_cast<const float*>(p.x.sums) + place.segment * p.how.rows + first;
    if constexpr (is_integer(A)) {
      of_x[i].read(static_cast<const int32_t*>(x_sums[i]), x_scales[i], p.how.portion);
    }
  }
  for (int64_t r = 0; r < p.how.portion; ++r) {
    Float total = y[r];
    SPECJAX_UNROLL for (int i = 0; i < kCount; ++i) {
      const Group& group = of_outputs[i];
      if constexpr (is_integer(A)) {
        Word sum = (Word)sums[i][r];
        if constexpr (kWide) sum = (sum << 8) + (Word)sums[i][r + kToLow];
        total = add_integers(group, sum, of_x[i], static_cast<const uint32_t*>(x_sums[i]),
                             x_scales[i], r, total);
      } else {
        const auto* of_floats = static_cast<const float*>(x_sums[i]);
        total = add_floats<kind, points>(group, sums[i][r], of_floats, r, total);
      }
    }
    y[r] = total;
  }
}

}  // namespace specjax::SPECJAX_ISA
