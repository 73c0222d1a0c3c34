#include "common/isa.h"

#include <cstdlib>
#include <string>

namespace specjax {
// Only those exist that the compiler supports (CMakeLists.txt).
#define SPECJAX_DECLARE(isa)    \
  namespace isa {               \
  extern const Kernels kernels; \
  }
SPECJAX_DECLARE(avx512_amx)
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
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace specjax {
namespace {

#if defined(__x86_64__)
// The compiler may use all of these for AVX2 and AVX-512 (CMakeLists.txt).
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Whether the processor has tile products, the system saves tiles, and this process may use them.
bool has_amx() {
  if (!has_avx512_bf16()) return false;
  // tests/kernels/test_amx.py sets this and runs an emulator. Without one, tile products would
  // fault.
  if (std::getenv("SPECJAX_AMX_EMULATED") != nullptr) return true;
#if defined(__linux__)
  constexpr unsigned kFeatures = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr unsigned kTileState = 3u << 17;                       // shapes and contents
  constexpr int kRequestPermission = 0x1023, kTileContents = 18;  // of arch_prctl
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kFeatures) != kFeatures) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileState) != kTileState) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileContents) == 0;
#else
  return false;
#endif
}

// Read from cpuid (leaf 7, subleaf 1), because older compilers have no name for it.
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
#if defined(SPECJAX_BUILT_avx512_amx)
  if (has_amx()) found.push_back(&avx512_amx::kernels);
#endif
#if defined(SPECJAX_BUILT_avx512_bf16)
  if (has_avx512_bf16()) found.push_back(&avx512_bf16::kernels);
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

#ifndef SPECJAX_SOURCES
#define SPECJAX_SOURCES ""
#endif

// The digest of the sources that this library was built from (../../sources.py).
extern "C" const char* specjax_sources() { return SPECJAX_SOURCES; }

// Names of the instruction sets this machine can run, one per line, best first.
extern "C" const char* specjax_instruction_sets() {
  static const std::string names = [] {
    std::string lines;
    for (const auto* kernels : specjax::available_kernels()) {
      lines.append(kernels->name).append("\n");
    }
    return lines;
  }();
  return names.c_str();
}
