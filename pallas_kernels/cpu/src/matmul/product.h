// One product of x with a weight: where its sums begin and end, and how they are added to y.
#pragma once

#include <type_traits>

#include "matmul/groups.h"

#if defined(__AVX512BF16__)
namespace specjax::avx512_vnni {
extern const Kernels kernels;
}
#elif defined(__AVXVNNI__)
namespace specjax::avx2 {
extern const Kernels kernels;
}
#endif

namespace specjax::SPECJAX_ISA {

// The instruction set whose kernels make the products that are not `is_own`.
#if defined(__AVX512BF16__)
#define SPECJAX_BELOW avx512_vnni
constexpr bool is_own(Arithmetic arithmetic) { return arithmetic == Arithmetic::kBfloat16; }
#elif defined(__AVXVNNI__)
#define SPECJAX_BELOW avx2
constexpr bool is_own(Arithmetic arithmetic) { return is_integer(arithmetic); }
#else
constexpr bool is_own(Arithmetic) { return true; }
#endif

inline constexpr int kSmallestGroup = 32;

// A slice is as long as the smallest group: no segment ends inside it.
inline constexpr int kSliceInputs = kSmallestGroup;

// Words of x that meet one word of a weight.
template <Arithmetic A>
inline constexpr int kWordsOfX = A == Arithmetic::kInteger16 ? 2 : 1;

// Vectors that hold one sum.
template <Arithmetic A>
inline constexpr int kPerSum = A == Arithmetic::kInteger16 && kHasDot4 ? 2 : 1;

// The sum over a segment, word after word.
template <Arithmetic A>
struct Sums {
  using Vector = Float;
  static SPECJAX_INLINE Word read(const uint32_t* x) { return splat(*x); }
  static SPECJAX_INLINE Float add(Float sum, Word w, Word x) {
    if constexpr (A == Arithmetic::kBfloat16) return dot2(sum, w, x);
    return fma((Float)w, (Float)x, sum);
  }
  static SPECJAX_INLINE Float total(Float sum) { return sum; }
};
template <>
struct Sums<Arithmetic::kInteger> {
  using Vector = Int;
  static SPECJAX_INLINE Word read(const uint32_t* x) { return splat(*x); }
  static SPECJAX_INLINE Int add(Int sum, Word w, Word x) { return dot4(sum, w, x); }
  static SPECJAX_INLINE Int total(Int sum) { return sum; }
};

struct TwoWords {
  Word first, second;
};

// For machines with products of bytes: x = 256 · high + low, a word of each, which are summed
// apart.
struct SumsOfBytes {
  struct Vector {
    Int high, low;
  };
  static SPECJAX_INLINE Vector add(Vector sum, Word w, TwoWords x) {
    return {dot4(sum.high, w, x.first), dot4(sum.low, w, x.second)};
  }
  static SPECJAX_INLINE Int total(Vector sum) { return (sum.high << 8) + sum.low; }
};

// For the others: inputs 0 and 2 of x as the halves of one word, inputs 1 and 3 as those of the
// other one. The bytes of a weight become such halves.
struct SumsOfHalves {
  using Vector = Int;
  static SPECJAX_INLINE Int add(Int sum, Word w, TwoWords x) {
    return dot2(dot2(sum, w & 0x00FF00FFu, x.first), w >> 8 & 0x00FF00FFu, x.second);
  }
  static SPECJAX_INLINE Int total(Int sum) { return sum; }
};

template <>
struct Sums<Arithmetic::kInteger16> : std::conditional_t<kHasDot4, SumsOfBytes, SumsOfHalves> {
  static SPECJAX_INLINE TwoWords read(const uint32_t* x) { return {splat(x[0]), splat(x[1])}; }
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

  // How many of the `size` inputs from `start` on stand before the padding, in whole slices.
  int64_t inputs_from(int64_t start, int64_t size) const {
    const int64_t left = (how.k - start + kSliceInputs - 1) / kSliceInputs * kSliceInputs;
    return left < 0 ? 0 : left < size ? left : size;
  }

  // The words of row `row` from input `start` on; of few rows, those of the portion's first row.
  template <Arithmetic A>
  const uint32_t* words(int64_t row, int64_t start) const {
    return x.words + (row * how.inputs + start) / kPerWord<A> * kWordsOfX<A>;
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

// y += the sums of a segment, less the zeros' share, and the minima's share. The scale of x is a
// power of two: products with it are exact.
SPECJAX_INLINE void add_integer16(const Weight& w, const Group& group, Int sum, int32_t x_sum,
                                  float x_scale, Float& y) {
  y = fma(to_float(sum) * splat(x_scale), group.scale, y);
  if (w.minima == nullptr) return;
  y = fma(group.minima, splat(static_cast<float>(x_sum) * x_scale), y);
}

// y += the sums of the segment at `place`, for row `row` of x. Minima are added for every input:
// the decoder has left the offset in integers, which then count from the smallest one; it has
// subtracted the offset from floats.
template <Arithmetic A>
SPECJAX_INLINE void add_scaled(const Product& p, const Group& group, const Place& place,
                               int64_t row, typename Sums<A>::Vector vector, Float& y) {
  const int64_t index = place.segment * p.how.rows + row;
  auto sum = Sums<A>::total(vector);
  if constexpr (A == Arithmetic::kInteger16) {
    const int32_t x_sum = static_cast<const int32_t*>(p.x.sums)[index];
    add_integer16(p.w, group, sum - group.zeros * x_sum, x_sum, p.x.scales[index], y);
  } else if constexpr (A == Arithmetic::kInteger) {
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
