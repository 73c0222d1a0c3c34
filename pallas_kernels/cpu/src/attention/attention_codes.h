// Reads a cache as bfloat16, kPairFeatures features of a slot at a time.
//
// A code of 8 or 4 bits less its slot's zero has 8 bits and a sign, which bfloat16 holds exactly.
// So integers are multiplied. The scale of a slot multiplies its scores for keys, and its weights
// for values.
#pragma once

#include "attention/attention_input.h"

namespace specjax::SPECJAX_ISA {

// Integers of five bits with their sign, 0 … 15 and -16 … -1, as bfloat16.
alignas(64) inline constexpr uint16_t kIntegers[2 * kLanes] = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130,
    0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};

SPECJAX_INLINE __m256i read_bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

SPECJAX_INLINE Word read_codes8(const uint8_t* from, uint8_t zero) {
  const Float low = integers(widen(load<Byte>(from)), zero);
  const Float high = integers(widen(load<Byte>(from + kLanes)), zero);
  return (Word)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Reads the low nibbles, or the high ones. A difference has five bits, and the lookup ignores the
// others.
SPECJAX_INLINE Word read_codes4(const uint8_t* from, bool high, uint8_t zero) {
  const __m256i bytes = read_bytes(from);
  const __m256i codes =
      _mm256_and_si256(high ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(0xF));
  const __m256i values = _mm256_sub_epi8(codes, _mm256_set1_epi8(static_cast<char>(zero)));
  const __m512i table = (__m512i)load<Word>(kIntegers);
  return (Word)_mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(values), table);
}

// The features of a slot from `feature` on, a multiple of kPairFeatures.
template <Cached kind>
SPECJAX_INLINE Word read_features(const Entries& entries, int64_t slot, int64_t feature) {
  const uint8_t* from = entries.start + slot * entries.stride;
  if constexpr (kind == Cached::kBfloat16) return load<Word>(from + feature * sizeof(uint16_t));
  const uint8_t zero = entries.zeros[slot * entries.heads];
  if constexpr (kind == Cached::kCodes8) return read_codes8(from + feature, zero);
  const bool high = feature >= entries.bytes;  // the features' second half
  return read_codes4(from + (high ? feature - entries.bytes : feature), high, zero);
}

// Reads `count` slots from `slot` on: bfloat16[count, features].
template <Cached kind>
inline void read_strip(const Entries& entries, int64_t slot, int64_t count, uint8_t* strip) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t feature = 0; feature < entries.features; feature += kPairFeatures) {
      store(strip, read_features<kind>(entries, slot + i, feature));
      strip += kBytes;
    }
  }
}

// The scale of a slot's integers.
template <Cached kind>
SPECJAX_INLINE float slot_scale(const Entries& entries, int64_t slot) {
  return kind == Cached::kBfloat16 ? 1 : entries.scales[slot * entries.heads];
}

}  // namespace specjax::SPECJAX_ISA
