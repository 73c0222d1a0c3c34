// The XLA handler of `matmul`: checks every buffer, prepares x once per Preparation, and deals the
// outputs of all weights out to the threads.
#include <algorithm>
#include <string>
#include <vector>

#include "common/handlers.h"
#include "common/isa.h"
#include "common/threads.h"
#include "common/types.h"

namespace specjax {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // values of x that one thread prepares faster than two

// What a weight has beside its scales. Numbered as POINTS in matmul.py.
enum class Points : int64_t { kNone = 0, kZeros = 1, kMinima = 2 };

// One weight as the attributes describe it.
struct Description {
  Kind kind;
  int64_t group_size;  // 0: one scale per output
  Points points;
  int64_t outputs;  // of an interleaved weight; 0: it is stored row by row
  bool stacked;     // the arrays hold several matrices; the number of one follows them

  bool quantized() const { return kind <= Kind::kInt8; }
  int64_t arrays() const {
    if (kind == Kind::kBfloat12 || kind == Kind::kNestedInt8) return 3;
    return quantized() ? 2 + (points != Points::kNone) : 1;
  }
  int64_t buffers() const { return arrays() + stacked; }
};

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
  if (!zeros && w.kind == Kind::kMxfp4) return invalid("MXFP4 has no minima");
  if (zeros) w.zeros = reinterpret_cast<const int8_t*>(points.data);
  if (!zeros) w.minima = points.data;
  return ffi::Error::Success();
}

// Reads the number of a matrix in its stack.
ffi::Error read_number(const ffi::AnyBuffer& buffer, int64_t& number) {
  if (auto error = check("a matrix's number", buffer, ffi::S32, {}); error.failure()) return error;
  number = *static_cast<const int32_t*>(buffer.untyped_data());
  return ffi::Error::Success();
}

// Reads the arrays of a weight from the buffers args[first] …
ffi::Error read_arrays(const Description& d, const ffi::RemainingArgs& args, int64_t first,
                       std::vector<Array>& arrays) {
  std::vector<ffi::AnyBuffer> buffers;
  for (int64_t i = first; i < first + d.buffers(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers.push_back(*buffer);
  }
  if (!d.stacked) {
    for (const ffi::AnyBuffer& buffer : buffers) arrays.emplace_back(buffer);
    return ffi::Error::Success();
  }
  int64_t number;
  if (auto error = read_number(buffers.back(), number); error.failure()) return error;
  for (int64_t i = 0; i < d.arrays(); ++i) {
    const Shape shape = shape_of(buffers[i]);
    if (number < 0 || shape.empty() || number >= shape[0]) {
      return invalid("there is no matrix " + std::to_string(number) + " in a stack " + text(shape));
    }
    arrays.emplace_back(buffers[i], number);
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

// Memory for one prepared x. The thread keeps it for its next call.
class Storage {
 public:
  Prepared reserve(const Preparation& how) {
    const int64_t groups = how.group_size == 0 ? 0 : how.inputs / how.group_size;
    const int64_t sums = how.sum_size == 0 ? 0 : how.inputs / how.sum_size;
    const size_t needed = how.rows * (how.inputs + groups + sums) + kSlack;
    if (memory_.size() < needed) memory_.resize(needed);
    uint32_t* start = memory_.data();
    start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 / sizeof(uint32_t);
    float* scales = reinterpret_cast<float*>(start + how.rows * how.inputs);
    return {start, scales, scales + how.rows * groups};
  }

 private:
  static constexpr size_t kSlack = 32;
  std::vector<uint32_t> memory_;
};

void prepare(ffi::ThreadPool& pool, const Kernels& kernels, const Preparation& how, const Input& x,
             const Prepared& out) {
  const int64_t rows = std::max<int64_t>(1, kSerialWork / how.inputs);
  parallel_for(pool, (x.m + rows - 1) / rows, [&](int64_t index) {
    thread_local std::vector<float> values;
    if (values.size() < static_cast<size_t>(2 * how.inputs)) values.resize(2 * how.inputs);
    for (int64_t row = index * rows; row < std::min(x.m, (index + 1) * rows); ++row) {
      kernels.prepare_row(how, x, row, values.data(), out);
    }
  });
}

struct Product {
  Weight weight;
  Preparation how;
  Prepared x;
  float* y;
  int64_t first;  // the number of its first piece of `how.columns` outputs
};

void multiply(ffi::ThreadPool& pool, const Kernels& kernels, const Input& x,
              std::vector<Product>& products) {
  thread_local std::vector<Storage> storage;
  if (storage.size() < products.size()) storage.resize(products.size());
  int64_t pieces = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    Product& product = products[i];
    product.first = pieces;
    pieces += (product.weight.n + product.how.columns - 1) / product.how.columns;
    const auto same = std::find_if(products.begin(), products.begin() + i,
                                   [&](const Product& p) { return p.how == product.how; });
    if (same != products.begin() + i) {
      product.x = same->x;
    } else {
      product.x = storage[i].reserve(product.how);
      prepare(pool, kernels, product.how, x, product.x);
    }
  }
  parallel_for(pool, pieces, [&](int64_t piece) {
    const Product& p = *std::find_if(products.rbegin(), products.rend(),
                                     [&](const Product& each) { return each.first <= piece; });
    const int64_t column = (piece - p.first) * p.how.columns;
    kernels.multiply_columns(p.weight, p.how, p.x, x.m, column, p.y);
  });
}

ffi::Error read_input(const ffi::AnyBuffer& x, Input& input) {
  const Shape dims = shape_of(x);
  const auto type = x.element_type();
  if (dims.size() != 2 || !is_float(type)) {
    return invalid("x must be a bfloat16 or float32 matrix, got " + text(dims));
  }
  input = {x.untyped_data(), type == ffi::BF16, dims[0], dims[1]};
  return ffi::Error::Success();
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args,
                  ffi::RemainingRets results, int64_t levels, std::string_view instruction_set,
                  ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> group_sizes,
                  ffi::Span<const int64_t> points, ffi::Span<const int64_t> outputs,
                  ffi::Span<const int64_t> stacked) {
  const Kernels* kernels = find_kernels(instruction_set);
  if (kernels == nullptr) {
    return invalid("this machine cannot run " + std::string(instruction_set));
  }
  Input input;
  if (auto error = read_input(x, input); error.failure()) return error;
  if (kinds.size() != results.size() || group_sizes.size() != kinds.size() ||
      points.size() != kinds.size() || outputs.size() != kinds.size() ||
      stacked.size() != kinds.size() || levels < 0 || levels > 127) {
    return invalid("attributes and results do not fit together");
  }
  std::vector<Product> products(kinds.size());
  int64_t first = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    const Description d{static_cast<Kind>(kinds[i]), group_sizes[i], static_cast<Points>(points[i]),
                        outputs[i], stacked[i] != 0};
    if (kinds[i] < 0 || d.kind > Kind::kBfloat12) return invalid("unknown kind of weight");
    if (points[i] < 0 || d.points > Points::kMinima) return invalid("unknown kind of points");
    if (levels != 0 && (!d.quantized() || d.kind == Kind::kNestedInt8)) {
      return invalid("integer products need a quantized weight of one plane");
    }
    Product& p = products[i];
    std::vector<Array> arrays;
    auto error = read_arrays(d, args, first, arrays);
    if (!error.failure()) error = read_weight(d, arrays, input.k, p.weight);
    if (error.failure()) return error;
    first += d.buffers();
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    if (shape_of(**y) != Shape{input.m, p.weight.n} || (*y)->element_type() != ffi::F32) {
      return invalid("a result does not fit: got " + text(shape_of(**y)));
    }
    p.y = static_cast<float*>((*y)->untyped_data());
    p.how = kernels->preparation(p.weight, input, static_cast<int>(levels));
  }
  if (first != static_cast<int64_t>(args.size())) return invalid("too many buffers");
  if (input.m > 0) multiply(pool, *kernels, input, products);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_matmul, specjax::matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("levels")
                                  .Attr<std::string_view>("instruction_set")
                                  .Attr<ffi::Span<const int64_t>>("kinds")
                                  .Attr<ffi::Span<const int64_t>>("group_sizes")
                                  .Attr<ffi::Span<const int64_t>>("points")
                                  .Attr<ffi::Span<const int64_t>>("outputs")
                                  .Attr<ffi::Span<const int64_t>>("stacked"));
