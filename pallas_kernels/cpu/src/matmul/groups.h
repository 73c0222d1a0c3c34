// The scales, zeros and minima of a panel's groups, as vectors over the panel's outputs.
#pragma once

#include "matmul/panel.h"

namespace specjax::SPECJAX_ISA {

// Loads the first `count` of kLanes values. The others are zero.
template <typename V>
SPECJAX_INLINE V load_some(const void* p, int64_t count) {
  if (count >= kLanes) return load<V>(p);
  V v{};
  std::memcpy(&v, p, count * (sizeof(V) / kLanes));
  return v;
}

// Stores the first `count` of kLanes values. Usually that is all of them; a call of memcpy would
// cost as much as several vectors.
template <typename V>
SPECJAX_INLINE void store_some(void* p, V v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  std::memcpy(p, &v, count * (sizeof(V) / kLanes));
}

// float16 values as float32 bits. A subnormal becomes a normal number. It must not be a subnormal
// float32 on the way: XLA's threads flush those to zero. The biases of the exponents differ by 112.
SPECJAX_INLINE Word half_values(Half v) {
#if defined(__AVX512F__)
  return (Word)_mm512_cvtph_ps((__m256i)v);
#elif defined(__F16C__)
  return (Word)_mm256_cvtph_ps((__m128i)v);
#else
  const Word bits = widen(v), rest = bits & 0x7FFFu;
  const Word special = (Word)(rest >= 0x7C00u) & splat(uint32_t{112} << 23);  // infinities, NaNs
  const Word normal = (rest << 13) + (uint32_t{112} << 23) + special;
  const Word subnormal = (Word)(to_float((Int)rest) * splat(0x1p-24f));
  return (rest < 0x400u ? subnormal : normal) | (bits & 0x8000u) << 16;
#endif
}

// Half of 2^(code - 127), since MXFP4's integers are doubled. The two smallest are subnormal.
inline Word exponent_values(Word code) {
  const Word normal = (code - 1) << 23, subnormal = splat(uint32_t{1} << 21) << (code & 1);
  const Word value = code > 1u ? normal : subnormal;
  return code == 255u ? splat(uint32_t{0x7FC00000}) : value;
}

// `count` scales or minima of one row from number `first` on, as float32 bits.
SPECJAX_INLINE Word read_floats(Scale type, const void* values, int64_t first, int64_t count) {
  const auto* p = static_cast<const uint8_t*>(values);
  if (type == Scale::kFloat32) return load_some<Word>(p + 4 * first, count);
  if (type == Scale::kE8m0) {
    return exponent_values(widen(load_some<Byte>(p + first, count)));
  }
  const Half halves = load_some<Half>(p + 2 * first, count);
  return type == Scale::kBfloat16 ? widen(halves) << 16 : half_values(halves);
}

// The scales, zeros and minima of one group and one vector of outputs. Scales of an unquantized
// weight are 1. Zeros include the kind's offset: they are 0 where there are minima, which are the
// values of the smallest integer.
struct Group {
  Float scale;
  Int zeros;
  Float minima;
};

// Reads groups in the order of the inputs. Those of a weight that is stored row by row are read and
// transposed kLanes at a time, which is as fast as reading one.
class Groups {
 public:
  Groups(const Weight& w, int64_t column) : w_(w), column_(column) {
    for (int64_t& start : start_) start = -1;
  }

  // Group `group`, for the outputs of vector `v`.
  SPECJAX_INLINE Group read(int v, int64_t group) {
    if (!w_.quantized()) return {splat(1.0f), Int{}, Float{}};
    if (w_.interleaved) return read_interleaved(column_ + v * kLanes, group);
    const int64_t start = group & -int64_t{kLanes};
    if (start != start_[v]) fill(v, start);
    return make(scales_[v][group - start], w_.has_points() ? points_[v][group - start] : Word{});
  }

  // Prefetches the groups of a chunk of an interleaved weight, for `vectors` vectors of outputs.
  // After the last chunk, prefetches the groups of the next outputs.
  template <Arithmetic A>
  SPECJAX_INLINE void ask(int vectors, int64_t chunk) const {
    if (!w_.quantized() || !w_.interleaved) return;
    const int64_t bytes = w_.scale == Scale::kE8m0 ? 1 : w_.scale == Scale::kFloat32 ? 4 : 2;
    const int64_t tiles = (vectors * kLanes + kTileRows - 1) / kTileRows;
    const int64_t group = run_start<A>(w_, chunk, 0) / w_.group_size;
    const int64_t count = (2 * kRun<A> + w_.group_size - 1) / w_.group_size;
    const int64_t beside = group < w_.groups ? 0 : tiles - 1;  // tiles that have been read
    const auto* scales = static_cast<const uint8_t*>(w_.scales);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = ((column_ / kTileRows + tile + beside) * w_.groups + group) * kTileRows;
      for (int64_t i = 0; i < count * kTileRows * bytes; i += kLine) {
        __builtin_prefetch(scales + first * bytes + i);
      }
      const auto* minima = static_cast<const uint8_t*>(w_.minima);
      for (int64_t i = 0; minima != nullptr && i < count * kTileRows * bytes; i += kLine) {
        __builtin_prefetch(minima + first * bytes + i);
      }
      if (w_.zeros != nullptr) __builtin_prefetch(w_.zeros + first);
    }
  }

 private:
  SPECJAX_INLINE Group read_interleaved(int64_t row, int64_t group) const {
    if (row >= w_.n) return {Float{}, Int{}, Float{}};
    const int64_t tile = row & -kTileRows,
                  first = tile * w_.groups + group * kTileRows + (row - tile);
    return make(read_floats(w_.scale, w_.scales, first, kLanes), read_points(first, kLanes));
  }

  // `count` points of one row from number `first` on.
  SPECJAX_INLINE Word read_points(int64_t first, int64_t count) const {
    if (w_.minima != nullptr) return read_floats(w_.scale, w_.minima, first, count);
    if (w_.zeros == nullptr) return Word{};
    return (Word)widen(load_some<SignedByte>(w_.zeros + first, count));
  }

  SPECJAX_INLINE Group make(Word scales, Word points) const {
    if (w_.minima != nullptr) return {(Float)scales, Int{}, (Float)points};
    if (w_.kind == Kind::kNestedInt8) {  // stored are the scales of the high nibbles
      return {(Float)scales * splat(0.0625f), Int{} + offset(w_.kind), Float{}};
    }
    return {(Float)scales, (Int)points + offset(w_.kind), Float{}};
  }

  void fill(int v, int64_t start) {
    start_[v] = start;
    const int64_t count = w_.groups - start;
    Word scales[kLanes], points[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t n = column_ + v * kLanes + lane;
      const int64_t first = (n < w_.n ? n : w_.n - 1) * w_.groups + start;
      scales[lane] = read_floats(w_.scale, w_.scales, first, count);
      points[lane] = read_points(first, count);
    }
    transpose(scales);
    std::memcpy(scales_[v], scales, sizeof scales);
    if (!w_.has_points()) return;
    transpose(points);
    std::memcpy(points_[v], points, sizeof points);
  }

  const Weight& w_;
  int64_t column_, start_[kVectors];
  Word scales_[kVectors][kLanes], points_[kVectors][kLanes];
};

}  // namespace specjax::SPECJAX_ISA
