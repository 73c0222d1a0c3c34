// Loops that only read or only multiply (probe.cc).
#pragma once

#include "matmul/matmul.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kProbeChains = 12;             // concurrent sums, to hide a product's latency
inline constexpr int64_t kProbeProducts = 1 << 12;  // products per chain
inline constexpr int64_t kProbeOperations = 2 * kLanes * kProbeChains * kProbeProducts;

inline uint32_t total(Word v) {
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

// Reads `size` bytes, a multiple of 4 · kBytes; the result keeps the compiler from skipping it.
inline uint32_t read_only(const uint8_t* data, int64_t size) {
  Word sums[4] = {};
  for (int64_t i = 0; i < size; i += 4 * kBytes) {
    __builtin_prefetch(data + i + 4096, 0, 2);
    for (int j = 0; j < 4; ++j) sums[j] ^= load<Word>(data + i + j * kBytes);
  }
  return total(sums[0] ^ sums[1] ^ sums[2] ^ sums[3]);
}

template <Arithmetic A>
inline uint32_t multiply_only() {
  typename Sums<A>::Vector sums[kProbeChains] = {};
  Word a = splat(0x01010101u), b = splat(0x01010101u);
  for (int64_t i = 0; i < kProbeProducts; ++i) {
    __asm__ volatile("" : "+m"(a), "+m"(b));  // or the compiler would fold the loop
    const Word x = a, y = b;
    SPECJAX_UNROLL for (int j = 0; j < kProbeChains; ++j) sums[j] = Sums<A>::add(sums[j], x, y);
  }
  Word all{};
  for (int j = 0; j < kProbeChains; ++j) all ^= (Word)sums[j];
  return total(all);
}

inline uint32_t multiply_only(Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kInteger) return multiply_only<Arithmetic::kInteger>();
  if (arithmetic == Arithmetic::kBfloat16) return multiply_only<Arithmetic::kBfloat16>();
  return multiply_only<Arithmetic::kFloat32>();
}

}  // namespace specjax::SPECJAX_ISA
