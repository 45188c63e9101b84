#include "comm/reduce_parts.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {
namespace {

constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool widens(const CollectiveLevels& levels, DType dtype) { return dtype == DType::bf16 && !levels.is_direct(); }

// A piece of the sum: out_n of each rank.
class Piece {
 public:
  // part(r) is the part of rank r.
  Piece(const PartCalls& calls, const CollectiveLevels& levels, const std::vector<LevelStep>& steps,
        const std::function<Tensor(int)>& part, std::byte* memory)
      : calls_(calls), levels_(levels), steps_(steps), part_(part), memory_(memory) {}

  void sum_directly(const Tensor& out_n) {
    Spans to;
    for (int r = 0; r < levels_.size(); ++r) to.push_back(span_of(part_(r)));
    sum_at_level(calls_.levels, steps_[0], out_n, part_(0).dtype, to, memory_);
  }

  void sum_over_levels(const Tensor& out_n) {
    Tensor x_N = part_(0);
    x_N.data = memory_;
    x_N.shape = {out_n.numel() * levels_.size()};
    const LevelStep& first = steps_[0];
    const Spans own = block(first.digit), places = slices(x_N, first.digit);
    for (size_t i = 0; i < own.size(); ++i) calls_.copy(places[i], own[i]);
    LevelMemory memory = level_memory(levels_, x_N.numel(), x_N.dtype, memory_);
    // This rank's block is in use until it is summed, and with it the sums of dtypes that are summed in place.
    if (!widens(levels_, x_N.dtype) && first.digit == 0) memory.above += x_N.num_bytes() / first.radix();
    LevelCalls calls = calls_.levels;
    calls.exchange = [&](const LevelStep& step, const Spans& to, const Spans& from) {
      step.level == 0 ? exchange_blocks(x_N) : calls_.levels.exchange(step, to, from);
    };
    moebius::sum_over_levels(calls, steps_, out_n, x_N, memory);
  }

 private:
  // The parts of the ranks of member d, and where they would be in x_N.
  Spans block(int d) const {
    Spans spans;
    for (int i = 0; i < steps_[0].width; ++i) spans.push_back(span_of(part_(levels_.rank_at(steps_[0].begin(d) + i))));
    return spans;
  }
  Spans slices(const Tensor& x_N, int d) const {
    Spans spans;
    for (int i = 0; i < steps_[0].width; ++i)
      spans.push_back(span_of(slice_of(x_N, steps_[0].begin(d) + i, levels_.size())));
    return spans;
  }
  void exchange_blocks(const Tensor& x_N) const {
    std::vector<Spans> to, from;
    for (int d = 0; d < steps_[0].radix(); ++d) {
      to.push_back(block(d));
      from.push_back(slices(x_N, d));
    }
    calls_.exchange(steps_[0], to, from);
  }

  const PartCalls& calls_;
  const CollectiveLevels& levels_;
  const std::vector<LevelStep>& steps_;
  const std::function<Tensor(int)>& part_;
  std::byte* memory_;
};

}  // namespace

int64_t sum_bytes(const CollectiveLevels& levels, int64_t num_elements, DType dtype) {
  const OfLevels<int64_t> bytes = level_bytes(levels, num_elements * levels.size(), dtype);
  const int64_t arrived = std::max(bytes.first, bytes.above);
  return bytes.sums == 0 ? arrived : aligned(arrived) + bytes.sums;
}

int64_t elements_that_fit(const CollectiveLevels& levels, int64_t wanted, DType dtype, int64_t num_bytes) {
  if (sum_bytes(levels, wanted, dtype) <= num_bytes) return wanted;
  const int64_t sums = widens(levels, dtype) ? levels.width(0) * size_of(DType::f32) : 0;
  int64_t most = num_bytes / (levels.size() * size_of(dtype) + sums);
  while (most > 0 && sum_bytes(levels, most, dtype) > num_bytes) --most;  // for the alignment
  return most < 16 ? most : most / 16 * 16;
}

LevelMemory level_memory(const CollectiveLevels& levels, int64_t num_elements, DType dtype, std::byte* memory) {
  const OfLevels<int64_t> bytes = level_bytes(levels, num_elements, dtype);
  return {.first = memory, .above = memory, .sums = memory + aligned(std::max(bytes.first, bytes.above))};
}

Span aligned_for(DType dtype, Span memory) {
  if (dtype != DType::bf16) return memory;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data));
  const int64_t skipped = std::min(aligned(address) - address, memory.num_bytes);
  return {.data = memory.data + skipped, .num_bytes = memory.num_bytes - skipped};
}

void reduce_parts(const PartCalls& calls, const CollectiveLevels& levels, int rank, const Tensor& out, const Tensor& in,
                  Span memory) {
  const std::vector<LevelStep> steps = levels.steps(rank);
  const int64_t own = out.numel();
  const Span at_work = aligned_for(in.dtype, memory);
  const int64_t piece = elements_that_fit(levels, own, in.dtype, at_work.num_bytes);
  MOEBIUS_ASSERT(piece > 0 || own == 0);
  const Tensor in_N = in.view({in.numel()}), out_N = out.view({own});
  for (int64_t at = 0; at < own; at += piece) {
    const int64_t end = std::min(at + piece, own);
    const std::function<Tensor(int)> part = [&](int r) { return in_N.rows(r * own + at, r * own + end); };
    Piece sum(calls, levels, steps, part, at_work.data);
    levels.is_direct() ? sum.sum_directly(out_N.rows(at, end)) : sum.sum_over_levels(out_N.rows(at, end));
  }
}

}  // namespace moebius
