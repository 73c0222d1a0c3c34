// The instruction sets that the library was built for, and which of them this machine has.
#pragma once

#include <string_view>
#include <vector>

#include "common/types.h"

namespace specjax {

// The kernels that this machine can run, best first. The last one, portable, runs everywhere.
const std::vector<const Kernels*>& available_kernels();

// The kernels of that name, the best ones for an empty name, or null.
const Kernels* find_kernels(std::string_view name);

}  // namespace specjax
