// Helpers of the XLA handlers: the shape of a buffer, and errors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {

using Shape = std::vector<int64_t>;

inline Shape shape_of(const ffi::AnyBuffer& buffer) {
  return Shape(buffer.dimensions().begin(), buffer.dimensions().end());
}

inline std::string text(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "specjax: " + message);
}

// Whether activations may have this type.
inline bool is_float(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

inline ffi::Error check(const std::string& name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                        const Shape& shape) {
  if (shape_of(buffer) != shape) {
    return invalid(name + " must be " + text(shape) + ", got " + text(shape_of(buffer)));
  }
  if (buffer.element_type() != type) return invalid(name + " has another type");
  return ffi::Error::Success();
}

}  // namespace specjax
