// The XLA handlers of norms, rotary embeddings and the gate of SwiGLU.
#include "rows/rows.h"

#include <string>

#include "common/handlers.h"
#include "common/threads.h"

namespace specjax {
namespace {

Row row_of(const ffi::AnyBuffer& buffer, int64_t first) {
  return Row(buffer.element_type() == ffi::BF16, buffer.untyped_data(), first);
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
  Team team(pool);
  for_rows(team, rows, size, kSerialWork, [&, share = rows / scales](int64_t row) {
    norm_row(row_of(x, row * size), row_of(scale, row / share * size), size, eps,
             row_of(*result, row * size));
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
  Team team(pool);
  for_rows(team, x.element_count() / width, width, kSerialWork, [&](int64_t row) {
    rotate_row(from + row * width, c + row * half, s + row * half, heads, half,
               row_of(*result, row * width));
  });
  return ffi::Error::Success();
}

// gate, up: f32[...]. result: [...].
ffi::Error swiglu(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                  ffi::Result<ffi::AnyBuffer> result) {
  const Shape shape = shape_of(gate);
  for (auto error : {check("gate", gate, ffi::F32, shape), check("up", up, ffi::F32, shape),
                     check_result(*result, shape)}) {
    if (error.failure()) return error;
  }
  const float* const gates = static_cast<const float*>(gate.untyped_data());
  const float* const ups = static_cast<const float*>(up.untyped_data());
  Team team(pool);
  for_pieces(team, gate.element_count(), kSerialWork, [&](int64_t first, int64_t count) {
    gate_values(gates + first, ups + first, count, row_of(*result, first));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_swiglu, specjax::swiglu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // gate
                                  .Arg<ffi::AnyBuffer>()  // up
                                  .Ret<ffi::AnyBuffer>());
