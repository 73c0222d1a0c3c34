// The XLA handler of `matmul`: checks every buffer, and multiplies.
#include <string>
#include <vector>

#include "common/handlers.h"
#include "common/isa.h"
#include "common/threads.h"
#include "matmul/products.h"
#include "matmul/weights.h"

namespace specjax {
namespace {

ffi::Error read_input(const ffi::AnyBuffer& x, Input& input) {
  const Shape dims = shape_of(x);
  const auto type = x.element_type();
  if (dims.size() != 2 || !is_float(type)) {
    return invalid("x must be a bfloat16 or float32 matrix, got " + text(dims));
  }
  input = {x.untyped_data(), type == ffi::BF16, dims[0], dims[1]};
  return ffi::Error::Success();
}

// Reads the number of a matrix in its stack.
ffi::Error read_number(const ffi::RemainingArgs& args, int64_t index, int64_t count,
                       int64_t& number) {
  auto buffer = args.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value()) return buffer.error();
  if (auto e = check("a matrix's number", *buffer, ffi::S32, {}); e.failure()) return e;
  number = *static_cast<const int32_t*>(buffer->untyped_data());
  if (number >= 0 && number < count) return ffi::Error::Success();
  return invalid("there is no matrix " + std::to_string(number) + " in a stack of " +
                 std::to_string(count));
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args,
                  ffi::RemainingRets results, std::string_view instruction_set,
                  ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> group_sizes,
                  ffi::Span<const int64_t> points, ffi::Span<const int64_t> outputs,
                  ffi::Span<const int64_t> stacked, ffi::Span<const int64_t> levels) {
  const Kernels* kernels = find_kernels(instruction_set);
  if (kernels == nullptr) {
    return invalid("this machine cannot run " + std::string(instruction_set));
  }
  Input input;
  if (auto error = read_input(x, input); error.failure()) return error;
  const Descriptions descriptions{kinds, group_sizes, points, outputs, stacked, levels};
  if (!descriptions.are(results.size())) {
    return invalid("attributes and results do not fit together");
  }
  std::vector<WeightProduct> products;
  int64_t first = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    Description d;
    Weights weights;
    int64_t number = 0;
    auto error = descriptions.read(i, d);
    if (!error.failure()) error = read_weights(d, args, first, input.k, weights);
    first += d.arrays();
    if (!error.failure() && d.stacked) error = read_number(args, first++, weights.count, number);
    if (error.failure()) return error;
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    if (shape_of(**y) != Shape{input.m, weights.first.n} || (*y)->element_type() != ffi::F32) {
      return invalid("a result does not fit: got " + text(shape_of(**y)));
    }
    const Weight weight = weights.at(number);
    products.push_back({weight, kernels->preparation(weight, input, static_cast<int>(levels[i])),
                        static_cast<float*>((*y)->untyped_data())});
  }
  if (first != static_cast<int64_t>(args.size())) return invalid("too many buffers");
  Team team(pool);
  if (input.m > 0) multiply(team, *kernels, input, products);
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
                                  .Attr<std::string_view>("instruction_set")
                                  .Attr<ffi::Span<const int64_t>>("kinds")
                                  .Attr<ffi::Span<const int64_t>>("group_sizes")
                                  .Attr<ffi::Span<const int64_t>>("points")
                                  .Attr<ffi::Span<const int64_t>>("outputs")
                                  .Attr<ffi::Span<const int64_t>>("stacked")
                                  .Attr<ffi::Span<const int64_t>>("levels"));
