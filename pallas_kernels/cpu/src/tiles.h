// Tile products (AMX): 16 rows of x times 64 outputs of a decoded panel in a handful of instructions.
//
// x is the left operand, as it is prepared for all kernels, and a panel the right one, as panel.h
// decodes it: a word of inputs of 16 outputs is a row of a tile. So the products come out as the
// vectors that `add_scaled` takes, and only the products themselves differ from other kernels'.
//
// Which tile serves what is written out, since compilers give out tiles only for code of their own:
// 0 … 3 sums, one per vector of outputs; 4 x; 5 and 6 weights.
#pragma once

#include "panel.h"

namespace specjax::SPECJAX_ISA {

// Integer sums are exact, so tiles serve those numbers of rows for which they are faster. Sums of
// bfloat16 products are rounded in an order that is the tile unit's own, so there they serve all.
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
template <Arithmetic A>
inline constexpr bool kTiles = A != Arithmetic::kFloat32;
#else
template <Arithmetic A>
inline constexpr bool kTiles = false;
#endif

inline constexpr int kTileRows = 16;   // of x, at most
inline constexpr int kTileWords = 16;  // of inputs, at most

// The tiles' shapes, for `rows` rows of x and segments of `words` words: set for as long as this
// lives and no longer, since others on this thread set their own.
template <Arithmetic A>
class TileShapes {
 public:
  TileShapes(int64_t rows, int64_t words) {
    if constexpr (kTiles<A>) {
      const auto depth = static_cast<uint8_t>(words < kTileWords ? words : kTileWords);
      Configuration shapes{};
      for (int sums = 0; sums < kVectors; ++sums) shapes.set(sums, rows, kBytes);
      shapes.set(4, rows, 4 * depth);
      shapes.set(5, depth, kBytes);
      shapes.set(6, depth, kBytes);
      __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
    }
  }

  ~TileShapes() {
    if constexpr (kTiles<A>) __asm__ volatile("tilerelease");
  }

  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  // What ldtilecfg reads.
  struct alignas(64) Configuration {
    void set(int tile, int64_t tile_rows, int64_t tile_bytes) {
      rows[tile] = static_cast<uint8_t>(tile_rows);
      bytes[tile] = static_cast<uint16_t>(tile_bytes);
    }

    uint8_t palette = 1, start_row = 0, reserved[14];
    uint16_t bytes[16];  // per row
    uint8_t rows[16];
  };
};

template <int tile>
SPECJAX_INLINE void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// `stride`: bytes from row to row.
template <int tile>
SPECJAX_INLINE void load_tile(const void* rows, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(rows), "r"(stride), "i"(tile)
                   : "memory");
}

template <int tile>
SPECJAX_INLINE void store_tile(void* rows, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(rows), "r"(stride), "i"(tile)
                   : "memory");
}

// Tile `sums` += tile `x` · tile `weights`: signed bytes by unsigned ones, or pairs of bfloat16.
template <Arithmetic A, int sums, int x, int weights>
SPECJAX_INLINE void add_product() {
  if constexpr (A == Arithmetic::kInteger) {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  } else {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  }
}

template <Arithmetic A, int vector>
SPECJAX_INLINE void add_vector(const Word* panel) {
  constexpr int weights = 5 + vector % 2;
  load_tile<weights>(panel + vector, kColumns * sizeof(uint32_t));
  add_product<A, vector, 4, weights>();
}

// sums[row][vector] = the products of `words` words of x's rows, `stride` words apart, with those
// of a panel, for as many rows as the tiles were shaped for.
template <Arithmetic A, typename Sum>
inline void multiply_tiles(const uint32_t* x, int64_t stride, const Word* panel, int64_t words,
                           Sum* sums) {
  static_assert(kTiles<A> && kVectors == 4 && kLanes == 16);
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t i = 0; i < words; i += kTileWords) {
    load_tile<4>(x + i, stride * sizeof(uint32_t));
    add_vector<A, 0>(panel + i * kVectors);
    add_vector<A, 1>(panel + i * kVectors);
    add_vector<A, 2>(panel + i * kVectors);
    add_vector<A, 3>(panel + i * kVectors);
  }
  store_tile<0>(sums, kColumns * sizeof(uint32_t));
  store_tile<1>(sums + 1, kColumns * sizeof(uint32_t));
  store_tile<2>(sums + 2, kColumns * sizeof(uint32_t));
  store_tile<3>(sums + 3, kColumns * sizeof(uint32_t));
}

}  // namespace specjax::SPECJAX_ISA
