// One product of x with a weight: where its sums begin and end, and how they are added to y.
#pragma once

#include "matmul/groups.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kSmallestGroup = 32;

// The sum over a segment, word after word.
template <Arithmetic A>
struct Sums;
template <>
struct Sums<Arithmetic::kInteger> {
  using Vector = Int;
  static Int add(Int sum, Word w, Word x) { return dot4(sum, w, x); }
};
template <>
struct Sums<Arithmetic::kBfloat16> {
  using Vector = Float;
  static Float add(Float sum, Word w, Word x) { return dot2(sum, w, x); }
};
template <>
struct Sums<Arithmetic::kFloat32> {
  using Vector = Float;
  static Float add(Float sum, Word w, Word x) { return fma((Float)w, (Float)x, sum); }
};

// One product of x with a weight.
struct Product {
  const Weight& w;
  const Preparation& how;
  const Prepared& x;

  // Inputs of a segment.
  template <Arithmetic A>
  int64_t segment() const {
    return w.quantized() && w.group_size < kRun<A> ? w.group_size : kRun<A>;
  }

  // The words of row `row` from input `start` on; of few rows, those of the portion's first row.
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
    return {group, start >> segment_bits};
  }

  int64_t group, segment;
};

// The values of the integer zero where there are minima, which are those of the smallest integer.
SPECJAX_INLINE Float values_of_zero(const Weight& w, const Group& group) {
  return fma(splat(static_cast<float>(offset(w.kind))), group.scale, group.minima);
}

// y + the sums of a segment whose integers count from the smallest one, and the minima's share.
SPECJAX_INLINE Float add_from_smallest(const Group& group, Float sums, int32_t x_sum, float x_scale,
                                       Float y) {
  const Float minima = group.minima * to_float(Int{} + x_sum);
  return fma(fma(sums, group.scale, minima), splat(x_scale), y);
}

// y += the sums of the segment at `place`, for row `row` of x. Minima are added for every input:
// the decoder has left the offset in integers, which then count from the smallest one; it has
// subtracted the offset from floats.
template <Arithmetic A>
SPECJAX_INLINE void add_scaled(const Product& p, const Group& group, const Place& place,
                               int64_t row, typename Sums<A>::Vector sum, Float& y) {
  const int64_t index = place.segment * p.how.rows + row;
  if constexpr (A == Arithmetic::kInteger) {
    const int32_t x_sum = static_cast<const int32_t*>(p.x.sums)[index];
    const float x_scale = p.x.scales[place.group * p.how.rows + row];
    if (p.w.minima == nullptr) {
      y = fma(to_float(sum - group.zeros * x_sum), group.scale * x_scale, y);
    } else {
      y = add_from_smallest(group, to_float(sum), x_sum, x_scale, y);
    }
  } else {
    if (p.w.zeros != nullptr) {
      const Float zeros = to_float(offset(p.w.kind) - group.zeros);
      sum = fma(zeros, splat(static_cast<const float*>(p.x.sums)[index]), sum);
    }
    y = fma(sum, group.scale, y);
    if (p.w.minima == nullptr) return;
    y = fma(values_of_zero(p.w, group), splat(static_cast<const float*>(p.x.sums)[index]), y);
  }
}

}  // namespace specjax::SPECJAX_ISA
