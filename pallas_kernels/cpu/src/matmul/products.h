// Products of one x with several weights, dealt out to threads.
#pragma once

#include <vector>

#include "common/threads.h"
#include "common/types.h"

namespace specjax {

struct WeightProduct {
  Weight weight;
  Preparation how;    // `multiply` may widen its shares
  float* y;           // [M, N]
  Prepared x = {};    // set by `multiply`
  int64_t first = 0;  // the number of its first share of `how.columns` outputs; set by `multiply`
};

// Prepares x once per Preparation, and multiplies it by all weights.
void multiply(Team& team, const Kernels& kernels, const Input& x,
              std::vector<WeightProduct>& products);

}  // namespace specjax
