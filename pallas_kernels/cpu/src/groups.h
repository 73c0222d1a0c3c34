// The scales and zeros of a panel's groups, as vectors over the panel's outputs.
#pragma once

#include "panel.h"

namespace specjax::SPECJAX_ISA {

inline float half_value(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  // The exponent's bias differs by 112; multiplying makes subnormals normal. Above: inf and NaN.
  uint32_t word = rest << 13;
  float value;
  std::memcpy(&value, &word, sizeof value);
  value *= 5.192296858534828e33f;  // 2^112
  std::memcpy(&word, &value, sizeof word);
  if (rest >= 0x7C00) word |= 0x7F800000;
  word |= sign;
  std::memcpy(&value, &word, sizeof value);
  return value;
#endif
}

// What a group's sum is multiplied with.
inline float scale_value(const Weight& w, int64_t index) {
  const uint16_t* halves = static_cast<const uint16_t*>(w.scales);
  uint32_t bits = 0;
  switch (w.scale) {
    case Scale::kFloat32: return static_cast<const float*>(w.scales)[index];
    case Scale::kBfloat16: bits = static_cast<uint32_t>(halves[index]) << 16; break;
    case Scale::kFloat16: return half_value(halves[index]);
    case Scale::kE8m0: {  // half of 2^(code - 127), since the integers are doubled
      const uint32_t code = static_cast<const uint8_t*>(w.scales)[index];
      bits = code == 255 ? 0x7FC00000u : code > 1 ? (code - 1) << 23 : (1u << 21) << code;
    }
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of one group and one vector of outputs: the scale (1 of an unquantized weight), and the zero plus
// the kind's offset.
struct Group {
  Float scale;
  Int zeros;
};

// Groups in the order of the inputs: kept kLanes at a time, since that many are as quickly read,
// transposed, as one.
class Groups {
 public:
  Groups(const Weight& w, int64_t column) : w_(w), column_(column) {
    for (int64_t& start : start_) start = -1;
  }

  // Of the group of input `input`, for the outputs of vector `v`.
  Group read(int v, int64_t input) {
    if (!w_.quantized()) return {splat(1.0f), Int{}};
    const int64_t group = input / w_.group_size;
    const int64_t start = group - group % kLanes;
    if (start != start_[v]) fill(v, start);
    Group result{(Float)scales_[v][group - start], Int{}};
    if (w_.zeros != nullptr) result.zeros = (Int)zeros_[v][group - start];
    result.zeros += offset(w_.kind);
    return result;
  }

 private:
  void fill(int v, int64_t start) {
    start_[v] = start;
    const int64_t count = w_.groups - start < kLanes ? w_.groups - start : kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t n = column_ + v * kLanes + lane;
      const int64_t first = (n < w_.n ? n : w_.n - 1) * w_.groups + start;
      read_scales(first, count, scales_[v] + lane);
      if (w_.zeros != nullptr) read_zeros(first, count, zeros_[v] + lane);
    }
    transpose(scales_[v]);
    if (w_.zeros != nullptr) transpose(zeros_[v]);
  }

  void read_scales(int64_t first, int64_t count, Word* out) const {
    float values[kLanes] = {};
    if (w_.scale == Scale::kBfloat16) {  // the common type, without a branch per scale
      const uint16_t* bits = static_cast<const uint16_t*>(w_.scales) + first;
      uint32_t words[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>(bits[i]) << 16;
      *out = load<Word>(words);
      return;
    }
    for (int64_t i = 0; i < count; ++i) values[i] = scale_value(w_, first + i);
    *out = load<Word>(values);
  }

  void read_zeros(int64_t first, int64_t count, Word* out) const {
    int32_t values[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = w_.zeros[first + i];
    *out = load<Word>(values);
  }

  const Weight& w_;
  int64_t column_, start_[kVectors];
  Word scales_[kVectors][kLanes], zeros_[kVectors][kLanes];
};

}  // namespace specjax::SPECJAX_ISA
