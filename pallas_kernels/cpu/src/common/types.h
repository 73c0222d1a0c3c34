// The types that the XLA handlers and the kernels of every instruction set share.
//
// The words for sizes and for pieces of a matrix. A product is y[M, N] = x[M, K] · weight[N, K]ᵀ.
//
//   row       of x (M of them) or of a weight (N); in attention, one query of a task
//   output    a column of y: one of N
//   input     one of K
//   group     the inputs that share a scale and a zero or minimum; a weight has [N, groups] of them
//
//   word      4 bytes of a row: 4 int8, 2 bfloat16 or 1 float32
//   lane      one word of a vector register
//   vector    kLanes words, one of each of kLanes neighbouring outputs
//   line      64 bytes of memory
//   square    kLanes words of kLanes rows, transposed in registers
//   tile      at most 16 rows of 16 words, as a tile register holds it. An interleaved weight is
//             stored 16 rows at a time: [N / kTileRows, words of a row, kTileRows]
//   piece     kPaletteInputs inputs of a tile, which share a palette (bfloat12.h)
//
//   portion   rows of x that are multiplied at once: kRows by panels, kFewRows as few rows,
//             kTileRows by tiles
//   sweep     portions that share one decoding of the weight
//   panel     kColumns outputs that are decoded together, [kColumns, K]
//   share     the outputs that a thread takes at once: a panel, or a few tiles
//
//   slice     the inputs of one iteration of an inner loop: 32 of a run; for tiles `depth` words of
//             every run
//   segment   the inputs of one run and one group: their sum is scaled
//   run       kRun inputs of one plane
//   chunk     two runs: what is decoded at once
//   plane     kPlane inputs whose 4-bit codes are the low, or the high, nibbles of kPlane bytes
//
//   slot      one entry of a cache, of one key-value head
//   strip     kStrip slots: what is decoded at once
//   block     kAttentionBlock slots: one update of the running softmax
//   span      consecutive slots of a block
//   task      the queries of some tokens that share a key-value head
//   step      one task over one block
//   pair      two features of a slot, or one feature of two slots: a word of bfloat16
//
// Work is dealt to threads in ranges (threads.h).
#pragma once

#include <cstdint>

namespace specjax {

// Numbered as WEIGHT_KINDS in native.py.
enum class Kind : int64_t {
  kInt4 = 0,
  kMxfp4 = 1,
  kNestedInt8 = 2,
  kInt8 = 3,
  kBfloat16 = 4,
  kFloat32 = 5,
  kBfloat12 = 6
};

// Whether the low and the high nibbles of a weight's bytes belong to inputs that are a plane apart.
constexpr bool in_nibbles(Kind kind) { return kind <= Kind::kNestedInt8; }

constexpr bool has_4_bits(Kind kind) { return kind == Kind::kInt4 || kind == Kind::kMxfp4; }

enum class Scale : int64_t { kBfloat16, kFloat16, kFloat32, kE8m0 };

inline constexpr int64_t kPlane = 128;
inline constexpr int64_t kPlanePair = 2 * kPlane;  // inputs that are packed into the same bytes
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kPalette = 16, kPaletteInputs = 256;  // of bfloat12.h

// A matrix [N, K] as pallas_kernels/formats.py describes it. `inputs` is K with its padding.
struct Weight {
  Kind kind;
  // False: stored row by row. True: words of kTileRows rows stand side by side, [n / kTileRows,
  // row_bytes / 4, kTileRows, 4 bytes]; scales, zeros and minima are [n / kTileRows, groups,
  // kTileRows].
  bool interleaved;
  int64_t n, inputs, row_bytes;
  const uint8_t* data;
  const uint8_t* rest;  // of kNestedInt8: the low nibbles of its integers, stored like `data`
  // Quantized kinds have these, [n, groups] with groups = inputs / group_size:
  int64_t group_size, groups;
  Scale scale;
  const void* scales;
  const int8_t* zeros;  // or null
  const void* minima;   // of the scales' type, or null; never with zeros
  // Only kBfloat12 has these, as pallas_kernels/bfloat12.py describes them: [tiles, pieces,
  // kPalette], [tiles, escapes_per_tile].
  const uint8_t* palettes;
  const uint32_t* escapes;
  int64_t escapes_per_tile;

  // Always inlined: a copy compiled for one instruction set must not serve the others.
  __attribute__((always_inline)) bool quantized() const { return kind <= Kind::kInt8; }
  __attribute__((always_inline)) bool nibbles() const { return in_nibbles(kind); }
  // Values are bfloat16.
  __attribute__((always_inline)) bool halves() const {
    return kind == Kind::kBfloat16 || kind == Kind::kBfloat12;
  }
  // Points are zeros or minima.
  __attribute__((always_inline)) bool has_points() const {
    return zeros != nullptr || minima != nullptr;
  }
};

// What is multiplied: words of four int8, of two bfloat16, or of one float32. kInteger16: words of
// four int8 by integers of 16 bits, four in two words of x.
enum class Arithmetic { kInteger, kBfloat16, kFloat32, kInteger16 };

constexpr bool is_integer(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kInteger || arithmetic == Arithmetic::kInteger16;
}

// Words of a row of x that hold `inputs` inputs.
constexpr int64_t words_of(Arithmetic arithmetic, int64_t inputs) {
  return arithmetic == Arithmetic::kInteger   ? inputs / 4
         : arithmetic == Arithmetic::kFloat32 ? inputs
                                              : inputs / 2;
}

// Which kernels multiply: those of panels, of a few rows (few_rows.h) or of tiles.
enum class Way { kPanels, kFewRows, kTiles };

// How x is prepared. Weights whose preparations are equal share one prepared x.
struct Preparation {
  Arithmetic arithmetic;
  Way way;
  int64_t k;           // inputs of x
  int64_t inputs;      // those padded with zeros
  int64_t group_size;  // inputs per scale of integers, or of floats that are rounded to them; or 0
  int64_t sum_size;    // inputs per sum of x, or 0 for no sums
  int levels;          // for kInteger: the largest magnitude
  bool swap_pairs;     // for bfloat16: inputs 4i … 4i + 3 in the order 0, 2, 1, 3
  int64_t rows;        // M; for tiles, rounded up to whole portions
  int64_t portion;     // rows of one portion; for panels 0
  int64_t depth;       // words of a row in one slice, a power of two; for panels 0
  int64_t columns;     // outputs of a share, which a thread multiplies at a time

  bool operator==(const Preparation& other) const = default;
};

// x: f32 or bf16[M, K].
struct Input {
  const void* data;
  bool bfloat16;
  int64_t m, k;
};

// x as the kernels read it:
//   words:  for panels [rows, words of a row]; for tiles [words of a row / depth, rows, depth]; for
//           few rows the same for every portion
//   scales: f32[inputs / group_size, rows], of integers only
//   sums:   i32 or f32[inputs / sum_size, rows], of the values in `words`
struct Prepared {
  uint32_t* words;
  float* scales;
  void* sums;
};

inline constexpr int64_t kAttentionBlock = 256;
inline constexpr int64_t kMostSinks = 64;

// How a cache holds its entries (pallas_kernels/cache_entries.py).
enum class Cached { kFloat32, kBfloat16, kCodes8, kCodes4 };

// Keys or values [b, layers, slots, kv_heads, e]. Codes have scales and zeros [b, layers, slots,
// kv_heads].
struct Cache {
  const void* data;
  const float* scales;
  const uint8_t* zeros;
};

// One call of attention (pallas_kernels/attention.py). Every buffer is row-major.
struct Attention {
  const void* queries;  // [b, tokens, heads, e]
  Cache keys, values;
  bool queries_bfloat16;
  Cached cached;
  const int32_t *lengths, *positions;  // [b], [b, tokens]
  // For a tree [b, tokens, depth]: the new tokens on the path to a token, then -1. Null for a
  // chain, where each token sees those before it.
  const int32_t* ancestors;
  int64_t b, tokens, depth, heads, e, layers, slots, kv_heads;
  int64_t layer;         // which of the cache's layers is read
  int64_t heads_per_kv;  // heads / kv_heads
  bool windowed;
  int64_t window;
  int64_t sinks;  // positions that every token sees, whatever the window: at most kMostSinks
  float scale;    // of scores, which are exponents of 2
  float* out;     // [b, tokens, heads, e]

  // The number of a batch row's first slot among all slots of the cache. Always inlined, as above.
  __attribute__((always_inline)) int64_t first_slot(int64_t batch_row) const {
    return (batch_row * layers + layer) * slots;
  }
};

// The queries of `tokens` tokens from `token` on, of all heads that share the key-value head
// `head`. They see no slots but first … last - 1, and the first `sinks`. In a tree, the new tokens
// of a path count as if they lay in consecutive slots (BlockWeights in attention.h).
struct AttentionTask {
  int64_t batch_row, head, token, tokens, first, last, sinks;

  // Its blocks: of the sinks, if these lie before the others, and of first … last - 1. Always
  // inlined, as above.
  __attribute__((always_inline)) bool sinks_apart() const {
    return sinks > 0 && first >= kAttentionBlock;
  }
  __attribute__((always_inline)) int64_t blocks() const {
    const int64_t end = (last + kAttentionBlock - 1) / kAttentionBlock;
    return end - first / kAttentionBlock + sinks_apart();
  }
  // The number of the block that comes as number `i` of them.
  __attribute__((always_inline)) int64_t block(int64_t i) const {
    return sinks_apart() ? (i == 0 ? 0 : first / kAttentionBlock + i - 1)
                         : first / kAttentionBlock + i;
  }
  // The end of a block's slots that are visited.
  __attribute__((always_inline)) int64_t end(int64_t block) const {
    const int64_t stop = block == 0 && sinks_apart() ? kMostSinks : (block + 1) * kAttentionBlock;
    return last < stop ? last : stop;
  }
};

struct AttentionStep {
  const AttentionTask* task;
  int64_t block;  // its number
};

// A thread's next step, and its step of the same head in the next block of which it reads all
// heads. Each may be null.
struct AttentionAhead {
  const AttentionStep *next, *later;
};

// Floats of a thread's scratch and of a task's sums.
struct AttentionSizes {
  int64_t scratch, sums;
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  // How x must be prepared for `weight`. levels: 0 for activations that are not quantized.
  Preparation (*preparation)(const Weight& weight, const Input& x, int levels);
  // values: scratch, 2 · how.inputs floats.
  void (*prepare_row)(const Preparation& how, const Input&, int64_t row, float* values,
                      const Prepared&);
  // Writes how.columns outputs from `column` on. y: f32[M, N].
  void (*multiply_columns)(const Weight&, const Preparation& how, const Prepared&, int64_t m,
                           int64_t column, float* y);
  AttentionSizes (*attention_sizes)(const Attention&, int64_t tokens);
  // Writes the sums of one step.
  void (*attend_block)(const Attention&, const AttentionStep&, const AttentionAhead&,
                       float* scratch, float* sums);
  void (*clear_sums)(const Attention&, int64_t tokens, float* sums);
  // Adds the sums of the next block to those of the blocks before it.
  void (*add_block)(const Attention&, int64_t tokens, const float* next, float* into);
  void (*write_result)(const Attention&, const AttentionTask&, const float* sums);
  // For measurements (probe.h). The result only keeps the compiler from skipping the work.
  uint32_t (*read)(const uint8_t* data, int64_t size);
  uint32_t (*multiply)(Arithmetic);
  // Operations of one call of `multiply` for kFloat32. kBfloat16 has twice as many, kInteger four
  // times as many.
  int64_t operations;
};

}  // namespace specjax
