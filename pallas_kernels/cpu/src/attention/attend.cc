#include "attention/attend.h"

#include <algorithm>
#include <vector>

#include "common/memory.h"

namespace specjax {
namespace {

constexpr int64_t kTaskRows = 64;  // queries of a task, at most: they share decoded strips
// With kTasksPerThread tasks or more per thread, and more than kFewRows queries per task, threads
// take whole tasks. Otherwise they take steps, in the order of memory and several in a deal.
constexpr int64_t kTasksPerThread = 4, kFewRows = 16, kDealsPerThread = 4;

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

void attend_tasks(Team& team, const Kernels& kernels, const Attention& a,
                  const std::vector<AttentionTask>& tasks) {
  team.for_each(tasks.size(), [&](int64_t i) {
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
void attend_steps(Team& team, const Kernels& kernels, const Attention& a,
                  const std::vector<AttentionTask>& tasks, int64_t tokens) {
  const std::vector<AttentionStep> steps = find_steps(a, tasks);
  const int64_t count = steps.size(), stride = kernels.attention_sizes(a, tokens).sums;
  const int64_t most = kDealsPerThread * team.threads();
  const int64_t each = std::clamp<int64_t>(count / most, 1, a.kv_heads);
  thread_local Memory shared;
  float* const all = shared.reserve((count + tasks.size()) * stride);
  const int64_t deals = (count + each - 1) / each;
  const auto step = [&](int64_t i) { return i < count ? &steps[i] : nullptr; };
  team.for_each(deals, [&](int64_t deal) {
    float* scratch = thread_memory().reserve(kernels.attention_sizes(a, tokens).scratch);
    // A thread's deals are neighbours. Where a deal is a whole block, the thread asks for the next
    // block while it works on this one. Its first deal, and smaller deals, are asked for by steps.
    const Range own = team.range_of(deals, deal);
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
  team.for_each(tasks.size(), [&](int64_t i) {
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

}  // namespace

void see(Attention& a, int64_t window, int64_t sinks) {
  // Positions differ by less than 2^33: a wider window hides nothing more.
  a.windowed = window >= 0, a.window = std::min(window, int64_t{1} << 33);
  a.sinks = a.windowed ? sinks : 0;
}

void attend(Team& team, const Kernels& kernels, const Attention& a) {
  const int64_t tokens = std::min(a.tokens, std::max<int64_t>(1, kTaskRows / a.heads_per_kv));
  const std::vector<AttentionTask> tasks = find_tasks(a, tokens);
  const bool few = static_cast<int64_t>(tasks.size()) < kTasksPerThread * team.threads();
  if (few || tokens * a.heads_per_kv <= kFewRows) {
    attend_steps(team, kernels, a, tasks, tokens);
  } else {
    attend_tasks(team, kernels, a, tasks);
  }
}

}  // namespace specjax
