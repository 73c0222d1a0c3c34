#include "matmul/weights.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace specjax {
namespace {

int64_t tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The shape of scales, zeros and minima.
Shape group_shape(const Weight& w) {
  return w.interleaved ? Shape{tiles(w.n), w.groups, kTileRows} : Shape{w.n, w.groups};
}

ffi::Error read_scales(const Array& scales, Weight& w) {
  if (const Shape shape = group_shape(w); scales.shape != shape) {
    return invalid("scales must be " + text(shape) + ", got " + text(scales.shape));
  }
  switch (scales.type) {
    case ffi::BF16: w.scale = Scale::kBfloat16; break;
    case ffi::F16: w.scale = Scale::kFloat16; break;
    case ffi::F32: w.scale = Scale::kFloat32; break;
    case ffi::U8: w.scale = Scale::kE8m0; break;
    default: return invalid("scales have an unknown type");
  }
  if ((w.scale == Scale::kE8m0) != (w.kind == Kind::kMxfp4)) {
    return invalid("scales have another format's type");
  }
  w.scales = scales.data;
  return ffi::Error::Success();
}

ffi::Error read_points(Points kind, const std::vector<Array>& arrays, Weight& w) {
  if (kind == Points::kNone) return ffi::Error::Success();
  const Array &scales = arrays[1], &points = arrays[2];
  const bool fits = points.shape == group_shape(w), zeros = kind == Points::kZeros;
  if (zeros && (!fits || points.type != ffi::S8)) {
    return invalid("zeros must be int8 like the scales, got " + text(points.shape));
  }
  if (!zeros && (!fits || points.type != scales.type)) {
    return invalid("minima must be like the scales, got " + text(points.shape));
  }
  if (zeros) w.zeros = reinterpret_cast<const int8_t*>(points.data);
  if (!zeros) w.minima = points.data;
  return ffi::Error::Success();
}

// The arrays of one weight, and what lies between those of two.
struct Arrays {
  std::vector<Array> arrays;
  int64_t count = 1;
  std::array<int64_t, 3> bytes = {};
};

ffi::Error read_arrays(const Description& d, const ffi::RemainingArgs& args, int64_t first,
                       Arrays& read) {
  if (d.stacked) read.count = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < d.arrays(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(first + i);
    if (!buffer.has_value()) return buffer.error();
    if (d.stacked && buffer->dimensions().size() == 0) return invalid("a stack has no axes");
    if (d.stacked) read.count = std::min(read.count, buffer->dimensions()[0]);
    read.arrays.push_back(d.stacked ? Array(*buffer, 0) : Array(*buffer));
    read.bytes[i] = read.arrays.back().size();
  }
  return ffi::Error::Success();
}

// Reads a weight of bfloat16 in 12 bits.
ffi::Error read_bfloat12(const Description& d, const std::vector<Array>& arrays, int64_t k,
                         Weight& w) {
  const Array &data = arrays[0], &palettes = arrays[1], &escapes = arrays[2];
  w = Weight{};
  w.kind = d.kind, w.interleaved = true, w.n = d.outputs, w.inputs = k;
  const int64_t words = (k + 7) / 8 * 3, pieces = (k + kPaletteInputs - 1) / kPaletteInputs;
  if (data.type != ffi::U8 || data.shape != Shape{tiles(w.n), words, 4 * kTileRows} || w.n < 1 ||
      k < 1) {
    return invalid("a weight for " + std::to_string(k) + " inputs does not fit: got " +
                   text(data.shape));
  }
  if (palettes.type != ffi::U8 || palettes.shape != Shape{tiles(w.n), pieces, kPalette}) {
    return invalid("palettes do not fit: got " + text(palettes.shape));
  }
  if (escapes.type != ffi::U32 || escapes.shape.size() != 2 || escapes.shape[0] != tiles(w.n)) {
    return invalid("escapes do not fit: got " + text(escapes.shape));
  }
  w.row_bytes = 4 * words, w.data = data.data, w.palettes = palettes.data;
  w.escapes = reinterpret_cast<const uint32_t*>(escapes.data);
  w.escapes_per_tile = escapes.shape[1];
  return ffi::Error::Success();
}

// Reads the weight that `d` describes. k: columns of x.
ffi::Error read_weight(const Description& d, const std::vector<Array>& arrays, int64_t k,
                       Weight& w) {
  if (d.kind == Kind::kBfloat12) return read_bfloat12(d, arrays, k, w);
  const Array& data = arrays[0];
  const ffi::DataType types[] = {ffi::U8, ffi::U8, ffi::U8, ffi::S8, ffi::U16, ffi::F32};
  const int64_t padded = (k + kPlanePair - 1) / kPlanePair * kPlanePair;
  w = Weight{};
  w.kind = d.kind, w.inputs = d.quantized() ? padded : k;
  w.interleaved = d.outputs != 0;
  const Shape& dims = data.shape;
  w.n = w.interleaved || dims.empty() ? d.outputs : dims[0];
  const int64_t columns = w.nibbles() ? padded / 2 : w.inputs;
  const int64_t size = ffi::ByteWidth(types[static_cast<int>(d.kind)]), per_word = 4 / size;
  const int64_t words = (columns + per_word - 1) / per_word;
  const Shape wanted =
      w.interleaved ? Shape{tiles(w.n), words, kTileRows * per_word} : Shape{w.n, columns};
  if (data.type != types[static_cast<int>(d.kind)] || dims != wanted || w.n < 1 || columns < 1) {
    return invalid("a weight for " + std::to_string(k) + " inputs does not fit: got " + text(dims));
  }
  w.row_bytes = w.interleaved ? 4 * words : size * columns;
  w.data = data.data;
  if (!d.quantized()) return ffi::Error::Success();
  w.group_size = d.group_size == 0 ? padded : d.group_size;
  if (w.group_size != padded && w.group_size != 32 && w.group_size != 64 && w.group_size != 128) {
    return invalid("unknown group size " + std::to_string(d.group_size));
  }
  if (w.kind == Kind::kMxfp4 && (w.group_size != 32 || d.points != Points::kNone)) {
    return invalid("MXFP4 has groups of 32 without zeros or minima");
  }
  w.groups = padded / w.group_size;
  if (auto error = read_scales(arrays[1], w); error.failure()) return error;
  if (d.kind != Kind::kNestedInt8) return read_points(d.points, arrays, w);
  const Array& rest = arrays[2];
  if (d.points != Points::kNone || rest.type != data.type || rest.shape != data.shape) {
    return invalid("the planes of a weight do not fit: got " + text(rest.shape));
  }
  w.rest = rest.data;
  return ffi::Error::Success();
}

// Moves a pointer that is not null.
template <typename Part>
void advance(const Part*& part, int64_t bytes) {
  if (part == nullptr) return;
  part = reinterpret_cast<const Part*>(reinterpret_cast<const char*>(part) + bytes);
}

void advance(const void*& part, int64_t bytes) {
  if (part != nullptr) part = static_cast<const char*>(part) + bytes;
}

}  // namespace

bool Descriptions::are(size_t count) const {
  for (const auto& each : {kinds, group_sizes, points, outputs, stacked, levels}) {
    if (each.size() != count) return false;
  }
  return std::all_of(levels.begin(), levels.end(),
                     [](int64_t level) { return level >= 0 && level <= 127; });
}

ffi::Error Descriptions::read(size_t i, Description& d) const {
  d = {static_cast<Kind>(kinds[i]), group_sizes[i], static_cast<Points>(points[i]), outputs[i],
       stacked[i] != 0};
  if (kinds[i] < 0 || d.kind > Kind::kBfloat12) return invalid("unknown kind of weight");
  if (points[i] < 0 || d.points > Points::kMinima) return invalid("unknown kind of points");
  if (levels[i] != 0 && (!d.quantized() || d.kind == Kind::kNestedInt8)) {
    return invalid("integer products need a quantized weight of one plane");
  }
  return ffi::Error::Success();
}

Weight Weights::at(int64_t number) const {
  Weight w = first;
  advance(w.data, number * bytes[0]);
  advance(w.scales, number * bytes[1]);
  advance(w.palettes, number * bytes[1]);
  advance(w.rest, number * bytes[2]);
  advance(w.zeros, number * bytes[2]);
  advance(w.minima, number * bytes[2]);
  advance(w.escapes, number * bytes[2]);
  return w;
}

ffi::Error read_weights(const Description& d, const ffi::RemainingArgs& args, int64_t first,
                        int64_t k, Weights& weights) {
  Arrays read;
  if (auto error = read_arrays(d, args, first, read); error.failure()) return error;
  weights.count = read.count, weights.bytes = read.bytes;
  return read_weight(d, read.arrays, k, weights.first);
}

}  // namespace specjax
