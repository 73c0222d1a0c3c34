// Vectors of 32-bit lanes for the instruction set that this file is compiled for.
//
// Arithmetic uses the compiler's vector types. This file adds what they lack: fused multiply-add,
// products of packed integers and bfloat16, table lookup, transposition. The kernels are written
// once in these terms, and compiled once per instruction set (CMakeLists.txt), each time in its own
// namespace, SPECJAX_ISA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace specjax::SPECJAX_ISA {

// For functions whose arguments and results stay in registers.
#define SPECJAX_INLINE __attribute__((always_inline)) inline

#define SPECJAX_LAMBDA __attribute__((always_inline))

// For loops over arrays that stay in registers.
#if defined(__clang__)
#define SPECJAX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SPECJAX_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512BW__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

#if defined(__AVX512BF16__)
inline constexpr bool kHasBf16 = true;
#else
inline constexpr bool kHasBf16 = false;
#endif

// Whether the machine has an instruction for products of bytes (dot4).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
inline constexpr bool kHasDot4 = true;
#else
inline constexpr bool kHasDot4 = false;
#endif

inline constexpr int kBytes = 4 * kLanes;
typedef float Float __attribute__((vector_size(kBytes)));
typedef int32_t Int __attribute__((vector_size(kBytes)));
typedef uint32_t Word __attribute__((vector_size(kBytes)));
typedef uint16_t Half __attribute__((vector_size(kBytes / 2)));  // a 16-bit value per lane
typedef int16_t SignedHalf __attribute__((vector_size(kBytes / 2)));
typedef uint8_t Byte __attribute__((vector_size(kLanes)));  // an 8-bit value per lane
typedef int8_t SignedByte __attribute__((vector_size(kLanes)));

template <typename V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline uint32_t load_word(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// One 32-bit word in every lane. A float is copied as bits: adding it to zeros would be arithmetic.
SPECJAX_INLINE Word splat(uint32_t x) { return Word{} + x; }
SPECJAX_INLINE Float splat(float x) { return (Float)splat(load_word(&x)); }

SPECJAX_INLINE Word widen(Half v) { return __builtin_convertvector(v, Word); }

// gcc compiles one fourfold conversion to scalar code, but two twofold ones to two instructions.
SPECJAX_INLINE Word widen(Byte v) {
#if defined(__AVX512BW__)
  return (Word)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(__AVX2__)
  return (Word)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v));
#else
  return widen(__builtin_convertvector(v, Half));
#endif
}
SPECJAX_INLINE Int widen(SignedByte v) {
  return __builtin_convertvector(__builtin_convertvector(v, SignedHalf), Int);
}

SPECJAX_INLINE Float to_float(Int v) { return __builtin_convertvector(v, Float); }

// a * b + c, rounded once where the machine can.
SPECJAX_INLINE Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Float)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// a where it is larger, else b: so b where either is a NaN.
SPECJAX_INLINE Float larger(Float a, Float b) {
#if defined(__AVX512F__)
  return (Float)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

SPECJAX_INLINE float largest_lane(Float v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float largest = v[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = v[lane] > largest ? v[lane] : largest;
  return largest;
#endif
}

SPECJAX_INLINE float sum_of_lanes(Float v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
#endif
}

// sum + the four products of the unsigned bytes of `u` with the signed bytes of `s`, lane by lane.
SPECJAX_INLINE Int dot4(Int sum, Word u, Word s) {
#if defined(__AVX512VNNI__)
  return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#elif defined(__AVXVNNI__)
  return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)s);
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(u & 0x00FF00FF), high = (__m256i)(u >> 8 & 0x00FF00FF);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)s, 8), 8);
  const __m256i odd = _mm256_srai_epi16((__m256i)s, 8);
  return sum + (Int)_mm256_madd_epi16(low, even) + (Int)_mm256_madd_epi16(high, odd);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Int)vusdotq_s32((int32x4_t)sum, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__ARM_FEATURE_DOTPROD)
  // Signed times signed, with u = (u - 128) + 128.
  const int8x16_t shifted = (int8x16_t)(u ^ 0x80808080u);
  const int32x4_t first = vdotq_s32((int32x4_t)sum, shifted, (int8x16_t)s);
  return (Int)vaddq_s32(first,
                        vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), (int8x16_t)s), 7));
#else
  const Int w = (Int)u, x = (Int)s;
  for (int shift = 0; shift < 32; shift += 8) {
    sum += (w >> shift & 0xFF) * (x << (24 - shift) >> 24);
  }
  return sum;
#endif
}

// sum + the two products of signed 16-bit halves, lane by lane.
SPECJAX_INLINE Int dot2(Int sum, Word a, Word b) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  return sum + (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX2__)
  return sum + (Int)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Int u = (Int)a, v = (Int)b;
  return sum + (u << 16 >> 16) * (v << 16 >> 16) + (u >> 16) * (v >> 16);
#endif
}

// sum + the two products of bfloat16 pairs, lane by lane. Only where kHasBf16.
SPECJAX_INLINE Float dot2(Float sum, Word a, Word b) {
#if defined(__AVX512BF16__)
  return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  (void)a, (void)b;
  return sum;
#endif
}

// Every nibble of `codes` (one per byte) replaced by its entry in a table of 16 bytes.
SPECJAX_INLINE Word lookup(Word codes, const uint8_t* table) {
#if defined(__AVX512BW__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Word)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)codes);
#elif defined(__AVX2__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Word)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)codes);
#elif defined(__ARM_NEON)
  return (Word)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  uint8_t bytes[kBytes];
  store(bytes, codes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load<Word>(bytes);
#endif
}

// rows[i] lane j <-> rows[j] lane i.
SPECJAX_INLINE void transpose(Word* rows) {
#if defined(__AVX512BW__)
  __m512i r[16], t[16];
  std::memcpy(r, rows, sizeof r);
  SPECJAX_UNROLL for (int i = 0; i < 16; i += 2) {  // pairs of rows: 32-bit lanes interleaved
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // r[i + c]: column c of every quarter, rows i … i + 3
  SPECJAX_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  SPECJAX_UNROLL for (int c = 0; c < 4; ++c) {
    const __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);  // quarters 0, 2
    const __m512i odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);   // quarters 1, 3
    const __m512i even2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
    t[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even, even2, 0xDD);
    t[4 + c] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
  }
  std::memcpy(rows, t, sizeof t);
#elif defined(__AVX2__)
  __m256i r[8], t[8];
  std::memcpy(r, rows, sizeof r);
  SPECJAX_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  SPECJAX_UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  SPECJAX_UNROLL for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
  }
  std::memcpy(rows, t, sizeof t);
#else
  uint32_t cells[kLanes][kLanes], transposed[kLanes][kLanes];
  std::memcpy(cells, rows, sizeof cells);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) transposed[j][i] = cells[i][j];
  }
  std::memcpy(rows, transposed, sizeof transposed);
#endif
}

}  // namespace specjax::SPECJAX_ISA
