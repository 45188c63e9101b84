#include <algorithm>
#include <cmath>
#include <functional>

#include "bench/rank_device.h"
#include "bench/ranks.h"
#include "comm/control.h"
#include "comm/group_cost.h"
#include "comm/message_group.h"

namespace moebius {
namespace {

constexpr int kMaxRuns = 9, kMinRuns = 3, kMaxCallsOfRun = 8;
constexpr size_t kMinSizes = 2;  // a rate follows from two

// A rank, with buffers for the largest message on each side.
struct Bench {
  Bench(DeviceKind kind, Transport& transport, int64_t max_bytes, GpuSums sums)
      : device(kind), rank(kind, transport, /*threads=*/1, sums), from(kind, max_bytes), to(kind, max_bytes) {
    std::vector<int> all;
    for (int r = 0; r < transport.size(); ++r) all.push_back(r);
    group = rank.links ? rank.links->make_group("bench", all, {}) : transport.make_group("bench", all);
    messages = dynamic_cast<const MessageGroup*>(group.get());
  }
  Tensor view(const Buffer& b, int64_t numel) const {
    Tensor x = tensor_of(static_cast<float*>(b.data()), {numel});
    x.device = device;
    return x;
  }

  DeviceKind device;
  RankDevice rank;
  Buffer from, to;
  std::unique_ptr<Group> group;
  const MessageGroup* messages = nullptr;  // the group, on a CPU
};

// A line without its times, and the call that it times.
struct Work {
  CollectiveLine line;
  std::function<void()> call;
};

double ms_of_calls(Bench& b, int calls, const Work& work) {
  b.group->barrier();
  const double all_ms = time_on_device(b.rank.stream, [&] {
    for (int i = 0; i < calls; ++i) work.call();
  });
  return all_ms / calls;
}

CollectiveLine measured(Bench& b, Control& control, double budget_s, const Work& work) {
  CollectiveLine line = work.line;
  const int64_t bytes = b.group->sent_bytes(), messages = b.messages ? b.messages->sent_messages() : 0;
  work.call();
  line.sent_bytes = b.group->sent_bytes() - bytes;
  if (b.messages) line.sent_messages = b.messages->sent_messages() - messages;
  // All ranks make as many calls as the slowest can.
  const int64_t call_us = control.max(std::llround(ms_of_calls(b, 1, work) * 1e3));
  const auto calls = static_cast<int64_t>(budget_s * 1e6 / static_cast<double>(std::max(int64_t{1}, call_us)));
  const auto runs = static_cast<size_t>(std::clamp<int64_t>(calls, kMinRuns, kMaxRuns));
  const auto calls_of_run = static_cast<int>(std::clamp<int64_t>(calls / kMaxRuns, 1, kMaxCallsOfRun));
  std::vector<double> ms;
  while (ms.size() < runs) ms.push_back(ms_of_calls(b, calls_of_run, work));
  std::sort(ms.begin(), ms.end());
  line.median_ms = ms[ms.size() / 2];
  return line;
}

std::vector<Work> collectives(Bench& b, int64_t n, int64_t bytes, const std::string& note) {
  const int64_t share = bytes / 4 / n / 64 * 64;
  const Tensor all_from = b.view(b.from, share * n), all_to = b.view(b.to, share * n);
  const Tensor one_from = b.view(b.from, share), one_to = b.view(b.to, share);
  const auto sent = static_cast<double>(all_to.num_bytes());
  Group& g = *b.group;
  Stream& s = b.rank.stream;
  std::vector<Work> works;
  const auto add = [&](const char* name, const GroupCost& cost, const std::function<void()>& call) {
    Work& work = works.emplace_back();
    work.line.name = name + note;
    work.line.bytes = bytes;
    work.line.formula_bytes = cost.wire_bytes;
    work.call = call;
  };
  add("all_gather", all_gather_cost(sent, n), [=, &g, &s] { g.all_gather(s, all_to, one_from); });
  add("reduce_scatter_sum", reduce_scatter_cost(sent, n), [=, &g, &s] { g.reduce_scatter_sum(s, one_to, all_from); });
  add("all_reduce_sum", all_reduce_cost(sent, n), [=, &g, &s] { g.all_reduce_sum(s, all_to); });
  if (!note.empty()) return works;  // NCCL has no all_to_all_v of its own
  const std::vector<int64_t> rows(static_cast<size_t>(n), share);
  const double others = sent * static_cast<double>(n - 1) / static_cast<double>(n);
  add("all_to_all_v", all_to_all_cost(others, n),
      [=, &g, &s] { g.all_to_all_v(s, {.out = all_to, .in = all_from, .recv_rows = rows, .send_rows = rows}); });
  return works;
}

// Ranks with GPUs have memory of their own. Those on CPUs may all be on one machine.
std::vector<int64_t> sizes_that_fit(DeviceKind device, const std::vector<int64_t>& sizes, Control& control) {
  std::vector<int64_t> fitting;
  for (const int64_t bytes : sizes) {
    const bool fits = device == DeviceKind::cuda || 2 * bytes * control.size() <= available_memory_bytes() / 2;
    if (control.max(fits ? 0 : 1) == 0 || fitting.size() < kMinSizes) fitting.push_back(bytes);
  }
  return fitting;
}

}  // namespace

std::vector<CollectiveLine> bench_collectives(DeviceKind device, Transport& world, const CollectivesBenchSpec& spec) {
  Control control(world);
  const std::vector<int64_t> sizes = sizes_that_fit(device, spec.sizes, control);
  std::vector<CollectiveLine> lines;
  const auto run = [&](Bench& b, const std::string& note) {
    for (const int64_t bytes : sizes)
      for (const Work& work : collectives(b, world.size(), bytes, note))
        lines.push_back(measured(b, control, spec.budget_s, work));
  };
  bool over_nccl = false;
  {
    Bench b(device, world, sizes.back(), GpuSums::ranks);
    over_nccl = b.rank.links && b.rank.links->can_capture();
    run(b, "");
  }
  if (over_nccl && world.size() > 1) {
    Bench b(device, world, sizes.back(), GpuSums::nccl);
    run(b, " of NCCL");
  }
  return lines;
}

}  // namespace moebius
