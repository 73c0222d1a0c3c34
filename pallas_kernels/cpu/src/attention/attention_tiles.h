// Attention by tile products, for queries in bfloat16 and a cache in bfloat16 or codes.
//
// Scores: the left operand is the keys of 16 slots, loaded from the cache itself if that is
// bfloat16; the right one is the queries. So keys are read once and not transposed, and scores come
// out slot by slot. Mixing: the left operand is the weights; the right one is the values of pairs
// of slots.
//
// Weights are rounded to bfloat16, and sums are float32, as in attention_mix.h. The number of a
// slot determines its place in the products here too: the slots of a tree's path are gathered.
#pragma once

#include "attention/attention.h"
#include "matmul/tiles.h"

namespace specjax::SPECJAX_ISA {

// How often a step prefetches (attention_ahead.h):
inline constexpr int kScoreAsks = 2;  // for the scores of a strip, which are transposed
inline constexpr int kPairSlots = 8;  // once per so many slots whose values are paired

inline int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// The layout of the scratch that tiles need beyond that of `Layout`, in floats.
struct TileLayout : Layout {
  TileLayout(const Attention& a, int64_t tokens)
      : Layout(a, tokens),
        token_rows(a.ancestors == nullptr ? a.heads_per_kv : whole_tiles(a.heads_per_kv)),
        tile_rows(whole_tiles(tokens * token_rows)),
        query_columns(whole_tiles(rows)),
        query_words(scratch),
        strip(query_words + features / 2 * query_columns),
        key_scales(strip + kStrip * features / 2),
        scores(key_scales + kStrip),
        rounded(scores + kStrip * kLanes),
        pairs(rounded + tile_rows * kPairStride / 2),
        mixed(pairs + kAttentionBlock * kPairFeatures / 2),
        tile_scratch(mixed + tile_rows * features) {}

  // Rows of a token's weights: in a tree whole tiles, because each token has its own path.
  int64_t token_rows;
  int64_t tile_rows, query_columns;
  // queries, two features to a word [features / 2, query_columns]; a strip of keys [kStrip,
  // features / 2], the scales of its scores [kStrip], and its scores for 16 queries [kStrip,
  // kLanes]; the weights, bfloat16[tile_rows, kPairStride]; values of two slots side by side
  // [kAttentionBlock / 2, kPairFeatures]; mixed [tile_rows, features].
  int64_t query_words, strip, key_scales, scores, rounded, pairs, mixed, tile_scratch;

  // How often a step prefetches: with the tiles of keys, the transposed scores, the rows of
  // weights, the paired values, and the tiles of weights.
  int64_t asks(int64_t strips) const {
    const int64_t slots = strips * kStrip, vectors = features / kPairFeatures;
    const int64_t keys = slots / kTileRows * vectors, transposed = strips * kScoreAsks;
    const int64_t tiles = slots / kPairedSlots * ((tile_rows / kTileRows + 1) / 2);
    return query_columns / kLanes * (keys + transposed) + rows +
           vectors * (slots / kPairSlots + tiles);
  }

  int64_t tile_row(const Attention& a, int64_t row) const {
    return row / a.heads_per_kv * token_rows + row % a.heads_per_kv;
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

// slot(i): where the values of slot number i are, or -1 where they add nothing.
template <Cached kind, typename Slot>
inline void pair_values(const Entries& entries, const Slot& slot, int64_t begin, int64_t end,
                        int64_t feature, float* pairs, Ahead& ahead) {
  for (int64_t i = begin; i < end; i += 2) {
    Word pair[2];
    read_pair<kind>(entries, slot(i), slot(i + 1), feature, pair);
    store(pairs + i * kLanes, pair[0]), store(pairs + (i + 1) * kLanes, pair[1]);
    if (i % kPairSlots == 0) ahead.ask();
  }
}

// Multiplies two tiles of weights, or one, by kPairFeatures features of slots begin … end - 1.
template <int tiles>
inline void mix_tiles(const uint16_t* weights, const float* pairs, int64_t begin, int64_t end,
                      float* mixed, int64_t stride, Ahead& ahead) {
  constexpr Arithmetic kBfloat16 = Arithmetic::kBfloat16;
  constexpr int64_t kRowBytes = kPairStride * sizeof(uint16_t);
  const int64_t bytes = stride * sizeof(float);
  float* second = mixed + kTileRows * stride;
  if (begin == 0) {
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(mixed, bytes), load_tile<1>(mixed + kLanes, bytes);
    if (tiles == 2) load_tile<2>(second, bytes), load_tile<3>(second + kLanes, bytes);
  }
  for (int64_t i = begin; i < end; i += kPairedSlots) {
    load_tile<6>(pairs + i * kLanes, 2 * kBytes);
    load_tile<7>(pairs + (i + 1) * kLanes, 2 * kBytes);
    load_tile<4>(weights + i, kRowBytes);
    add_product<kBfloat16, 0, 4, 6>(), add_product<kBfloat16, 1, 4, 7>();
    ahead.ask();
    if (tiles == 1) continue;
    load_tile<5>(weights + kTileRows * kPairStride + i, kRowBytes);
    add_product<kBfloat16, 2, 5, 6>(), add_product<kBfloat16, 3, 5, 7>();
  }
  store_tile<0>(mixed, bytes), store_tile<1>(mixed + kLanes, bytes);
  if (tiles == 2) store_tile<2>(second, bytes), store_tile<3>(second + kLanes, bytes);
}

// Mixes rows first … last - 1 of the weights with slots begin … end - 1 of the block, both whole
// tiles.
template <Cached kind, typename Slot>
inline void mix_slots(const Entries& entries, const Slot& slot, const TileLayout& layout,
                      int64_t first, int64_t last, int64_t begin, int64_t end, float* scratch,
                      Ahead& ahead) {
  if (begin == end) return;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(scratch + layout.rounded);
  float *pairs = scratch + layout.pairs, *mixed = scratch + layout.mixed;
  for (int64_t feature = 0; feature < layout.features; feature += kPairFeatures) {
    pair_values<kind>(entries, slot, begin, end, feature, pairs, ahead);
    int64_t row = first;
    for (; row + 2 * kTileRows <= last; row += 2 * kTileRows) {
      mix_tiles<2>(weights + row * kPairStride, pairs, begin, end,
                   mixed + row * layout.features + feature, layout.features, ahead);
    }
    if (row < last) {
      mix_tiles<1>(weights + row * kPairStride, pairs, begin, end,
                   mixed + row * layout.features + feature, layout.features, ahead);
    }
  }
}

template <Cached kind>
inline void mix_by_tiles(const Values& values, const TileLayout& layout, float* scratch,
                         float* sums, Ahead& ahead) {
  const Attention& a = values.a;
  const int64_t tokens = layout.rows / a.heads_per_kv, shared = values.shared, all = values.all;
  uint16_t* rounded = reinterpret_cast<uint16_t*>(scratch + layout.rounded);
  SlotScales scales;
  values.read_scales<kind>(0, shared, 0, scales);
  for (int64_t row = 0; row < layout.rows; ++row) {
    if (row % a.heads_per_kv == 0) {
      values.read_scales<kind>(shared, all, row / a.heads_per_kv, scales);
    }
    sums[layout.totals + row] =
        round_weights<kind>(scratch + layout.weights + row * kWeightStride, scales, all,
                            rounded + layout.tile_row(a, row) * kPairStride);
    ahead.ask();
  }
  const auto mix = [&](const auto& slot, int64_t first, int64_t last, int64_t begin, int64_t end) {
    mix_slots<kind>(values.entries, slot, layout, first, last, begin, end, scratch, ahead);
  };
  mix([&](int64_t i) SPECJAX_LAMBDA { return values.slot(i); }, 0, layout.tile_rows, 0, shared);
  for (int64_t token = 0; token < tokens && shared < all; ++token) {
    mix([&](int64_t i) { return values.slot(i, token); }, token * layout.token_rows,
        (token + 1) * layout.token_rows, shared, all);
  }
  for (int64_t row = 0; row < layout.rows; ++row) {
    store_in_order(scratch + layout.mixed + layout.tile_row(a, row) * layout.features,
                   layout.features, sums + row * layout.features);
  }
}

// Mixes a row at a time, with zeros for values that it does not see. So values that are not finite
// reach only the rows that give them a weight.
template <Cached kind>
inline void mix_by_tiles_carefully(const Values& values, const TileLayout& layout, float* scratch,
                                   float* sums) {
  Ahead nothing;
  uint16_t* rounded = reinterpret_cast<uint16_t*>(scratch + layout.rounded);
  SlotScales scales;
  for (int64_t row = 0; row < layout.rows; ++row) {
    const float* weights = scratch + layout.weights + row * kWeightStride;
    const int64_t token = row / values.a.heads_per_kv;
    values.read_scales<kind>(0, values.all, token, scales);
    sums[layout.totals + row] = round_weights<kind>(weights, scales, values.all, rounded);
    const auto seen = [&](int64_t i) { return weights[i] == 0 ? -1 : values.slot(i, token); };
    mix_slots<kind>(values.entries, seen, layout, 0, kTileRows, 0, values.all, scratch, nothing);
    store_in_order(scratch + layout.mixed, layout.features, sums + row * layout.features);
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
