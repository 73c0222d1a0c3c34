// Memory that a thread keeps from call to call.
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

}  // namespace specjax
