// The scales and zeros of a panel's groups, as vectors over the panel's outputs.
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

// float16 bits as float32. The biases of the exponents differ by 112, and a product with 2^112
// normalizes subnormals as well. Infinities and NaNs are set apart.
inline Word half_values(Word bits) {
  const Word rest = bits & 0x7FFFu;
  const Word finite = (Word)((Float)(rest << 13) * splat(5.192296858534828e33f));
  const Word special = (Word)(rest >= 0x7C00u) & 0x7F800000u;
  return finite | special | (bits & 0x8000u) << 16;
}

// Half of 2^(code - 127), since MXFP4's integers are doubled. The two smallest are subnormal.
inline Word exponent_values(Word code) {
  const Word normal = (code - 1) << 23, subnormal = splat(uint32_t{1} << 21) << (code & 1);
  const Word value = code > 1u ? normal : subnormal;
  return code == 255u ? splat(uint32_t{0x7FC00000}) : value;
}

// `count` scales of one row from number `first` on, as float32 bits.
SPECJAX_INLINE Word read_scales(const Weight& w, int64_t first, int64_t count) {
  const auto* p = static_cast<const uint8_t*>(w.scales);
  if (w.scale == Scale::kFloat32) return load_some<Word>(p + 4 * first, count);
  if (w.scale == Scale::kE8m0) {
    return exponent_values(widen(load_some<Byte>(p + first, count)));
  }
  const Word bits = widen(load_some<Half>(p + 2 * first, count));
  return w.scale == Scale::kBfloat16 ? bits << 16 : half_values(bits);
}

// The scales and the zeros of one group and one vector of outputs. Scales of an unquantized weight
// are 1. Zeros include the kind's offset.
struct Group {
  Float scale;
  Int zeros;
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
    if (!w_.quantized()) return {splat(1.0f), Int{}};
    if (w_.interleaved) return read_interleaved(column_ + v * kLanes, group);
    const int64_t start = group & -int64_t{kLanes};
    if (start != start_[v]) fill(v, start);
    Group result{(Float)scales_[v][group - start], Int{} + offset(w_.kind)};
    if (w_.zeros != nullptr) result.zeros += (Int)zeros_[v][group - start];
    return result;
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
      if (w_.zeros != nullptr) __builtin_prefetch(w_.zeros + first);
    }
  }

 private:
  SPECJAX_INLINE Group read_interleaved(int64_t row, int64_t group) const {
    if (row >= w_.n) return {Float{}, Int{}};
    const int64_t tile = row & -kTileRows,
                  first = tile * w_.groups + group * kTileRows + (row - tile);
    Group result{(Float)read_scales(w_, first, kLanes), Int{} + offset(w_.kind)};
    if (w_.zeros != nullptr) {
      result.zeros += widen(load<SignedByte>(w_.zeros + first));
    }
    return result;
  }

  void fill(int v, int64_t start) {
    start_[v] = start;
    const int64_t count = w_.groups - start;
    Word scales[kLanes], zeros[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t n = column_ + v * kLanes + lane;
      const int64_t first = (n < w_.n ? n : w_.n - 1) * w_.groups + start;
      scales[lane] = read_scales(w_, first, count);
      if (w_.zeros != nullptr) {
        zeros[lane] = (Word)widen(load_some<SignedByte>(w_.zeros + first, count));
      }
    }
    transpose(scales);
    std::memcpy(scales_[v], scales, sizeof scales);
    if (w_.zeros == nullptr) return;
    transpose(zeros);
    std::memcpy(zeros_[v], zeros, sizeof zeros);
  }

  const Weight& w_;
  int64_t column_, start_[kVectors];
  Word scales_[kVectors][kLanes], zeros_[kVectors][kLanes];
};

}  // namespace specjax::SPECJAX_ISA
