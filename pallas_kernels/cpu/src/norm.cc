// The XLA handler of `rms_norm`.
//
// A row's squares are summed in an order that the row's length alone decides. This is compiled
// once, not once per instruction set like the kernels: a row is short and in the cache, so wide
// vectors would gain little. No product is fused with a sum; so the bits are the same on every
// processor.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "handlers.h"
#include "threads.h"

namespace specjax {
namespace {

constexpr int64_t kSums = 32;             // side by side: as many as hide an addition's latency
constexpr int64_t kSerialWork = 1 << 16;  // values that one thread norms faster than two

inline float value(float x) { return x; }

inline float value(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

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

// x: [size] of X, scale: [size] of S.
template <typename X, typename S>
void norm_row(const void* x_row, const void* scale_row, int64_t size, float eps, float* y) {
  const X* x = static_cast<const X*>(x_row);
  const S* scale = static_cast<const S*>(scale_row);
  const float mean = sum_of_squares(x, size) / static_cast<float>(size);
  const float inverse = 1 / std::sqrt(mean + eps);
  for (int64_t i = 0; i < size; ++i) y[i] = value(x[i]) * inverse * value(scale[i]);
}

auto pick(ffi::DataType x, ffi::DataType scale) {
  if (x == ffi::F32) return scale == ffi::F32 ? norm_row<float, float> : norm_row<float, uint16_t>;
  return scale == ffi::F32 ? norm_row<uint16_t, float> : norm_row<uint16_t, uint16_t>;
}

// x, result: [..., D]. scale: [..., D], one or several; each serves its share of the rows in turn.
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                    ffi::Result<ffi::AnyBuffer> result, float eps) {
  const auto dims = x.dimensions(), scale_dims = scale.dimensions();
  if (dims.size() < 1 || !is_float(x.element_type())) {
    return invalid("x must be bfloat16 or float32 [..., D], got " + text(shape_of(x)));
  }
  const int64_t size = dims.back();
  if (scale_dims.size() < 1 || scale_dims.back() != size || !is_float(scale.element_type())) {
    return invalid("scale must be bfloat16 or float32 [" + std::to_string(size) + "], got " +
                   text(shape_of(scale)));
  }
  if (auto error = check("the result", *result, ffi::F32, shape_of(x)); error.failure()) {
    return error;
  }
  if (x.element_count() == 0) return ffi::Error::Success();
  const int64_t rows = x.element_count() / size, scales = scale.element_count() / size;
  if (scales == 0 || rows % scales != 0) {
    return invalid(std::to_string(scales) + " scales do not fit " + std::to_string(rows) + " rows");
  }
  const auto norm = pick(x.element_type(), scale.element_type());
  const int64_t x_bytes = x.size_bytes() / rows, scale_bytes = scale.size_bytes() / scales;
  const char* const x_data = static_cast<const char*>(x.untyped_data());
  const char* const scale_data = static_cast<const char*>(scale.untyped_data());
  float* const y = static_cast<float*>(result->untyped_data());
  const int64_t share = rows / scales, part = std::max<int64_t>(1, kSerialWork / size);
  parallel_for(pool, (rows + part - 1) / part, [&](int64_t index) {
    for (int64_t row = index * part; row < std::min(rows, (index + 1) * part); ++row) {
      norm(x_data + row * x_bytes, scale_data + row / share * scale_bytes, size, eps,
           y + row * size);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_rms_norm, specjax::rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // scale
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
