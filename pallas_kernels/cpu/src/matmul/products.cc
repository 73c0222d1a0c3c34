#include "matmul/products.h"

#include <algorithm>

#include "common/memory.h"

namespace specjax {
namespace {

constexpr int64_t kSerialInputs = 1 << 13;  // values of x that one thread prepares faster than two

Prepared reserve(CallMemory& memory, const Preparation& how) {
  const int64_t count = words_of(how.arithmetic, how.inputs);
  const int64_t groups = is_integer(how.arithmetic) ? how.inputs / how.group_size : 0;
  const int64_t sums = how.sum_size == 0 ? 0 : how.inputs / how.sum_size;
  float* const words = memory.reserve(how.rows * (count + groups + sums));
  float* const scales = words + how.rows * count;
  return {reinterpret_cast<uint32_t*>(words), scales, scales + how.rows * groups};
}

void prepare(Team& team, const Kernels& kernels, const Preparation& how, const Input& x,
             const Prepared& out) {
  const int64_t rows = std::max<int64_t>(1, kSerialInputs / how.inputs);
  team.for_each((x.m + rows - 1) / rows, [&](int64_t index) {
    thread_local std::vector<float> values;
    if (values.size() < static_cast<size_t>(2 * how.inputs)) values.resize(2 * how.inputs);
    for (int64_t row = index * rows; row < std::min(x.m, (index + 1) * rows); ++row) {
      kernels.prepare_row(how, x, row, values.data(), out);
    }
  });
}

// Tiles read many rows of x from farther caches, once per share. The shares of all products become
// as much wider as leaves enough of them to every thread.
void widen(std::vector<WeightProduct>& products, int64_t threads) {
  constexpr int64_t kManyRows = 64;  // that meet a share together (tile_product.h)
  constexpr int64_t kMostTimes = 4, kSharesPerThread = 8;
  int64_t shares = 0, times = 1;
  for (const WeightProduct& p : products) shares += p.weight.n / p.how.columns;
  while (times < kMostTimes && shares >= 2 * times * kSharesPerThread * threads) times *= 2;
  for (WeightProduct& p : products) {
    if (p.how.way == Way::kTiles && p.how.rows > kManyRows) p.how.columns *= times;
  }
}

}  // namespace

void multiply(Team& team, const Kernels& kernels, const Input& x,
              std::vector<WeightProduct>& products) {
  thread_local std::vector<Memory> kept;
  if (kept.size() < products.size()) kept.resize(products.size());
  std::vector<CallMemory> memories(kept.begin(), kept.begin() + products.size());
  for (size_t i = 0; i < products.size(); ++i) {
    WeightProduct& product = products[i];
    const auto same = std::find_if(products.begin(), products.begin() + i,
                                   [&](const WeightProduct& p) { return p.how == product.how; });
    if (same != products.begin() + i) {
      product.x = same->x;
    } else {
      product.x = reserve(memories[i], product.how);
      prepare(team, kernels, product.how, x, product.x);
    }
  }
  widen(products, team.threads());
  int64_t shares = 0;
  for (WeightProduct& product : products) {
    product.first = shares;
    shares += (product.weight.n + product.how.columns - 1) / product.how.columns;
  }
  team.for_each(shares, [&](int64_t share) {
    const WeightProduct& p =
        *std::find_if(products.rbegin(), products.rend(),
                      [&](const WeightProduct& each) { return each.first <= share; });
    const int64_t column = (share - p.first) * p.how.columns;
    kernels.multiply_columns(p.weight, p.how, p.x, x.m, column, p.y);
  });
}

}  // namespace specjax
