// Scores by products of pairs, for queries in bfloat16 and a cache in bfloat16 or codes.
//
// The keys of kLanes slots are transposed in registers: a word is two features, the lanes are
// slots. Queries are read as they are, two features at a time. Nothing is decoded to float32.
//
// A score is summed over its features in the same order for any number of queries.
#pragma once

#include "attention/attention_input.h"
#if defined(__AVX512BF16__)
#include "attention/attention_mix.h"
#endif

namespace specjax::SPECJAX_ISA {

// Whether products of pairs serve this call. Features of a slot are read in whole vectors, 4-bit
// codes in two.
inline bool pairs_serve(const Attention& a) {
  if (!kHasBf16 || !a.queries_bfloat16 || a.cached == Cached::kFloat32) return false;
  return a.e % (a.cached == Cached::kCodes4 ? 2 * kPairFeatures : kPairFeatures) == 0;
}

// The task's queries as they are: bfloat16[rows, 2 · features], of which the first half is used.
inline void copy_queries(const Attention& a, const AttentionTask& task, const Layout& layout,
                         float* queries) {
  for (int64_t row = 0; row < layout.rows; ++row) {
    const uint16_t* query = static_cast<const uint16_t*>(a.queries) + query_offset(a, task, row);
    std::memcpy(queries + row * layout.features, query, a.e * sizeof(uint16_t));
  }
}

// The keys of kLanes slots and kPairFeatures features, and what their scores are multiplied by.
struct PairedKeys {
  Word words[kLanes];
  Float scales;
};

// Adds the products of R queries with kLanes slots to their scores. A query has two sums, because a
// product waits for the previous one of its sum. stride: of queries, in words.
template <int R>
inline void add_pairs(const PairedKeys& keys, const float* queries, int64_t stride, float* scores,
                      int64_t score_stride) {
  Float even[R] = {}, odd[R] = {};
  SPECJAX_UNROLL for (int i = 0; i < kLanes; i += 2) {
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const float* query = queries + r * stride + i;
      even[r] = dot2(even[r], keys.words[i], (Word)splat(query[0]));
      odd[r] = dot2(odd[r], keys.words[i + 1], (Word)splat(query[1]));
    }
  }
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    float* at = scores + r * score_stride;
    store(at, fma(even[r] + odd[r], keys.scales, load<Float>(at)));
  }
}

template <int R>
inline void add_pairs(int64_t rows, const PairedKeys& keys, const float* queries, int64_t stride,
                      float* scores, int64_t score_stride) {
  if constexpr (R > 1) {
    if (rows < R) return add_pairs<R - 1>(rows, keys, queries, stride, scores, score_stride);
  }
  add_pairs<R>(keys, queries, stride, scores, score_stride);
}

// Slots from `end` on repeat the last one.
template <Cached kind>
SPECJAX_INLINE void read_pairs(const Entries& entries, int64_t slot, int64_t end, int64_t feature,
                               Word* words) {
#if defined(__AVX512BF16__)
  SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) {
    words[i] = read_features<kind>(entries, slot + i < end ? slot + i : end - 1, feature);
  }
  transpose(words);
#else
  (void)entries, (void)slot, (void)end, (void)feature, (void)words;
#endif
}

template <Cached kind>
inline void score_pairs_of(const Attention& a, const Entries& entries, const SpanWeights& weights,
                           const Layout& layout, const float* queries, Ahead& ahead) {
  const Span& span = weights.span;
  const int64_t rows = layout.rows, portions = (rows + kRows - 1) / kRows;
  const int64_t blocks = a.e / kPairFeatures, asks = kLanes * head_lines(a) / blocks;
  PairedKeys keys;
  keys.scales = splat(a.scale);
  for (int64_t i = 0; i < span.strips * kStrip; i += kLanes) {
    const int64_t slot = span.first + i;
    for (int lane = 0; kind != Cached::kBfloat16 && lane < kLanes; ++lane) {
      const int64_t at = slot + lane < span.end ? slot + lane : span.end - 1;
      keys.scales[lane] = a.scale * entries.scales[at * entries.heads];
    }
    for (int64_t block = 0; block < blocks; ++block) {
      ahead.ask(asks);
      read_pairs<kind>(entries, slot, span.end, block * kPairFeatures, keys.words);
      for (int64_t portion = 0; portion < portions; ++portion) {
        const int64_t row = rows * portion / portions, next = rows * (portion + 1) / portions;
        add_pairs<kRows>(next - row, keys, queries + row * layout.features + block * kLanes,
                         layout.features, weights.values + row * weights.stride + i,
                         weights.stride);
      }
    }
  }
}

// Writes the scores of a span's slots.
inline void score_pairs(const Attention& a, const Entries& entries, const SpanWeights& weights,
                        const Layout& layout, const float* queries, Ahead& ahead) {
  if (weights.span.strips == 0) return;
  std::memset(weights.values, 0, layout.rows * weights.stride * sizeof(float));
  if (a.cached == Cached::kBfloat16) {
    score_pairs_of<Cached::kBfloat16>(a, entries, weights, layout, queries, ahead);
  } else if (a.cached == Cached::kCodes8) {
    score_pairs_of<Cached::kCodes8>(a, entries, weights, layout, queries, ahead);
  } else {
    score_pairs_of<Cached::kCodes4>(a, entries, weights, layout, queries, ahead);
  }
}

}  // namespace specjax::SPECJAX_ISA
