// The row operations between matrix products: norms, rotary embeddings, and the gate of SwiGLU.
//
// Products are not fused with sums, so the bits are the same on every processor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/threads.h"

namespace specjax {

// Values that one thread processes faster than two: if the others must be woken, and if they wait.
inline constexpr int64_t kSerialWork = 1 << 16, kSerialWaiting = 1 << 12;

// A row of an operand or a result, float32 or bfloat16.
struct Row {
  Row(bool bfloat16, void* array, int64_t first)
      : bfloat16(bfloat16), data(static_cast<char*>(array) + first * (bfloat16 ? 2 : 4)) {}

  // Calls work with the pointer of its type.
  template <typename Work>
  void typed(const Work& work) const {
    if (bfloat16) {
      work(reinterpret_cast<uint16_t*>(data));
    } else {
      work(reinterpret_cast<float*>(data));
    }
  }

  bool bfloat16;
  char* data;
};

// y = x · scale / its root mean square, [size] each. y may be x.
void norm_row(Row x, Row scale, int64_t size, float eps, Row y);

// x, y: [heads, 2, half]. cos, sin: [half].
void rotate_row(const float* x, const float* cos, const float* sin, int64_t heads, int64_t half,
                Row y);

// y = gate · sigmoid(gate) · up, [size] each.
void gate_values(const float* gate, const float* up, int64_t size, Row y);

// y = x, rounded to its type.
void round_values(const float* x, int64_t size, Row y);

// y = y + x.
void add_values(const float* x, int64_t size, Row y);

// Calls work(row) for rows of `width` values, on several threads where these are more than
// `serial`.
template <typename Work>
void for_rows(Team& team, int64_t rows, int64_t width, int64_t serial, const Work& work) {
  const int64_t each = std::max<int64_t>(1, serial / width);
  team.for_each((rows + each - 1) / each, [&](int64_t index) {
    for (int64_t row = index * each; row < std::min(rows, (index + 1) * each); ++row) work(row);
  });
}

// Calls work(first, count) for pieces of at most `serial` values.
template <typename Work>
void for_pieces(Team& team, int64_t size, int64_t serial, const Work& work) {
  team.for_each((size + serial - 1) / serial, [&](int64_t index) {
    const int64_t first = index * serial;
    work(first, std::min(serial, size - first));
  });
}

}  // namespace specjax
