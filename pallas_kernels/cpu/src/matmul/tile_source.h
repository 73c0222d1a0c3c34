// Reads a weight for tiles, a slice of one vector of outputs at a time: kDepth words of every run.
//
// Interleaved weights of 8 or 16 bits are loaded as they are stored. 4-bit codes are decoded to
// bytes or bfloat16, and both planes of an 8-bit weight to signed bytes.
#pragma once

#include "matmul/product.h"
#include "matmul/tiles.h"

namespace specjax::SPECJAX_ISA {

// Whether tiles multiply integers that count from the smallest one: unsigned bytes.
template <Kind kind>
inline constexpr bool kUnsigned = kind == Kind::kInt4;

// The decoder takes so much from integers that count from the smallest one. Signed bytes do not
// hold those of two planes less their whole offset.
template <Kind kind>
inline constexpr int kTaken = kUnsigned<kind>             ? 0
                              : kind == Kind::kNestedInt8 ? offset(kind) - 8
                                                          : offset(kind);

alignas(16) inline constexpr int8_t kMxfp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                        0, -1, -2, -3, -4, -6, -8, -12};

// The slices of a product whose x is prepared for tiles of `kDepth` words.
template <Arithmetic A, Kind kind, int kDepth>
struct TileSlices {
  static constexpr int kRuns = in_nibbles(kind) ? 2 : 1;  // whose inputs lie in the same bytes
  static constexpr int kInputs = kDepth * kPerWord<A>;    // of a run
  // Lines of a slice: each has kWordBytes bytes of each output.
  static constexpr int kLines = kind == Kind::kBfloat12                    ? 3 * kDepth / 4
                                : kRuns == 2 && A == Arithmetic::kBfloat16 ? kDepth / 2
                                                                           : kDepth;
  static constexpr int kPerChunk = 2 * kRun<A> / (kRuns * kInputs);

  // Words of x from a slice to the next within a chunk, between runs, and from chunk to chunk.
  explicit TileSlices(const Product& p)
      : words(kDepth * p.how.rows * kWordsOfX<A>),
        run_words(kPlane / kDepth / kPerWord<A> * words),
        chunk_words(2 * kRun<A> / kDepth / kPerWord<A> * words),
        chunks(p.how.inputs / (2 * kRun<A>)),
        per_segment(p.segment<A>() / kInputs) {}

  const int64_t words, run_words, chunk_words, chunks, per_segment;
};

// Reads one vector of outputs from `column` on.
template <Arithmetic A, Kind kind, int kDepth>
class TileSource {
 public:
  using Slices = TileSlices<A, kind, kDepth>;
  static constexpr int kRuns = Slices::kRuns, kLines = Slices::kLines;

  TileSource(const Weight& w, int64_t column)
      : w_(w),
        column_(column),
        from_(w.data + column * w.row_bytes),
        length_(w.row_bytes * kTileRows) {
    if constexpr (A == Arithmetic::kBfloat16 && kind == Kind::kInt4) {
      if (w.minima != nullptr) decoder_.table = value_table<A, kind>(0);
    }
    if constexpr (kind == Kind::kBfloat12) escapes_ = Escapes(w, column);
  }

  // Where slice `slice` is stored as tiles load it. Null if it must be read.
  SPECJAX_INLINE const Word* stored(int64_t slice) const {
    if (kRuns == 2 || kind == Kind::kBfloat12 || !is_whole((slice + 1) * kLines)) return nullptr;
    return reinterpret_cast<const Word*>(from_ + slice * kLines * kBytes);
  }

  // Decodes lines first … first + kCount - 1 of slice `slice`: to[run][word]. Runs are kRunWords
  // words apart.
  template <int kCount, int kRunWords>
  SPECJAX_INLINE void read(int64_t slice, int first, Word* to) {
    if constexpr (kind == Kind::kBfloat12) {
      constexpr int kInputs = Slices::kInputs;
      return decode_blocks<false>(w_, column_, slice * kInputs, kInputs, escapes_, to, 1);
    } else {
      read_lines<kCount, kRunWords>(slice, first, to);
    }
  }

  template <int kCount, int kRunWords>
  SPECJAX_INLINE void read_lines(int64_t slice, int first, Word* to) {
    const int64_t line = slice * kLines + first;
    const bool whole = is_whole(line + kCount);
    const uint8_t* from = whole ? from_ + line * kBytes : transposed(w_.data, line, data_);
    const Decoder<A, kind> decoder = decoder_;
    to += first * (kDepth / kLines);
    if constexpr (kind == Kind::kNestedInt8) {
      const uint8_t* rest = whole ? from + (w_.rest - w_.data) : transposed(w_.rest, line, rest_);
      SPECJAX_UNROLL for (int i = 0; i < kCount; ++i) {
        const Planes planes{load<Word>(from + i * kBytes), load<Word>(rest + i * kBytes)};
        SPECJAX_UNROLL for (int run = 0; run < kRuns; ++run) {
          to[run * kRunWords + i] = decoder.word(run, 0, planes) ^ 0x80808080u;
        }
      }
    } else {
      SPECJAX_UNROLL for (int i = 0; i < kCount; ++i) {
        decode<kRunWords>(decoder, load<Word>(from + i * kBytes), i, to);
      }
    }
  }

  // Prefetches kCount lines from line `line` on. Past the end of these outputs, they belong to the
  // vector after the next, because two vectors are read side by side.
  template <int kCount>
  SPECJAX_INLINE void ask(int64_t line) const {
    if (!w_.interleaved) return;
    const int64_t offset = line * kBytes;
    const uint8_t* from = from_ + offset + (offset < length_ ? 0 : length_);
    SPECJAX_UNROLL for (int i = 0; i < kCount; ++i) {
      __builtin_prefetch(from + i * kBytes);
      if (kind == Kind::kNestedInt8) __builtin_prefetch(from + (w_.rest - w_.data) + i * kBytes);
    }
  }

 private:
  static constexpr int kWordBytes = 4;  // of an output
  static_assert(kTileRows == kLanes);

  // Whether the lines before line `end` are stored as such.
  SPECJAX_INLINE bool is_whole(int64_t end) const {
    return w_.interleaved && end * kWordBytes <= w_.row_bytes;
  }

  struct Square {
    int64_t number = -1;
    Word words[kLanes];
  };

  // Line `line` of a plane that is stored row by row, or whose rows end within the square.
  const uint8_t* transposed(const uint8_t* plane, int64_t line, Square& square) {
    const int64_t number = line / kLanes;
    if (number != square.number) read_square(w_, plane, column_, number * kBytes, square.words);
    square.number = number;
    return reinterpret_cast<const uint8_t*>(square.words + line % kLanes);
  }

  template <int kRunWords>
  SPECJAX_INLINE void decode(const Decoder<A, kind>& decoder, Word codes, int i, Word* to) const {
    if constexpr (kRuns == 1) {
      to[i] = codes;
    } else if constexpr (A == Arithmetic::kBfloat16) {
      constexpr int kWords = Decoder<A, kind>::kWords;
      SPECJAX_UNROLL for (int word = 0; word < kWords * kRuns; ++word) {
        const int run = word % kRuns;
        const Word value = decoder.word(run, word / kRuns, codes);
        to[run * kRunWords + kWords * i + word / kRuns] = value;
      }
    } else if constexpr (kind == Kind::kInt4) {
      const Word bytes = codes ^ 0x88888888u;
      to[i] = bytes & 0x0F0F0F0Fu;
      to[kRunWords + i] = bytes >> 4 & 0x0F0F0F0Fu;
    } else {
      const auto* table = reinterpret_cast<const uint8_t*>(kMxfp4Values);
      to[i] = lookup(codes & 0x0F0F0F0Fu, table);
      to[kRunWords + i] = lookup(codes >> 4 & 0x0F0F0F0Fu, table);
    }
  }

  const Weight& w_;
  const int64_t column_;
  const uint8_t* const from_;
  const int64_t length_;
  Decoder<A, kind> decoder_;
  Escapes escapes_;
  Square data_, rest_;
};

}  // namespace specjax::SPECJAX_ISA
