// The kernels for processors with tile products: those for AVX-512, which such processors have too,
// but for the products that tiles do faster.
//
// Integer sums are exact, so there tiles and vectors may take turns: a panel of a few rows is
// bound by its decoding, which vectors need not store. A tile's sums of bfloat16 products are rounded
// in an order of their own, so there tiles do all: a row's bits must not depend on the other rows.
#pragma once

#include "matmul.h"

namespace specjax::avx512_bf16 {
extern const Kernels kernels;
}

namespace specjax::SPECJAX_ISA {

inline void multiply_panel_by_tiles(const Weight& w, const Preparation& how, const Prepared& x,
                                    int64_t m, int64_t panel, float* y) {
  const Product p{w, how, x};
  if (how.arithmetic == Arithmetic::kBfloat16) {
    multiply<Arithmetic::kBfloat16>(p, m, panel * kColumns, y);
  } else if (how.arithmetic == Arithmetic::kInteger && !are_few(w, m)) {
    multiply<Arithmetic::kInteger>(p, m, panel * kColumns, y);
  } else {
    avx512_bf16::kernels.multiply_panel(w, how, x, m, panel, y);
  }
}

// A tile product is so many operations per arithmetic's products in a word.
inline constexpr int64_t kTileOperations = 2 * kTileRows * kTileWords * kLanes;
// Calls of the vectors' probe that one of the tiles' stands for, or setting up would be seen.
inline constexpr int kProbeCalls = 8;

// `operations` as Kernels counts them, with nothing to load.
template <Arithmetic A>
inline uint32_t multiply_only_tiles(int64_t operations) {
  alignas(64) Word zeros[kTileRows] = {};
  const TileShapes<A> shapes(kTileRows, kTileWords);
  load_tile<4>(zeros, kBytes), load_tile<5>(zeros, kBytes), load_tile<6>(zeros, kBytes);
  zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
  for (int64_t done = 0; done < operations; done += 4 * kTileOperations) {
    add_product<A, 0, 4, 5>(), add_product<A, 1, 4, 6>();
    add_product<A, 2, 4, 5>(), add_product<A, 3, 4, 6>();
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
