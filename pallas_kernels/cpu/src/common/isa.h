// The instruction sets that the library was built for, and which of them this machine has.
#pragma once

#include <string_view>
#include <vector>

#include "common/types.h"

namespace specjax {

// Best first; only those that this machine can run. The last, portable, always can.
const std::vector<const Kernels*>& available_kernels();

// The one of that name, the best for an empty name, or null.
const Kernels* find_kernels(std::string_view name);

}  // namespace specjax
