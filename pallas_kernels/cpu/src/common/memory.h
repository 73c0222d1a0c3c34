// Memory that a thread keeps from call to call, unless it is large.
#pragma once

#include <cstdint>
#include <vector>

namespace specjax {

class Memory {
 public:
  // At least `floats` floats, aligned to a line, with the contents that earlier calls left.
  float* reserve(int64_t floats) {
    if (memory_.size() < static_cast<size_t>(floats + kSlack)) memory_.resize(floats + kSlack);
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - start % 64) % 64 / sizeof(float);
  }

 private:
  static constexpr int64_t kSlack = 16;
  std::vector<float> memory_;
};

// Memory of one call: what the thread keeps, or its own where much is needed.
class CallMemory {
 public:
  explicit CallMemory(Memory& kept) : kept_(kept) {}

  float* reserve(int64_t floats) { return (floats <= kMostKept ? kept_ : own_).reserve(floats); }

 private:
  static constexpr int64_t kMostKept = 1 << 22;
  Memory& kept_;
  Memory own_;
};

}  // namespace specjax
