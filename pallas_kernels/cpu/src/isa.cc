#include "isa.h"

#include <string>

namespace specjax {
// Not all are there: only those that the compiler knew (CMakeLists.txt).
#define SPECJAX_DECLARE(isa)    \
  namespace isa {               \
  extern const Kernels kernels; \
  }
SPECJAX_DECLARE(avx512_bf16)
SPECJAX_DECLARE(avx512_vnni)
SPECJAX_DECLARE(avx2_vnni)
SPECJAX_DECLARE(avx2)
SPECJAX_DECLARE(neon_i8mm)
SPECJAX_DECLARE(neon_dotprod)
SPECJAX_DECLARE(portable)
}  // namespace specjax

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace specjax {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Leaf 7, subleaf 1 of cpuid: compilers learned its name late.
bool has_avx2_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#elif defined(__aarch64__) && defined(__linux__)
bool has_neon_i8mm() { return getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
bool has_neon_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
#elif defined(__aarch64__)
bool has_neon_i8mm() { return false; }
bool has_neon_dotprod() { return true; }  // every Arm machine that runs macOS
#endif

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found;
#if defined(SPECJAX_BUILT_avx512_bf16)
  if (has_avx512() && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16::kernels);
#endif
#if defined(SPECJAX_BUILT_avx512_vnni)
  if (has_avx512()) found.push_back(&avx512_vnni::kernels);
#endif
#if defined(SPECJAX_BUILT_avx2_vnni)
  if (has_avx2() && has_avx2_vnni()) found.push_back(&avx2_vnni::kernels);
#endif
#if defined(SPECJAX_BUILT_avx2)
  if (has_avx2()) found.push_back(&avx2::kernels);
#endif
#if defined(SPECJAX_BUILT_neon_i8mm)
  if (has_neon_i8mm()) found.push_back(&neon_i8mm::kernels);
#endif
#if defined(SPECJAX_BUILT_neon_dotprod)
  if (has_neon_dotprod()) found.push_back(&neon_dotprod::kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

}  // namespace

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> found = detect();
  return found;
}

const Kernels* find_kernels(std::string_view name) {
  for (const Kernels* kernels : available_kernels()) {
    if (name.empty() || name == kernels->name) return kernels;
  }
  return nullptr;
}

}  // namespace specjax

// Names of the instruction sets this machine can run, one per line, best first.
extern "C" const char* specjax_instruction_sets() {
  static const std::string names = [] {
    std::string lines;
    for (const auto* kernels : specjax::available_kernels()) lines.append(kernels->name).append("\n");
    return lines;
  }();
  return names.c_str();
}
