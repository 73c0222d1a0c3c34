// The product of scores and of mixed values: rows of floats times a small matrix, which lies in
// memory or in the cache.
#pragma once

#include "attention/attention_input.h"

namespace specjax::SPECJAX_ISA {

// A matrix that was decoded.
struct Decoded {
  static constexpr int kSize = 4;
  const float* start;
  int64_t stride;
  Float read(int64_t row, int64_t column) const {
    return load<Float>(start + row * stride + column);
  }
};

// The values of a cache's slots from `slot` on. Those of codes lack their slot's scale.
template <Cached kind>
struct Stored {
  static constexpr int kSize = kind == Cached::kFloat32 ? 4 : kind == Cached::kBfloat16 ? 2 : 1;
  const Entries& entries;
  int64_t slot;

  SPECJAX_INLINE Float read(int64_t row, int64_t column) const {
    const uint8_t* from = entries.start + (slot + row) * entries.stride;
    if constexpr (kind == Cached::kFloat32) {
      return load<Float>(from + column * sizeof(float));
    } else if constexpr (kind == Cached::kBfloat16) {
      return bfloat16_values(from + column * sizeof(uint16_t));
    } else {
      const bool high = kind == Cached::kCodes4 && column >= entries.bytes;
      const Word bytes = widen(load<Byte>(from + (high ? column - entries.bytes : column)));
      const int zero = entries.zeros[(slot + row) * entries.heads];
      return integers(kind == Cached::kCodes8 ? bytes : high ? bytes >> 4 : bytes & 0xFu, zero);
    }
  }
};

// The factors of y[row, column] += Σ_i x[row, i] · m[i, column], i in order, but for m.
struct Factor {
  const float* x;
  int64_t x_stride, count;
  Ahead* ahead;  // what to prefetch meanwhile, or null
};

template <typename Matrix, int R, int V>
inline void add_columns(const Factor& f, const Matrix& m, int64_t row, int64_t column, float* y,
                        int64_t y_stride) {
  Float sums[R][V];
  const float* x = f.x + row * f.x_stride;
  y += row * y_stride + column;
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    const float* from = y + r * y_stride;
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = load<Float>(from + v * kLanes);
  }
  const bool ask = f.ahead != nullptr && row == 0;  // only those who read m first
  for (int64_t i = 0; i < f.count; ++i) {
    Float columns[V];
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) {
      if (ask && v * kLanes * Matrix::kSize % kLine == 0) f.ahead->ask();
      columns[v] = m.read(i, column + v * kLanes);
    }
    SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
      const Float value = splat(x[r * f.x_stride + i]);
      SPECJAX_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = fma(columns[v], value, sums[r][v]);
    }
  }
  SPECJAX_UNROLL for (int r = 0; r < R; ++r) {
    SPECJAX_UNROLL for (int v = 0; v < V; ++v) store(y + r * y_stride + v * kLanes, sums[r][v]);
  }
}

template <typename Matrix, int R>
inline void add_portion(const Factor& f, const Matrix& m, int64_t row, int64_t rows,
                        int64_t columns, float* y, int64_t y_stride) {
  if constexpr (R > 1) {
    if (rows < R) return add_portion<Matrix, R - 1>(f, m, row, rows, columns, y, y_stride);
  }
  int64_t column = 0;
  for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
    add_columns<Matrix, R, kVectors>(f, m, row, column, y, y_stride);
  }
  for (; column < columns; column += kLanes) {
    add_columns<Matrix, R, 1>(f, m, row, column, y, y_stride);
  }
}

// `columns`: a multiple of kLanes.
template <typename Matrix>
inline void add_product(const Factor& f, const Matrix& m, int64_t rows, int64_t columns, float* y,
                        int64_t y_stride) {
  const int64_t portions = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < portions; ++i) {
    const int64_t row = rows * i / portions, next = rows * (i + 1) / portions;
    add_portion<Matrix, kRows>(f, m, row, next - row, columns, y, y_stride);
  }
}

}  // namespace specjax::SPECJAX_ISA
