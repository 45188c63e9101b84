#include "plan/memory/state_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moebius {
namespace {

constexpr double kGib = int64_t{1} << 30;

// The states of a pipeline rank, and the memory that it needs without a buffer.
struct BufferRank {
  std::vector<StatesOf> states;
  int64_t bytes = 0;
};

class BufferChoice {
 public:
  BufferChoice(const RunMemory& memory, int64_t limit_bytes)
      : memory_(memory), limit_(limit_bytes), optimizer_(memory.spec().optimizer.value()) {
    LayoutParts parts(memory.library(), memory.spec());
    for (int64_t r = 0; r < memory.num_pp_ranks(); ++r)
      ranks_.push_back({states_of_rank(parts, memory.layout(), r), bytes(r, 0)});
  }

  // A buffer for all states needs no slots, so it may fit where a smaller one does not.
  StateBuffer result() const {
    const int64_t most = steps(kept_bytes(1e300));
    for (const int64_t n : {most, largest_by_sum(most)})
      if (const StateBuffer b = with_steps(n); b.bytes <= limit_) return b;
    return with_steps(0);
  }

 private:
  static int64_t steps(double bytes) { return static_cast<int64_t>(std::ceil(bytes / kGib * kBufferStepsPerGib)); }
  static double gib(int64_t steps) { return static_cast<double>(steps) / kBufferStepsPerGib; }

  int64_t bytes(int64_t pp_rank, double buffer) const {
    return memory_.bytes(pp_rank, memory_.spec().recompute, buffer);
  }

  int64_t kept_of(const BufferRank& rank, double buffer) const {
    OptimizerSpec optimizer = optimizer_;
    optimizer.offload_buffer = buffer;
    const std::vector<bool> kept = kept_states(optimizer, rank.states);
    int64_t bytes = 0;
    for (size_t i = 0; i < kept.size(); ++i)
      if (kept[i]) bytes += states_bytes(optimizer, rank.states[i]);
    return bytes;
  }

  // Returns the bytes that a buffer holds on the rank where it holds the most.
  double kept_bytes(double buffer) const {
    int64_t most = 0;
    for (const BufferRank& rank : ranks_) most = std::max(most, kept_of(rank, buffer));
    return static_cast<double>(most);
  }

  // A larger buffer holds at least as much: the first state that only the larger one holds fills it to its last byte.
  int64_t largest_by_sum(int64_t most) const {
    const auto fits = [&](int64_t n) {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](const BufferRank& rank) { return rank.bytes + kept_of(rank, gib(n)) <= limit_; });
    };
    if (!fits(0)) return 0;
    int64_t fit = 0, too_many = most + 1;
    while (too_many - fit > 1) {
      const int64_t n = fit + (too_many - fit) / 2;
      (fits(n) ? fit : too_many) = n;
    }
    return std::min(fit, steps(kept_bytes(gib(fit))));
  }

  StateBuffer with_steps(int64_t n) const {
    StateBuffer b{.gib = gib(n), .limit_bytes = limit_};
    for (int64_t r = 0; r < memory_.num_pp_ranks(); ++r) b.bytes = std::max(b.bytes, bytes(r, b.gib));
    return b;
  }

  const RunMemory& memory_;
  int64_t limit_ = 0;
  OptimizerSpec optimizer_;
  std::vector<BufferRank> ranks_;  // [pp_rank]
};

}  // namespace

std::string StateBuffer::text(int64_t gpu_bytes) const {
  return fmt::format("optimizer.offload_buffer = {}: a rank needs {} of {}, {:.0f} % of {} that the GPU has for it{}",
                     gib, bytes_text(bytes), bytes_text(limit_bytes), 100 * (1 - kFreeShare), bytes_text(gpu_bytes),
                     bytes > limit_bytes ? ", which leaves nothing for a buffer" : "");
}

int64_t without_margin(int64_t gpu_bytes) {
  return static_cast<int64_t>((1 - kFreeShare) * static_cast<double>(gpu_bytes));
}

bool chooses_buffer(const RunSpec& run) {
  return run.optimizer.offload && !run.optimizer.offload_buffer && run.device == DeviceKind::cuda;
}

StateBuffer choose_state_buffer(const RunMemory& memory, int64_t limit_bytes) {
  return BufferChoice(memory, limit_bytes).result();
}

}  // namespace moebius
