// Divides the queries of one call of attention into tasks, and deals tasks or their steps out to
// threads.
#pragma once

#include "common/threads.h"
#include "common/types.h"

namespace specjax {

// Sets what tokens see: `window` positions back, or all if that is negative, and the first `sinks`.
void see(Attention& a, int64_t window, int64_t sinks);

void attend(Team& team, const Kernels& kernels, const Attention& a);

}  // namespace specjax
