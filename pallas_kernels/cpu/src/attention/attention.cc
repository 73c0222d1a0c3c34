// The XLA handler of `attention`: checks every buffer, divides the queries into tasks, and deals
// tasks or their steps out to the threads.
#include <algorithm>
#include <string>
#include <vector>

#include "common/handlers.h"
#include "common/isa.h"
#include "common/threads.h"
#include "common/types.h"

namespace specjax {
namespace {

constexpr int64_t kTaskRows = 64;  // queries of a task, at most: they share decoded strips
// With kTasksPerThread tasks or more per thread, and more than kFewRows queries per task, threads
// take whole tasks. Otherwise they take steps, in the order of memory and several in a deal.
constexpr int64_t kTasksPerThread = 4, kFewRows = 16, kDealsPerThread = 4;

// --- Sharing the work.

class Memory {
 public:
  // At least `floats` floats, aligned to a line, with the contents that earlier calls left.
  float* reserve(int64_t floats) {
    if (memory_.size() < static_cast<size_t>(floats + kSlack)) memory_.resize(floats + kSlack);
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - start % 64) % 64 / sizeof(float);
  }

 private:
  static constexpr int64_t kSlack = 16;
  std::vector<float> memory_;
};

Memory& thread_memory() {
  thread_local Memory memory;
  return memory;
}

// The number of new tokens on the longest path to one of the task's tokens.
int64_t longest_path(const Attention& a, const AttentionTask& task) {
  const int32_t* paths = a.ancestors + (task.batch_row * a.tokens + task.token) * a.depth;
  int64_t longest = 0;
  for (int64_t i = 0; i < task.tokens * a.depth; ++i) {
    if (paths[i] >= 0) longest = std::max(longest, i % a.depth + 1);
  }
  return longest;
}

// Sets the slots that any of the task's tokens may see.
void find_slots(const Attention& a, AttentionTask& task) {
  const int64_t length = a.lengths[task.batch_row];
  const int64_t shown = a.ancestors == nullptr ? task.token + task.tokens : longest_path(a, task);
  task.last = std::clamp<int64_t>(length + shown, 0, a.slots);
  task.first = 0;
  if (a.windowed) {
    const int32_t* positions = a.positions + task.batch_row * a.tokens + task.token;
    const int64_t position = *std::min_element(positions, positions + task.tokens);
    task.first = std::clamp<int64_t>(std::min(length, position - a.window + 1), 0, task.last);
  }
}

// All tasks, longest first, so that no thread is left with a long one at the end.
std::vector<AttentionTask> find_tasks(const Attention& a, int64_t tokens) {
  std::vector<AttentionTask> tasks;
  for (int64_t token = (a.tokens - 1) / tokens * tokens; token >= 0; token -= tokens) {
    for (int64_t row = 0; row < a.b; ++row) {
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        tasks.push_back({row, head, token, std::min(tokens, a.tokens - token), 0, 0, a.sinks});
        find_slots(a, tasks.back());
      }
    }
  }
  return tasks;
}

void attend_tasks(ffi::ThreadPool& pool, const Kernels& kernels, const Attention& a,
                  const std::vector<AttentionTask>& tasks) {
  parallel_for(pool, tasks.size(), [&](int64_t i) {
    const AttentionTask& task = tasks[i];
    const AttentionSizes sizes = kernels.attention_sizes(a, task.tokens);
    float* sums = thread_memory().reserve(2 * sizes.sums + sizes.scratch);
    float* scratch = sums + 2 * sizes.sums;
    kernels.clear_sums(a, task.tokens, sums);
    for (int64_t block = 0; block < task.blocks(); ++block) {
      const AttentionStep step{&task, task.block(block)}, next{&task, task.block(block + 1)};
      const AttentionAhead ahead{block + 1 < task.blocks() ? &next : nullptr, nullptr};
      kernels.attend_block(a, step, ahead, scratch, sums + sizes.sums);
      kernels.add_block(a, task.tokens, sums + sizes.sums, sums);
    }
    kernels.write_result(a, task, sums);
  });
}

// The steps of all tasks. Those of neighbouring heads are adjacent, because they read adjacent
// memory.
std::vector<AttentionStep> find_steps(const Attention& a, const std::vector<AttentionTask>& tasks) {
  std::vector<AttentionStep> steps;
  for (size_t first = 0; first < tasks.size(); first += a.kv_heads) {
    for (int64_t block = 0; block < tasks[first].blocks(); ++block) {
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        steps.push_back({&tasks[first + head], tasks[first].block(block)});
      }
    }
  }
  return steps;
}

// Computes the same sums, and adds them in the same order once all of them are there. No task has
// more tokens than `tokens`.
void attend_steps(ffi::ThreadPool& pool, const Kernels& kernels, const Attention& a,
                  const std::vector<AttentionTask>& tasks, int64_t tokens) {
  const std::vector<AttentionStep> steps = find_steps(a, tasks);
  const int64_t count = steps.size(), stride = kernels.attention_sizes(a, tokens).sums;
  const int64_t most = kDealsPerThread * pool.num_threads();
  const int64_t each = std::clamp<int64_t>(count / most, 1, a.kv_heads);
  thread_local Memory shared;
  float* const all = shared.reserve((count + tasks.size()) * stride);
  const int64_t deals = (count + each - 1) / each;
  const auto step = [&](int64_t i) { return i < count ? &steps[i] : nullptr; };
  parallel_for(pool, deals, [&](int64_t deal) {
    float* scratch = thread_memory().reserve(kernels.attention_sizes(a, tokens).scratch);
    // A thread's deals are neighbours. Where a deal is a whole block, the thread asks for the next
    // block while it works on this one. Its first deal, and smaller deals, are asked for by steps.
    const Range own = range_of(pool, deals, deal);
    const bool blocks = each == a.kv_heads;
    const bool single = !blocks || deal == own.begin, more = blocks && deal + 1 < own.end;
    const int64_t end = std::min(count, (deal + 1) * each);
    for (int64_t i = deal * each; i < end; ++i) {
      const AttentionAhead ahead{single ? step(i + 1) : nullptr, more ? step(i + each) : nullptr};
      kernels.attend_block(a, steps[i], ahead, scratch, all + i * stride);
    }
  });
  std::vector<int64_t> firsts(tasks.size());
  for (int64_t i = count - 1; i >= 0; --i) firsts[steps[i].task - tasks.data()] = i;
  parallel_for(pool, tasks.size(), [&](int64_t i) {
    const AttentionTask& task = tasks[i];
    float* sums = all + (count + i) * stride;
    kernels.clear_sums(a, task.tokens, sums);
    for (int64_t block = 0; block < task.blocks(); ++block) {
      const float* next = all + (firsts[i] + block * a.kv_heads) * stride;
      kernels.add_block(a, task.tokens, next, sums);
    }
    kernels.write_result(a, task, sums);
  });
}

void attend(ffi::ThreadPool& pool, const Kernels& kernels, const Attention& a) {
  const int64_t tokens = std::min(a.tokens, std::max<int64_t>(1, kTaskRows / a.heads_per_kv));
  const std::vector<AttentionTask> tasks = find_tasks(a, tokens);
  const bool few = static_cast<int64_t>(tasks.size()) < kTasksPerThread * pool.num_threads();
  if (few || tokens * a.heads_per_kv <= kFewRows) {
    attend_steps(pool, kernels, a, tasks, tokens);
  } else {
    attend_tasks(pool, kernels, a, tasks);
  }
}

// --- The handler.

ffi::Error read_shapes(const ffi::AnyBuffer& queries, const ffi::AnyBuffer& keys, Attention& a) {
  const auto q = queries.dimensions(), k = keys.dimensions();
  const auto type = queries.element_type(), cache = keys.element_type();
  if (q.size() != 4 || !is_float(type)) {
    return invalid("queries must be bfloat16 or float32 [B, T, H, E], got " +
                   text(shape_of(queries)));
  }
  if (k.size() != 5 || (cache != ffi::F32 && cache != ffi::U16 && cache != ffi::U8)) {
    return invalid("keys must be float32, uint16 or uint8 [B, L, S, K, E], got " +
                   text(shape_of(keys)));
  }
  a.b = q[0], a.tokens = q[1], a.heads = q[2], a.e = q[3];
  a.layers = k[1], a.slots = k[2], a.kv_heads = k[3];
  const bool nibbles = cache == ffi::U8 && 2 * k[4] == a.e;
  if (k[0] != a.b || (k[4] != a.e && !nibbles) || a.kv_heads < 1 || a.heads % a.kv_heads != 0) {
    return invalid("keys " + text(shape_of(keys)) + " do not fit queries " +
                   text(shape_of(queries)));
  }
  a.heads_per_kv = a.heads / a.kv_heads;
  a.queries_bfloat16 = type == ffi::BF16;
  a.cached = cache == ffi::F32   ? Cached::kFloat32
             : cache == ffi::U16 ? Cached::kBfloat16
             : nibbles           ? Cached::kCodes4
                                 : Cached::kCodes8;
  return ffi::Error::Success();
}

// Reads the scales and zeros of keys and values if the cache holds codes, then the ancestors if
// there is a tree.
ffi::Error read_others(const ffi::RemainingArgs& others, Attention& a) {
  const size_t grids = a.cached >= Cached::kCodes8 ? 4 : 0;
  if (others.size() < grids || others.size() > grids + 1) {
    return invalid("the number of buffers does not fit the cache's type");
  }
  const void* data[5] = {};
  const Shape grid{a.b, a.layers, a.slots, a.kv_heads};
  for (size_t i = 0; i < others.size(); ++i) {
    auto buffer = others.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    if (i == grids && buffer->dimensions().size() > 0) a.depth = buffer->dimensions().back();
    const auto error = i == grids ? check("ancestors", *buffer, ffi::S32, {a.b, a.tokens, a.depth})
                       : i % 2 == 0 ? check("scales", *buffer, ffi::F32, grid)
                                    : check("zeros", *buffer, ffi::U8, grid);
    if (error.failure()) return error;
    data[i] = buffer->untyped_data();
  }
  a.ancestors = static_cast<const int32_t*>(data[grids]);
  if (grids == 0) return ffi::Error::Success();
  a.keys.scales = static_cast<const float*>(data[0]);
  a.keys.zeros = static_cast<const uint8_t*>(data[1]);
  a.values.scales = static_cast<const float*>(data[2]);
  a.values.zeros = static_cast<const uint8_t*>(data[3]);
  return ffi::Error::Success();
}

// window: negative for none.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, ffi::AnyBuffer lengths, ffi::AnyBuffer positions,
                     ffi::AnyBuffer layer, ffi::RemainingArgs others,
                     ffi::Result<ffi::AnyBuffer> result, int64_t window, int64_t sinks, float scale,
                     std::string_view instruction_set) {
  const Kernels* kernels = find_kernels(instruction_set);
  if (kernels == nullptr) {
    return invalid("this machine cannot run " + std::string(instruction_set));
  }
  Attention a{};
  if (auto error = read_shapes(queries, keys, a); error.failure()) return error;
  for (auto error :
       {check("values", values, keys.element_type(), shape_of(keys)),
        check("lengths", lengths, ffi::S32, {a.b}),
        check("positions", positions, ffi::S32, {a.b, a.tokens}),
        check("layer", layer, ffi::S32, {}),
        check("the result", *result, ffi::F32, shape_of(queries)), read_others(others, a)}) {
    if (error.failure()) return error;
  }
  if (sinks < 0 || sinks > kMostSinks) {
    return invalid("sinks must be in 0 … " + std::to_string(kMostSinks) + ", got " +
                   std::to_string(sinks));
  }
  a.layer = *static_cast<const int32_t*>(layer.untyped_data());
  if (a.layer < 0 || a.layer >= a.layers) {
    return invalid("layer must be in 0 … " + std::to_string(a.layers - 1) + ", got " +
                   std::to_string(a.layer));
  }
  a.queries = queries.untyped_data();
  a.keys.data = keys.untyped_data(), a.values.data = values.untyped_data();
  a.lengths = static_cast<const int32_t*>(lengths.untyped_data());
  a.positions = static_cast<const int32_t*>(positions.untyped_data());
  // Positions differ by less than 2^33: a wider window hides nothing more.
  a.windowed = window >= 0, a.window = std::min(window, int64_t{1} << 33), a.scale = scale;
  a.sinks = a.windowed ? sinks : 0;
  a.out = static_cast<float*>(result->untyped_data());
  if (a.b * a.tokens * a.heads * a.e > 0) attend(pool, *kernels, a);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_attention, specjax::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // queries
                                  .Arg<ffi::AnyBuffer>()  // keys
                                  .Arg<ffi::AnyBuffer>()  // values
                                  .Arg<ffi::AnyBuffer>()  // lengths
                                  .Arg<ffi::AnyBuffer>()  // positions
                                  .Arg<ffi::AnyBuffer>()  // layer
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<float>("scale")
                                  .Attr<std::string_view>("instruction_set"));
