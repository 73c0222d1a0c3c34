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

// constexpr: a table that is computed when the library is loaded would run instructions that the
// machine may lack.
extern const Kernels kernels;
constexpr Kernels kernels = {
    .name = SPECJAX_NAME(SPECJAX_ISA),
#if defined(__AMX_INT8__)
    .preparation = preparation_for_tiles,
    .prepare_row = prepare_row,
    .multiply_columns = multiply_columns_by_tiles,
    .attention_sizes = attention_sizes_by_tiles,
    .attend_block = attend_block_where_tiles_serve,
#else
    .preparation = preparation,
    .prepare_row = prepare_row,
    .multiply_columns = multiply_columns,
    .attention_sizes = attention_sizes,
    .attend_block = attend_block,
#endif
    .clear_sums = clear_sums,
    .add_block = add_block,
    .write_result = write_result,
    .read = read_only,
#if defined(__AMX_INT8__)
    .multiply = multiply_only_by_tiles,
    .operations = kProbeCalls * kProbeOperations,
#else
    .multiply = multiply_only,
    .operations = kProbeOperations,
#endif
};

}  // namespace specjax::SPECJAX_ISA
