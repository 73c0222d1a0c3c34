// bfloat16 and float32. Always inlined: a copy compiled for one instruction set must not serve
// others.
#pragma once

#include <cstdint>
#include <cstring>

namespace specjax {

__attribute__((always_inline)) inline float bfloat16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// Rounds to nearest, ties to even. A NaN stays a NaN. Without branches, so that loops vectorize.
__attribute__((always_inline)) inline uint16_t bfloat16_bits(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  const uint32_t rounded = word + 0x7FFF + (word >> 16 & 1), nan = word | 0x400000;
  return static_cast<uint16_t>((x == x ? rounded : nan) >> 16);
}

}  // namespace specjax
