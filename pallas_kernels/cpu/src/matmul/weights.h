// Weights as the Python side describes them by attributes and buffers (../../matmul_call.py).
#pragma once

#include <array>

#include "common/handlers.h"
#include "common/types.h"

namespace specjax {

// The part that a weight has beside its scales. Numbered as POINTS in matmul_call.py.
enum class Points : int64_t { kNone = 0, kZeros = 1, kMinima = 2 };

// One weight as the attributes describe it.
struct Description {
  Kind kind;
  int64_t group_size;  // 0: one scale per output
  Points points;
  int64_t outputs;  // of an interleaved weight; 0: it is stored row by row
  bool stacked;     // the arrays hold several matrices

  bool quantized() const { return kind <= Kind::kInt8; }
  int64_t arrays() const {
    if (kind == Kind::kBfloat12 || kind == Kind::kNestedInt8) return 3;
    return quantized() ? 2 + (points != Points::kNone) : 1;
  }
};

// The attributes of a call, one entry per weight.
struct Descriptions {
  ffi::Span<const int64_t> kinds, group_sizes, points, outputs, stacked, levels;

  // Reads number `i`, and checks that its activations have levels that it can be multiplied at.
  ffi::Error read(size_t i, Description& d) const;
  bool are(size_t count) const;
};

// Weights of one form in one set of arrays.
struct Weights {
  Weight first;
  int64_t count;
  std::array<int64_t, 3> bytes;  // from one weight to the next, in each of the arrays

  Weight at(int64_t number) const;
};

// Reads the weights that `d` describes from the buffers args[first] … k: columns of x.
ffi::Error read_weights(const Description& d, const ffi::RemainingArgs& args, int64_t first,
                        int64_t k, Weights& weights);

}  // namespace specjax
