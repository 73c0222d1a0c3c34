// All kernels, for the instruction set that SPECJAX_ISA names and the compiler's flags allow.
#include "matmul/activations.h"
#include "attention/attention.h"
#include "matmul/matmul.h"
#include "common/probe.h"
#if defined(__AMX_INT8__)
#include "common/amx.h"
#include "attention/attention_tiles.h"
#endif

namespace specjax::SPECJAX_ISA {

#define SPECJAX_STRING(name) #name
#define SPECJAX_NAME(name) SPECJAX_STRING(name)

extern const Kernels kernels;
// constexpr: what is computed when the library is loaded would run on machines that lack the
// instructions.
#if defined(__AMX_INT8__)
constexpr Kernels kernels = {SPECJAX_NAME(SPECJAX_ISA), kColumns, preparation_for_tiles, prepare_row,
                             multiply_panel_by_tiles, attention_sizes_by_tiles,
                             attend_block_where_tiles_serve, clear_sums, add_block, write_result,
                             read_only, multiply_only_by_tiles, kProbeCalls * kProbeOperations};
#else
constexpr Kernels kernels = {SPECJAX_NAME(SPECJAX_ISA), kColumns, preparation, prepare_row,
                             multiply_panel, attention_sizes, attend_block, clear_sums, add_block,
                             write_result, read_only, multiply_only, kProbeOperations};
#endif

}  // namespace specjax::SPECJAX_ISA
