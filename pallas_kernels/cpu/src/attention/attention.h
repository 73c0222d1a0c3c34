// Attention of one task over one block of slots.
//
// The lanes are slots for scores, and features for mixed values. Both are products of pairs where
// these serve (attention_pairs.h, attention_mix.h). Else keys are decoded to float32, a strip at a
// time, and scores and mixed values are the same small matrix product (attention_product.h).
//
// Every sum runs over features, or over slots in the order of their numbers from the block's start.
// A slot that a token does not see adds an exact zero. So a query's result is a function of that
// query and of what it sees, whatever else shares the task.
#pragma once

#include "attention/attention_pairs.h"
#include "attention/attention_product.h"

namespace specjax::SPECJAX_ISA {

// Up to so many rows, values are decoded where they are used, once per portion of rows.
inline constexpr int kDirectRows = kLanes == 16 ? 4 * kRows : kRows;

inline AttentionSizes attention_sizes(const Attention& a, int64_t tokens) {
  const Layout layout(a, tokens);
  return {layout.scratch, layout.sums};
}

// 2^x for x <= 0: a relative error below 1.1e-7, exactly 1 at 0, 0 below 2^-126. A NaN stays a NaN.
inline Float exp2(Float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const Float clamped = larger(splat(-126.0f), x);
  const Float shifted = clamped + kRound;
  const Float f = clamped - (shifted - kRound);  // in [-1/2, 1/2], exact
  Float y = splat(1.53533620e-4f);               // minimax in the relative error, 2e-9
  y = fma(y, f, splat(1.33988750e-3f));
  y = fma(y, f, splat(9.61843692e-3f));
  y = fma(y, f, splat(5.55033237e-2f));
  y = fma(y, f, splat(2.40226477e-1f));
  y = fma(y, f, splat(6.93147182e-1f));
  y = fma(y, f, splat(1.0f));
  const Float power = (Float)(((Word)shifted << 23) + 0x3F800000u);
  return x < -126.0f ? Float{} : y * power;
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// --- The softmax of a block.

inline constexpr float kNothing = -__builtin_inff();  // the maximum of no scores

// scores[count] -> weights 2^(score - maximum) in place, 0 where not seen (null: all are). count: a
// multiple of kStrip.
inline void weigh(float* scores, const uint32_t* seen, int64_t count, float& maximum,
                  float& total) {
  constexpr int kChains = 4;  // of additions that do not wait for each other
  constexpr int kValues = kChains * kLanes;
  static_assert(kStrip % kValues == 0);
  Float tops[kChains], sums[kChains] = {};
  for (Float& top : tops) top = splat(kNothing);
  for (int64_t i = 0; i < count; i += kValues) {
    SPECJAX_UNROLL for (int j = 0; j < kChains; ++j) {
      float* at = scores + i + j * kLanes;
      Float s = load<Float>(at);
      if (seen != nullptr) {
        s = load<Word>(seen + i + j * kLanes) != 0 ? s : splat(kNothing);
        store(at, s);
      }
      tops[j] = larger(s, tops[j]);
    }
  }
  const float top = largest_lane(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
  for (int64_t i = 0; i < count; i += kValues) {
    SPECJAX_UNROLL for (int j = 0; j < kChains; ++j) {
      float* at = scores + i + j * kLanes;
      Float w = exp2(load<Float>(at) - top);
      if (seen != nullptr) w = load<Word>(seen + i + j * kLanes) != 0 ? w : Float{};
      store(at, w);
      sums[j] += w;
    }
  }
  maximum = top;
  total = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// --- A block.

// The weights of one step's slots as these lie in memory: the context and, of a tree, the new
// tokens. A token of a tree sees its path as if it were a chain: token number d of the path counts
// as slot length + d, wherever it lies. Only its score and its weight change places. Along a path
// the numbers rise, so sums have the order of a chain, and the tokens of other paths add zeros.
struct BlockWeights {
  BlockWeights(const Attention& a, const AttentionTask& task, const Span& span,
               const Layout& layout, float* scratch)
      : context{span, scratch + layout.weights, kWeightStride},
        fresh{Span(0, 0), scratch + layout.new_weights, 0} {
    const int64_t length = a.lengths[task.batch_row], end = length + a.tokens;
    if (a.ancestors == nullptr || span.end <= length) return;
    context.span = Span(span.first, length);
    fresh.span = Span(length > 0 ? length : 0, end < a.slots ? end : a.slots);
    fresh.stride = layout.new_stride;
  }

  SpanWeights context, fresh;
};

// Calls move(weight of a slot, weight of the new token that counts as that slot) for all new tokens
// of a tree.
template <typename Move>
inline void for_new_tokens(const Attention& a, const AttentionTask& task, const Span& span,
                           const BlockWeights& weights, int64_t rows, const Move& move) {
  if (weights.fresh.span.strips == 0) return;
  const int64_t length = a.lengths[task.batch_row];
  for (int64_t row = 0; row < rows; ++row) {
    float* of_slots = weights.context.values + row * weights.context.stride - span.first;
    float* of_tokens = weights.fresh.values + row * weights.fresh.stride - weights.fresh.span.first;
    for (int64_t slot = length > span.first ? length : span.first; slot < span.end; ++slot) {
      const int64_t index = new_token(a, task, task.token + row / a.heads_per_kv, slot - length);
      if (index >= 0) move(of_slots[slot], of_tokens[length + index]);
    }
  }
}

inline void score_floats(const Entries& entries, const SpanWeights& weights, const Layout& layout,
                         float* scratch, Ahead& ahead) {
  const Span& span = weights.span;
  if (span.strips == 0) return;
  float* keys = scratch + layout.keys;
  std::memset(weights.values, 0, layout.rows * weights.stride * sizeof(float));
  const Factor queries{scratch, layout.features, entries.features, nullptr};
  for (int64_t i = 0; i < span.strips; ++i) {
    read_keys(entries, span.slot(i), span.end, keys, ahead);
    add_product(queries, Decoded{keys, kStrip}, layout.rows, kStrip, weights.values + i * kStrip,
                weights.stride);
  }
}

inline void score(const Attention& a, const AttentionTask& task, const Entries& keys,
                  const BlockWeights& weights, const Layout& layout, float* scratch, Ahead& ahead) {
  if constexpr (kHasBf16) {
    if (pairs_serve(a)) {
      copy_queries(a, task, layout, scratch);
      score_pairs(a, keys, weights.context, layout, scratch, ahead);
      score_pairs(a, keys, weights.fresh, layout, scratch, ahead);
      return;
    }
  }
  read_queries(a, task, layout, scratch);
  score_floats(keys, weights.context, layout, scratch, ahead);
  score_floats(keys, weights.fresh, layout, scratch, ahead);
}

// A product in which values that are not finite reach only the rows that give them a weight.
inline void add_careful(const Factor& f, const Decoded& m, int64_t rows, int64_t columns,
                        float* y) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < f.count; ++i) {
      const float* weight = f.x + row * f.x_stride + i;
      if (*weight == 0) continue;
      const Decoded slot{m.start + i * m.stride, m.stride};
      add_product(Factor{weight, 1, 1, nullptr}, slot, 1, columns, y + row * columns, columns);
    }
  }
}

// Multiplies weights by the scales of the values of their slots, which hold codes. A weight of zero
// stays zero, whatever the scale.
inline void scale_weights(const Entries& entries, const SpanWeights& weights, int64_t rows) {
  if (entries.kind < Cached::kCodes8) return;
  const Span& span = weights.span;
  for (int64_t i = 0; i < span.strips; ++i) {
    alignas(64) float scales[kStrip] = {};
    for (int64_t slot = 0; slot < span.count(i); ++slot) {
      scales[slot] = entries.scales[(span.slot(i) + slot) * entries.heads];
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* of_strip = weights.values + row * weights.stride + i * kStrip;
      for (int64_t slot = 0; slot < kStrip; slot += kLanes) {
        const Float weight = load<Float>(of_strip + slot);
        store(of_strip + slot, weight != 0 ? weight * load<Float>(scales + slot) : Float{});
      }
    }
  }
}

// Mixes the values of a strip where they lie.
inline void mix_stored(const Factor& f, const Entries& entries, int64_t slot, int64_t rows,
                       float* sums) {
  const auto add = [&](const auto& values) {
    add_product(f, values, rows, entries.features, sums, entries.features);
  };
  if (entries.kind == Cached::kFloat32) return add(Stored<Cached::kFloat32>{entries, slot});
  if (entries.kind == Cached::kBfloat16) return add(Stored<Cached::kBfloat16>{entries, slot});
  if (entries.kind == Cached::kCodes8) return add(Stored<Cached::kCodes8>{entries, slot});
  add(Stored<Cached::kCodes4>{entries, slot});
}

template <bool careful>
inline void mix(const Entries& entries, const SpanWeights& weights, const Layout& layout,
                float* values, float* sums, Ahead& ahead) {
  const Span& span = weights.span;
  const int64_t rows = layout.rows, features = layout.features;
  // No vector reaches past a slot's values or, of nibbles, past a half.
  const bool halves = entries.kind != Cached::kCodes4 || entries.bytes % kLanes == 0;
  const bool whole = entries.features == features && halves;
  const bool direct = whole && (rows <= kDirectRows || entries.kind == Cached::kFloat32);
  for (int64_t i = 0; i < span.strips; ++i) {
    Factor f{weights.values + i * kStrip, weights.stride, span.count(i), &ahead};
    if (direct && !careful) {
      mix_stored(f, entries, span.slot(i), rows, sums);
      continue;
    }
    read_values(entries, span.slot(i), span.count(i), layout, values, ahead);
    f.ahead = nullptr;
    const Decoded decoded{values, features};
    if (careful) {
      add_careful(f, decoded, rows, features, sums);
    } else {
      add_product(f, decoded, rows, features, sums, features);
    }
  }
}

template <bool careful>
inline void mix_block(const Entries& entries, const BlockWeights& weights, const Layout& layout,
                      float* values, float* sums, Ahead& ahead) {
  std::memset(sums, 0, layout.rows * layout.features * sizeof(float));
  mix<careful>(entries, weights.context, layout, values, sums, ahead);
  mix<careful>(entries, weights.fresh, layout, values, sums, ahead);
}

// Replaces scores by weights, in the order of slots, and writes their maxima and totals.
inline void weigh_block(const Attention& a, const AttentionTask& task, const Span& span,
                        const BlockWeights& weights, const Layout& layout, float* scratch,
                        float* sums) {
  for_new_tokens(a, task, span, weights, layout.rows,
                 [](float& slot, float& token) { slot = token; });
  uint32_t* seen = reinterpret_cast<uint32_t*>(scratch + layout.seen);
  const int64_t count = span.strips * kStrip;
  const bool masked = see(a, task, span.first, count, seen);
  for (int64_t row = 0; row < layout.rows; ++row) {
    const uint32_t* mask = masked ? seen + row / a.heads_per_kv * kAttentionBlock : nullptr;
    weigh(scratch + layout.weights + row * kWeightStride, mask, count, sums[layout.maxima + row],
          sums[layout.totals + row]);
  }
}

// sums: of this step alone.
inline void attend_block(const Attention& a, const AttentionStep& step, const AttentionAhead& steps,
                         float* scratch, float* sums) {
  const AttentionTask& task = *step.task;
  const Layout layout(a, task.tokens);
  const Span span(task, step.block);
  const BlockWeights weights(a, task, span, layout, scratch);
  const Entries keys(a, task, a.keys), values(a, task, a.values);
  Ahead ahead(a, steps, 2 * span.strips * kStrip * head_lines(a));  // once per line of this step
  score(a, task, keys, weights, layout, scratch, ahead);
  weigh_block(a, task, span, weights, layout, scratch, sums);
#if defined(__AVX512BF16__)
  if (pairs_serve(a)) return mix_pairs(Values{a, task, values, span}, layout, scratch, sums, ahead);
#endif
  std::memset(weights.fresh.values, 0, layout.rows * weights.fresh.stride * sizeof(float));
  for_new_tokens(a, task, span, weights, layout.rows,
                 [](float& slot, float& token) { token = slot; });
  scale_weights(values, weights.context, layout.rows);
  scale_weights(values, weights.fresh, layout.rows);
  mix_block<false>(values, weights, layout, scratch + layout.values, sums, ahead);
  if (!all_finite(sums, layout.rows * layout.features)) {
    mix_block<true>(values, weights, layout, scratch + layout.values, sums, ahead);
  }
}

// --- The running softmax over blocks.

inline void clear_sums(const Attention& a, int64_t tokens, float* sums) {
  const Layout layout(a, tokens);
  std::memset(sums, 0, layout.sums * sizeof(float));
  for (int64_t row = 0; row < layout.rows; ++row) sums[layout.maxima + row] = kNothing;
}

// into: the sums of the blocks so far. next: those of the next block. A block that a query does not
// see changes nothing.
inline void add_block(const Attention& a, int64_t tokens, const float* next, float* into) {
  const Layout layout(a, tokens);
  for (int64_t row = 0; row < layout.rows; ++row) {
    float& maximum = into[layout.maxima + row];
    float& total = into[layout.totals + row];
    const float other = next[layout.maxima + row], other_total = next[layout.totals + row];
    if (other_total == 0) continue;
    const float top = other > maximum ? other : maximum;
    const float keep = exp2(maximum - top), gain = exp2(other - top);
    maximum = top;
    total = total * keep + other_total * gain;
    for (int64_t e = row * layout.features; e < (row + 1) * layout.features; e += kLanes) {
      const Float kept = load<Float>(into + e) * keep;
      store(into + e, fma(load<Float>(next + e), splat(gain), kept));
    }
  }
}

inline void write_result(const Attention& a, const AttentionTask& task, const float* sums) {
  const Layout layout(a, task.tokens);
  for (int64_t row = 0; row < layout.rows; ++row) {
    float* out = a.out + query_offset(a, task, row);
    const float* mixed = sums + row * layout.features;
    const float total = sums[layout.totals + row];
    // A zero sum may have the sign of values that were not seen. Adding 0 removes it.
    for (int64_t e = 0; e < a.e; ++e) out[e] = mixed[e] / (total == 0 ? 1 : total) + 0.0f;
  }
}

}  // namespace specjax::SPECJAX_ISA
