// Attention by tile products, for queries in bfloat16 and a cache in bfloat16 or codes.
//
// Scores: the left operand is the keys of 16 slots, loaded from the cache itself if that is
// bfloat16; the right one is the queries. So keys are read once and not transposed, and scores come
// out slot by slot. Mixing: the left operand is the weights; the right one is the values of pairs
// of slots.
//
// A weight is the sum of three parts in bfloat16, with 8 of its 24 bits each. They are three rows
// of a tile, so nothing is rounded but the sums, which are float32. As in attention.h, zeros add
// nothing, and the number of a slot determines its place in the products: the slots of a tree's
// path are gathered.
#pragma once

#include "attention/attention.h"
#include "attention/attention_codes.h"
#include "matmul/tiles.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kParts = 3;                   // of a weight
inline constexpr int kTileSlots = 2 * kTileWords;  // slots of a tile of weights, in bfloat16
inline constexpr int64_t kPartStride = kAttentionBlock + kTileSlots;  // in bfloat16

// How often a step prefetches (attention_ahead.h):
inline constexpr int kScoreAsks = 2;  // for the scores of a strip, which are transposed
inline constexpr int kPairSlots = 8;  // once per so many slots whose values are paired

inline int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// The layout of the scratch that tiles need beyond that of `Layout`, in floats.
struct TileLayout : Layout {
  TileLayout(const Attention& a, int64_t tokens)
      : Layout(a, tokens),
        token_rows(a.ancestors == nullptr ? kParts * a.heads_per_kv
                                          : whole_tiles(kParts * a.heads_per_kv)),
        part_rows(whole_tiles(tokens * token_rows)),
        query_columns(whole_tiles(rows)),
        query_words(scratch),
        strip(query_words + features / 2 * query_columns),
        key_scales(strip + kStrip * features / 2),
        scores(key_scales + kStrip),
        value_scales(scores + kStrip * kLanes),
        parts(value_scales + kAttentionBlock),
        pairs(parts + part_rows * kPartStride / 2),
        mixed(pairs + kAttentionBlock * kPairFeatures / 2),
        tile_scratch(mixed + part_rows * features) {}

  // Rows of a token's parts: in a tree whole tiles, because each token has its own path.
  int64_t token_rows;
  int64_t part_rows, query_columns;
  // queries, two features to a word [features / 2, query_columns]; a strip of keys [kStrip,
  // features / 2], the scales of its scores [kStrip], and its scores for 16 queries [kStrip,
  // kLanes]; the scales of a block's values [kAttentionBlock]; parts of the weights,
  // bfloat16[part_rows, kPartStride]; values of two slots side by side [kAttentionBlock / 2,
  // kPairFeatures]; mixed [part_rows, features].
  int64_t query_words, strip, key_scales, scores, value_scales, parts, pairs, mixed, tile_scratch;

  // How often a step prefetches: with the tiles of keys, the transposed scores, the rows of
  // weights, the paired values, and the tiles of weights.
  int64_t asks(int64_t strips) const {
    const int64_t slots = strips * kStrip, vectors = features / kPairFeatures;
    const int64_t keys = slots / kTileRows * vectors, transposed = strips * kScoreAsks;
    const int64_t tiles = slots / kTileSlots * ((part_rows / kTileRows + 1) / 2);
    return query_columns / kLanes * (keys + transposed) + rows +
           vectors * (slots / kPairSlots + tiles);
  }

  int64_t part_row(const Attention& a, int64_t row) const {
    return row / a.heads_per_kv * token_rows + row % a.heads_per_kv * kParts;
  }
};

inline AttentionSizes attention_sizes_by_tiles(const Attention& a, int64_t tokens) {
  if (!pairs_serve(a)) return attention_sizes(a, tokens);
  const TileLayout layout(a, tokens);
  return {layout.tile_scratch, layout.sums};
}

// --- Scores.

inline void pair_queries(const Attention& a, const AttentionTask& task, const TileLayout& layout,
                         float* scratch) {
  float* words = scratch + layout.query_words;
  std::memset(words, 0, layout.features / 2 * layout.query_columns * sizeof(float));
  for (int64_t row = 0; row < layout.rows; ++row) {
    const uint16_t* query = static_cast<const uint16_t*>(a.queries) + query_offset(a, task, row);
    for (int64_t i = 0; i < a.e / 2; ++i) {
      std::memcpy(words + i * layout.query_columns + row, query + 2 * i, sizeof(float));
    }
  }
}

// The scores of kStrip slots and 16 queries: [kStrip, kLanes]. keys: of the first slot.
inline void score_strip(const uint8_t* keys, int64_t stride, const float* queries,
                        const TileLayout& layout, float* scores, Ahead& ahead) {
  constexpr Arithmetic kBfloat16 = Arithmetic::kBfloat16;
  const int64_t tile = kTileRows * stride;
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t i = 0; i < layout.features / 2; i += kTileWords, keys += kBytes) {
    load_tile<6>(queries + i * layout.query_columns, layout.query_columns * sizeof(float));
    load_tile<4>(keys, stride), add_product<kBfloat16, 0, 4, 6>(), ahead.ask();
    load_tile<5>(keys + tile, stride), add_product<kBfloat16, 1, 5, 6>(), ahead.ask();
    load_tile<4>(keys + 2 * tile, stride), add_product<kBfloat16, 2, 4, 6>(), ahead.ask();
    load_tile<5>(keys + 3 * tile, stride), add_product<kBfloat16, 3, 5, 6>(), ahead.ask();
  }
  store_tile<0>(scores, kBytes);
  store_tile<1>(scores + kTileRows * kLanes, kBytes);
  store_tile<2>(scores + 2 * kTileRows * kLanes, kBytes);
  store_tile<3>(scores + 3 * kTileRows * kLanes, kBytes);
}

// Transposes the scores of a strip for `count` queries, times the scales of its slots: out[count,
// stride].
inline void transpose_scores(const float* scores, int64_t count, const float* scales, float* out,
                             int64_t stride) {
  for (int64_t slot = 0; slot < kStrip; slot += kLanes) {
    Word words[kLanes];
    for (int i = 0; i < kLanes; ++i) words[i] = load<Word>(scores + (slot + i) * kLanes);
    transpose(words);
    for (int64_t i = 0; i < count; ++i) {
      store(out + i * stride + slot, (Float)words[i] * load<Float>(scales + slot));
    }
  }
}

template <Cached kind>
inline void score_by_tiles(const Attention& a, const Entries& entries, const SpanWeights& weights,
                           const TileLayout& layout, float* scratch, Ahead& ahead) {
  const Span& span = weights.span;
  float* scales = scratch + layout.key_scales;
  for (int64_t i = 0; i < span.strips; ++i) {
    const int64_t first = span.slot(i), count = span.count(i);
    const uint8_t* keys = entries.start + first * entries.stride;
    int64_t stride = entries.stride;
    // The cache may end within this strip. Also, keys that are far apart share few sets of the
    // first-level cache.
    if (kind != Cached::kBfloat16 || count < kStrip || layout.rows > kLanes) {
      uint8_t* strip = reinterpret_cast<uint8_t*>(scratch + layout.strip);
      read_strip<kind>(entries, first, count, strip);
      keys = strip, stride = entries.features * sizeof(uint16_t);
    }
    for (int64_t slot = 0; slot < count; ++slot) {
      scales[slot] = a.scale * slot_scale<kind>(entries, first + slot);
    }
    for (int64_t row = 0; row < layout.rows; row += kLanes) {
      score_strip(keys, stride, scratch + layout.query_words + row, layout, scratch + layout.scores,
                  ahead);
      transpose_scores(scratch + layout.scores, std::min<int64_t>(kLanes, layout.rows - row),
                       scales, weights.values + row * weights.stride + i * kStrip, weights.stride);
      ahead.ask(kScoreAsks);
    }
  }
}

// --- Mixing.

// Splits one row's weights of a block, times the scales of the values, into three rows of parts. A
// weight of zero stays zero, whatever the scale.
template <Cached kind>
inline void split_weights(const float* weights, const float* scales, int64_t count,
                          uint16_t* parts) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Float rest = load<Float>(weights + i);
    if constexpr (kind != Cached::kBfloat16) {
      rest = rest != 0 ? rest * load<Float>(scales + i) : Float{};
    }
    for (int part = 0; part < kParts; ++part) {
      const Word high = (Word)rest & 0xFFFF0000u;
      store(parts + part * kPartStride + i, __builtin_convertvector(high >> 16, Half));
      rest -= (Float)high;
    }
  }
}

// slot(i): where the values of slot number i are, or -1 where they add nothing.
template <Cached kind, typename Slot>
inline void pair_values(const Entries& entries, const Slot& slot, int64_t begin, int64_t end,
                        int64_t feature, float* pairs, Ahead& ahead) {
  const auto read = [&](int64_t i) SPECJAX_LAMBDA {
    const int64_t at = slot(i);
    return (__m512i)(at < 0 ? Word{} : read_features<kind>(entries, at, feature));
  };
  for (int64_t i = begin; i < end; i += 2) {
    const __m512i even = read(i), odd = read(i + 1);
    store(pairs + i * kLanes, (Word)_mm512_unpacklo_epi16(even, odd));
    store(pairs + (i + 1) * kLanes, (Word)_mm512_unpackhi_epi16(even, odd));
    if (i % kPairSlots == 0) ahead.ask();
  }
}

// Multiplies two tiles of parts, or one, by kPairFeatures features of slots begin … end - 1.
template <int tiles>
inline void mix_tiles(const uint16_t* parts, const float* pairs, int64_t begin, int64_t end,
                      float* mixed, int64_t stride, Ahead& ahead) {
  constexpr Arithmetic kBfloat16 = Arithmetic::kBfloat16;
  constexpr int64_t kPartBytes = kPartStride * sizeof(uint16_t);
  const int64_t bytes = stride * sizeof(float);
  float* second = mixed + kTileRows * stride;
  if (begin == 0) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(mixed, bytes), load_tile<1>(mixed + kLanes, bytes);
    if (tiles == 2) load_tile<2>(second, bytes), load_tile<3>(second + kLanes, bytes);
  }
  for (int64_t i = begin; i < end; i += kTileSlots) {
    load_tile<6>(pairs + i * kLanes, 2 * kBytes);
    load_tile<7>(pairs + (i + 1) * kLanes, 2 * kBytes);
    load_tile<4>(parts + i, kPartBytes);
    add_product<kBfloat16, 0, 4, 6>(), add_product<kBfloat16, 1, 4, 7>();
    ahead.ask();
    if (tiles == 1) continue;
    load_tile<5>(parts + kTileRows * kPartStride + i, kPartBytes);
    add_product<kBfloat16, 2, 5, 6>(), add_product<kBfloat16, 3, 5, 7>();
  }
  store_tile<0>(mixed, bytes), store_tile<1>(mixed + kLanes, bytes);
  if (tiles == 2) store_tile<2>(second, bytes), store_tile<3>(second + kLanes, bytes);
}

// Mixes rows first … last - 1 of the parts with slots begin … end - 1 of the block, both whole
// tiles.
template <Cached kind, typename Slot>
inline void mix_slots(const Entries& entries, const Slot& slot, const TileLayout& layout,
                      int64_t first, int64_t last, int64_t begin, int64_t end, float* scratch,
                      Ahead& ahead) {
  if (begin == end) return;
  const uint16_t* parts = reinterpret_cast<const uint16_t*>(scratch + layout.parts);
  float *pairs = scratch + layout.pairs, *mixed = scratch + layout.mixed;
  for (int64_t feature = 0; feature < layout.features; feature += kPairFeatures) {
    pair_values<kind>(entries, slot, begin, end, feature, pairs, ahead);
    int64_t row = first;
    for (; row + 2 * kTileRows <= last; row += 2 * kTileRows) {
      mix_tiles<2>(parts + row * kPartStride, pairs, begin, end,
                   mixed + row * layout.features + feature, layout.features, ahead);
    }
    if (row < last) {
      mix_tiles<1>(parts + row * kPartStride, pairs, begin, end,
                   mixed + row * layout.features + feature, layout.features, ahead);
    }
  }
}

// Adds the sums of a row's parts, and restores the order of features, which pairs interleave by
// fours.
inline void add_parts(const float* mixed, int64_t features, float* sums) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t i = 0; i < features; i += kPairFeatures) {
    Float halves[2];
    for (int half = 0; half < 2; ++half) {
      const float* part = mixed + i + half * kLanes;
      halves[half] =
          load<Float>(part) + (load<Float>(part + features) + load<Float>(part + 2 * features));
    }
    const __m512 low = (__m512)halves[0], high = (__m512)halves[1];
    store(sums + i, (Float)_mm512_permutex2var_ps(low, first, high));
    store(sums + i + kLanes, (Float)_mm512_permutex2var_ps(low, second, high));
  }
}

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
  void read_scales(int64_t first, int64_t last, int64_t token, float* scales) const {
    if constexpr (kind == Cached::kBfloat16) return;  // which has none
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = slot(i, token);
      scales[i] = at < 0 ? 0 : slot_scale<kind>(entries, at);
    }
  }

  const Attention& a;
  const AttentionTask& task;
  const Entries& entries;
  const Span& span;
  const int64_t length = a.lengths[task.batch_row];
  const int64_t end = span.end - span.first;
  // Slots before `shared` are the same for all tokens, and no token sees slots from `all` on. Both
  // are whole tiles.
  const int64_t all = (end + kTileSlots - 1) / kTileSlots * kTileSlots;
  const int64_t shared =
      a.ancestors == nullptr
          ? all
          : std::clamp<int64_t>((length - span.first) / kTileSlots * kTileSlots, 0, all);
};

template <Cached kind>
inline void mix_by_tiles(const Values& values, const TileLayout& layout, float* scratch,
                         float* sums, Ahead& ahead) {
  const Attention& a = values.a;
  const int64_t tokens = layout.rows / a.heads_per_kv, shared = values.shared, all = values.all;
  uint16_t* parts = reinterpret_cast<uint16_t*>(scratch + layout.parts);
  float* scales = scratch + layout.value_scales;
  values.read_scales<kind>(0, shared, 0, scales);
  for (int64_t row = 0; row < layout.rows; ++row) {
    if (row % a.heads_per_kv == 0) {
      values.read_scales<kind>(shared, all, row / a.heads_per_kv, scales);
    }
    split_weights<kind>(scratch + layout.weights + row * kWeightStride, scales, all,
                        parts + layout.part_row(a, row) * kPartStride);
    ahead.ask();
  }
  const auto mix = [&](const auto& slot, int64_t first, int64_t last, int64_t begin, int64_t end) {
    mix_slots<kind>(values.entries, slot, layout, first, last, begin, end, scratch, ahead);
  };
  mix([&](int64_t i) SPECJAX_LAMBDA { return values.slot(i); }, 0, layout.part_rows, 0, shared);
  for (int64_t token = 0; token < tokens && shared < all; ++token) {
    mix([&](int64_t i) { return values.slot(i, token); }, token * layout.token_rows,
        (token + 1) * layout.token_rows, shared, all);
  }
  for (int64_t row = 0; row < layout.rows; ++row) {
    add_parts(scratch + layout.mixed + layout.part_row(a, row) * layout.features, layout.features,
              sums + row * layout.features);
  }
}

// Mixes a row at a time, with zeros for values that it does not see. So values that are not finite
// reach only the rows that give them a weight. An infinite value makes such a sum NaN, because its
// product with a zero part is NaN.
template <Cached kind>
inline void mix_by_tiles_carefully(const Values& values, const TileLayout& layout, float* scratch,
                                   float* sums) {
  Ahead nothing;
  uint16_t* parts = reinterpret_cast<uint16_t*>(scratch + layout.parts);
  float* scales = scratch + layout.value_scales;
  for (int64_t row = 0; row < layout.rows; ++row) {
    const float* weights = scratch + layout.weights + row * kWeightStride;
    const int64_t token = row / values.a.heads_per_kv;
    values.read_scales<kind>(0, values.all, token, scales);
    split_weights<kind>(weights, scales, values.all, parts);
    const auto seen = [&](int64_t i) { return weights[i] == 0 ? -1 : values.slot(i, token); };
    mix_slots<kind>(values.entries, seen, layout, 0, kTileRows, 0, values.all, scratch, nothing);
    add_parts(scratch + layout.mixed, layout.features, sums + row * layout.features);
  }
}

template <Cached kind>
inline void attend_block_by_tiles(const Attention& a, const AttentionStep& step,
                                  const AttentionAhead& steps, float* scratch, float* sums) {
  const AttentionTask& task = *step.task;
  const TileLayout layout(a, task.tokens);
  const Span span(task, step.block);
  const BlockWeights weights(a, task, span, layout, scratch);
  const Entries keys(a, task, a.keys), values(a, task, a.values);
  Ahead ahead(a, steps, layout.asks(span.strips));
  const TileShapes shapes(kTileRows, kTileWords);
  pair_queries(a, task, layout, scratch);
  score_by_tiles<kind>(a, keys, weights.context, layout, scratch, ahead);
  score_by_tiles<kind>(a, keys, weights.fresh, layout, scratch, ahead);
  weigh_block(a, task, span, weights, layout, scratch, sums);
  const Values seen{a, task, values, span};
  mix_by_tiles<kind>(seen, layout, scratch, sums, ahead);
  if (!all_finite(sums, layout.rows * layout.features)) {
    mix_by_tiles_carefully<kind>(seen, layout, scratch, sums);
  }
}

inline void attend_block_where_tiles_serve(const Attention& a, const AttentionStep& step,
                                           const AttentionAhead& steps, float* scratch,
                                           float* sums) {
  if (!pairs_serve(a)) {
    attend_block(a, step, steps, scratch, sums);
  } else if (a.cached == Cached::kBfloat16) {
    attend_block_by_tiles<Cached::kBfloat16>(a, step, steps, scratch, sums);
  } else if (a.cached == Cached::kCodes8) {
    attend_block_by_tiles<Cached::kCodes8>(a, step, steps, scratch, sums);
  } else {
    attend_block_by_tiles<Cached::kCodes4>(a, step, steps, scratch, sums);
  }
}

}  // namespace specjax::SPECJAX_ISA
