// Calls every kernel of the C++ library without XLA, for processors that are only emulated
// (tests/kernels/test_neon.py).
//
// Products and attention are compared with float64, and rows of x with the same rows among others.
// Prints, for every instruction set, its name and a hash of the bits of its integer products.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "common/isa.h"

namespace {

using namespace specjax;

std::mt19937 generator;

float uniform() { return static_cast<float>(generator()) / 2147483648.0f - 1; }

uint32_t bits(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  return word;
}

float rounded_down(float x) {  // to bfloat16
  const uint32_t word = bits(x) & 0xFFFF0000u;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

void expect(bool holds, const Kernels& kernels, const char* what, int64_t kind) {
  if (holds) return;
  std::fprintf(stderr, "%s: %s (kind %d)\n", kernels.name, what, static_cast<int>(kind));
  std::exit(1);
}

template <typename T>
void append(std::vector<uint8_t>& bytes, T value) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof value);
}

// --- Products.

// Interleaves `count` rows, in words of `word` bytes (pallas_kernels/interleave.py).
template <typename T>
std::vector<T> interleave(const std::vector<T>& rows, int64_t count, int64_t word) {
  const auto length = static_cast<int64_t>(rows.size()) / count;
  std::vector<T> tiles((count + kTileRows - 1) / kTileRows * kTileRows * length);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t place = (row / kTileRows * length + i / word * word) * kTileRows;
      tiles[place + row % kTileRows * word + i % word] = rows[row * length + i];
    }
  }
  return tiles;
}

enum class Points { kNone, kZeros, kMinima };

// A random weight, stored row by row and interleaved, and its values.
struct Matrix {
  Matrix(Kind kind, Scale scale, int64_t group_size, Points points) {
    if (kind == Kind::kBfloat12) {
      make_bfloat12();
      return;
    }
    w.kind = kind, w.scale = scale, w.n = kOutputs;
    w.inputs = w.quantized() ? (kInputs + kPlanePair - 1) / kPlanePair * kPlanePair : kInputs;
    if (w.quantized()) w.group_size = group_size == 0 ? w.inputs : group_size;
    if (w.quantized()) w.groups = w.inputs / w.group_size;
    for (int64_t i = 0; i < kOutputs * w.groups; ++i) add_group(points);
    for (int64_t i = 0; i < kOutputs * w.inputs; ++i) {
      const float value = rounded_down(uniform());
      if (kind == Kind::kFloat32) append(data, value);
      if (kind == Kind::kBfloat16) append(data, static_cast<uint16_t>(bits(value) >> 16));
      if (kind == Kind::kInt8 || (w.nibbles() && i % 2 == 0)) {
        data.push_back(static_cast<uint8_t>(generator()));
      }
    }
    w.row_bytes = static_cast<int64_t>(data.size()) / kOutputs;
    w.data = data.data(), w.scales = scales.data();
    if (points == Points::kZeros) w.zeros = zeros.data();
    if (points == Points::kMinima) w.minima = minima.data();
    other_data = interleave(data, kOutputs, 4);
    if (w.quantized()) {
      const auto scale_bytes = static_cast<int64_t>(scales.size()) / (kOutputs * w.groups);
      other_scales = interleave(scales, kOutputs, scale_bytes);
      other_minima = interleave(minima, kOutputs, scale_bytes);
      other_zeros = interleave(zeros, kOutputs, 1);
    }
    other = w, other.interleaved = true;
    other.data = other_data.data(), other.scales = other_scales.data();
    if (points == Points::kZeros) other.zeros = other_zeros.data();
    if (points == Points::kMinima) other.minima = other_minima.data();
  }

  // bfloat16 in 12 bits, which has one order. A tile of three has no escapes.
  void make_bfloat12() {
    constexpr int64_t kTiles = (kOutputs + kTileRows - 1) / kTileRows;
    constexpr int64_t kPieces = (kInputs + kPaletteInputs - 1) / kPaletteInputs;
    w.kind = Kind::kBfloat12, w.interleaved = true, w.n = kOutputs, w.inputs = kInputs;
    w.row_bytes = (kInputs + 7) / 8 * 12;
    for (int64_t i = 0; i < kTiles * kTileRows * w.row_bytes; ++i) {
      data.push_back(static_cast<uint8_t>(generator()));
    }
    for (int64_t i = 0; i < kTiles * kPieces * kPalette; ++i) palettes.push_back(high_byte());
    for (int64_t i = 0; i < kTiles * kEscapes; ++i) {
      const uint32_t input = i % kEscapes * 41 + 3, output = generator() % kTileRows;
      const bool none = i % kEscapes == kEscapes - 1 || i / kEscapes == 1;
      escapes.push_back(none ? UINT32_MAX : input << 12 | output << 8 | high_byte());
    }
    w.data = data.data(), w.palettes = palettes.data(), w.escapes = escapes.data();
    w.escapes_per_tile = kEscapes;
    other = w;
  }

  // Of a value between 2^-10 and 4, of either sign.
  static uint8_t high_byte() { return (generator() & 0x80) | (0x3A + generator() % 6); }

  double bfloat12_at(int64_t row, int64_t k) const {
    constexpr int64_t kBytes[] = {0, 2, 1, 3};  // of the inputs of a word
    const int64_t tile = row / kTileRows, output = row % kTileRows, word = k / 8 * 3;
    const uint8_t* from = w.data + tile * kTileRows * w.row_bytes + 4 * output + kBytes[k % 4];
    const uint8_t low = from[(word + k % 8 / 4) * 4 * kTileRows];
    const int code = from[(word + 2) * 4 * kTileRows] >> (k % 8 / 4 * 4) & 15;
    const int64_t pieces = (kInputs + kPaletteInputs - 1) / kPaletteInputs;
    uint8_t high = palettes[(tile * pieces + k / kPaletteInputs) * kPalette + code];
    for (int64_t i = 0; i < kEscapes; ++i) {
      const uint32_t escape = escapes[tile * kEscapes + i];
      if (escape >> 12 == k && (escape >> 8 & 15) == output) high = static_cast<uint8_t>(escape);
    }
    const uint32_t word_bits = static_cast<uint32_t>(high) << 24 | static_cast<uint32_t>(low) << 16;
    float value;
    std::memcpy(&value, &word_bits, sizeof value);
    return value;
  }

  void add_group(Points points) {
    const uint32_t eighths = generator() % 8;
    values.push_back(std::ldexp(1 + eighths / 8.0, -6));
    if (w.scale == Scale::kE8m0) values.back() = std::ldexp(1.0, static_cast<int>(eighths) - 6);
    append_float(scales, values.back());
    zeros.push_back(points == Points::kZeros ? static_cast<int8_t>(generator() % 16 - 8) : 0);
    least.push_back(points == Points::kMinima ? -std::ldexp(generator() % 8, -6) : 0);
    append_float(minima, least.back());
  }

  // Appends a value that is exact in every type of scales: for E8M0 a power of two.
  void append_float(std::vector<uint8_t>& bytes, double value) const {
    const uint32_t word = bits(static_cast<float>(value));
    if (w.scale == Scale::kE8m0) append(bytes, static_cast<uint8_t>(word >> 23));
    if (w.scale == Scale::kFloat32) append(bytes, static_cast<float>(value));
    if (w.scale == Scale::kBfloat16) append(bytes, static_cast<uint16_t>(word >> 16));
    if (w.scale != Scale::kFloat16) return;
    const uint32_t rest = value == 0 ? 0 : (word & 0x7FFFFFFFu) - (112u << 23);
    append(bytes, static_cast<uint16_t>(word >> 31 << 15 | rest >> 13));
  }

  double at(int64_t row, int64_t k) const {
    constexpr double kE2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    if (w.kind == Kind::kBfloat12) return bfloat12_at(row, k);
    const uint8_t* from = w.data + row * w.row_bytes;
    if (!w.quantized()) {
      float value = 0;
      const int64_t size = w.row_bytes / kInputs;
      std::memcpy(reinterpret_cast<uint8_t*>(&value) + 4 - size, from + k * size, size);
      return value;
    }
    const int64_t group = row * w.groups + k / w.group_size;
    int code = from[w.kind == Kind::kInt8 ? k : k / kPlanePair * kPlane + k % kPlane];
    if (w.nibbles()) code = code >> (k / kPlane % 2 * 4) & 15;
    if (w.kind == Kind::kMxfp4) return (code < 8 ? 1 : -1) * kE2m1[code % 8] * values[group];
    const int integer = w.kind == Kind::kInt4 ? (code ^ 8) - 8 : static_cast<int8_t>(code);
    if (w.minima == nullptr) return (integer - zeros[group]) * values[group];
    return (integer + (w.kind == Kind::kInt4 ? 8 : 128)) * values[group] + least[group];
  }

  static constexpr int64_t kOutputs = 37, kInputs = 300, kEscapes = 8;
  Weight w{}, other{};
  std::vector<uint8_t> data, scales, minima, other_data, other_scales, other_minima, palettes;
  std::vector<uint32_t> escapes;
  std::vector<int8_t> zeros, other_zeros;
  std::vector<double> values, least;  // of the scales, of the minima
};

// Where byte `byte` of row `row` lies in the words of x, which hold integers (Prepared in types.h).
int64_t place(const Preparation& how, int64_t row, int64_t byte) {
  if (how.way == Way::kPanels) return row * how.inputs + byte;
  const int64_t together = how.way == Way::kTiles ? how.rows : how.portion;
  const int64_t first = row / together * together, word = byte / 4;
  const int64_t rows = std::min(together, how.rows - first);
  const int64_t slice = word / how.depth * rows + row - first;
  return first * how.inputs + 4 * (slice * how.depth + word % how.depth) + byte % 4;
}

// Rounds values to integers of 16 bits and back (split_activations in
// pallas_kernels/activations.py).
void round16(double* values, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(values[i]));
  int exponent = 0;
  const double mantissa = std::frexp(largest / (127 * 257), &exponent);
  const double scale = std::ldexp(1, mantissa == 0.5 ? exponent - 1 : exponent);
  for (int64_t i = 0; i < count; ++i) values[i] = std::nearbyint(values[i] / scale) * scale;
}

// The result for the first m rows, and the values that those were rounded to.
struct Result {
  Result(const Kernels& kernels, const Weight& w, Input x, int64_t m, int levels) {
    x.m = m;
    const Preparation how = kernels.preparation(w, x, levels);
    const int64_t size = how.rows * how.inputs;
    std::vector<uint32_t> words(size), sums(size);
    std::vector<float> scales(size), scratch(2 * how.inputs);
    const bool wide = how.arithmetic == Arithmetic::kInteger16;
    integers = is_integer(how.arithmetic);
    const Prepared prepared{words.data(), scales.data(), sums.data()};
    for (int64_t row = 0; row < m; ++row) {
      kernels.prepare_row(how, x, row, scratch.data(), prepared);
      for (int64_t i = 0; i < x.k; ++i) {
        values.push_back(scratch[i]);
        if (levels == 0) continue;
        const float scale = scales[i / how.group_size * how.rows + row];
        const auto* q = reinterpret_cast<const int8_t*>(words.data());
        values.back() = double{scale} * q[place(how, row, i)];
      }
      for (int64_t i = 0; wide && i < x.k; i += how.group_size) {
        round16(values.data() + row * x.k + i, std::min(how.group_size, x.k - i));
      }
    }
    y.resize(m * w.n);
    for (int64_t column = 0; column < w.n; column += how.columns) {
      kernels.multiply_columns(w, how, prepared, m, column, y.data());
    }
  }

  bool integers;
  std::vector<double> values;
  std::vector<float> y;
};

uint64_t check_product(const Kernels& kernels, const Matrix& matrix, const Input& x, int levels) {
  const auto kind = static_cast<int64_t>(matrix.w.kind);
  const Result all(kernels, matrix.w, x, x.m, levels);
  for (int64_t m : {1, 2, 3, 4, 5, 8, 12, 17, 25}) {
    for (const Weight& w : {matrix.w, matrix.other}) {
      const Result some(kernels, w, x, m, levels);
      const size_t bytes = some.y.size() * sizeof(float);
      expect(std::memcmp(some.y.data(), all.y.data(), bytes) == 0, kernels,
             "a row depends on the others, or on the order of the weight's", kind);
    }
  }
  uint64_t hash = 14695981039346656037u;
  for (int64_t i = 0; i < x.m * matrix.kOutputs; ++i) {
    double sum = 0, bound = 1e-30;  // as tests/kernels/test_matmul.py has it
    for (int64_t k = 0; k < x.k; ++k) {
      const double value = all.values[i / matrix.kOutputs * x.k + k];
      const double weight = matrix.at(i % matrix.kOutputs, k);
      sum += value * weight;
      const double levels = matrix.w.kind == Kind::kInt8 ? 256 : 16;  // points are added at the end
      const double points = matrix.w.has_points() ? levels / 32 : 0;
      bound += std::abs(value) * (std::abs(weight) + points) * 0x1p-19;
    }
    expect(std::abs(all.y[i] - sum) <= bound, kernels, "a product is wrong", kind);
    if (all.integers) hash = (hash ^ bits(all.y[i])) * 1099511628211u;
  }
  return hash;
}

uint64_t check_products(const Kernels& kernels) {
  const Matrix matrices[] = {{Kind::kInt4, Scale::kFloat16, 32, Points::kZeros},
                             {Kind::kInt4, Scale::kBfloat16, 128, Points::kNone},
                             {Kind::kInt4, Scale::kFloat32, 0, Points::kZeros},
                             {Kind::kInt4, Scale::kFloat16, 32, Points::kMinima},
                             {Kind::kInt4, Scale::kBfloat16, 0, Points::kMinima},
                             {Kind::kMxfp4, Scale::kE8m0, 32, Points::kNone},
                             {Kind::kInt8, Scale::kFloat32, 64, Points::kZeros},
                             {Kind::kInt8, Scale::kFloat32, 32, Points::kMinima},
                             {Kind::kInt8, Scale::kBfloat16, 0, Points::kNone},
                             {Kind::kBfloat16, Scale::kFloat32, 0, Points::kNone},
                             {Kind::kFloat32, Scale::kFloat32, 0, Points::kNone},
                             {Kind::kBfloat12, Scale::kFloat32, 0, Points::kNone}};
  std::vector<uint8_t> wide, narrow;
  for (int64_t i = 0; i < 25 * Matrix::kInputs; ++i) {
    const float value = uniform();
    append(wide, value), append(narrow, static_cast<uint16_t>(bits(value) >> 16));
  }
  uint64_t hash = 0;
  for (const Matrix& matrix : matrices) {
    for (bool bfloat16 : {false, true}) {
      const Input x{bfloat16 ? narrow.data() : wide.data(), bfloat16, 25, Matrix::kInputs};
      for (int levels : {0, 7, 127}) {
        if (levels != 0 && !matrix.w.quantized()) continue;
        hash = 31 * hash + check_product(kernels, matrix, x, levels);
      }
    }
  }
  return hash;
}

// --- Attention.

constexpr int64_t kRows = 2, kTokens = 3, kHeads = 4, kKvHeads = 2, kFeatures = 40, kSlots = 600;
constexpr int32_t kLengths[] = {300, 7};
constexpr int64_t kDepth = 2;
constexpr int32_t kPositions[] = {300, 301, 301, 7, 8, 8};  // a tree: the last two are siblings
constexpr int32_t kAncestors[] = {0, -1, 0, 1, 0, 2, 0, -1, 0, 1, 0, 2};

// A random cache, and the values that it holds.
struct Entries {
  explicit Entries(Cached cached) {
    constexpr int64_t kEach = kSlots * kKvHeads;
    for (int64_t i = 0; i < kRows * kEach; ++i) {
      scales.push_back((1 + uniform() / 2) / (cached == Cached::kCodes8 ? 128 : 8));
      zeros.push_back(generator() % (cached == Cached::kCodes8 ? 256 : 16));
      const auto first = static_cast<int64_t>(data.size());
      for (int64_t e = 0; e < kFeatures; ++e) {
        const float value = rounded_down(uniform());
        if (cached == Cached::kFloat32) append(data, value);
        if (cached == Cached::kBfloat16) append(data, static_cast<uint16_t>(bits(value) >> 16));
        if (cached == Cached::kCodes8 || (cached == Cached::kCodes4 && e < kFeatures / 2)) {
          data.push_back(static_cast<uint8_t>(generator()));
        }
        values.push_back(value);
      }
      for (int64_t e = 0; e < kFeatures && cached >= Cached::kCodes8; ++e) {
        const bool nibbles = cached == Cached::kCodes4, high = nibbles && e >= kFeatures / 2;
        const int code = data[first + (high ? e - kFeatures / 2 : e)];
        const int integer = nibbles ? code >> 4 * high & 15 : code;
        values[i * kFeatures + e] = (integer - zeros[i]) * double{scales[i]};
      }
    }
  }

  std::vector<uint8_t> data, zeros;
  std::vector<float> scales;
  std::vector<double> values;
};

bool visible(const Attention& a, int64_t row, int64_t token, int64_t slot) {
  const int64_t index = slot - kLengths[row];
  if (index >= kTokens) return false;
  const int32_t* positions = kPositions + row * kTokens;
  const int32_t* path = kAncestors + (row * kTokens + token) * kDepth;
  const bool ancestor = std::find(path, path + kDepth, index) != path + kDepth;
  const bool shown = index < 0 || (a.ancestors == nullptr ? index <= token : ancestor);
  const int64_t position = index < 0 ? slot : positions[index];
  return shown && (!a.windowed || positions[token] - position < a.window);
}

std::vector<float> attend(const Kernels& kernels, Attention a) {
  std::vector<float> out(kRows * kTokens * kHeads * kFeatures);
  a.out = out.data();
  const AttentionSizes sizes = kernels.attention_sizes(a, kTokens);
  std::vector<float> scratch(sizes.scratch), next(sizes.sums), sums(sizes.sums);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t head = 0; head < kKvHeads; ++head) {
      const int64_t seen = a.ancestors == nullptr ? kTokens : kDepth;
      const AttentionTask task{row, head, 0, kTokens, 0, kLengths[row] + seen};
      kernels.clear_sums(a, kTokens, sums.data());
      for (int64_t block = 0; block * kAttentionBlock < task.last; ++block) {
        kernels.attend_block(a, {&task, block}, {nullptr, nullptr}, scratch.data(), next.data());
        kernels.add_block(a, kTokens, next.data(), sums.data());
      }
      kernels.write_result(a, task, sums.data());
    }
  }
  return out;
}

void check_attention(const Kernels& kernels, Cached cached, bool windowed, bool tree) {
  const Entries keys(cached), values(cached);
  std::vector<float> queries(kRows * kTokens * kHeads * kFeatures);
  for (float& query : queries) query = 2 * uniform();
  Attention a{};
  a.queries = queries.data(), a.cached = cached;
  a.keys = {keys.data.data(), keys.scales.data(), keys.zeros.data()};
  a.values = {values.data.data(), values.scales.data(), values.zeros.data()};
  a.lengths = kLengths, a.positions = kPositions;
  a.ancestors = tree ? kAncestors : nullptr, a.depth = tree ? kDepth : 0;
  a.b = kRows, a.tokens = kTokens, a.heads = kHeads, a.e = kFeatures, a.layers = 1,
  a.slots = kSlots;
  a.kv_heads = kKvHeads, a.heads_per_kv = kHeads / kKvHeads, a.windowed = windowed, a.window = 100;
  a.scale = 0.25f;
  const std::vector<float> out = attend(kernels, a);
  for (int64_t query = 0; query < kRows * kTokens * kHeads; ++query) {
    const int64_t row = query / kHeads / kTokens, token = query / kHeads % kTokens;
    double total = 0, sums[kFeatures] = {}, error = 0, largest = 0;
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      if (!visible(a, row, token, slot)) continue;
      const int64_t head = query % kHeads / a.heads_per_kv;
      const int64_t entry = ((row * kSlots + slot) * kKvHeads + head) * kFeatures;
      double score = 0, magnitude = 0;
      for (int64_t e = 0; e < kFeatures; ++e) {
        const double product = queries[query * kFeatures + e] * keys.values[entry + e] * a.scale;
        score += product, magnitude += std::abs(product);
      }
      error = std::max(error, magnitude * (kFeatures + 2));
      total += std::exp2(score);
      for (int64_t e = 0; e < kFeatures; ++e) {
        sums[e] += std::exp2(score) * values.values[entry + e];
        largest = std::max(largest, std::abs(values.values[entry + e]));
      }
    }
    // As tests/kernels/test_cpu_attention.py has it.
    const double bound = (2 * error + 16 + kAttentionBlock) * 0x1p-24 * largest;
    for (int64_t e = 0; e < kFeatures; ++e) {
      const bool close = std::abs(out[query * kFeatures + e] - sums[e] / total) <= bound;
      expect(close, kernels, "attention is wrong", static_cast<int64_t>(cached));
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* kernels : available_kernels()) {
    generator.seed(0);
    const unsigned long long hash = check_products(*kernels);
    std::printf("%s %016llx\n", kernels->name, hash);
    for (Cached cached : {Cached::kFloat32, Cached::kBfloat16, Cached::kCodes8, Cached::kCodes4}) {
      check_attention(*kernels, cached, false, false);
      check_attention(*kernels, cached, true, true);
    }
    const std::vector<uint8_t> bytes(1 << 12, 1);
    expect(kernels->read(bytes.data(), 0) == 0, *kernels, "nothing is read as something", 0);
    kernels->read(bytes.data(), static_cast<int64_t>(bytes.size()));
    for (Arithmetic each : {Arithmetic::kInteger, Arithmetic::kBfloat16, Arithmetic::kFloat32}) {
      kernels->multiply(each);
    }
  }
}
