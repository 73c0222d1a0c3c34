// The inputs of attention: queries, strips of the cache decoded to float32, and which token sees
// which slots.
#pragma once

#include "matmul/activations.h"
#include "attention/attention_ahead.h"
#include "matmul/panel.h"
#include "common/simd.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kStrip = 64;  // with 64 features, a strip stays in the first-level cache
static_assert(kAttentionBlock % kStrip == 0 && kStrip % (kVectors * kLanes) == 0);

inline constexpr int kPairFeatures = 2 * kLanes;  // features in bfloat16 that fill a vector

// The stride of the weights. It is not a power of two, because those share few sets of the
// first-level cache.
inline constexpr int kWeightStride = kAttentionBlock + 16;
inline constexpr int kPairStride = kAttentionBlock + 32;  // of weights in bfloat16

// The layout of a thread's scratch and of a task's sums, in floats.
struct Layout {
  Layout(const Attention& a, int64_t tokens)
      : rows(tokens * a.heads_per_kv),
        features((a.e + 15) / 16 * 16),
        new_stride(a.ancestors == nullptr ? 0 : (a.tokens + kStrip - 1) / kStrip * kStrip + 16),
        keys(rows * features),
        values(keys + (a.e + 31) / 32 * 32 * kStrip),
        weights(values + kStrip * features),
        new_weights(weights + rows * kWeightStride),
        seen(new_weights + rows * new_stride),
        pair_weights(seen + tokens * kAttentionBlock),
        scratch(pair_weights + rows * kPairStride / 2),
        maxima(rows * features),
        totals(maxima + rows),
        sums((totals + rows + 15) / 16 * 16) {}

  int64_t rows, features, new_stride;
  // Scratch: queries [rows, features]; keys [features, kStrip]; values [kStrip, features]; weights
  // [rows, kWeightStride]; in a tree, those of the new tokens as they lie in memory [rows,
  // new_stride]; seen [tokens, kAttentionBlock]; weights in bfloat16 [rows, kPairStride].
  int64_t keys, values, weights, new_weights, seen, pair_weights, scratch;
  // Sums: mixed values [rows, features], maxima [rows], totals [rows].
  int64_t maxima, totals, sums;
};

// The entries of one batch row and one key-value head. Slot s begins at byte stride · s.
struct Entries {
  Entries(const Attention& a, const AttentionTask& task, const Cache& cache)
      : kind(a.cached),
        features(a.e),
        bytes(head_bytes(a)),
        stride(a.kv_heads * bytes),
        heads(a.kv_heads) {
    const int64_t first = a.first_slot(task.batch_row) * heads + task.head;
    start = static_cast<const uint8_t*>(cache.data) + first * bytes;
    if (kind < Cached::kCodes8) return;
    scales = cache.scales + first, zeros = cache.zeros + first;
  }

  Cached kind;
  int64_t features, bytes, stride, heads;
  const uint8_t* start;
  const float* scales = nullptr;  // of slot s: scales[s · heads], zeros[s · heads]
  const uint8_t* zeros = nullptr;
};

// Slots first … end - 1, divided into strips.
struct Span {
  // The slots of a block that are visited: from the strip of task.first on, or from the sinks.
  Span(const AttentionTask& task, int64_t block) {
    const int64_t start = block * kAttentionBlock;
    const bool skips = task.first > start && (block > 0 || task.sinks == 0);
    first = start + (skips ? (task.first - start) / kStrip * kStrip : 0);
    end = task.end(block);
    strips = (end - first + kStrip - 1) / kStrip;
  }

  Span(int64_t first, int64_t end)
      : first(first), end(end), strips(end > first ? (end - first + kStrip - 1) / kStrip : 0) {}

  int64_t slot(int64_t strip) const { return first + strip * kStrip; }
  // The number of slots of a strip.
  int64_t count(int64_t strip) const {
    return end - slot(strip) < kStrip ? end - slot(strip) : kStrip;
  }

  int64_t first, end, strips;
};

// A span, and the queries' scores or weights of its slots: [rows, stride].
struct SpanWeights {
  Span span;
  float* values;
  int64_t stride;
};

// kLanes bfloat16 from memory.
SPECJAX_INLINE Float bfloat16_values(const uint8_t* from) {
  return (Float)(widen(load<Half>(from)) << 16);
}

// Codes as the integers that they stand for, without their slot's scale.
SPECJAX_INLINE Float integers(Word codes, Int zeros) { return to_float((Int)codes - zeros); }
SPECJAX_INLINE Float integers(Word codes, int zero) { return integers(codes, Int{} + zero); }

// Where the query of a task's row begins in the queries, and its result in the output.
inline int64_t query_offset(const Attention& a, const AttentionTask& task, int64_t row) {
  const int64_t token = task.batch_row * a.tokens + task.token + row / a.heads_per_kv;
  return (token * a.heads + task.head * a.heads_per_kv + row % a.heads_per_kv) * a.e;
}

// The task's queries times the scale of the scores: f32[rows, features].
inline void read_queries(const Attention& a, const AttentionTask& task, const Layout& layout,
                         float* queries) {
  for (int64_t row = 0; row < layout.rows; ++row) {
    const int64_t index = query_offset(a, task, row);
    float* out = queries + row * layout.features;
    if (a.queries_bfloat16) {
      const uint16_t* bits = static_cast<const uint16_t*>(a.queries) + index;
      for (int64_t i = 0; i < a.e; ++i) out[i] = bfloat16_value(bits[i]) * a.scale;
    } else {
      const float* values = static_cast<const float*>(a.queries) + index;
      for (int64_t i = 0; i < a.e; ++i) out[i] = values[i] * a.scale;
    }
  }
}

// Transposes the words of kLanes slots from `slot` on: calls put(number of the word, that word of
// every slot). Slots from `end` on repeat the last one.
template <typename Put>
SPECJAX_INLINE void transpose_words(const Entries& entries, int64_t slot, int64_t end, Ahead& ahead,
                                    const Put& put) {
  const uint8_t* rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    rows[i] = entries.start + (slot + i < end ? slot + i : end - 1) * entries.stride;
  }
  for (int64_t byte = 0; byte < entries.bytes; byte += kBytes) {
    Word words[kLanes];
    const int64_t left = entries.bytes - byte;
    ahead.ask(kLanes * kBytes / kLine);
    for (int i = 0; i < kLanes; ++i) {
      if (left >= kBytes) {
        words[i] = load<Word>(rows[i] + byte);
      } else {
        words[i] = Word{};
        std::memcpy(&words[i], rows[i] + byte, left);
      }
    }
    transpose(words);
    for (int64_t i = 0; i < kLanes && 4 * i < left; ++i) put(byte / 4 + i, words[i]);
  }
}

// Decodes and transposes kLanes slots: f32[features, kStrip].
inline void transpose_codes(const Entries& entries, int64_t slot, int64_t end, float* keys,
                            Ahead& ahead) {
  const bool nibbles = entries.kind == Cached::kCodes4;
  Int zeros;
  Float scales;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t at = (slot + i < end ? slot + i : end - 1) * entries.heads;
    zeros[i] = entries.zeros[at], scales[i] = entries.scales[at];
  }
  float* high = keys + entries.bytes * kStrip;  // of nibbles: the features' second half
  const auto put_byte = [&](int64_t byte, Word codes) SPECJAX_LAMBDA {
    const Word low = codes & (nibbles ? 0xFu : 0xFFu);
    store(keys + byte * kStrip, integers(low, zeros) * scales);
    if (nibbles) store(high + byte * kStrip, integers(codes >> 4 & 0xFu, zeros) * scales);
  };
  transpose_words(entries, slot, end, ahead, [&](int64_t n, Word word) SPECJAX_LAMBDA {
    const int64_t left = entries.bytes - 4 * n;
    put_byte(4 * n, word);
    if (left > 1) put_byte(4 * n + 1, word >> 8);
    if (left > 2) put_byte(4 * n + 2, word >> 16);
    if (left > 3) put_byte(4 * n + 3, word >> 24);
  });
}

// Decodes and transposes kStrip slots from `slot` on: f32[features, kStrip]. Slots from `end` on
// have arbitrary values.
inline void read_keys(const Entries& entries, int64_t slot, int64_t end, float* keys,
                      Ahead& ahead) {
  for (int64_t stop = slot + kStrip; slot < stop; slot += kLanes, keys += kLanes) {
    if (entries.kind >= Cached::kCodes8) {
      transpose_codes(entries, slot, end, keys, ahead);
    } else if (entries.kind == Cached::kFloat32) {
      transpose_words(entries, slot, end, ahead,
                      [&](int64_t n, Word word) SPECJAX_LAMBDA { store(keys + n * kStrip, word); });
    } else {
      transpose_words(entries, slot, end, ahead, [&](int64_t n, Word word) SPECJAX_LAMBDA {
        store(keys + 2 * n * kStrip, word << 16);
        store(keys + (2 * n + 1) * kStrip, word & 0xFFFF0000u);
      });
    }
  }
}

// Decodes one slot of codes, without its scale: f32[features].
inline void decode_slot(const Entries& entries, int64_t slot, float* out, Ahead& ahead) {
  const uint8_t* codes = entries.start + slot * entries.stride;
  const int zero = entries.zeros[slot * entries.heads];
  const bool nibbles = entries.kind == Cached::kCodes4;
  float* high = out + entries.bytes;  // of nibbles: the features' second half
  int64_t i = 0;
  for (; i + kLanes <= entries.bytes; i += kLanes) {
    if (i % kLine == 0) ahead.ask();
    const Word word = widen(load<Byte>(codes + i));
    store(out + i, integers(nibbles ? word & 0xFu : word, zero));
    if (nibbles) store(high + i, integers(word >> 4, zero));
  }
  for (; i < entries.bytes; ++i) {
    out[i] = static_cast<float>((nibbles ? codes[i] & 0xF : codes[i]) - zero);
    if (nibbles) high[i] = static_cast<float>((codes[i] >> 4) - zero);
  }
}

// kLanes values of a slot in float32 or bfloat16. Those after the first `left` are zero.
inline Float read_vector(const Entries& entries, const uint8_t* from, int64_t left) {
  if (entries.kind == Cached::kFloat32) {
    Float values{};
    if (left >= kLanes) return load<Float>(from);
    std::memcpy(&values, from, left * sizeof(float));
    return values;
  }
  if (left >= kLanes) return bfloat16_values(from);
  uint16_t bits[kLanes] = {};
  std::memcpy(bits, from, left * sizeof(uint16_t));
  return bfloat16_values(reinterpret_cast<const uint8_t*>(bits));
}

// Decodes `count` slots from `slot` on: f32[count, features]. Codes lack their slot's scale.
inline void read_values(const Entries& entries, int64_t slot, int64_t count, const Layout& layout,
                        float* values, Ahead& ahead) {
  const int64_t size = entries.kind == Cached::kFloat32 ? 4 : 2;
  for (int64_t i = 0; i < count; ++i) {
    float* out = values + i * layout.features;
    if (entries.kind >= Cached::kCodes8) {
      decode_slot(entries, slot + i, out, ahead);
      std::memset(out + entries.features, 0, (layout.features - entries.features) * sizeof(float));
      continue;
    }
    const uint8_t* from = entries.start + (slot + i) * entries.stride;
    for (int64_t e = 0; e < layout.features; e += kLanes) {
      const int64_t left = entries.features - e;
      if (e * size % kLine == 0) ahead.ask();
      store(out + e, left > 0 ? read_vector(entries, from + e * size, left) : Float{});
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

// --- Visibility.

// Which new token is number d of those that a token sees. -1 if there is none.
inline int64_t new_token(const Attention& a, const AttentionTask& task, int64_t token, int64_t d) {
  if (a.ancestors == nullptr) return d <= token ? d : -1;
  if (d >= a.depth) return -1;
  const int64_t index = a.ancestors[(task.batch_row * a.tokens + token) * a.depth + d];
  const int64_t slot = a.lengths[task.batch_row] + index;
  return index >= 0 && index < a.tokens && slot >= 0 && slot < a.slots ? index : -1;
}

// Which of `count` slots from `first` on a token sees: all ones or zero in seen[count].
inline void see_token(const Attention& a, const AttentionTask& task, int64_t token, int64_t first,
                      int64_t count, uint32_t* seen) {
  const int64_t length = a.lengths[task.batch_row];
  const int32_t* positions = a.positions + task.batch_row * a.tokens;
  const int64_t oldest = a.windowed ? positions[token] - a.window + 1 : INT64_MIN;
  const int64_t context = std::clamp<int64_t>(length - first, 0, count);
  for (int64_t i = 0; i < context; ++i) {
    seen[i] = first + i >= oldest || first + i < a.sinks ? ~0u : 0u;
  }
  for (int64_t i = context; i < count; ++i) {
    const int64_t index = new_token(a, task, token, first + i - length);
    const bool near = index >= 0 && (positions[index] >= oldest || positions[index] < a.sinks);
    seen[i] = near ? ~0u : 0u;
  }
}

// The same for all tokens of the task, at seen[token · kAttentionBlock]. Returns false, and writes
// nothing, if all of them see all slots.
inline bool see(const Attention& a, const AttentionTask& task, int64_t first, int64_t count,
                uint32_t* seen) {
  const int64_t chain = a.ancestors == nullptr && !a.windowed ? task.token + 1 : 0;
  bool all = first + count <= a.lengths[task.batch_row] + chain;
  for (int64_t t = 0; t < task.tokens && all && a.windowed; ++t) {
    all = first > a.positions[task.batch_row * a.tokens + task.token + t] - a.window;
  }
  if (all) return false;
  for (int64_t t = 0; t < task.tokens; ++t) {
    see_token(a, task, task.token + t, first, count, seen + t * kAttentionBlock);
  }
  return true;
}

}  // namespace specjax::SPECJAX_ISA
