// Measures the peak rates of this machine, which benchmarks compare with. The threads and the
// vectors are those of the kernels.
#include <atomic>
#include <chrono>

#include "common/isa.h"
#include "common/threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specjax {
namespace {

// Calls work(i) for 0 <= i < count on all threads, and writes the seconds that this took.
template <typename Work>
void measure(ffi::ThreadPool& pool, int64_t count, float* seconds, const Work& work) {
  Team team(pool);
  const auto start = std::chrono::steady_clock::now();
  team.for_each(count, work);
  const std::chrono::duration<float> passed = std::chrono::steady_clock::now() - start;
  *seconds = passed.count();
}

ffi::Error read(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> data,
                ffi::ResultBufferR0<ffi::F32> seconds) {
  constexpr int64_t kReadBytes = 1 << 18;
  const Kernels& kernels = *find_kernels("");
  std::atomic<uint32_t> sink{0};
  const auto size = static_cast<int64_t>(data.element_count());
  measure(pool, size / kReadBytes, seconds->typed_data(),
          [&](int64_t i) { sink += kernels.read(data.typed_data() + i * kReadBytes, kReadBytes); });
  return ffi::Error::Success();
}

// operations: how many were measured. A product and an addition count as two.
ffi::Error multiply(ffi::ThreadPool pool, ffi::ResultBufferR0<ffi::F32> seconds,
                    ffi::ResultBufferR0<ffi::F32> operations, int64_t arithmetic, int64_t count) {
  const Kernels& kernels = *find_kernels("");
  if (arithmetic < 0 || arithmetic > 2) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "unknown arithmetic");
  }
  const auto kind = static_cast<Arithmetic>(arithmetic);
  std::atomic<uint32_t> sink{0};
  measure(pool, count, seconds->typed_data(), [&](int64_t) { sink += kernels.multiply(kind); });
  const int64_t per_word = kind == Arithmetic::kInteger ? 4 : kind == Arithmetic::kBfloat16 ? 2 : 1;
  *operations->typed_data() = static_cast<float>(per_word * count * kernels.operations);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_probe_read, specjax::read,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::BufferR0<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_probe_multiply, specjax::multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Ret<ffi::BufferR0<ffi::F32>>()
                                  .Ret<ffi::BufferR0<ffi::F32>>()
                                  .Attr<int64_t>("arithmetic")
                                  .Attr<int64_t>("count"));
