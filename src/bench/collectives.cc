#include <algorithm>
#include <functional>

#include "bench/rank_device.h"
#include "bench/ranks.h"

namespace moebius {
namespace {

constexpr int kRuns = 9, kCallsOfRun = 8;

// A rank, with buffers for the largest message on each side.
struct Bench {
  Bench(DeviceKind kind, Transport& transport, int64_t max_bytes, GpuSums sums)
      : device(kind), rank(kind, transport, /*threads=*/1, sums), from(kind, max_bytes), to(kind, max_bytes) {
    std::vector<int> all;
    for (int r = 0; r < transport.size(); ++r) all.push_back(r);
    group = rank.links ? rank.links->make_group("bench", all, {}) : transport.make_group("bench", all);
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
};

CollectiveLine timed(Bench& b, const std::string& name, int64_t bytes, const std::function<void()>& call) {
  call();
  std::vector<double> ms;
  int64_t sent = 0;
  for (int run = 0; run < kRuns; ++run) {
    b.group->barrier();
    const int64_t before = b.group->sent_bytes();
    const double all_ms = time_on_device(b.rank.stream, [&] {
      for (int i = 0; i < kCallsOfRun; ++i) call();
    });
    ms.push_back(all_ms / kCallsOfRun);
    sent = (b.group->sent_bytes() - before) / kCallsOfRun;
  }
  std::sort(ms.begin(), ms.end());
  const double median = ms[ms.size() / 2];
  return {
      .name = name, .bytes = bytes, .median_ms = median, .sent_gbytes_per_s = static_cast<double>(sent) / median / 1e6};
}

constexpr int64_t kSizes[] = {int64_t{1} << 20, int64_t{16} << 20, int64_t{128} << 20};

void time_collectives(Bench& b, int64_t n, const std::string& note, std::vector<CollectiveLine>& lines) {
  for (const int64_t bytes : kSizes) {
    const int64_t share = bytes / 4 / n / 64 * 64;
    const Tensor all_from = b.view(b.from, share * n), all_to = b.view(b.to, share * n);
    const Tensor one_from = b.view(b.from, share), one_to = b.view(b.to, share);
    const std::vector<int64_t> rows(static_cast<size_t>(n), share);
    Group& g = *b.group;
    Stream& s = b.rank.stream;
    lines.push_back(timed(b, "all_gather" + note, bytes, [&] { g.all_gather(s, all_to, one_from); }));
    lines.push_back(timed(b, "reduce_scatter_sum" + note, bytes, [&] { g.reduce_scatter_sum(s, one_to, all_from); }));
    lines.push_back(timed(b, "all_reduce_sum" + note, bytes, [&] { g.all_reduce_sum(s, all_to); }));
    if (!note.empty()) continue;  // NCCL has none
    lines.push_back(timed(b, "all_to_all_v", bytes, [&] {
      g.all_to_all_v(s, {.out = all_to, .in = all_from, .recv_rows = rows, .send_rows = rows});
    }));
  }
}

}  // namespace

std::vector<CollectiveLine> bench_collectives(DeviceKind device, Transport& world) {
  std::vector<CollectiveLine> lines;
  bool over_nccl = false;
  {
    Bench b(device, world, kSizes[2], GpuSums::ranks);
    over_nccl = b.rank.links && b.rank.links->can_capture();
    time_collectives(b, world.size(), "", lines);
  }
  if (over_nccl && world.size() > 1) {
    Bench b(device, world, kSizes[2], GpuSums::nccl);
    time_collectives(b, world.size(), " of NCCL", lines);
  }
  return lines;
}

}  // namespace moebius
