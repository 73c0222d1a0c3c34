// Decoder layers of a model, one after the other.
//
// Layer by layer this does what specjax/model/transformer.py writes down, with the same bits. For
// few tokens of a small model the products themselves take half of a pass; the rest is a dozen
// calls and loops per layer, each of which has to be begun and to wake the other threads. Here they
// wait in place for the next one, and ask for its weights meanwhile.
#pragma once

#include <array>
#include <vector>

#include "common/threads.h"
#include "common/types.h"
#include "matmul/weights.h"
#include "rows/rows.h"

namespace specjax {

// The linear layers of a decoder layer, in the order of the operands.
enum Name { kQ, kK, kV, kO, kGate, kUp, kDown, kLinears };

// One linear layer of all decoder layers. bias: [layers, N], or null.
struct Linear {
  Weights weights;
  int levels;
  const float* bias;
};

// The scales of one norm of all decoder layers, [layers, width]; null: there is none.
struct Norm {
  Row row(int64_t layer) const { return Row(bfloat16, data, layer * width); }

  void* data = nullptr;
  bool bfloat16 = false;
  int64_t width = 0;
};

// The operands of one pass. Activations and cache entries are bfloat16, or all float32.
struct Pass {
  const Kernels* kernels;
  bool bfloat16;
  int64_t rows, d, f;      // rows: of x, [B · T]
  void* x;                 // [rows, D], the residual stream; overwritten
  void *keys, *values;     // [B, layers, S, K, E]; entries are written
  const float *cos, *sin;  // [rows, E / 2]
  Norm attention_norm, mlp_norm, q_norm, k_norm;
  std::array<Linear, kLinears> linears;
  float eps;
  Attention attention;  // without queries and result
};

// One of the layers to run. window: negative for none.
struct LayerCall {
  int64_t number, window, sinks;
};

void run_layers(xla::ffi::ThreadPool& pool, const Pass& pass, const std::vector<LayerCall>& calls);

}  // namespace specjax
