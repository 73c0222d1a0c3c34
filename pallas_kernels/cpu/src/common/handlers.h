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

// A row-major array: a buffer, or one entry of a buffer's first axis.
struct Array {
  explicit Array(const ffi::AnyBuffer& buffer)
      : shape(shape_of(buffer)), type(buffer.element_type()), data(bytes(buffer)) {}

  // Entry `index` of a stack of arrays.
  Array(const ffi::AnyBuffer& stack, int64_t index) : Array(stack) {
    shape.erase(shape.begin());
    data += index * size();
  }

  // Its bytes.
  int64_t size() const {
    int64_t size = ffi::ByteWidth(type);
    for (const int64_t axis : shape) size *= axis;
    return size;
  }

  static const uint8_t* bytes(const ffi::AnyBuffer& buffer) {
    return static_cast<const uint8_t*>(buffer.untyped_data());
  }

  Shape shape;
  ffi::DataType type;
  const uint8_t* data;
};

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
