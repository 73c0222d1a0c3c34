// The XLA handlers of the row operations between matrix products: norms and rotary embeddings.
//
// Compiled once, not once per instruction set like the kernels: a row is short and in the cache, so
// wide vectors would gain little. Products are not fused with sums, so the bits are the same on
// every processor.
#include <algorithm>
#include <cmath>

#include "common/bfloat16.h"
#include "common/handlers.h"
#include "common/threads.h"

namespace specjax {
namespace {

constexpr int64_t kSums = 32;             // concurrent, to hide an addition's latency
constexpr int64_t kSerialWork = 1 << 16;  // values that one thread processes faster than two

inline float value(float x) { return x; }
inline float value(uint16_t x) { return bfloat16_value(x); }

inline void store(float x, float* y) { *y = x; }
inline void store(float x, uint16_t* y) { *y = bfloat16_bits(x); }

// A row of an operand or a result, float32 or bfloat16.
struct Row {
  Row(const ffi::AnyBuffer& buffer, int64_t first)
      : bfloat16(buffer.element_type() == ffi::BF16),
        data(static_cast<char*>(buffer.untyped_data()) + first * (bfloat16 ? 2 : 4)) {}

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

// x, scale, y: [size].
void norm_row(Row x_row, Row scale_row, int64_t size, float eps, Row y_row) {
  x_row.typed([&](const auto* x) {
    const float mean = sum_of_squares(x, size) / static_cast<float>(size);
    const float inverse = 1 / std::sqrt(mean + eps);
    scale_row.typed([&](const auto* scale) {
      y_row.typed([&](auto* __restrict y) {
        for (int64_t i = 0; i < size; ++i) store(value(x[i]) * inverse * value(scale[i]), y + i);
      });
    });
  });
}

// x, y: [heads, 2, half]. cos, sin: [half].
void rotate_row(const float* x, const float* cos, const float* sin, int64_t heads, int64_t half,
                Row y_row) {
  y_row.typed([&](auto* __restrict y) {
    for (int64_t head = 0; head < heads; ++head, x += 2 * half, y += 2 * half) {
      const float* other = x + half;
      for (int64_t i = 0; i < half; ++i) store(x[i] * cos[i] - other[i] * sin[i], y + i);
      for (int64_t i = 0; i < half; ++i) store(other[i] * cos[i] + x[i] * sin[i], y + half + i);
    }
  });
}

// Calls work(row) for rows of `width` values, on several threads where that is faster.
template <typename Work>
void for_rows(ffi::ThreadPool& pool, int64_t rows, int64_t width, const Work& work) {
  const int64_t each = std::max<int64_t>(1, kSerialWork / width);
  parallel_for(pool, (rows + each - 1) / each, [&](int64_t index) {
    for (int64_t row = index * each; row < std::min(rows, (index + 1) * each); ++row) work(row);
  });
}

ffi::Error check_result(const ffi::AnyBuffer& result, const Shape& shape) {
  const ffi::DataType type = result.element_type();
  return check("the result", result, type == ffi::BF16 ? type : ffi::F32, shape);
}

// x, result: [..., D]. scale: [..., D], one or several; each serves an equal share of consecutive
// rows.
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
  if (auto error = check_result(*result, shape_of(x)); error.failure()) return error;
  if (x.element_count() == 0) return ffi::Error::Success();
  const int64_t rows = x.element_count() / size, scales = scale.element_count() / size;
  if (scales == 0 || rows % scales != 0) {
    return invalid(std::to_string(scales) + " scales do not fit " + std::to_string(rows) + " rows");
  }
  for_rows(pool, rows, size, [&, share = rows / scales](int64_t row) {
    norm_row(Row(x, row * size), Row(scale, row / share * size), size, eps,
             Row(*result, row * size));
  });
  return ffi::Error::Success();
}

// x, result: [..., H, E]. cos, sin: f32[..., E / 2].
ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                  ffi::Result<ffi::AnyBuffer> result) {
  const Shape shape = shape_of(x);
  if (shape.size() < 2 || shape.back() % 2 != 0 || x.element_type() != ffi::F32) {
    return invalid("x must be float32 [..., H, E] with an even E, got " + text(shape));
  }
  const int64_t half = shape.back() / 2, heads = shape[shape.size() - 2], width = 2 * half * heads;
  Shape angles(shape.begin(), shape.end() - 1);
  angles.back() = half;
  for (auto error : {check("cos", cos, ffi::F32, angles), check("sin", sin, ffi::F32, angles),
                     check_result(*result, shape)}) {
    if (error.failure()) return error;
  }
  if (x.element_count() == 0) return ffi::Error::Success();
  const float* const from = static_cast<const float*>(x.untyped_data());
  const float* const c = static_cast<const float*>(cos.untyped_data());
  const float* const s = static_cast<const float*>(sin.untyped_data());
  for_rows(pool, x.element_count() / width, width, [&](int64_t row) {
    rotate_row(from + row * width, c + row * half, s + row * half, heads, half,
               Row(*result, row * width));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_rotate, specjax::rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // cos
                                  .Arg<ffi::AnyBuffer>()  // sin
                                  .Ret<ffi::AnyBuffer>());
