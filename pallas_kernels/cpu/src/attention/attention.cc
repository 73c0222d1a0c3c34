// The XLA handler of `attention`: checks every buffer, and attends.
#include <algorithm>
#include <string>

#include "attention/attend.h"
#include "common/handlers.h"
#include "common/isa.h"
#include "common/threads.h"
#include "common/types.h"

namespace specjax {
namespace {

// The cache may have more rows than the queries, which belong to the first ones.
ffi::Error read_shapes(const ffi::AnyBuffer& queries, const ffi::AnyBuffer& keys, Attention& a) {
  const auto q = queries.dimensions(), k = keys.dimensions();
  const auto type = queries.element_type(), cache = keys.element_type();
  if (q.size() != 4 || !is_float(type)) {
    return invalid("queries must be bfloat16 or float32 [B, T, H, E], got " +
                   text(shape_of(queries)));
  }
  if (k.size() != 5 || (cache != ffi::F32 && cache != ffi::U16 && cache != ffi::U8)) {
    return invalid("keys must be float32, uint16 or uint8 [B, L, S, K, E], got " +
                   text(shape_of(keys)));
  }
  a.b = q[0], a.tokens = q[1], a.heads = q[2], a.e = q[3];
  a.layers = k[1], a.slots = k[2], a.kv_heads = k[3];
  const bool nibbles = cache == ffi::U8 && 2 * k[4] == a.e;
  if (k[0] < a.b || (k[4] != a.e && !nibbles) || a.kv_heads < 1 || a.heads % a.kv_heads != 0) {
    return invalid("keys " + text(shape_of(keys)) + " do not fit queries " +
                   text(shape_of(queries)));
  }
  a.heads_per_kv = a.heads / a.kv_heads;
  a.queries_bfloat16 = type == ffi::BF16;
  a.cached = cache == ffi::F32   ? Cached::kFloat32
             : cache == ffi::U16 ? Cached::kBfloat16
             : nibbles           ? Cached::kCodes4
                                 : Cached::kCodes8;
  return ffi::Error::Success();
}

// Reads the scales and zeros of keys and values if the cache, of `rows` rows, holds codes, then the
// ancestors if there is a tree.
ffi::Error read_others(const ffi::RemainingArgs& others, int64_t rows, Attention& a) {
  const size_t grids = a.cached >= Cached::kCodes8 ? 4 : 0;
  if (others.size() < grids || others.size() > grids + 1) {
    return invalid("the number of buffers does not fit the cache's type");
  }
  const void* data[5] = {};
  const Shape grid{rows, a.layers, a.slots, a.kv_heads};
  for (size_t i = 0; i < others.size(); ++i) {
    auto buffer = others.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    if (i == grids && buffer->dimensions().size() > 0) a.depth = buffer->dimensions().back();
    const auto error = i == grids ? check("ancestors", *buffer, ffi::S32, {a.b, a.tokens, a.depth})
                       : i % 2 == 0 ? check("scales", *buffer, ffi::F32, grid)
                                    : check("zeros", *buffer, ffi::U8, grid);
    if (error.failure()) return error;
    data[i] = buffer->untyped_data();
  }
  a.ancestors = static_cast<const int32_t*>(data[grids]);
  if (grids == 0) return ffi::Error::Success();
  a.keys.scales = static_cast<const float*>(data[0]);
  a.keys.zeros = static_cast<const uint8_t*>(data[1]);
  a.values.scales = static_cast<const float*>(data[2]);
  a.values.zeros = static_cast<const uint8_t*>(data[3]);
  return ffi::Error::Success();
}

// window: negative for none.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::AnyBuffer lengths, ffi::AnyBuffer positions,
                     ffi::AnyBuffer layer, ffi::RemainingArgs others,
                     ffi::Result<ffi::AnyBuffer> result, int64_t window, int64_t sinks, float scale,
                     std::string_view instruction_set) {
  const Kernels* kernels = find_kernels(instruction_set);
  if (kernels == nullptr) {
    return invalid("this machine cannot run " + std::string(instruction_set));
  }
  Attention a{};
  if (auto error = read_shapes(queries, keys, a); error.failure()) return error;
  for (auto error : {check("values", values, keys.element_type(), shape_of(keys)),
                     check("lengths", lengths, ffi::S32, {a.b}),
                     check("positions", positions, ffi::S32, {a.b, a.tokens}),
                     check("layer", layer, ffi::S32, {}),
                     check("the result", *result, ffi::F32, shape_of(queries)),
                     read_others(others, keys.dimensions()[0], a)}) {
    if (error.failure()) return error;
  }
  if (sinks < 0 || sinks > kMostSinks) {
    return invalid("sinks must be in 0 … " + std::to_string(kMostSinks) + ", got " +
                   std::to_string(sinks));
  }
  a.layer = *static_cast<const int32_t*>(layer.untyped_data());
  if (a.layer < 0 || a.layer >= a.layers) {
    return invalid("layer must be in 0 … " + std::to_string(a.layers - 1) + ", got " +
                   std::to_string(a.layer));
  }
  a.queries = queries.untyped_data();
  a.keys.data = keys.untyped_data(), a.values.data = values.untyped_data();
  a.lengths = static_cast<const int32_t*>(lengths.untyped_data());
  a.positions = static_cast<const int32_t*>(positions.untyped_data());
  a.scale = scale;
  see(a, window, sinks);
  a.out = static_cast<float*>(result->untyped_data());
  Team team(pool);
  if (a.b * a.tokens * a.heads * a.e > 0) attend(team, *kernels, a);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, specjax::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // queries
                                  .Arg<ffi::AnyBuffer>()  // keys
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // lengths
                                  .Arg<ffi::AnyBuffer>()  // positions
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<float>("scale")
                                  .Attr<std::string_view>("instruction_set"));
