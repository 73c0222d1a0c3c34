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
SPECJAX_INLINE Float add_from_smallest(const Group& group, Float sums, Float x_sum, Float x_scale,
                                       Float y) {
  return fma(fma(sums, group.scale, group.minima * x_sum), x_scale, y);
}

// The integers of a weight count from its zero points, or from the smallest one, whose values are
// the minima. `kNone`: they count from the number that the kind has for all.
enum class Points { kNone, kZeros, kMinima };

// The sums and scales of the rows of x from `row` on, for the segment at `place`. The sums are
// those of integers for products of integers, else of values.
template <Arithmetic A>
struct RowsOfX {
  using Sum = std::conditional_t<is_integer(A), int32_t, float>;

  RowsOfX(const Product& p, const Place& place, int64_t row)
      : sums(static_cast<const Sum*>(p.x.sums) + place.segment * p.how.rows + row),
        scales(p.x.scales + row +
               (A == Arithmetic::kInteger16 ? place.segment : place.group) * p.how.rows) {}

  const Sum* sums;
  const float* scales;
};

// The values of the number that a group's integers count from, for `scaled`.
template <Points points>
SPECJAX_INLINE Float at_zero(const Weight& w, const Group& group) {
  return points == Points::kMinima ? values_of_zero(w, group)
                                   : to_float(offset(w.kind) - group.zeros);
}

// y + the sums of a segment, for row `r` of x. Minima are added for every input: the decoder has
// left the offset in integers, which then count from the smallest one; it has subtracted the offset
// from floats. The scale of 16-bit integers is a power of two: products with it are exact.
template <Arithmetic A, Points points>
SPECJAX_INLINE Float scaled(const Group& group, Float zero, typename Sums<A>::Vector vector,
                            const RowsOfX<A>& x, int r, Float y) {
  auto sum = Sums<A>::total(vector);
  if constexpr (A == Arithmetic::kInteger16) {
    if constexpr (points != Points::kMinima) sum -= group.zeros * x.sums[r];
    y = fma(to_float(sum) * splat(x.scales[r]), group.scale, y);
    if constexpr (points != Points::kMinima) return y;
    return fma(group.minima, splat(static_cast<float>(x.sums[r]) * x.scales[r]), y);
  } else if constexpr (A == Arithmetic::kInteger) {
    if constexpr (points == Points::kMinima) {
      const Float x_sum = to_float(Int{} + x.sums[r]);
      return add_from_smallest(group, to_float(sum), x_sum, splat(x.scales[r]), y);
    } else {
      return fma(to_float(sum - group.zeros * x.sums[r]), group.scale * x.scales[r], y);
    }
  } else {
    if constexpr (points == Points::kZeros) sum = fma(zero, splat(x.sums[r]), sum);
    y = fma(sum, group.scale, y);
    if constexpr (points == Points::kMinima) y = fma(zero, splat(x.sums[r]), y);
    return y;
  }
}

// Calls call(std::integral_constant<Points, what the integers of `w` count from>).
template <typename Call>
SPECJAX_INLINE void by_points(const Weight& w, const Call& call) {
  if (w.minima != nullptr) {
    call(std::integral_constant<Points, Points::kMinima>{});
  } else if (w.zeros != nullptr) {
    call(std::integral_constant<Points, Points::kZeros>{});
  } else {
    call(std::integral_constant<Points, Points::kNone>{});
  }
}

}  // namespace specjax::SPECJAX_ISA
