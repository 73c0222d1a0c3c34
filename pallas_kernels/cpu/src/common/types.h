// What the XLA handlers and the kernels of every instruction set say to each other.
#pragma once

#include <cstdint>

namespace specjax {

// The numbers of WEIGHT_KINDS in native.py.
enum class Kind : int64_t { kInt4 = 0, kMxfp4 = 1, kInt8 = 2, kBfloat16 = 3, kFloat32 = 4 };
enum class Scale : int64_t { kBfloat16, kFloat16, kFloat32, kE8m0 };

inline constexpr int64_t kPlane = 128;         // inputs per nibble plane
inline constexpr int64_t kBlock = 2 * kPlane;  // inputs per packed block
inline constexpr int64_t kTile = 16;           // rows that are interleaved

// A matrix [n, k] as pallas_kernels/formats.py describes it; `inputs` is k with its padding.
struct Weight {
  Kind kind;
  // Row by row; or words of kTile rows side by side, [n / kTile, row_bytes / 4, kTile, 4 bytes],
  // and so the scales and zeros: [n / kTile, groups, kTile].
  bool interleaved;
  int64_t n, inputs, row_bytes;
  const uint8_t* data;
  // Of quantized kinds: [n, groups]; inputs / group_size groups.
  int64_t group_size, groups;
  Scale scale;
  const void* scales;
  const int8_t* zeros;  // or null

  // Always inlined: a copy compiled for one instruction set must not serve the others.
  __attribute__((always_inline)) bool quantized() const { return kind <= Kind::kInt8; }
  __attribute__((always_inline)) bool nibbles() const { return kind <= Kind::kMxfp4; }
};

// The form in which x meets a weight: words of four int8, of two bfloat16, or of one float32.
enum class Arithmetic { kInteger, kBfloat16, kFloat32 };

// Everything that the preparation of x depends on.
struct Preparation {
  Arithmetic arithmetic;
  int64_t inputs;      // padded with zeros
  int64_t group_size;  // of integers: inputs per scale
  int64_t sum_size;    // inputs per sum, or 0 where none is wanted
  int levels;          // of integers: the largest magnitude
  bool swap_pairs;     // of bfloat16: inputs 4i … 4i + 3 in the order 0, 2, 1, 3
  int64_t rows;        // of x; for tiles rounded up to whole portions
  int64_t portion;     // for tiles: rows of x in one
  int64_t depth;       // for tiles: words of inputs in one, a power of two; 0: rows stay whole

  bool operator==(const Preparation& other) const {
    return arithmetic == other.arithmetic && inputs == other.inputs &&
           group_size == other.group_size && sum_size == other.sum_size &&
           levels == other.levels &&
           swap_pairs == other.swap_pairs && rows == other.rows && depth == other.depth;
  }
};

// x: f32 or bf16[m, k].
struct Input {
  const void* data;
  bool bfloat16;
  int64_t m, k;
};

// x prepared. words: [rows, inputs / inputs per word], or for tiles [words of a row / depth, rows,
// depth]; scales: f32[m, inputs / group_size]; sums of the values in `words`: i32 or f32[m, inputs /
// sum_size]. For tiles scales and sums are transposed: [inputs / …, rows].
struct Prepared {
  uint32_t* words;
  float* scales;
  void* sums;
};

inline constexpr int64_t kAttentionBlock = 256;  // cache slots per step of the running softmax

// How a cache holds its entries (pallas_kernels/cache_entries.py).
enum class Cached { kFloat32, kBfloat16, kCodes8, kCodes4 };

// Keys or values, [b, slots, kv_heads, e]; of codes, a scale and a zero per head: [b, slots,
// kv_heads].
struct Cache {
  const void* data;
  const float* scales;
  const uint8_t* zeros;
};

// One call of attention (pallas_kernels/attention.py), every buffer row-major.
struct Attention {
  const void* queries;  // [b, tokens, heads, e]
  Cache keys, values;
  bool queries_bfloat16;
  Cached cached;
  const int32_t *lengths, *positions;  // [b], [b, tokens]
  // Of a tree: [b, tokens, depth], the new tokens on the path to a token, -1 where it has ended. Of
  // a chain null: each token sees those before it.
  const int32_t* ancestors;
  int64_t b, tokens, depth, heads, e, slots, kv_heads;
  int64_t group;  // heads / kv_heads
  bool windowed;
  int64_t window;
  float scale;  // on scores, which are exponents of 2
  float* out;   // [b, tokens, heads, e]
};

// The queries of `tokens` tokens from `token` on, of all heads that share the key-value head
// `head`. Of the row's slots, only first … last - 1 are seen by any of them; in a tree, a path's
// new tokens count as if they lay in consecutive slots (attention_input.h).
struct AttentionTile {
  int64_t row, head, token, tokens, first, last;
};

struct AttentionStep {
  const AttentionTile* tile;
  int64_t block;  // of kAttentionBlock slots
};

// What a thread reads after a step, each null where there is none: the next step; and the same
// head's of the next block that the thread reads of all heads.
struct AttentionAhead {
  const AttentionStep *next, *later;
};

// Floats of a thread's scratch and of a tile's sums, for tiles of so many tokens.
struct AttentionSizes {
  int64_t scratch, sums;
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  int64_t columns;  // outputs per panel
  // How x must be prepared for `weight`; levels 0 stands for activations "a16".
  Preparation (*preparation)(const Weight& weight, const Input& x, int levels);
  // `values`: scratch for twice how.inputs floats.
  void (*prepare_row)(const Preparation& how, const Input&, int64_t row, float* values,
                      const Prepared&);
  // Outputs `columns` · panel …; y: f32[m, n].
  void (*multiply_panel)(const Weight&, const Preparation&, const Prepared&, int64_t m,
                         int64_t panel, float* y);
  AttentionSizes (*attention_sizes)(const Attention&, int64_t tokens);
  // sums: of one tile over one block of slots.
  void (*attend_block)(const Attention&, const AttentionStep&, const AttentionAhead&,
                       float* scratch, float* sums);
  void (*clear_sums)(const Attention&, int64_t tokens, float* sums);
  // Takes the sums of the next block into those of the blocks before it.
  void (*add_block)(const Attention&, int64_t tokens, const float* next, float* into);
  void (*write_result)(const Attention&, const AttentionTile&, const float* sums);
  // For measuring (probe.h): both do nothing of use, and return a number that depends on it.
  uint32_t (*read)(const uint8_t* data, int64_t size);
  uint32_t (*multiply)(Arithmetic);
  int64_t operations;  // of one call of `multiply` for kFloat32; twice and four times for the others
};

}  // namespace specjax
