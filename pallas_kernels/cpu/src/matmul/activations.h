// Prepares x, row by row: quantizes it as pallas_kernels/activations.py does, bit for bit, or
// converts its type; pads it with zeros; sums its segments.
#pragma once

#include "common/bfloat16.h"
#include "common/simd.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

// Reads a row of x as float32.
inline void read_row(const Input& x, int64_t row, float* values) {
  const int64_t start = row * x.k;
  if (!x.bfloat16) {
    std::memcpy(values, static_cast<const float*>(x.data) + start, x.k * sizeof(float));
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(x.data) + start;
  for (int64_t i = 0; i < x.k; ++i) values[i] = bfloat16_value(bits[i]);
}

// The largest magnitude of values[size], or NaN if there is one: as integers, the magnitudes' bits
// have the same order, and those of a NaN are above all others. Sizes are multiples of 32.
inline float largest(const float* values, int64_t size) {
  Word most{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Word magnitude = load<Word>(values + i) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  uint32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      const uint32_t other = lanes[lane + half];
      lanes[lane] = lanes[lane] > other ? lanes[lane] : other;
    }
  }
  float result;
  std::memcpy(&result, lanes, sizeof result);
  return result;
}

inline constexpr float kTiny = 1.17549435e-38f;  // the smallest normal

// Adding 1.5 · 2^23 rounds to an integer, ties to even. It is then in the low bits.
inline constexpr float kRound = 12582912.0f;

// Quantizes one group: q ≈ values / scale. Returns the scale.
inline float quantize(const float* values, int64_t size, int levels, int8_t* q) {
  float scale = largest(values, size) * (1.0f / static_cast<float>(levels));
  if (scale < kTiny) scale = 0;
  const float inverse = scale == 0 ? 0 : 1 / scale;
  for (int64_t i = 0; i < size; ++i) {
    const float shifted = values[i] * inverse + kRound;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    q[i] = static_cast<int8_t>(bits);  // for a NaN, anything
  }
  return scale;
}

// The largest integer of 16 bits whose bytes are both signed, as 256 · high + low.
inline constexpr int kLevels16 = 127 * 256 + 127;

// The smallest power of two that is not below `value`, or 0. A NaN stays one.
inline float power_above(float value) {
  if (value != value) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7FFFFFu) & 0xFF800000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// Integers as 256 · high + low.
inline void split_bytes(const int16_t* q, int64_t size, int8_t* high, int8_t* low) {
  for (int64_t i = 0; i < size; ++i) {
    high[i] = static_cast<int8_t>((q[i] + 128) >> 8);  // rounded, because `low` is signed
    low[i] = static_cast<int8_t>(q[i]);
  }
}

// Writes at most kPlane integers as Sums<Arithmetic::kInteger16> reads them.
inline void write_integers16(const int16_t* q, int64_t size, uint32_t* words) {
  if constexpr (kHasDot4) {
    int8_t high[kPlane], low[kPlane];
    split_bytes(q, size, high, low);
    for (int64_t i = 0; i < size; i += 4) {
      std::memcpy(words + i / 2, high + i, sizeof *words);
      std::memcpy(words + i / 2 + 1, low + i, sizeof *words);
    }
  } else {
    int16_t* halves = reinterpret_cast<int16_t*>(words);
    for (int64_t i = 0; i < size; i += 4) {
      halves[i] = q[i], halves[i + 1] = q[i + 2];
      halves[i + 2] = q[i + 1], halves[i + 3] = q[i + 3];
    }
  }
}

// Quantizes one group of at most kPlane values: q ≈ values / scale. Returns the scale, a power of
// two, and their sum in `sum`.
inline float quantize16(const float* values, int64_t size, int16_t* q, int32_t& sum) {
  float scale = power_above(largest(values, size) * (1.0f / kLevels16));
  if (scale < kTiny) scale = 0;
  const float inverse = scale == 0 ? 0 : 1 / scale;
  int32_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float shifted = values[i] * inverse + kRound;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    q[i] = static_cast<int16_t>(bits);  // for a NaN, anything
    total += q[i];
  }
  sum = total;
  return scale;
}

// The sum of values[size], in one order on every processor: of those whose numbers are equal modulo
// kParts first.
template <typename Sum, typename Value>
inline Sum sum_of(const Value* values, int64_t size) {
  constexpr int kParts = 16;
  Sum parts[kParts] = {};
  for (int64_t i = 0; i < size; i += kParts) {
    for (int part = 0; part < kParts; ++part) parts[part] += values[i + part];
  }
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int part = 0; part < half; ++part) parts[part] += parts[part + half];
  }
  return parts[0];
}

// Sums `count` segments of `size` values. The sums are `stride` apart.
template <typename Value, typename Sum>
inline void sum_segments(const Value* values, int64_t count, int64_t size, Sum* sums,
                         int64_t stride) {
  for (int64_t i = 0; i < count; ++i) sums[i * stride] = sum_of<Sum>(values + i * size, size);
}

// Copies a row of x, pads it with zeros, and swaps pairs.
inline void copy_bfloat16(const Preparation& how, const Input& x, int64_t row, uint32_t* words) {
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + row * x.k;
  std::memcpy(words, from, x.k * sizeof *from);
  std::memset(reinterpret_cast<uint16_t*>(words) + x.k, 0, (how.inputs - x.k) * sizeof *from);
  if (!how.swap_pairs) return;
  for (int64_t i = 0; i < how.inputs / 2; i += 2) {
    const uint32_t first = words[i], second = words[i + 1];
    words[i] = (first & 0xFFFFu) | second << 16;
    words[i + 1] = first >> 16 | (second & 0xFFFF0000u);
  }
}

// Rounds a row to integers of 16 bits times their groups' scales, which bfloat16 holds, and sums
// the groups.
inline void round_to_integers16(const Preparation& how, int64_t row, float* values,
                                const Prepared& out) {
  for (int64_t g = 0; g < how.inputs / how.group_size; ++g) {
    float* const group = values + g * how.group_size;
    int16_t q[kPlane];
    int32_t sum;
    const float scale = quantize16(group, how.group_size, q, sum);
    for (int64_t i = 0; i < how.group_size; ++i) group[i] = static_cast<float>(q[i]) * scale;
    if (how.sum_size == 0) continue;
    static_cast<float*>(out.sums)[g * how.rows + row] = static_cast<float>(sum) * scale;
  }
}

// Writes values that bfloat16 holds, as `copy_bfloat16` does where it swaps pairs.
inline void write_bfloat16(const Preparation& how, const float* values, uint32_t* words) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(words);
  for (int64_t i = 0; i < how.inputs; i += 4) {
    halves[i] = bfloat16_bits(values[i]), halves[i + 1] = bfloat16_bits(values[i + 2]);
    halves[i + 2] = bfloat16_bits(values[i + 1]), halves[i + 3] = bfloat16_bits(values[i + 3]);
  }
}

// Copies the high bytes of one row and its low ones, `count` words each, to rows of their own:
// tiles read the high bytes of a portion's rows, then the low ones.
inline void write_planes(const Preparation& how, const uint32_t* words, int64_t count, int64_t row,
                         uint32_t* out) {
  const int64_t in_portion = row % how.portion, size = how.depth * sizeof(uint32_t);
  uint32_t* high = out + (2 * (row - in_portion) + in_portion) * how.depth;
  for (int64_t i = 0; i < count; i += how.depth, high += 2 * how.rows * how.depth) {
    std::memcpy(high, words + i, size);
    std::memcpy(high + how.portion * how.depth, words + count + i, size);
  }
}

// Copies one row of [rows, words] to its place among the rows that stand together.
inline void write_slices(const Preparation& how, const uint32_t* words, int64_t count, int64_t row,
                         uint32_t* out) {
  const int64_t together = how.way == Way::kTiles ? how.rows : how.portion;
  const int64_t first = row / together * together;
  const int64_t rows = how.rows - first < together ? how.rows - first : together;
  out += first * count + (row - first) * how.depth;
  for (int64_t i = 0; i < count; i += how.depth) {
    std::memcpy(out + i * rows, words + i, how.depth * sizeof(uint32_t));
  }
}

inline void prepare_row(const Preparation& how, const Input& x, int64_t row, float* values,
                        const Prepared& out) {
  const bool rounds = how.arithmetic == Arithmetic::kBfloat16 && how.group_size != 0;
  if (how.arithmetic != Arithmetic::kBfloat16 || how.sum_size != 0 || rounds) {
    read_row(x, row, values);
    std::memset(values + x.k, 0, (how.inputs - x.k) * sizeof(float));
  }
  const int64_t count = words_of(how.arithmetic, how.inputs);
  const bool panels = how.way == Way::kPanels;
  const bool in_planes = how.arithmetic == Arithmetic::kInteger16 && how.way == Way::kTiles;
  uint32_t* words =
      panels ? out.words + row * count : reinterpret_cast<uint32_t*>(values + how.inputs);
  const int64_t sums = how.sum_size == 0 ? 0 : how.inputs / how.sum_size;
  if (how.arithmetic == Arithmetic::kInteger) {
    const int64_t groups = how.inputs / how.group_size;
    int8_t* q = reinterpret_cast<int8_t*>(words);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t start = g * how.group_size;
      out.scales[g * how.rows + row] =
          quantize(values + start, how.group_size, how.levels, q + start);
    }
    sum_segments(q, sums, how.sum_size, static_cast<int32_t*>(out.sums) + row, how.rows);
  } else if (how.arithmetic == Arithmetic::kInteger16) {
    for (int64_t g = 0; g < how.inputs / how.group_size; ++g) {
      const int64_t start = g * how.group_size, at = g * how.rows + row;
      int16_t q[kPlane];
      out.scales[at] =
          quantize16(values + start, how.group_size, q, static_cast<int32_t*>(out.sums)[at]);
      if (in_planes) {
        int8_t* high = reinterpret_cast<int8_t*>(words) + start;
        split_bytes(q, how.group_size, high, high + how.inputs);
      } else {
        write_integers16(q, how.group_size, words + start / 2);
      }
    }
  } else if (rounds) {
    round_to_integers16(how, row, values, out);
    write_bfloat16(how, values, words);
  } else {
    sum_segments(values, sums, how.sum_size, static_cast<float*>(out.sums) + row, how.rows);
    if (how.arithmetic == Arithmetic::kBfloat16) {
      copy_bfloat16(how, x, row, words);
    } else {
      std::memcpy(words, values, how.inputs * sizeof(float));
    }
  }
  if (in_planes) {
    write_planes(how, words, count / 2, row, out.words);
  } else if (!panels) {
    write_slices(how, words, count, row, out.words);
  }
}

}  // namespace specjax::SPECJAX_ISA
