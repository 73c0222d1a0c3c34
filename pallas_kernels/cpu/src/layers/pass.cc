#include "layers/pass.h"

#include <algorithm>
#include <initializer_list>

#include "attention/attend.h"
#include "common/memory.h"
#include "matmul/products.h"

namespace specjax {
namespace {

// Memory for what lies between the products of one layer.
class Between {
 public:
  explicit Between(const Pass& p) {
    const int64_t heads = p.attention.heads * p.attention.e;
    const int64_t entries = p.attention.kv_heads * p.attention.e;
    const std::array<int64_t, 9> widths{std::max(p.d, heads), heads, entries, entries, heads, heads,
                                        std::max(p.d, p.f),   p.f,   p.f};
    int64_t needed = 0;
    for (const int64_t width : widths) needed += lines(p.rows * width);
    float* next = memory_.reserve(needed);
    float** parts[] = {&input, &q, &k, &v, &queries, &mixed, &result, &gate, &up};
    for (size_t i = 0; i < widths.size(); ++i) {
      *parts[i] = next;
      next += lines(p.rows * widths[i]);
    }
  }

  float* input;                // of the next product: [rows, K], bfloat16 or float32; and `down`
  float *q, *k, *v, *queries;  // queries: rotated, bfloat16 or float32
  float *mixed, *gate, *up;
  float* result;  // [rows, D]; before it, the input of `down`

 private:
  static constexpr int64_t kAlignment = 16;  // floats

  static int64_t lines(int64_t floats) {
    return (floats + kAlignment - 1) / kAlignment * kAlignment;
  }

  static Memory& kept() {
    thread_local Memory memory;
    return memory;
  }

  CallMemory memory_{kept()};
};

// One pass over one layer.
class Layer {
 public:
  Layer(Team& team, const Pass& pass, Between& between, int64_t number)
      : team_(team), p_(pass), at_(between), number_(number) {}

  void run(int64_t window, int64_t sinks) {
    norm(p_.attention_norm);
    multiply(at_.input, p_.d, {{kQ, at_.q}, {kK, at_.k}, {kV, at_.v}});
    place_heads();
    attend(window, sinks);
    round(at_.mixed, p_.attention.heads * p_.attention.e);
    multiply(at_.input, p_.attention.heads * p_.attention.e, {{kO, at_.result}});
    add(at_.result);
    norm(p_.mlp_norm);
    multiply(at_.input, p_.d, {{kGate, at_.gate}, {kUp, at_.up}});
    for_pieces(team_, p_.rows * p_.f, kSerialWaiting, [&](int64_t first, int64_t count) {
      gate_values(at_.gate + first, at_.up + first, count, Row(p_.bfloat16, at_.result, first));
    });
    multiply(at_.result, p_.f, {{kDown, at_.input}});
    add(at_.input);
  }

 private:
  struct Output {
    Name name;
    float* y;
  };

  template <typename Work>
  void for_rows(int64_t width, const Work& work) {
    specjax::for_rows(team_, p_.rows, width, kSerialWaiting, work);
  }

  // x, normed -> input
  void norm(const Norm& scale) {
    for_rows(p_.d, [&](int64_t row) {
      norm_row(Row(p_.bfloat16, p_.x, row * p_.d), scale.row(number_), p_.d, p_.eps,
               Row(p_.bfloat16, at_.input, row * p_.d));
    });
  }

  // y -> input
  void round(const float* y, int64_t width) {
    for_pieces(team_, p_.rows * width, kSerialWaiting, [&](int64_t first, int64_t count) {
      round_values(y + first, count, Row(p_.bfloat16, at_.input, first));
    });
  }

  // x + y -> x
  void add(const float* y) {
    for_pieces(team_, p_.rows * p_.d, kSerialWaiting, [&](int64_t first, int64_t count) {
      add_values(y + first, count, Row(p_.bfloat16, p_.x, first));
    });
  }

  void multiply(const void* x, int64_t k, std::initializer_list<Output> outputs) {
    const Input input{x, p_.bfloat16, p_.rows, k};
    std::vector<WeightProduct> products;
    for (const Output& output : outputs) {
      const Linear& linear = p_.linears[output.name];
      const Weight weight = linear.weights.at(number_);
      products.push_back({weight, p_.kernels->preparation(weight, input, linear.levels), output.y});
    }
    team_.reach_next();
    specjax::multiply(team_, *p_.kernels, input, products);
    for (const Output& output : outputs) add_bias(p_.linears[output.name], output.y);
  }

  void add_bias(const Linear& linear, float* y) {
    if (linear.bias == nullptr) return;
    const int64_t n = linear.weights.first.n;
    const float* bias = linear.bias + number_ * n;
    for_rows(n, [&](int64_t row) { add_values(bias, n, Row(false, y, row * n)); });
  }

  // q, rotated -> queries; k, rotated, and v -> the cache
  void place_heads() {
    const Attention& a = p_.attention;
    const int64_t entry = a.kv_heads * a.e, query = a.heads * a.e;
    for_rows(query + 2 * entry, [&](int64_t row) {
      rotate(at_.q + row * query, p_.q_norm, a.heads, row,
             Row(p_.bfloat16, at_.queries, row * query));
      const int64_t batch_row = row / a.tokens;
      const int64_t slot = a.lengths[batch_row] + row % a.tokens;
      if (slot < 0 || slot >= a.slots) return;
      const int64_t place = ((batch_row * a.layers + number_) * a.slots + slot) * entry;
      rotate(at_.k + row * entry, p_.k_norm, a.kv_heads, row, Row(p_.bfloat16, p_.keys, place));
      round_values(at_.v + row * entry, entry, Row(p_.bfloat16, p_.values, place));
    });
  }

  // heads: f32[heads, E], overwritten where there is a norm.
  void rotate(float* heads, const Norm& scale, int64_t count, int64_t row, Row to) {
    const int64_t e = p_.attention.e;
    for (int64_t head = 0; scale.data != nullptr && head < count; ++head) {
      const Row place(false, heads, head * e);
      norm_row(place, scale.row(number_), e, p_.eps, place);
    }
    rotate_row(heads, p_.cos + row * (e / 2), p_.sin + row * (e / 2), count, e / 2, to);
  }

  // queries -> mixed
  void attend(int64_t window, int64_t sinks) {
    Attention a = p_.attention;
    a.queries = at_.queries, a.out = at_.mixed, a.layer = number_;
    see(a, window, sinks);
    specjax::attend(team_, *p_.kernels, a);
  }

  Team& team_;
  const Pass& p_;
  Between& at_;
  const int64_t number_;
};

// The memory that the products of some layers read, in order.
std::vector<Announced> products_of(const Pass& p, const std::vector<LayerCall>& calls) {
  std::vector<Announced> all;
  for (const LayerCall& call : calls) {
    for (const auto& names : {std::vector{kQ, kK, kV}, {kO}, {kGate, kUp}, {kDown}}) {
      Announced& ahead = all.emplace_back();
      for (size_t i = 0; i < names.size(); ++i) {
        const Weights& weights = p.linears[names[i]].weights;
        const Weight w = weights.at(call.number);
        const bool scaled = w.scales != nullptr;
        ahead.parts[i] = {w.n,
                          {w.data, static_cast<const uint8_t*>(w.scales)},
                          {weights.bytes[0], scaled ? weights.bytes[1] : 0}};
      }
    }
  }
  return all;
}

}  // namespace

void run_layers(xla::ffi::ThreadPool& pool, const Pass& pass, const std::vector<LayerCall>& calls) {
  if (pass.rows == 0) return;
  Team team(pool, products_of(pass, calls));
  Between between(pass);
  for (const LayerCall& call : calls) {
    Layer(team, pass, between, call.number).run(call.window, call.sinks);
  }
}

}  // namespace specjax
