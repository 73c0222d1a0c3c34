// Mixes the values of a block by products of pairs, for a cache in bfloat16 or codes: a word is one
// feature of two slots, the lanes are features.
//
// A weight is rounded to bfloat16, as the values are. Sums are float32, and the softmax's total is
// that of the rounded weights: a mean of equal values is that value.
//
// Pairs begin at even numbers, counted from the block's start, so the number of a slot determines
// its place in the products. The slots of a tree's path are gathered: a token of a tree gets the
// bits of a chain.
#pragma once

#include "attention/attention_codes.h"
#include "attention/attention_input.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int64_t kPairedSlots = 2 * kLanes;  // slots that all tokens share, in steps of it
inline constexpr int kMixedRows = 12;                // rows of a portion
inline constexpr int kMixedSums = 24;                // vectors of sums that stay in registers

// The scales of a block's slots, and their inverses. Those of bfloat16 are not used.
struct SlotScales {
  alignas(64) float scales[kAttentionBlock];
  alignas(64) float inverses[kAttentionBlock];
};

// The values that a block's weights belong to.
struct Values {
  // Where slot number i of the span is. -1 past its end.
  int64_t slot(int64_t i) const { return i < end ? span.first + i : -1; }

  // The same for one token of a tree: the new tokens on its path follow the context.
  int64_t slot(int64_t i, int64_t token) const {
    if (a.ancestors == nullptr || span.first + i < length) return slot(i);
    const int64_t index = new_token(a, task, task.token + token, span.first + i - length);
    return index < 0 ? -1 : length + index;
  }

  // Reads the scales of slots number first … last - 1, as one token counts them.
  template <Cached kind>
  void read_scales(int64_t first, int64_t last, int64_t token, SlotScales& out) const {
    if constexpr (kind == Cached::kBfloat16) return;  // which has none
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = slot(i, token);
      out.scales[i] = at < 0 ? 0 : slot_scale<kind>(entries, at);
      out.inverses[i] = 1 / out.scales[i];
    }
  }

  const Attention& a;
  const AttentionTask& task;
  const Entries& entries;
  const Span& span;
  const int64_t length = a.lengths[task.batch_row];
  const int64_t end = span.end - span.first;
  // Slots before `shared` are the same for all tokens, and no token sees slots from `all` on.
  const int64_t all = (end + kPairedSlots - 1) / kPairedSlots * kPairedSlots;
  const int64_t shared =
      a.ancestors == nullptr
          ? all
          : std::clamp<int64_t>((length - span.first) / kPairedSlots * kPairedSlots, 0, all);
};

// kPairFeatures features of two slots, side by side in two vectors. A slot of -1 is zeros.
template <Cached kind>
SPECJAX_INLINE void read_pair(const Entries& entries, int64_t even, int64_t odd, int64_t feature,
                              Word* pairs) {
  const auto read = [&](int64_t slot) SPECJAX_LAMBDA {
    return (__m512i)(slot < 0 ? Word{} : read_features<kind>(entries, slot, feature));
  };
  const __m512i first = read(even), second = read(odd);
  pairs[0] = (Word)_mm512_unpacklo_epi16(first, second);
  pairs[1] = (Word)_mm512_unpackhi_epi16(first, second);
}

// Writes mixed values in the order of features, which pairs interleave by fours. out may be mixed.
inline void store_in_order(const float* mixed, int64_t count, float* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t i = 0; i < count; i += kPairFeatures) {
    const __m512 first = (__m512)load<Float>(mixed + i);
    const __m512 second = (__m512)load<Float>(mixed + i + kLanes);
    store(out + i, (Float)_mm512_permutex2var_ps(first, low, second));
    store(out + i + kLanes, (Float)_mm512_permutex2var_ps(first, high, second));
  }
}

// The rounded weights of some rows for the slots of a block, [rows, kPairStride].
struct MixedRows {
  const uint16_t* weights;
  float* sums;  // [rows, stride], in the order of pairs
  int64_t stride;

  MixedRows from(int64_t row) const {
    return {weights + row * kPairStride, sums + row * stride, stride};
  }
};

// Adds slots begin … end - 1 to the sums of R rows, for V vectors of features from `feature` on.
// slots: where they are. asks: how often to prefetch with a pair.
template <Cached kind, int R, int V>
inline void add_values(const MixedRows& rows, const Entries& entries, const int32_t* slots,
                       int64_t begin, int64_t end, int64_t feature, Ahead& ahead, int64_t asks) {
  Float sums[R][V];
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    const float* from = rows.sums + r * rows.stride + feature;
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = load<Float>(from + v * kLanes);
  }
  for (int64_t i = begin; i < end; i += 2) {
    Word pairs[V];
    SPECJAX_UNROLL for (int v = 0; v < V; v += 2) {
      read_pair<kind>(entries, slots[i], slots[i + 1], feature + v * kLanes, pairs + v);
    }
    ahead.ask(asks);
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const Word weights = splat(load_word(rows.weights + r * kPairStride + i));
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = dot2(sums[r][v], pairs[v], weights);
    }
  }
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    float* to = rows.sums + r * rows.stride + feature;
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) store(to + v * kLanes, sums[r][v]);
  }
}

template <Cached kind, int R>
inline void add_values(int64_t count, const MixedRows& rows, const Entries& entries,
                       const int32_t* slots, int64_t begin, int64_t end, Ahead& ahead,
                       int64_t asks) {
  if constexpr (R > 1) {
    if (count < R) {
      return add_values<kind, R - 1>(count, rows, entries, slots, begin, end, ahead, asks);
    }
  }
  int64_t feature = 0;
  if constexpr (4 * R <= kMixedSums) {
    for (; feature + 2 * kPairFeatures <= entries.features; feature += 2 * kPairFeatures) {
      add_values<kind, R, 4>(rows, entries, slots, begin, end, feature, ahead, 2 * asks);
    }
  }
  for (; feature < entries.features; feature += kPairFeatures) {
    add_values<kind, R, 2>(rows, entries, slots, begin, end, feature, ahead, asks);
  }
}

// Adds slots begin … end - 1 to the sums of `count` rows.
template <Cached kind>
inline void add_slots(int64_t count, const MixedRows& rows, const Entries& entries,
                      const int32_t* slots, int64_t begin, int64_t end, Ahead& ahead,
                      int64_t asks) {
  const int64_t portions = (count + kMixedRows - 1) / kMixedRows;
  for (int64_t i = 0; i < portions; ++i) {
    const int64_t row = count * i / portions, next = count * (i + 1) / portions;
    add_values<kind, kMixedRows>(next - row, rows.from(row), entries, slots, begin, end, ahead,
                                 i == 0 ? asks : 0);
  }
}

// Rounds one row's weights of a block, times the scales of the values. Returns the total of what
// the weights are then. A weight of zero stays zero, whatever the scale, and a product that
// vanishes counts as the weight that it was.
template <Cached kind>
inline float round_weights(const float* weights, const SlotScales& of, int64_t count,
                           uint16_t* rounded) {
  Float total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Float weight = load<Float>(weights + i);
    Float scaled = weight;
    if constexpr (kind != Cached::kBfloat16) {
      scaled = weight != 0 ? weight * load<Float>(of.scales + i) : Float{};
    }
    const Half halves = (Half)_mm512_cvtneps_pbh((__m512)scaled);
    store(rounded + i, halves);
    Float kept = (Float)(widen(halves) << 16);
    if constexpr (kind != Cached::kBfloat16) {
      kept = kept != 0 ? kept * load<Float>(of.inverses + i) : weight;
    }
    total += kept;
  }
  return sum_of_lanes(total);
}

// Mixes all rows, and sets their totals. careful: a row at a time, with zeros for values that it
// does not see, so that values that are not finite reach only the rows that give them a weight.
template <Cached kind, bool careful>
inline void mix_by_pairs(const Values& values, const Layout& layout, float* scratch, float* sums,
                         Ahead& ahead) {
  const int64_t group = careful ? 1 : values.a.heads_per_kv, all = values.all;
  const int64_t shared = careful ? 0 : values.shared;
  const Entries& entries = values.entries;
  uint16_t* rounded = reinterpret_cast<uint16_t*>(scratch + layout.pair_weights);
  const MixedRows rows{rounded, sums, layout.features};
  int32_t slots[kAttentionBlock];
  SlotScales scales;
  for (int64_t i = 0; i < shared; ++i) slots[i] = static_cast<int32_t>(values.slot(i));
  values.read_scales<kind>(0, shared, 0, scales);
  std::memset(sums, 0, layout.rows * layout.features * sizeof(float));
  for (int64_t row = 0; row < layout.rows; ++row) {
    const int64_t token = row / values.a.heads_per_kv;
    const float* weights = scratch + layout.weights + row * kWeightStride;
    if (row % group == 0) values.read_scales<kind>(shared, all, token, scales);
    sums[layout.totals + row] =
        round_weights<kind>(weights, scales, all, rounded + row * kPairStride);
  }
  // Once per line of a pair's values, of kPairFeatures features.
  const int64_t asks = values.a.cached == Cached::kBfloat16 ? 2 : 1;
  add_slots<kind>(layout.rows, rows, entries, slots, 0, shared, ahead, asks);
  for (int64_t row = 0; row < layout.rows && shared < all; row += group) {
    const float* weights = scratch + layout.weights + row * kWeightStride;
    for (int64_t i = shared; i < all; ++i) {
      const bool hidden = careful && weights[i] == 0;
      const int64_t at = hidden ? -1 : values.slot(i, row / values.a.heads_per_kv);
      slots[i] = static_cast<int32_t>(at);
    }
    add_slots<kind>(group, rows.from(row), entries, slots, shared, all, ahead, 0);
  }
  store_in_order(sums, layout.rows * layout.features, sums);
}

template <Cached kind>
inline void mix_pairs(const Values& values, const Layout& layout, float* scratch, float* sums,
                      Ahead& ahead) {
  mix_by_pairs<kind, false>(values, layout, scratch, sums, ahead);
  if (all_finite(sums, layout.rows * layout.features)) return;
  mix_by_pairs<kind, true>(values, layout, scratch, sums, ahead);
}

// Mixes all rows, f32[rows, features], and sets their totals.
inline void mix_pairs(const Values& values, const Layout& layout, float* scratch, float* sums,
                      Ahead& ahead) {
  if (values.a.cached == Cached::kBfloat16) {
    mix_pairs<Cached::kBfloat16>(values, layout, scratch, sums, ahead);
  } else if (values.a.cached == Cached::kCodes8) {
    mix_pairs<Cached::kCodes8>(values, layout, scratch, sums, ahead);
  } else {
    mix_pairs<Cached::kCodes4>(values, layout, scratch, sums, ahead);
  }
}

}  // namespace specjax::SPECJAX_ISA
