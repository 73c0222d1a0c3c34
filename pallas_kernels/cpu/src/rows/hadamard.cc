// The XLA handler of the fast Hadamard transform. It adds in the same order as
// pallas_kernels/hadamard.py, and that order depends on the sizes alone.
//
// Compiled once, not once per instruction set: it is fast beside a matrix product. A product with
// ±1 is exact, so it does not matter whether it is fused with a sum.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/handlers.h"
#include "common/threads.h"

namespace specjax {
namespace {

constexpr int64_t kSums = 32;               // sums that stay in registers
constexpr int64_t kSerialValues = 1 << 14;  // values that one thread rotates faster than two

struct Matrix {
  const float* signs;  // [order, order] of ±1
  int64_t order;
};

// y[i] = the sum of signs[i, j] · x[j] over j in turn; x, y: [order, size].
void multiply(const Matrix& matrix, const float* x, int64_t size, float* y) {
  for (int64_t i = 0; i < matrix.order; ++i) {
    const float* signs = matrix.signs + i * matrix.order;
    const auto add = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      float sums[kSums] = {};
      for (int64_t j = 0; j < matrix.order; ++j) {
        const float sign = signs[j], *values = x + j * size + first;
        for (int64_t s = 0; s < count; ++s) sums[s] += sign * values[s];
      }
      std::memcpy(y + i * size + first, sums, count * sizeof(float));
    };
    const int64_t whole = size / kSums * kSums;
    for (int64_t first = 0; first < whole; first += kSums) add(first, kSums);
    if (whole < size) add(whole, size - whole);
  }
}

// Sums and differences of pairs that are unit, 2 · unit, 4 · unit … apart; two distances at a time,
// because loads and stores cost more than additions.
void add_pairs(float* x, int64_t size, int64_t unit) {
  int64_t distance = unit;
  for (; 4 * distance <= size; distance *= 4) {
    for (int64_t start = 0; start < size; start += 4 * distance) {
      float* __restrict x0 = x + start, * __restrict x1 = x0 + distance;
      float* __restrict x2 = x1 + distance, * __restrict x3 = x2 + distance;
      for (int64_t i = 0; i < distance; ++i) {
        const float sum = x0[i] + x1[i], difference = x0[i] - x1[i];
        const float sum2 = x2[i] + x3[i], difference2 = x2[i] - x3[i];
        x0[i] = sum + sum2, x1[i] = difference + difference2;
        x2[i] = sum - sum2, x3[i] = difference - difference2;
      }
    }
  }
  if (distance == size) return;
  float* __restrict first = x, * __restrict second = x + distance;
  for (int64_t i = 0; i < distance; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a + b, second[i] = a - b;
  }
}

// y = scale · (matrices ⊗ Sylvester's) · x over the leading axis of x: [n, unit], n · unit = size.
void rotate(const std::vector<Matrix>& matrices, const float* x, int64_t size, int64_t unit,
            float scale, float* y) {
  thread_local std::vector<float> scratch;
  std::memcpy(y, x, size * sizeof(float));
  int64_t length = size;  // of the ranges that are independent after the matrices so far
  for (const Matrix& matrix : matrices) {
    scratch.assign(y, y + size);
    for (int64_t start = 0; start < size; start += length) {
      multiply(matrix, scratch.data() + start, length / matrix.order, y + start);
    }
    length /= matrix.order;
  }
  for (int64_t start = 0; start < size; start += length) add_pairs(y + start, length, unit);
  for (int64_t i = 0; i < size; ++i) y[i] *= scale;
}

// Reads the matrices. The product of their orders and a power of two must be n.
ffi::Error read_matrices(const ffi::RemainingArgs& args, int64_t n, std::vector<Matrix>& matrices) {
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    const auto dims = buffer->dimensions();
    const int64_t order = dims.size() == 0 ? 0 : dims.back();
    if (buffer->element_type() != ffi::F32 || order < 1 || n % order != 0 ||
        static_cast<int64_t>(buffer->element_count()) != order * order) {
      return invalid("a matrix does not fit: got " + text(shape_of(*buffer)));
    }
    matrices.push_back({static_cast<const float*>(buffer->untyped_data()), order});
    n /= order;
  }
  if ((n & (n - 1)) != 0) return invalid("no power of two is left: " + std::to_string(n));
  return ffi::Error::Success();
}

// x: f32[..., n, unit].
ffi::Error hadamard(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args,
                    ffi::Result<ffi::AnyBuffer> result, float scale) {
  const auto dims = x.dimensions();
  if (dims.size() < 2 || x.element_type() != ffi::F32) {
    return invalid("x must be float32 [..., n, unit], got " + text(shape_of(x)));
  }
  if (auto error = check("the result", *result, ffi::F32, shape_of(x)); error.failure()) {
    return error;
  }
  if (x.element_count() == 0) return ffi::Error::Success();
  const int64_t unit = dims.back(), n = dims[dims.size() - 2], size = n * unit;
  std::vector<Matrix> matrices;
  if (auto error = read_matrices(args, n, matrices); error.failure()) return error;
  const int64_t rows = x.element_count() / size, each = std::max<int64_t>(1, kSerialValues / size);
  const float* const from = static_cast<const float*>(x.untyped_data());
  float* const to = static_cast<float*>(result->untyped_data());
  Team team(pool);
  team.for_each((rows + each - 1) / each, [&](int64_t index) {
    for (int64_t row = index * each; row < std::min(rows, (index + 1) * each); ++row) {
      rotate(matrices, from + row * size, size, unit, scale, to + row * size);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_hadamard, specjax::hadamard,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .RemainingArgs()        // matrices
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale"));
