// Attention of one task over one block of slots.
//
// Keys and values are decoded to float32, a strip at a time. The lanes are slots for scores, and
// features for mixed values, so both are the same small matrix product.
//
// Every sum runs over features, or over slots in the order of their numbers from the block's start.
// A slot that a token does not see adds an exact zero. So a query's result is a function of that
// query and of what it sees, whatever else shares the task.
#pragma once

#include "attention/attention_input.h"

namespace specjax::SPECJAX_ISA {

// Up to so many rows, values are decoded where they are used.
inline constexpr int kDirectRows = kRows;

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

// --- y[row, column] += Σ_i x[row, i] · m[i, column], i in order.

// m_stride: in bytes.
struct Factors {
  Factors(const float* x, int64_t x_stride, const void* m, int64_t m_stride, int64_t count,
          Ahead* ahead = nullptr)
      : x(x),
        x_stride(x_stride),
        m(static_cast<const uint8_t*>(m)),
        m_stride(m_stride),
        count(count),
        ahead(ahead) {}

  const float* x;
  int64_t x_stride;
  const uint8_t* m;
  int64_t m_stride, count;
  Ahead* ahead;  // what to prefetch while m is read from memory
};

template <typename Values, int R, int V, bool kAhead = Values::kAhead>
inline void add_columns(const Factors& f, int64_t row, int64_t column, float* y, int64_t y_stride) {
  Float sums[R][V];
  const float* x = f.x + row * f.x_stride;
  const uint8_t* m = f.m + column * Values::kSize;
  y += row * y_stride + column;
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    const float* from = y + r * y_stride;
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = load<Float>(from + v * kLanes);
  }
  for (int64_t i = 0; i < f.count; ++i, m += f.m_stride) {
    Float columns[V];
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      const uint8_t* from = m + v * kLanes * Values::kSize;
      if (kAhead && v * kLanes * Values::kSize % kLine == 0) f.ahead->ask();
      columns[v] = Values::read(from);
    }
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const Float value = splat(x[r * f.x_stride + i]);
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(columns[v], value, sums[r][v]);
    }
  }
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) store(y + r * y_stride + v * kLanes, sums[r][v]);
  }
}

template <typename Values, int R>
inline void add_portion(const Factors& f, int64_t row, int64_t rows, int64_t columns, float* y,
                        int64_t y_stride) {
  if constexpr (R > 1) {
    if (rows < R) return add_portion<Values, R - 1>(f, row, rows, columns, y, y_stride);
  }
  int64_t column = 0;
  for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
    add_columns<Values, R, kVectors>(f, row, column, y, y_stride);
  }
  for (; column < columns; column += kLanes) add_columns<Values, R, 1>(f, row, column, y, y_stride);
}

// `columns`: a multiple of kLanes.
template <typename Values>
inline void add_product(const Factors& f, int64_t rows, int64_t columns, float* y,
                        int64_t y_stride) {
  const int64_t portions = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < portions; ++i) {
    const int64_t row = rows * i / portions, next = rows * (i + 1) / portions;
    add_portion<Values, kRows>(f, row, next - row, columns, y, y_stride);
  }
}

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

// A span, and the queries' scores or weights of its slots: [rows, stride].
struct SpanWeights {
  Span span;
  float* values;
  int64_t stride;
};

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

inline void score(const Entries& entries, const SpanWeights& weights, const Layout& layout,
                  float* scratch, Ahead& ahead) {
  const Span& span = weights.span;
  if (span.strips == 0) return;
  float* keys = scratch + layout.keys;
  std::memset(weights.values, 0, layout.rows * weights.stride * sizeof(float));
  for (int64_t i = 0; i < span.strips; ++i) {
    read_keys(entries, span.slot(i), span.end, keys, ahead);
    const Factors factors(scratch, layout.features, keys, kStrip * sizeof(float), entries.features);
    add_product<Floats>(factors, layout.rows, kStrip, weights.values + i * kStrip, weights.stride);
  }
}

// The same product, where values that are not finite reach only the rows that give them a weight.
inline void add_careful(const Factors& f, int64_t rows, int64_t columns, float* y) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < f.count; ++i) {
      if (f.x[row * f.x_stride + i] == 0) continue;
      const Factors one(f.x + row * f.x_stride + i, 1, f.m + i * f.m_stride, f.m_stride, 1);
      add_product<Floats>(one, 1, columns, y + row * columns, columns);
    }
  }
}

inline bool all_finite(const float* values, int64_t count) {
  Float differences{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Float v = load<Float>(values + i);
    differences += v - v;  // NaN where v is not finite
  }
  return sum_of_lanes(differences) == 0;
}

template <bool careful>
inline void mix(const Entries& entries, const SpanWeights& weights, const Layout& layout,
                float* values, float* sums, Ahead& ahead) {
  const Span& span = weights.span;
  const int64_t rows = layout.rows, features = layout.features;
  const bool whole = entries.features == features;  // no vector reaches past a slot's values
  for (int64_t i = 0; i < span.strips; ++i) {
    const float* of_strip = weights.values + i * kStrip;
    const uint8_t* direct = entries.start + span.slot(i) * entries.stride;
    const Factors factors(of_strip, weights.stride, direct, entries.stride, span.count(i), &ahead);
    if (!careful && whole && entries.kind == Cached::kFloat32) {
      add_product<Floats>(factors, rows, features, sums, features);
    } else if (!careful && whole && entries.kind == Cached::kBfloat16 && rows <= kDirectRows) {
      add_product<Bfloat16s>(factors, rows, features, sums, features);
    } else {
      read_values(entries, span.slot(i), span.count(i), layout, values, ahead);
      const Factors decoded(of_strip, weights.stride, values, features * sizeof(float),
                            span.count(i));
      if (careful) {
        add_careful(decoded, rows, features, sums);
      } else {
        add_product<Floats>(decoded, rows, features, sums, features);
      }
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
  read_queries(a, task, layout, scratch);
  score(keys, weights.context, layout, scratch, ahead);
  score(keys, weights.fresh, layout, scratch, ahead);
  weigh_block(a, task, span, weights, layout, scratch, sums);
  std::memset(weights.fresh.values, 0, layout.rows * weights.fresh.stride * sizeof(float));
  for_new_tokens(a, task, span, weights, layout.rows,
                 [](float& slot, float& token) { token = slot; });
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
