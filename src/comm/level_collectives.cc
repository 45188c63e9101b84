#include "comm/level_collectives.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {
namespace {

// Returns the number of ranks of the group.
int size_of_group(const std::vector<LevelStep>& steps) { return steps.front().radix() * steps.front().width; }

// Returns the bytes of the parts that arrive at a level, at most.
int64_t bytes_at(const CollectiveLevels& levels, int level, int64_t num_elements, int64_t element_bytes) {
  const int64_t part = (num_elements * levels.width(level) + levels.size() - 1) / levels.size();
  return levels.radix(level) * part * element_bytes;
}

}  // namespace

OfLevels<int64_t> level_bytes(const CollectiveLevels& levels, int64_t num_elements, DType dtype) {
  const bool widens = dtype == DType::bf16 && levels.count() > 1;
  OfLevels<int64_t> bytes{.first = bytes_at(levels, 0, num_elements, size_of(dtype))};
  for (int l = 1; l < levels.count(); ++l)
    bytes.above = std::max(bytes.above, bytes_at(levels, l, num_elements, size_of(widens ? DType::f32 : dtype)));
  if (widens) bytes.sums = bytes_at(levels, 0, num_elements, size_of(DType::f32)) / levels.radix(0);
  return bytes;
}

void sum_at_level(const LevelCalls& calls, const LevelStep& step, const Tensor& own, DType dtype, const Spans& to,
                  std::byte* arrived) {
  const int64_t bytes = own.numel() * size_of(dtype);
  Spans from;
  for (int d = 0; d < step.radix(); ++d) from.push_back({.data = arrived + d * bytes, .num_bytes = bytes});
  from[step.digit] = to[step.digit];
  calls.exchange(step, to, from);
  calls.sum(own, {.own = to[step.digit].data,
                  .arrived = arrived,
                  .stride_bytes = bytes,
                  .own_rank = step.digit,
                  .count = step.radix(),
                  .dtype = dtype});
}

void sum_over_levels(const LevelCalls& calls, const std::vector<LevelStep>& steps, const Tensor& own, const Tensor& x_N,
                     const LevelMemory& memory) {
  const int size = size_of_group(steps);
  Tensor sums_N = x_N;  // the slices that this rank still sums
  for (const LevelStep& step : steps) {
    const auto begin_of = [&](int place) { return x_N.numel() * place / size - x_N.numel() * step.first / size; };
    const auto part = [&](int d) { return sums_N.rows(begin_of(step.begin(d)), begin_of(step.begin(d) + step.width)); };
    Spans to;
    for (int d = 0; d < step.radix(); ++d) to.push_back(span_of(part(d)));
    const DType dtype = sums_N.dtype;
    Tensor out = part(step.digit);
    if (&step == &steps.back()) {
      out = own;
    } else if (dtype == DType::bf16) {
      out.data = memory.sums;
      out.dtype = DType::f32;
    }
    sum_at_level(calls, step, out, dtype, to, step.level == 0 ? memory.first : memory.above);
    sums_N = out;
  }
}

void gather_over_levels(const LevelCalls& calls, const std::vector<LevelStep>& steps, const Tensor& x_N) {
  const int64_t n = x_N.numel(), size = size_of_group(steps);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    Spans from;
    for (int d = 0; d < step->radix(); ++d) {
      const int64_t begin = step->begin(d);
      from.push_back(span_of(x_N.rows(n * begin / size, n * (begin + step->width) / size)));
    }
    calls.exchange(*step, Spans(from.size(), from[step->digit]), from);
  }
}

void broadcast_over_levels(const LevelCalls& calls, const CollectiveLevels& levels, int rank, int root,
                           const Tensor& x) {
  const std::vector<LevelStep> steps = levels.steps(rank);
  for (int level = levels.count() - 1; level >= 0; --level) {
    bool takes_part = true;
    for (int l = 0; l < level; ++l) takes_part = takes_part && levels.digit(rank, l) == levels.digit(root, l);
    if (!takes_part) continue;
    const int sender = levels.digit(root, level);
    Spans to(levels.radix(level)), from(levels.radix(level));
    from[sender] = span_of(x);
    if (levels.digit(rank, level) == sender) to.assign(to.size(), span_of(x));
    // The sender gets empty messages, so that it notices a missing rank here.
    calls.exchange(steps[level], to, from);
  }
}

}  // namespace moebius
