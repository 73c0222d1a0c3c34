// Products by tiles: kLanes outputs at a time, a slab of their inputs after the other.
//
// A slab is kBytes bytes of each of the kLanes rows. What is stored as tiles want it is loaded as it
// stands; 4-bit codes are decoded to signed bytes or bfloat16 first. A tile cannot be filled from
// registers, and is filled late from what was stored a moment ago: so the next slab is decoded
// before this one is multiplied.
//
// Of a quantized weight sums end with every segment (product.h), where they are scaled; of others they
// run on to the end. So they do for MXFP4 in bfloat16, whose segments are short: a scale is a power of
// two, and one instruction scales what is decoded, exactly.
#pragma once

#include "few_rows.h"
#include "tiles.h"

namespace specjax::SPECJAX_ISA {

inline constexpr int kPortionsPerPass = 4;  // of rows of x, that share a decoded panel

// Bytes that a stream asks for before they are read. What is decoded needs the cache as well.
inline constexpr int64_t kTileAhead = 1 << 12;

// int4 codes as signed bytes are kept in the bytes' upper halves: 16 times the integers.
template <Kind kind>
inline constexpr int kShift = kind == Kind::kInt4 ? 4 : 0;

// Codes of MXFP4's scales under which all its values but zero are normal bfloat16.
inline constexpr uint8_t kFirstScale = 2, kLastScale = 252;

// MXFP4 as bfloat16 under the last of these scales, twice. Less is subtracted from the exponents for
// others: from zeros too, with saturation, so that they stay zeros.
alignas(64) inline constexpr uint16_t kLargestMxfp4[2 * kLanes] = {
    0, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40,
    0, 0xFD80, 0xFE00, 0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40,
    0, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40,
    0, 0xFD80, 0xFE00, 0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40};

// Whether all scales of the panel from `column` on are such.
inline bool scales_are_exponents(const Weight& w, int64_t column) {
  const auto* scales = static_cast<const uint8_t*>(w.scales);
  const int64_t rows = w.n - column < kColumns ? w.n - column : kColumns;
  const int64_t whole = w.interleaved ? rows / kTile * kTile : rows;
  uint8_t least = kFirstScale, most = kLastScale;
  const auto look = [&](int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      least = scales[i] < least ? scales[i] : least, most = scales[i] > most ? scales[i] : most;
    }
  };
  look(column * w.groups, whole * w.groups);
  for (int64_t group = 0; group < w.groups && whole < rows; ++group) {
    look((column + whole) * w.groups + group * kTile, rows - whole);
  }
  return least == kFirstScale && most == kLastScale;
}

alignas(16) inline constexpr int8_t kMxfp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                        0, -1, -2, -3, -4, -6, -8, -12};

// The slabs of vector `vector` of the panel at `column`, in the order of their bytes; kScaled: of
// values that are scaled.
template <Arithmetic A, Kind kind, bool kScaled>
class Slabs {
 public:
  static constexpr int kRuns = kind <= Kind::kMxfp4 ? 2 : 1;  // whose inputs lie in the same bytes
  // Words of a run per slab.
  static constexpr int kWords = kRuns == 2 && A == Arithmetic::kBfloat16 ? 2 * kLanes : kLanes;
  static constexpr int kInputs = kWords * kPerWord<A>;  // of a run
  static constexpr int kPerChunk = kRun<A> / kInputs * (3 - kRuns);

  Slabs(const Weight& w, int64_t column, int vector, Groups& groups)
      : w_(w), column_(column + vector * kLanes), vector_(vector), groups_(groups) {
    if constexpr (kScaled) decoder_.table = load<Word>(kLargestMxfp4);
  }

  // The first input of slab `slab`, in run 0.
  static SPECJAX_INLINE int64_t start(const Weight& w, int64_t slab) {
    if constexpr (kRuns == 1) return slab * kInputs;
    return run_start<A>(w, slab * kInputs / kRun<A>, 0) + slab * kInputs % kRun<A>;
  }

  // Slab `slab`: [run][word][output], where it is stored or in `buffer`. Memory is asked for what
  // comes `ahead` bytes later in an interleaved weight.
  SPECJAX_INLINE const Word* read(int64_t slab, int64_t ahead, Word* buffer) {
    const int64_t offset = slab * kBytes;
    if constexpr (kScaled) read_exponents(start(w_, slab));
    if (w_.interleaved && column_ < w_.n && offset + kBytes <= w_.row_bytes) {
      const uint8_t* from = w_.data + column_ * w_.row_bytes + offset * kTile;
      SPECJAX_UNROLL for (int i = 0; i < kLanes; ++i) {
        __builtin_prefetch(from + ahead + i * kBytes);
        if (kRuns == 2) decode(load<Word>(from + i * kBytes), i, buffer);
      }
      return kRuns == 2 ? buffer : reinterpret_cast<const Word*>(from);
    }
    Word words[kLanes];
    read_slab(w_, column_, offset, words);
    for (int i = 0; i < kLanes; ++i) decode(words[i], i, buffer);
    return buffer;
  }

 private:
  static constexpr int kGroups = kScaled ? kInputs / kSmallestGroup : 1;  // of a run

  // For the slab whose run 0 begins at input `first`.
  SPECJAX_INLINE void read_exponents(int64_t first) {
    SPECJAX_UNROLL for (int run = 0; run < kRuns; ++run) {
      SPECJAX_UNROLL for (int i = 0; i < kGroups; ++i) {
        const int64_t group = (first + run * kPlane) / kSmallestGroup + i;
        const Word half = (Word)groups_.read(vector_, group).scale >> 16;  // 2^(code - 128)
        const Word less = (uint32_t{kLastScale - 1} << 7) - half;
        less_[run][i] = less | less << 16;
      }
    }
  }

  SPECJAX_INLINE void decode(Word codes, int i, Word* to) const {
    if constexpr (kRuns == 1) {
      to[i] = codes;
    } else if constexpr (kScaled) {
      decoder_.decode_nibbles(i, codes, [&](int run, int word, Word value) SPECJAX_LAMBDA {
        const __m512i less = (__m512i)less_[run][i * kGroups / kLanes];
        to[run * kWords + word] = (Word)_mm512_subs_epu16((__m512i)value, less);
      });
    } else if constexpr (A == Arithmetic::kBfloat16) {
      decoder_.decode_nibbles(i, codes, [&](int run, int word, Word value) SPECJAX_LAMBDA {
        to[run * kWords + word] = value;
      });
    } else if constexpr (kind == Kind::kInt4) {
      to[i] = codes << 4 & 0xF0F0F0F0u;
      to[kWords + i] = codes & 0xF0F0F0F0u;
    } else {
      const auto* table = reinterpret_cast<const uint8_t*>(kMxfp4Values);
      to[i] = lookup(codes & 0x0F0F0F0Fu, table);
      to[kWords + i] = lookup(codes >> 4 & 0x0F0F0F0Fu, table);
    }
  }

  const Weight& w_;
  const int64_t column_;
  const int vector_;
  Groups& groups_;
  Decoder<A, kind> decoder_;
  Word less_[kRuns][kGroups];  // what scales take away from the exponents of both halves of a word
};

// kLanes outputs of a portion of rows: the sums under way in tiles, of run r in tile r, and y in memory.
//
// No more than four tiles are in use, though with eight a load could serve two products. Two threads
// of a core share the registers that tiles are renamed to, and where the other one is busy, as on any
// rented machine, products out of eight tiles wait for each other.
template <Arithmetic A, Kind kind, bool kScaled>
class TileSums {
 public:
  using Source = Slabs<A, kind, kScaled>;
  static constexpr bool kSegments = kind <= Kind::kInt8 && !kScaled;
  static constexpr int kSums = kSegments ? 1 : Source::kRuns;  // that make up an output

  // y: f32[kSums, kTileRows, kLanes], of the panel's vector `vector` and portion `portion` of the
  // rows.
  TileSums(const Product& p, Groups& groups, int vector, int64_t portion, Float* y)
      : p_(p),
        groups_(groups),
        vector_(vector),
        rows_(p.how.portion),
        first_(portion * p.how.portion),
        depth_(p.how.depth),
        steps_(Source::kWords / p.how.depth),
        segment_steps_(p.segment<A>() / kPerWord<A> / p.how.depth),
        y_(y) {}

  // Begins with zeros; with y where there are no segments.
  SPECJAX_INLINE void begin() {
    if constexpr (kSegments) return zero();
    load_tile<0>(y_, kBytes);
    if constexpr (kSums == 2) load_tile<1>(y_ + kTileRows, kBytes);
  }

  SPECJAX_INLINE void end() {
    if constexpr (kSegments) return;
    store_tile<0>(y_, kBytes);
    if constexpr (kSums == 2) store_tile<1>(y_ + kTileRows, kBytes);
  }

  // Adds slab `slab`, which lies at `weights`.
  SPECJAX_INLINE void add(int64_t slab, const Word* weights) {
    const int64_t first = Source::start(p_.w, slab);
    for (int64_t step = 0; step < steps_; ++step) {
      const int64_t start = first + step * depth_ * kPerWord<A>;
      add_step<0>(start, weights + step * depth_);
      if constexpr (Source::kRuns > 1) {
        add_step<1>(start + kPlane, weights + Source::kWords + step * depth_);
      }
      if (!kSegments || ((slab * steps_ + step + 1) & (segment_steps_ - 1)) != 0) continue;
      const int64_t begin = start + depth_ * kPerWord<A> - p_.segment<A>();
      end_segment<0>(Place::of<A>(p_, begin));
      if constexpr (Source::kRuns > 1) end_segment<1>(Place::of<A>(p_, begin + kPlane));
      zero();
    }
  }

 private:
  using Vector = typename Sums<A>::Vector;

  static SPECJAX_INLINE void zero() {
    zero_tile<0>();
    if constexpr (Source::kRuns > 1) zero_tile<1>();
  }

  template <int run>
  SPECJAX_INLINE void add_step(int64_t start, const Word* weights) {
    const uint32_t* x = p_.x.words + start / kPerWord<A> * p_.how.rows + first_ * depth_;
    load_tile<2>(weights, kBytes);
    load_tile<3>(x, depth_ * sizeof(uint32_t));
    add_product<A, run, 3, 2>();
  }

  template <int run>
  SPECJAX_INLINE void end_segment(const Place& place) {
    alignas(64) Vector sums[kTileRows];
    store_tile<run>(sums, kBytes);
    const Group group = groups_.read(vector_, place.group);
    if constexpr (A == Arithmetic::kInteger) {
      if (p_.w.zeros != nullptr) subtract_zeros(group, place, sums);
    }
    const float* scales = p_.x.scales + first_ * place.groups + place.group;
    for (int64_t r = 0; r < rows_; ++r) {
      if constexpr (A == Arithmetic::kInteger) {
        const Float sum = to_float(sums[r] >> kShift<kind>);
        y_[r] = fma(sum, group.scale * scales[r * place.groups], y_[r]);
      } else {
        add_scaled<A>(p_, group, place, first_ + r, sums[r], y_[r]);
      }
    }
  }

  void subtract_zeros(const Group& group, const Place& place, Vector* sums) const {
    const Int zeros = group.zeros - offset(p_.w.kind);
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t at = (first_ + r) * place.segments + place.segment;
      sums[r] -= (zeros * static_cast<const int32_t*>(p_.x.sums)[at]) << kShift<kind>;
    }
  }

  const Product& p_;
  Groups& groups_;
  const int vector_;
  const int64_t rows_, first_, depth_, steps_, segment_steps_;
  Float* const y_;
};

// y[rows of the portion, kLanes outputs from `column` on], from TileSums' order.
template <int kSums>
inline void write_portion(const Product& p, int64_t m, int64_t column, int64_t portion,
                          const Float* sums, float* y) {
  const int64_t outputs = p.w.n - column < kLanes ? p.w.n - column : kLanes;
  for (int64_t r = 0; r < p.how.portion && portion * p.how.portion + r < m; ++r) {
    float* to = y + (portion * p.how.portion + r) * p.w.n + column;
    const Float sum = kSums == 1 ? sums[r] : sums[r] + sums[kTileRows + r];
    std::memcpy(to, &sum, outputs * sizeof(float));
  }
}

// One portion: every slab is multiplied as soon as it is decoded.
template <Arithmetic A, Kind kind, bool kScaled>
inline void multiply_stream(const Product& p, int64_t m, int64_t column, float* y) {
  using Total = TileSums<A, kind, kScaled>;
  using Source = typename Total::Source;
  const int64_t slabs = p.how.inputs / (2 * kRun<A>) * Source::kPerChunk;
  alignas(64) Word buffers[2][Source::kRuns * Source::kWords];
  alignas(64) Float sums[Total::kSums * kTileRows] = {};
  Groups groups(p.w, column);
  Source source(p.w, column, 0, groups);
  Total total(p, groups, 0, 0, sums);
  total.begin();
  const Word* next = source.read(0, kTileAhead, buffers[0]);
  for (int64_t slab = 0; slab < slabs; ++slab) {
    const Word* weights = next;
    if (slab % Source::kPerChunk == 0) groups.template ask<A>(1, slab / Source::kPerChunk + 1);
    if (slab + 1 < slabs) next = source.read(slab + 1, kTileAhead, buffers[(slab + 1) & 1]);
    total.add(slab, weights);
  }
  total.end();
  write_portion<Total::kSums>(p, m, column, 0, sums, y);
}

// Of a panel of kColumns outputs, chunks of inputs are decoded for all portions of a pass.
template <Arithmetic A, Kind kind, bool kScaled>
class TilePanel {
 public:
  TilePanel(const Product& p, int64_t column)
      : p_(p), column_(column), groups_(p.w, column) {
    const int64_t left = (p.w.n - column + kLanes - 1) / kLanes;
    vectors_ = left < kVectors ? left : kVectors;
  }

  void multiply(int64_t m, int64_t first, int64_t portions, float* y) {
    const int64_t chunks = p_.how.inputs / (2 * kRun<A>);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      groups_.template ask<A>(kVectors, chunk + 1);
      // The next chunk of the same outputs, at last the first one of the next panel's.
      const int64_t ahead = chunk + 1 < chunks ? kChunkBytes
                                               : kColumns * p_.w.row_bytes - chunk * kChunkBytes;
      for (int v = 0; v < vectors_; ++v) {
        Source source(p_.w, column_, v, groups_);
        for (int s = 0; s < kSlabs; ++s) {
          weights_[v][s] = source.read(chunk * kSlabs + s, ahead, buffers_[v][s]);
        }
      }
      for (int64_t i = 0; i < portions; ++i) add(chunk, first, i);
    }
    for (int v = 0; v < vectors_; ++v) {
      for (int64_t i = 0; i < portions; ++i) {
        write_portion<Total::kSums>(p_, m, column_ + v * kLanes, first + i, sums_[v][i], y);
      }
    }
  }

 private:
  using Total = TileSums<A, kind, kScaled>;
  using Source = typename Total::Source;
  static constexpr int kSlabs = Source::kPerChunk;
  static constexpr int64_t kChunkBytes = chunk_bytes<A>(kind) * kTile;

  void add(int64_t chunk, int64_t first, int64_t portion) {
    for (int v = 0; v < vectors_; ++v) {
      Total total(p_, groups_, v, first + portion, sums_[v][portion]);
      total.begin();
      for (int s = 0; s < kSlabs; ++s) total.add(chunk * kSlabs + s, weights_[v][s]);
      total.end();
    }
  }

  const Product& p_;
  const int64_t column_;
  int64_t vectors_;
  Groups groups_;
  alignas(64) Float sums_[kVectors][kPortionsPerPass][Total::kSums * kTileRows] = {};
  alignas(64) Word buffers_[kVectors][kSlabs][Source::kRuns * Source::kWords];
  const Word* weights_[kVectors][kSlabs];
};

template <Arithmetic A, Kind kind, bool kScaled = false>
inline void multiply_by_tiles(const Product& p, int64_t m, int64_t column, float* y) {
  const TileShapes shapes(p.how.portion, p.how.depth);
  const int64_t portions = p.how.rows / p.how.portion;
  if (portions == 1) {
    for (int64_t n = column; n < column + kColumns && n < p.w.n; n += kLanes) {
      multiply_stream<A, kind, kScaled>(p, m, n, y);
    }
    return;
  }
  for (int64_t first = 0; first < portions; first += kPortionsPerPass) {
    const int64_t left = portions - first;
    const int64_t count = left < kPortionsPerPass ? left : kPortionsPerPass;
    TilePanel<A, kind, kScaled>(p, column).multiply(m, first, count, y);
  }
}

}  // namespace specjax::SPECJAX_ISA
