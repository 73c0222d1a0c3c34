// Decodes a chunk of a panel into vectors, each of which holds one word of kLanes neighbouring
// outputs.
//
// An interleaved weight (pallas_kernels/interleave.py) is stored as such vectors. A weight that is
// stored row by row is read in squares, which are transposed in registers: this costs a fifth of
// the memory's bandwidth.
//
// The two runs of a chunk of 4-bit codes are the low and the high nibbles of the same bytes.
#pragma once

#include "common/prefetch.h"
#include "common/simd.h"
#include "common/types.h"
#include "matmul/bfloat12.h"

namespace specjax::SPECJAX_ISA {

// Vectors of a panel, and rows of a portion: as many concurrent sums as hide a product's latency,
// and no more than fit in registers.
#if defined(__AVX512BW__)
inline constexpr int kVectors = 4, kRows = 6;
#elif defined(__AVX2__)
inline constexpr int kVectors = 2, kRows = 4;
#elif defined(__aarch64__)
inline constexpr int kVectors = 4, kRows = 5;
#else
inline constexpr int kVectors = 2, kRows = 4;
#endif
inline constexpr int kColumns = kVectors * kLanes;

template <Arithmetic A>
inline constexpr int kPerWord = is_integer(A)                ? 4
                                : A == Arithmetic::kBfloat16 ? 2
                                                             : 1;

// Inputs of a run: so few that a decoded chunk stays in the first-level cache.
template <Arithmetic A>
inline constexpr int kRun = A == Arithmetic::kFloat32 ? 64 : 128;

template <Arithmetic A>
inline constexpr int kRunWords = kRun<A> / kPerWord<A>;

// The number that makes a weight's integers unsigned bytes when it is added to them.
constexpr int offset(Kind kind) {
  return kind == Kind::kInt4         ? 8
         : kind == Kind::kMxfp4      ? 12
         : kind == Kind::kNestedInt8 ? 16 * 8 + 8
                                     : 128;
}

// The integers of 4-bit codes, plus the offset.
alignas(16) inline constexpr uint8_t kInt4Bytes[16] = {8, 9, 10, 11, 12, 13, 14, 15,
                                                       0, 1, 2,  3,  4,  5,  6,  7};
alignas(16) inline constexpr uint8_t kMxfp4Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};

inline const uint8_t* code_bytes(Kind kind) {
  return kind == Kind::kInt4 ? kInt4Bytes : kMxfp4Bytes;
}

// The first input of run `run` (0 or 1) of chunk `chunk`.
template <Arithmetic A>
inline int64_t run_start(const Weight& w, int64_t chunk, int run) {
  if (!w.nibbles()) return (2 * chunk + run) * kRun<A>;
  constexpr int64_t per_plane = kPlane / kRun<A>;
  return chunk / per_plane * kPlanePair + chunk % per_plane * kRun<A> + run * kPlane;
}

// Bytes of a row per chunk.
template <Arithmetic A>
constexpr int chunk_bytes(Kind kind) {
  return kind == Kind::kFloat32    ? 8 * kRun<A>
         : kind == Kind::kBfloat16 ? 4 * kRun<A>
         : kind == Kind::kBfloat12 ? 3 * kRun<A>
         : kind == Kind::kInt8     ? 2 * kRun<A>
                                   : kRun<A>;
}

// Reads a square of an interleaved weight, whose last tile is padded with rows.
SPECJAX_INLINE void read_interleaved(const Weight& w, const uint8_t* data, int64_t row,
                                     int64_t offset, Word* words) {
  const int64_t tile = row & -kTileRows;
  const uint8_t* from = data + tile * w.row_bytes + offset * kTileRows + (row - tile) * 4;
  const int64_t left = row < w.n ? (w.row_bytes - offset) / 4 : 0;
  if (__builtin_expect(left < kLanes, 0)) {
    for (int i = 0; i < kLanes; ++i) {
      words[i] = i < left ? load<Word>(from + i * kTileRows * 4) : Word{};
    }
    return;
  }
  SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) words[i] = load<Word>(from + i * kTileRows * 4);
}

// Reads the square from row `row` and byte `offset` of a row on. data: of `w`, or its other plane.
// Words outside the weight are zero.
SPECJAX_INLINE void read_square(const Weight& w, const uint8_t* data, int64_t row, int64_t offset,
                                Word* words) {
  if (w.interleaved) return read_interleaved(w, data, row, offset, words);
  alignas(64) uint8_t edge[kLanes * kBytes];
  const uint8_t* from = data + row * w.row_bytes + offset;
  int64_t stride = w.row_bytes;
  const int64_t rows = w.n - row, bytes = w.row_bytes - offset;
  if (__builtin_expect(rows < kLanes || bytes < kBytes, 0)) {
    std::memset(edge, 0, sizeof edge);
    for (int64_t i = 0; i < rows && i < kLanes && bytes > 0; ++i) {
      std::memcpy(edge + i * kBytes, from + i * stride, bytes < kBytes ? bytes : kBytes);
    }
    from = edge, stride = kBytes;
  }
  SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) words[i] = load<Word>(from + i * stride);
  transpose(words);
}

#if defined(__AVX512BW__)
// The values of the 16 codes of `kind`: one float32 per lane, or one bfloat16 per half lane,
// repeated. They count from `zero`.
template <Arithmetic A, Kind kind>
inline Word value_table(int zero = offset(kind)) {
  uint32_t floats[2 * kLanes];
  uint16_t bfloats[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) {
    const float value = static_cast<float>(code_bytes(kind)[i % 16] - zero);
    std::memcpy(floats + i, &value, sizeof value);
    bfloats[i] = static_cast<uint16_t>(floats[i] >> 16);
  }
  return A == Arithmetic::kBfloat16 ? load<Word>(bfloats) : load<Word>(floats);
}

// Looks up the low nibble of every lane, or half lane, of `codes`. The higher bits are ignored.
template <Arithmetic A>
SPECJAX_INLINE Word look_up_values(Word codes, Word table) {
  if (A == Arithmetic::kBfloat16) {
    return (Word)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
  }
  return (Word)_mm512_permutexvar_epi32((__m512i)codes, (__m512i)table);
}
#endif

// Word `i` of four unsigned bytes, which are integers plus the offset of `kind`.
template <Arithmetic A, Kind kind>
SPECJAX_INLINE Word word_of_bytes(int i, Word four) {
  if constexpr (is_integer(A)) return four;
  const Float value = to_float((Int)(four >> (8 * i) & 0xFFu));
  return (Word)(value - splat(static_cast<float>(offset(kind))));
}

// Decodes stored words. One holds kWords words of a run or, of 4-bit codes, of both runs.
template <Arithmetic A, Kind kind>
struct Decoder {
  using Stored = Word;
  static constexpr bool kNibbles = in_nibbles(kind);
  static constexpr int kLines = 1;  // that `Stored` holds
  static constexpr int kRuns = kNibbles ? 2 : 1;
  static constexpr int kWords = (kind <= Kind::kInt8       ? 4
                                 : kind == Kind::kBfloat16 ? 2
                                                           : 1) /
                                kPerWord<A>;

#if defined(__AVX512BW__)
  Word table = value_table<A, kind>();
#endif

  // Word `i` of run `run` of those that `stored` holds.
  SPECJAX_INLINE Word word(int run, int i, Word stored) const {
    if constexpr (kNibbles) return nibbles(run, i, stored);
    if constexpr (kind == Kind::kInt8) return word_of_bytes<A, kind>(i, stored ^ 0x80808080u);
    if constexpr (kind == Kind::kBfloat16 && A == Arithmetic::kFloat32) {
      return i == 0 ? stored << 16 : stored & 0xFFFF0000u;
    }
    return stored;
  }

 private:
  SPECJAX_INLINE Word nibbles(int run, int i, Word codes) const {
#if defined(__AVX512BW__)
    if constexpr (!is_integer(A)) {
      return look_up_values<A>(codes >> (8 * i + 4 * run), table);
    }
#endif
    if constexpr (A == Arithmetic::kFloat32 && kind == Kind::kInt4) {  // a shift extends the sign
      return (Word)to_float((Int)(codes << (28 - 8 * i - 4 * run)) >> 28);
    }
    if constexpr (kind == Kind::kInt4) codes ^= 0x88888888u;
    codes = codes >> (4 * run) & 0x0F0F0F0Fu;
    return word_of_bytes<A, kind>(i, kind == Kind::kMxfp4 ? lookup(codes, kMxfp4Bytes) : codes);
  }
};

// Words of both planes: an integer's high nibble is in the first, its low one in the second.
struct Planes {
  Word high, low;
};

template <Arithmetic A>
struct Decoder<A, Kind::kNestedInt8> {
  using Stored = Planes;
  static constexpr int kLines = 1, kRuns = 2, kWords = 4 / kPerWord<A>;

  SPECJAX_INLINE Word word(int run, int i, Planes stored) const {
    const Word high = (run == 0 ? stored.high << 4 : stored.high) & 0xF0F0F0F0u;
    const Word low = (run == 0 ? stored.low : stored.low >> 4) & 0x0F0F0F0Fu;
    return word_of_bytes<A, Kind::kNestedInt8>(i, (high | low) ^ 0x88888888u);
  }
};

// Decodes blocks, which hold words of one run.
template <Arithmetic A>
struct Decoder<A, Kind::kBfloat12> {
  using Stored = Block;
  static constexpr int kLines = kBlockLines, kRuns = 1, kWords = kBlockInputs / kPerWord<A>;

  SPECJAX_INLINE Word word(int, int i, const Block& stored) const {
    if constexpr (A != Arithmetic::kFloat32) return pair_of(stored, i);
    return half_of(pair_of(stored, i / 2), i % 2);
  }
};

// Calls put(run, word of the run, value) for a chunk of the kLanes outputs from `row` on.
template <Arithmetic A, Kind kind, typename Put>
SPECJAX_INLINE void decode_rows(const Weight& w, int64_t row, int64_t chunk, const Put& put) {
  // Nibbles of both runs share their bytes.
  constexpr int kRunsApart = in_nibbles(kind) ? 1 : 2;
  constexpr int kBytesApart = chunk_bytes<A>(kind) / kRunsApart;
  const Decoder<A, kind> decoder;
  SPECJAX_UNROLL for (int run = 0; run < kRunsApart; ++run) {
    for (int square = 0; square < kBytesApart / kBytes; ++square) {
      const int64_t byte = (chunk * kRunsApart + run) * kBytesApart + square * kBytes;
      Word words[kLanes], others[kLanes];
      read_square(w, w.data, row, byte, words);
      if constexpr (kind == Kind::kNestedInt8) read_square(w, w.rest, row, byte, others);
      SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) {
        typename Decoder<A, kind>::Stored stored;
        if constexpr (kind == Kind::kNestedInt8) {
          stored = {words[i], others[i]};
        } else {
          stored = words[i];
        }
        const int first = (square * kLanes + i) * Decoder<A, kind>::kWords;
        SPECJAX_UNROLL for (int word = 0; word < Decoder<A, kind>::kWords; ++word) {
          SPECJAX_UNROLL for (int half = 0; half < Decoder<A, kind>::kRuns; ++half) {
            put(run + half, first + word, decoder.word(run + half, word, stored));
          }
        }
      }
    }
  }
}

// Decodes a chunk of kColumns outputs: panel[word of the chunk][vector].
template <Arithmetic A, Kind kind>
SPECJAX_INLINE void decode_chunk(const Weight& w, int64_t column, int64_t chunk, Word* panel) {
  for (int vector = 0; vector < kVectors; ++vector) {
    const int64_t row = column + vector * kLanes;
    if constexpr (kind == Kind::kBfloat12) {
      Escapes escapes(w, row < w.n ? row : 0);
      decode_blocks<A == Arithmetic::kFloat32>(w, row, 2 * kRun<A> * chunk, 2 * kRun<A>, escapes,
                                               panel + vector, kVectors);
    } else {
      const auto put = [&](int run, int word, Word value) SPECJAX_LAMBDA {
        panel[(run * kRunWords<A> + word) * kVectors + vector] = value;
      };
      decode_rows<A, kind>(w, row, chunk, put);
    }
  }
}

}  // namespace specjax::SPECJAX_ISA
