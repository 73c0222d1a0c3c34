// Panels: kColumns outputs times a chunk of inputs of a weight, turned and decoded so that one
// vector holds one word of inputs for kLanes neighbouring outputs.
//
// A weight is stored row by row (pallas_kernels/formats.py). Its rows are read a slab of kBytes at
// a time, kLanes rows at once, and transposed in registers: cheaper than the memory they come from,
// so no second, rearranged copy of a weight is needed.
//
// A chunk is two runs of `kRun` inputs: of packed nibbles, the same bytes' low and high ones.
#pragma once

#include "simd.h"
#include "types.h"

namespace specjax::SPECJAX_ISA {

// kVectors · kLanes outputs per panel, so that as many sums are under way as hide a product's
// latency; kRows rows of x at once, as many as the registers hold sums.
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
inline constexpr int kPerWord = A == Arithmetic::kInteger ? 4 : A == Arithmetic::kBfloat16 ? 2 : 1;

// Inputs per run: as many as leave a panel in the first-level cache.
template <Arithmetic A>
inline constexpr int kRun = A == Arithmetic::kFloat32 ? 64 : 128;

template <Arithmetic A>
inline constexpr int kRunWords = kRun<A> / kPerWord<A>;

// What is added to a weight's integers to make them unsigned bytes.
inline int offset(Kind kind) {
  return kind == Kind::kInt4 ? 8 : kind == Kind::kMxfp4 ? 12 : 128;
}

// Of 4-bit codes, the integer plus the offset.
alignas(16) inline constexpr uint8_t kInt4Bytes[16] = {8,  9,  10, 11, 12, 13, 14, 15,
                                                       0,  1,  2,  3,  4,  5,  6,  7};
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
  return chunk / per_plane * kBlock + chunk % per_plane * kRun<A> + run * kPlane;
}

// Bytes of a row per chunk.
template <Arithmetic A>
constexpr int chunk_bytes(Kind kind) {
  return kind == Kind::kFloat32    ? 8 * kRun<A>
         : kind == Kind::kBfloat16 ? 4 * kRun<A>
         : kind == Kind::kInt8     ? 2 * kRun<A>
                                   : kRun<A>;
}

// Where the rows of a panel begin. Rows past the last repeat it.
struct Rows {
  Rows(const Weight& w, int64_t column) : bytes(w.row_bytes) {
    for (int i = 0; i < kColumns; ++i) {
      start[i] = w.data + (column + i < w.n ? column + i : w.n - 1) * bytes;
    }
  }

  int64_t bytes;
  const uint8_t* start[kColumns];
};

// kLanes rows of kBytes bytes, transposed; bytes past a row's end are zero.
//
// So many rows are too many streams for the hardware to foresee: each asks for its own next chunk,
// `ahead` bytes on, and at its end for the beginning of the row that is read next, `stride` rows on.
SPECJAX_INLINE void read_slab(const Rows& rows, int vector, int64_t offset, int64_t ahead, int64_t stride,
                      Word* words) {
  const uint8_t* const* start = rows.start + vector * kLanes;
  const int64_t left = rows.bytes - offset;
  const int64_t next = offset + ahead + (ahead < left ? 0 : (stride - 1) * rows.bytes);
  SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) __builtin_prefetch(start[i] + next, 0, 2);
  if (left >= kBytes) {
    SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) words[i] = load<Word>(start[i] + offset);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      words[i] = Word{};
      if (left > 0) std::memcpy(&words[i], start[i] + offset, left);
    }
  }
  transpose(words);
}

#if defined(__AVX512BF16__)
// The bfloat16 values of the low nibbles of `codes`' 16-bit halves; what is above them is ignored,
// because the table holds every entry twice.
SPECJAX_INLINE Word bfloat16_values(Word codes, Word table) {
  return (Word)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
}

template <Kind kind>
inline Word bfloat16_table() {
  uint16_t entries[32];
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(code_bytes(kind)[i % 16] - offset(kind));
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    entries[i] = static_cast<uint16_t>(bits >> 16);
  }
  return load<Word>(entries);
}
#endif

// Decodes words of a weight: calls put(run, word of the run, value).
template <Arithmetic A, Kind kind>
struct Decoder {
#if defined(__AVX512BF16__)
  Word table = bfloat16_table<kind>();
#endif

  // The chunk's word `index`, four bytes of every row.
  template <typename Put>
  SPECJAX_INLINE void decode(int index, Word word, const Put& put) const {
    if constexpr (kind <= Kind::kMxfp4) {
      decode_nibbles(index, word, put);
    } else if constexpr (kind == Kind::kInt8) {
      constexpr int quads = kRun<A> / 4;
      put_bytes(index / quads, index % quads, word ^ 0x80808080u, put);
    } else if constexpr (kind == Kind::kBfloat16 && A == Arithmetic::kFloat32) {
      constexpr int pairs = kRun<A> / 2;
      put(index / pairs, index % pairs * 2, word << 16);
      put(index / pairs, index % pairs * 2 + 1, word & 0xFFFF0000u);
    } else {
      put(index / kRunWords<A>, index % kRunWords<A>, word);
    }
  }

  template <typename Put>
  SPECJAX_INLINE void decode_nibbles(int quad, Word codes, const Put& put) const {
#if defined(__AVX512BF16__)
    if constexpr (A == Arithmetic::kBfloat16) {
      put(0, 2 * quad, bfloat16_values(codes, table));
      put(1, 2 * quad, bfloat16_values(codes >> 4, table));
      put(0, 2 * quad + 1, bfloat16_values(codes >> 8, table));
      put(1, 2 * quad + 1, bfloat16_values(codes >> 12, table));
      return;
    }
#endif
    if constexpr (kind == Kind::kInt4) codes ^= 0x88888888u;
    Word low = codes & 0x0F0F0F0Fu, high = codes >> 4 & 0x0F0F0F0Fu;
    if constexpr (kind == Kind::kMxfp4) {
      low = lookup(low, kMxfp4Bytes), high = lookup(high, kMxfp4Bytes);
    }
    put_bytes(0, quad, low, put);
    put_bytes(1, quad, high, put);
  }

  // Unsigned bytes of the four inputs from 4 · `quad` on.
  template <typename Put>
  SPECJAX_INLINE void put_bytes(int run, int quad, Word bytes, const Put& put) const {
    if constexpr (A == Arithmetic::kInteger) {
      put(run, quad, bytes);
    } else {
      SPECJAX_UNROLL for (int i = 0; i < 4; ++i) {
        const Float value = to_float((Int)(bytes >> (8 * i) & 0xFFu));
        put(run, 4 * quad + i, (Word)(value - splat(static_cast<float>(offset(kind)))));
      }
    }
  }
};

// A chunk of kColumns outputs: panel[word of the chunk][vector].
template <Arithmetic A, Kind kind>
inline void decode_chunk(const Rows& rows, int64_t chunk, Word* panel) {
  const Decoder<A, kind> decoder;
  constexpr int bytes = chunk_bytes<A>(kind);
  for (int vector = 0; vector < kVectors; ++vector) {
    SPECJAX_UNROLL for (int slab = 0; slab < bytes / kBytes; ++slab) {
      Word words[kLanes];
      read_slab(rows, vector, chunk * bytes + slab * kBytes, bytes, kColumns, words);
      SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) {
        decoder.decode(slab * kLanes + i, words[i], [&](int run, int word, Word value) SPECJAX_LAMBDA {
          panel[(run * kRunWords<A> + word) * kVectors + vector] = value;
        });
      }
    }
  }
}

}  // namespace specjax::SPECJAX_ISA
