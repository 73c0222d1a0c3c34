// Decodes bfloat16 in 12 bits (pallas_kernels/bfloat12.py). Such a weight is always interleaved.
//
// A block is 8 inputs: a line of the low bytes of inputs 0, 2, 1, 3, one of inputs 4, 6, 5, 7, and
// one of codes. A code is looked up in the palette of the piece of the matrix that the block lies
// in. Escapes are few: they are written over what was decoded.
#pragma once

#include "common/simd.h"
#include "common/types.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kBlockInputs = 8, kBlockLines = 3, kBlockPairs = kBlockInputs / 2;

// The stored words of a block of kLanes outputs, and the palette that its codes mean.
struct Block {
  Word words[kBlockLines];
  const uint8_t* palette;
};

// Bytes 0 and 2 of `even` and bytes 1 and 3 of `odd`.
SPECJAX_INLINE Word join_bytes(Word even, Word odd) {
#if defined(__AVX512BW__)
  return (Word)_mm512_mask_mov_epi8((__m512i)even, 0xAAAAAAAAAAAAAAAA, (__m512i)odd);
#else
  return (even & 0x00FF00FFu) | (odd & 0xFF00FF00u);
#endif
}

// Word `i` of kBlockPairs: the bfloat16 of inputs 2i and 2i + 1.
SPECJAX_INLINE Word pair_of(const Block& block, int i) {
  const Word codes = block.words[2] >> (i / 2 * 4) & 0x0F0F0F0Fu;
  const Word low = block.words[i / 2], high = lookup(codes, block.palette);
  return i % 2 == 0 ? join_bytes(low, high << 8) : join_bytes(low >> 8, high);
}

// The float32 of the first, or the second, bfloat16 of a pair.
SPECJAX_INLINE Word half_of(Word pair, int half) {
  return half == 0 ? pair << 16 : pair & 0xFFFF0000u;
}

// Where the piece of input `input` of a tile has its palette.
SPECJAX_INLINE const uint8_t* palette_of(const Weight& w, int64_t row, int64_t input) {
  const int64_t pieces = (w.inputs + kPaletteInputs - 1) / kPaletteInputs;
  return w.palettes + (row / kTileRows * pieces + input / kPaletteInputs) * kPalette;
}

// The escapes of one tile, in the order of the inputs.
class Escapes {
 public:
  Escapes() = default;
  Escapes(const Weight& w, int64_t row)
      : first_(w.escapes + row / kTileRows * w.escapes_per_tile),
        end_(first_ + w.escapes_per_tile) {
    move(first_);
  }

  // Goes to the first escape at or behind `input`.
  SPECJAX_INLINE void seek(int64_t input) {
    if (input < sought_) move(first_);
    sought_ = input;
    while (input_ < input) move(next_ + 1);
  }

  // Whether there is an escape before `input`, at or behind the input that was sought.
  SPECJAX_INLINE bool before(int64_t input) const { return input_ < input; }

  // Calls put(input, output of the tile, high byte) for those before `end`.
  template <typename Put>
  inline void take(int64_t end, const Put& put) {
    for (; input_ < end; move(next_ + 1)) {
      put(input_, static_cast<int>(*next_ >> 8 & (kTileRows - 1)), static_cast<uint8_t>(*next_));
    }
    sought_ = end;
  }

 private:
  static constexpr int64_t kNever = INT64_MAX;

  SPECJAX_INLINE void move(const uint32_t* to) {
    next_ = to, input_ = to < end_ ? *to >> 12 : kNever;
  }

  const uint32_t *first_ = nullptr, *end_ = nullptr, *next_ = nullptr;
  int64_t input_ = kNever, sought_ = 0;  // of the next escape, and the last one that was sought
};

// Decodes `inputs` inputs, whole blocks of one piece, from input `first` on, of the kLanes outputs
// from `row` on: to[i * stride] is word i. Those outside the weight are finite. kFloats: words are
// float32, otherwise pairs of bfloat16.
template <bool kFloats>
inline void decode_blocks(const Weight& w, int64_t row, int64_t first, int inputs, Escapes& escapes,
                          Word* to, int stride) {
  constexpr int kPerWord = kFloats ? 1 : 2;
  const int64_t lane = row % kTileRows, line_bytes = kTileRows * 4;
  const int64_t line = first / kBlockInputs * kBlockLines;
  const int64_t left = row < w.n ? (w.row_bytes / 4 - line) / kBlockLines : 0;  // blocks
  const uint8_t* from = w.data + (row - lane) * w.row_bytes + line * line_bytes + lane * 4;
  const uint8_t* palette = left > 0 ? palette_of(w, row, first) : w.palettes;
  Word* word = to;
  for (int64_t i = 0; i < inputs / kBlockInputs; ++i, from += kBlockLines * line_bytes) {
    Block block{{}, palette};
    if (__builtin_expect(i < left, 1)) {
      SPECJAX_UNROLL for (int l = 0; l < kBlockLines; ++l) {
        block.words[l] = load<Word>(from + l * line_bytes);
      }
    }
    SPECJAX_UNROLL for (int w = 0; w < kBlockInputs / kPerWord; ++w) {
      const Word pair = pair_of(block, w * kPerWord / 2);
      word[w * stride] = kFloats ? half_of(pair, w % 2) : pair;
    }
    word += kBlockInputs / kPerWord * stride;
  }
  if (row >= w.n) return;
  escapes.seek(first);
  escapes.take(first + inputs, [&](int64_t input, int output, uint8_t high) {
    const int64_t at = (input - first) / kPerWord * stride * kBytes + (output - lane) * 4;
    if (output < lane || output >= lane + kLanes || input < first) return;
    reinterpret_cast<uint8_t*>(to)[at + (kFloats ? 3 : input % 2 * 2 + 1)] = high;
  });
}

}  // namespace specjax::SPECJAX_ISA
