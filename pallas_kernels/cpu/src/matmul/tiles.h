// Tile registers (AMX): matrices of up to 16 rows of 64 bytes, and their products.
//
// x is the left operand: a row of x is a row of the tile. The weight is the right one, as an
// interleaved weight is stored (pallas_kernels/interleave.py): a row of the tile is one word of
// each of 16 outputs. So the sums are vectors over outputs, like the scales.
//
// Registers are assigned by hand, because compilers do not allocate tiles in inline assembly: 0 to
// 3 hold sums, 4 and 5 x, 6 and 7 weights.
#pragma once

#include "matmul/panel.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kTileWords = 16;  // of a row, at most
static_assert(kLanes == kTileRows);

// Sets the tiles' shapes, for `rows` rows of x and `words` words of a row. They last as long as the
// object, because other code on this thread sets its own.
class TileShapes {
 public:
  TileShapes(int64_t rows, int64_t words) {
    Configuration shapes{};
    for (int tile = 0; tile < 4; ++tile) shapes.set(tile, rows, kBytes);
    for (int tile = 4; tile < 6; ++tile) shapes.set(tile, rows, 4 * words);
    for (int tile = 6; tile < 8; ++tile) shapes.set(tile, words, kBytes);
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
  }

  ~TileShapes() { __asm__ volatile("tilerelease"); }

  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  // The operand of ldtilecfg.
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

// Tile `sums` += tile `x` · tile `weights`: of signed bytes, of signed and unsigned ones, or of
// pairs of bfloat16.
template <Arithmetic A, int sums, int x, int weights, bool is_unsigned = false>
SPECJAX_INLINE void add_product() {
  if constexpr (is_integer(A) && is_unsigned) {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  } else if constexpr (is_integer(A)) {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  } else {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
  }
}

}  // namespace specjax::SPECJAX_ISA
