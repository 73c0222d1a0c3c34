#include "rows/rows.h"

#include <cmath>
#include <cstring>

#include "common/bfloat16.h"

// Compiled for wide vectors too, of which the loader chooses. A row is short, so that one choice
// per call is enough.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define SPECJAX_CLONED __attribute__((target_clones("avx512f", "avx2", "default"), flatten))
#else
#define SPECJAX_CLONED
#endif

namespace specjax {
namespace {

constexpr int64_t kSums = 32;  // concurrent, to hide an addition's latency

float value(float x) { return x; }
float value(uint16_t x) { return bfloat16_value(x); }

void store(float x, float* y) { *y = x; }
void store(float x, uint16_t* y) { *y = bfloat16_bits(x); }

// Value i goes to sum i % kSums; then the sums are added up in halves.
template <typename X>
float sum_of_squares(const X* x, int64_t size) {
  float sums[kSums] = {};
  const auto add = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) sums[i] += value(x[first + i]) * value(x[first + i]);
  };
  const int64_t whole = size / kSums * kSums;
  for (int64_t first = 0; first < whole; first += kSums) add(first, kSums);
  add(whole, size - whole);
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// e^x within one unit in the last place: x = n · ln 2 + r, and e^r by a polynomial that has the
// least error relative to e^r.
float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  x = x > 88 ? 88 : x;
  x = x < -87 ? -87 : x;
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 0.001381446490995586f;
  p = p * r + 0.008368780836462975f;
  p = p * r + 0.04166839271783829f;
  p = p * r + 0.1666651964187622f;
  p = p * r + 0.4999999403953552f;
  const float y = (p * (r * r) + r) + 1;
  uint32_t bits, power;
  std::memcpy(&bits, &y, sizeof bits);
  std::memcpy(&power, &shifted, sizeof power);
  bits += power << 23;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace

SPECJAX_CLONED void norm_row(Row x_row, Row scale_row, int64_t size, float eps, Row y_row) {
  x_row.typed([&](const auto* x) {
    const float mean = sum_of_squares(x, size) / static_cast<float>(size);
    const float inverse = 1 / std::sqrt(mean + eps);
    scale_row.typed([&](const auto* scale) {
      y_row.typed([&](auto* y) {
        for (int64_t i = 0; i < size; ++i) store(value(x[i]) * inverse * value(scale[i]), y + i);
      });
    });
  });
}

SPECJAX_CLONED void rotate_row(const float* x, const float* cos, const float* sin, int64_t heads,
                               int64_t half, Row y_row) {
  y_row.typed([&](auto* __restrict y) {
    for (int64_t head = 0; head < heads; ++head, x += 2 * half, y += 2 * half) {
      const float* other = x + half;
      for (int64_t i = 0; i < half; ++i) store(x[i] * cos[i] - other[i] * sin[i], y + i);
      for (int64_t i = 0; i < half; ++i) store(other[i] * cos[i] + x[i] * sin[i], y + half + i);
    }
  });
}

SPECJAX_CLONED void gate_values(const float* gate, const float* up, int64_t size, Row y_row) {
  y_row.typed([&](auto* __restrict y) {
    for (int64_t i = 0; i < size; ++i) {
      store(gate[i] / (1 + exponential(-gate[i])) * up[i], y + i);
    }
  });
}

SPECJAX_CLONED void round_values(const float* x, int64_t size, Row y_row) {
  y_row.typed([&](auto* __restrict y) {
    for (int64_t i = 0; i < size; ++i) store(x[i], y + i);
  });
}

SPECJAX_CLONED void add_values(const float* x, int64_t size, Row y_row) {
  y_row.typed([&](auto* __restrict y) {
    for (int64_t i = 0; i < size; ++i) store(value(y[i]) + x[i], y + i);
  });
}

}  // namespace specjax
