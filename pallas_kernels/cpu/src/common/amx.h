// The kernels for processors with tile products (AMX). Tiles compute the products that they are
// faster at. The AVX-512 kernels, which such processors also run, compute the others.
//
// Integer sums are exact, so tiles and vectors give the same bits. Vectors multiply a few rows by
// 4-bit codes: most of that work is decoding, and vectors need not store what they decode. Tiles
// round sums of bfloat16 products in their own order, so they compute all of them: the bits of a
// row must not depend on the other rows. Codes of 4 bits therefore meet 16-bit activations as
// integers, or as bfloat16 that is rounded to these, where no sum of a group needs to be rounded.
#pragma once

#include "matmul/matmul.h"
#include "matmul/tile_product.h"

namespace specjax::avx512_bf16 {
extern const Kernels kernels;
}

namespace specjax::SPECJAX_ISA {

inline void multiply_columns_by_tiles(const Weight& w, const Preparation& how, const Prepared& x,
                                      int64_t m, int64_t column, float* y) {
  const Product p{w, how, x};
  constexpr Arithmetic kInteger = Arithmetic::kInteger, kBfloat16 = Arithmetic::kBfloat16;
  constexpr Arithmetic kInteger16 = Arithmetic::kInteger16;
  const bool shallow = how.depth == kTileWords / 2;
  if (how.way != Way::kTiles) {
    avx512_bf16::kernels.multiply_columns(w, how, x, m, column, y);
  } else if (how.arithmetic == kInteger) {
    if (w.kind == Kind::kMxfp4) {
      return multiply_by_tiles<kInteger, Kind::kMxfp4, 8>(p, m, column, y);
    }
    if (w.kind == Kind::kInt4 && shallow) {
      multiply_by_tiles<kInteger, Kind::kInt4, 8>(p, m, column, y);
    } else if (w.kind == Kind::kInt4) {
      multiply_by_tiles<kInteger, Kind::kInt4>(p, m, column, y);
    } else if (shallow) {
      multiply_by_tiles<kInteger, Kind::kInt8, 8>(p, m, column, y);
    } else {
      multiply_by_tiles<kInteger, Kind::kInt8>(p, m, column, y);
    }
  } else if (how.arithmetic == kInteger16) {
    if (w.kind == Kind::kInt4) {
      multiply_by_tiles<kInteger16, Kind::kInt4>(p, m, column, y);
    } else if (w.kind == Kind::kInt8 && shallow) {
      multiply_by_tiles<kInteger16, Kind::kInt8, 8>(p, m, column, y);
    } else if (w.kind == Kind::kInt8) {
      multiply_by_tiles<kInteger16, Kind::kInt8>(p, m, column, y);
    } else if (shallow) {
      multiply_by_tiles<kInteger16, Kind::kNestedInt8, 8>(p, m, column, y);
    } else {
      multiply_by_tiles<kInteger16, Kind::kNestedInt8>(p, m, column, y);
    }
  } else {
    if (w.kind == Kind::kInt4) return multiply_by_tiles<kBfloat16, Kind::kInt4>(p, m, column, y);
    if (w.kind == Kind::kBfloat16) {
      multiply_by_tiles<kBfloat16, Kind::kBfloat16>(p, m, column, y);
    } else if (w.kind == Kind::kBfloat12) {
      multiply_by_tiles<kBfloat16, Kind::kBfloat12>(p, m, column, y);
    } else {
      multiply_by_tiles<kBfloat16, Kind::kMxfp4>(p, m, column, y);
    }
  }
}

// Up to so many rows of x, vectors are faster than tiles at 4-bit codes: of 8 bits, and of 16.
inline constexpr int64_t kFewerThanTiles = 4, kFewerThanTiles16 = 3;

// Whether float32 holds every sum of a group's products of 4-bit codes and integers of 16 bits.
// Products of bfloat16 then have the sums of integers, in any order, and need no conversion. Codes
// count from the smallest one where there are minima. What zeros take away is added by one fma,
// which rounds as the conversion of integers does. A sum may overflow where x is 2^119 or more.
inline bool sums_fit_in_float32(const Weight& w) {
  const int most = w.kind == Kind::kMxfp4 ? 12 : w.minima != nullptr ? 15 : 8;
  return has_4_bits(w.kind) && most * kLevels16 * w.group_size < 1 << 24;
}

inline Preparation preparation_for_tiles(const Weight& w, const Input& x, int levels) {
  Preparation how = preparation(w, x, levels);
  const bool wide = how.arithmetic == Arithmetic::kInteger16;
  const int64_t most = wide ? kFewerThanTiles16 : kFewerThanTiles;
  const bool few = is_integer(how.arithmetic) && w.nibbles() && w.interleaved && x.m <= most;
  if (few || how.arithmetic == Arithmetic::kFloat32) return how;
  how.way = Way::kTiles;
  how.columns = kColumns;
  if (wide && sums_fit_in_float32(w)) how.arithmetic = Arithmetic::kBfloat16;
  const bool floats = how.arithmetic == Arithmetic::kBfloat16, planes = wide && !floats;
  const bool counts_from_zero = floats || w.kind == Kind::kInt8 || w.kind == Kind::kMxfp4;
  if (counts_from_zero && !w.has_points() && !planes) how.sum_size = 0;
  const int64_t group_words = w.group_size / (floats ? 2 : 4);
  how.depth = w.quantized() && group_words < kTileWords ? group_words : kTileWords;
  int64_t portions = (x.m + kTileRows - 1) / kTileRows;
  if (portions > 1 && !planes) portions += portions % 2;  // TileChunks takes them in pairs
  how.portion = portions == 0 ? 0 : (x.m + portions - 1) / portions;
  how.rows = portions * how.portion;
  return how;
}

// The operations of one tile product, counted as Kernels::operations counts them.
inline constexpr int64_t kTileOperations = 2 * kTileRows * kTileWords * kLanes;
// One call of the tiles' probe does the work of so many calls of the vectors' probe, so that its
// setup does not show.
inline constexpr int kProbeCalls = 8;

// Does so many operations, counted as Kernels counts them, without loading anything.
template <Arithmetic A>
inline uint32_t multiply_only_tiles(int64_t operations) {
  alignas(64) Word zeros[kTileRows] = {};
  const TileShapes shapes(kTileRows, kTileWords);
  load_tile<4>(zeros, kBytes), load_tile<6>(zeros, kBytes);
  zero_tile<0>(), zero_tile<1>();
  for (int64_t done = 0; done < operations; done += 2 * kTileOperations) {
    add_product<A, 0, 4, 6>(), add_product<A, 1, 4, 6>();
  }
  store_tile<0>(zeros, kBytes);
  return zeros[0][0];
}

inline uint32_t multiply_only_by_tiles(Arithmetic arithmetic) {
  const int64_t operations = kProbeCalls * avx512_bf16::kernels.operations;
  if (arithmetic == Arithmetic::kInteger) {
    return multiply_only_tiles<Arithmetic::kInteger>(operations);
  }
  if (arithmetic == Arithmetic::kBfloat16) {
    return multiply_only_tiles<Arithmetic::kBfloat16>(operations);
  }
  uint32_t sum = 0;
  for (int i = 0; i < kProbeCalls; ++i) sum += avx512_bf16::kernels.multiply(arithmetic);
  return sum;
}

}  // namespace specjax::SPECJAX_ISA
