// The XLA handler of `layers`: checks every buffer, and runs the layers.
#include <cstring>
#include <string>
#include <vector>

#include "common/handlers.h"
#include "common/isa.h"
#include "common/threads.h"
#include "layers/pass.h"
#include "matmul/weights.h"

namespace specjax {
namespace {

// The attributes beside those of weights: what belongs to each layer that is run, and flags.
struct Options {
  ffi::Span<const int64_t> numbers, windows, sinks, biased;
  bool tree, head_norms;
};

// Reads buffer after buffer of the remaining ones.
class Reader {
 public:
  explicit Reader(const ffi::RemainingArgs& args) : args_(args) {}

  // Reads one of that type and shape.
  template <typename Element>
  ffi::Error read(const char* name, ffi::DataType type, const Shape& shape, const Element*& data) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_++);
    if (!buffer.has_value()) return buffer.error();
    data = static_cast<const Element*>(buffer->untyped_data());
    return check(name, *buffer, type, shape);
  }

  ffi::Error read(const char* name, int64_t layers, int64_t width, Norm& norm) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_++);
    if (!buffer.has_value()) return buffer.error();
    norm = {buffer->untyped_data(), buffer->element_type() == ffi::BF16, width};
    return check(name, *buffer, norm.bfloat16 ? ffi::BF16 : ffi::F32, {layers, width});
  }

  ffi::Error read_ancestors(Attention& a) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_++);
    if (!buffer.has_value()) return buffer.error();
    if (buffer->dimensions().size() > 0) a.depth = buffer->dimensions().back();
    a.ancestors = static_cast<const int32_t*>(buffer->untyped_data());
    return check("ancestors", *buffer, ffi::S32, {a.b, a.tokens, a.depth});
  }

  ffi::Error read(const Description& d, int64_t k, Weights& weights) {
    const int64_t first = next_;
    next_ += d.arrays();
    return read_weights(d, args_, first, k, weights);
  }

  bool ended() const { return next_ == static_cast<int64_t>(args_.size()); }

 private:
  const ffi::RemainingArgs& args_;
  int64_t next_ = 0;
};

// x: [B, T, D]. keys: [B, layers, S, K, E], or of more rows: x belongs to the first ones.
ffi::Error read_shapes(const ffi::AnyBuffer& x, const ffi::AnyBuffer& keys, Pass& p) {
  const auto dims = x.dimensions(), k = keys.dimensions();
  const auto type = x.element_type();
  if (dims.size() != 3 || !is_float(type)) {
    return invalid("x must be bfloat16 or float32 [B, T, D], got " + text(shape_of(x)));
  }
  p.bfloat16 = type == ffi::BF16;
  const auto cached = p.bfloat16 ? ffi::U16 : ffi::F32;
  if (k.size() != 5 || keys.element_type() != cached || k[0] < dims[0] || k[3] < 1 || k[4] < 2 ||
      k[4] % 2 != 0) {
    return invalid("keys must be [B, L, S, K, E] like x, got " + text(shape_of(keys)));
  }
  Attention& a = p.attention;
  a.b = dims[0], a.tokens = dims[1], p.d = dims[2], p.rows = a.b * a.tokens;
  a.layers = k[1], a.slots = k[2], a.kv_heads = k[3], a.e = k[4];
  a.queries_bfloat16 = p.bfloat16;
  a.cached = p.bfloat16 ? Cached::kBfloat16 : Cached::kFloat32;
  return ffi::Error::Success();
}

ffi::Error read_linears(const Descriptions& descriptions, const Options& options, Reader& reader,
                        Pass& p) {
  Attention& a = p.attention;
  for (int i = 0; i < kLinears; ++i) {
    Linear& linear = p.linears[i];
    Description d;
    auto error = descriptions.read(i, d);
    const int64_t k = i == kO ? a.heads * a.e : i == kDown ? p.f : p.d;
    if (!error.failure()) error = reader.read(d, k, linear.weights);
    if (error.failure()) return error;
    const int64_t n = linear.weights.first.n;
    if (i == kQ) a.heads = n / a.e, a.heads_per_kv = a.heads / a.kv_heads;
    if (i == kGate) p.f = n;
    const int64_t wanted = i == kQ                  ? a.heads_per_kv * a.kv_heads * a.e
                           : i == kK || i == kV     ? a.kv_heads * a.e
                           : i == kGate || i == kUp ? p.f
                                                    : p.d;
    if (n != wanted || n == 0 || !d.stacked || linear.weights.count != a.layers) {
      return invalid("linear layer " + std::to_string(i) + " does not fit the others");
    }
    linear.levels = static_cast<int>(descriptions.levels[i]);
    linear.bias = nullptr;
    if (!options.biased[i]) continue;
    if (auto e = reader.read("a bias", ffi::F32, {a.layers, n}, linear.bias); e.failure()) return e;
  }
  return ffi::Error::Success();
}

ffi::Error read_call(const Descriptions& descriptions, const Options& options,
                     const ffi::RemainingArgs& args, Pass& p) {
  Attention& a = p.attention;
  Reader reader(args);
  const Shape angles{a.b, a.tokens, a.e / 2};
  if (options.tree) {
    if (auto e = reader.read_ancestors(a); e.failure()) return e;
  }
  for (auto error :
       {reader.read("lengths", ffi::S32, {a.b}, a.lengths),
        reader.read("positions", ffi::S32, {a.b, a.tokens}, a.positions),
        reader.read("cos", ffi::F32, angles, p.cos), reader.read("sin", ffi::F32, angles, p.sin),
        reader.read("attention_norm", a.layers, p.d, p.attention_norm),
        reader.read("mlp_norm", a.layers, p.d, p.mlp_norm)}) {
    if (error.failure()) return error;
  }
  if (options.head_norms) {
    for (auto error : {reader.read("q_norm", a.layers, a.e, p.q_norm),
                       reader.read("k_norm", a.layers, a.e, p.k_norm)}) {
      if (error.failure()) return error;
    }
  }
  if (auto e = read_linears(descriptions, options, reader, p); e.failure()) return e;
  return reader.ended() ? ffi::Error::Success() : invalid("too many buffers");
}

ffi::Error read_calls(const Options& options, const Attention& a, std::vector<LayerCall>& calls) {
  const size_t count = options.numbers.size();
  if (options.windows.size() != count || options.sinks.size() != count) {
    return invalid("numbers, windows and sinks must be of one length");
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t number = options.numbers[i], sinks = options.sinks[i];
    if (number < 0 || number >= a.layers) {
      return invalid("there is no layer " + std::to_string(number));
    }
    if (sinks < 0 || sinks > kMostSinks) {
      return invalid("sinks must be in 0 … " + std::to_string(kMostSinks));
    }
    calls.push_back({number, options.windows[i], sinks});
  }
  return ffi::Error::Success();
}

// The results are x after the layers, and the cache with the new entries.
ffi::Error layers(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y,
                  ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                  std::string_view instruction_set, ffi::Span<const int64_t> kinds,
                  ffi::Span<const int64_t> group_sizes, ffi::Span<const int64_t> points,
                  ffi::Span<const int64_t> outputs, ffi::Span<const int64_t> stacked,
                  ffi::Span<const int64_t> levels, ffi::Span<const int64_t> biased,
                  ffi::Span<const int64_t> numbers, ffi::Span<const int64_t> windows,
                  ffi::Span<const int64_t> sinks, bool tree, bool head_norms, float eps,
                  float scale) {
  Pass p{};
  p.kernels = find_kernels(instruction_set);
  if (p.kernels == nullptr) {
    return invalid("this machine cannot run " + std::string(instruction_set));
  }
  const Descriptions descriptions{kinds, group_sizes, points, outputs, stacked, levels};
  std::vector<LayerCall> calls;
  const Options options{numbers, windows, sinks, biased, tree, head_norms};
  if (!descriptions.are(kLinears) || biased.size() != kLinears) {
    return invalid("attributes must describe seven linear layers");
  }
  if (auto error = read_shapes(x, keys, p); error.failure()) return error;
  for (auto error :
       {check("values", values, keys.element_type(), shape_of(keys)),
        check("the result", *y, x.element_type(), shape_of(x)),
        check("the new keys", *new_keys, keys.element_type(), shape_of(keys)),
        check("the new values", *new_values, keys.element_type(), shape_of(keys)),
        read_call(descriptions, options, args, p), read_calls(options, p.attention, calls)}) {
    if (error.failure()) return error;
  }
  p.eps = eps, p.attention.scale = scale;
  const auto begin = [](const ffi::AnyBuffer& from, ffi::AnyBuffer& to) {
    void* const data = to.untyped_data();
    if (data != from.untyped_data()) std::memcpy(data, from.untyped_data(), from.size_bytes());
    return data;
  };
  p.x = begin(x, *y), p.keys = begin(keys, *new_keys), p.values = begin(values, *new_values);
  p.attention.keys.data = p.keys, p.attention.values.data = p.values;
  run_layers(pool, p, calls);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_layers, specjax::layers,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // keys
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("instruction_set")
                                  .Attr<ffi::Span<const int64_t>>("kinds")
                                  .Attr<ffi::Span<const int64_t>>("group_sizes")
                                  .Attr<ffi::Span<const int64_t>>("points")
                                  .Attr<ffi::Span<const int64_t>>("outputs")
                                  .Attr<ffi::Span<const int64_t>>("stacked")
                                  .Attr<ffi::Span<const int64_t>>("levels")
                                  .Attr<ffi::Span<const int64_t>>("biased")
                                  .Attr<ffi::Span<const int64_t>>("numbers")
                                  .Attr<ffi::Span<const int64_t>>("windows")
                                  .Attr<ffi::Span<const int64_t>>("sinks")
                                  .Attr<bool>("tree")
                                  .Attr<bool>("head_norms")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale"));
