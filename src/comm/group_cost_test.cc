#include "comm/group_cost.h"

#include <gtest/gtest.h>

#include <functional>

#include "comm/transport/counting_testing.h"
#include "comm/transport/threads.h"

namespace moebius {
namespace {

class GroupCosts : public ::testing::TestWithParam<int> {};

TEST_P(GroupCosts, EqualTheCounters) {
  const int n = GetParam();
  run_threads(n, {.timeout_s = 60}, [&](Transport& world) {
    std::vector<int> all;
    for (int r = 0; r < n; ++r) all.push_back(r);
    testing::CountingTransport counting(world);
    const auto g = counting.make_group("ep", all);
    ThreadPool pool{1};
    Stream s{DeviceKind::cpu, pool};
    const auto expect = [&](const GroupCost& cost, const std::function<void()>& call) {
      const int64_t messages = counting.sent, bytes = g->sent_bytes();
      call();
      EXPECT_EQ(counting.sent - messages, cost.messages);
      EXPECT_EQ(static_cast<double>(g->sent_bytes() - bytes), cost.wire_bytes);
    };
    const int64_t part = 6;
    std::vector<float> a(static_cast<size_t>(part * n)), b(a.size());
    std::vector<bf16> c(a.size()), d(a.size());
    const Tensor whole = tensor_of(a.data(), {part * n}), other = tensor_of(b.data(), {part * n});
    const Tensor own = tensor_of(b.data(), {part}), received = tensor_of(a.data(), {part});
    const double bytes = static_cast<double>(whole.num_bytes());
    expect(all_gather_cost(bytes, n), [&] { g->all_gather(s, whole, own); });
    expect(all_gather_cost(bytes, n), [&] { g->start_all_gather(s, whole, own).wait(); });
    expect(reduce_scatter_cost(bytes, n), [&] { g->reduce_scatter_sum(s, own, whole); });
    expect(reduce_scatter_cost(bytes, n), [&] { g->start_reduce_scatter_sum(s, received, other, whole).wait(); });
    expect(all_reduce_cost(bytes, n), [&] { g->all_reduce_sum(s, whole); });
    const Tensor whole_bf16 = tensor_of(c.data(), {part * n}), own_bf16 = tensor_of(d.data(), {part});
    expect(reduce_scatter_cost(bytes / 2, n, DType::bf16), [&] { g->reduce_scatter_sum(s, own_bf16, whole_bf16); });
    expect(all_reduce_cost(bytes / 2, n, DType::bf16), [&] { g->all_reduce_sum(s, whole_bf16); });
    const std::vector<int64_t> rows(static_cast<size_t>(n), part);
    const double for_others = static_cast<double>(4 * part * (n - 1));
    expect(all_to_all_cost(for_others, n),
           [&] { g->all_to_all_v(s, {.out = other, .in = whole, .recv_rows = rows, .send_rows = rows}); });
    if (n == 1) return;
    expect(send_cost(static_cast<double>(own.num_bytes())), [&] {
      Pending sent = g->send(s, own, (g->rank() + 1) % n);
      Pending arrived = g->recv(s, received, (g->rank() + n - 1) % n);
      sent.wait();
      arrived.wait();
    });
  });
}

// The null device counts the same bytes in its trace.
TEST_P(GroupCosts, AreInTheTraceOfTheNullDevice) {
  const int n = GetParam();
  const auto world = make_dry_run_transport(0, n);
  std::vector<int> all;
  for (int r = 0; r < n; ++r) all.push_back(r);
  const auto g = world->make_group("ep", all);
  ThreadPool pool{1};
  Trace trace;
  Stream s{DeviceKind::null, pool, &trace};
  const Tensor whole{.shape = {12 * n}, .dtype = DType::f32, .device = DeviceKind::null};
  const Tensor own{.shape = {12}, .dtype = DType::f32, .device = DeviceKind::null};
  g->all_gather(s, whole, own);
  g->reduce_scatter_sum(s, own, whole);
  g->all_reduce_sum(s, whole);
  if (n > 1) g->send(s, own, 1).wait();
  const std::vector<int64_t> rows(static_cast<size_t>(n), 12);
  g->all_to_all_v(s, {.out = whole, .in = whole, .recv_rows = rows, .send_rows = rows});
  const auto totals = trace.totals();
  if (n == 1) {
    EXPECT_TRUE(totals.empty());
    return;
  }
  const double bytes = static_cast<double>(whole.num_bytes());
  EXPECT_EQ(totals.at("ep all_gather").cost.bytes, all_gather_cost(bytes, n).wire_bytes);
  EXPECT_EQ(totals.at("ep reduce_scatter_sum").cost.bytes, reduce_scatter_cost(bytes, n).wire_bytes);
  EXPECT_EQ(totals.at("ep send").cost.bytes, send_cost(static_cast<double>(own.num_bytes())).wire_bytes);
  EXPECT_EQ(totals.at("ep all_reduce_sum").cost.bytes, all_reduce_cost(bytes, n).wire_bytes);
  EXPECT_EQ(totals.at("ep all_to_all_v").cost.bytes, bytes * (n - 1) / n);
}

INSTANTIATE_TEST_SUITE_P(All, GroupCosts, ::testing::Values(1, 2, 3, 4, 9, 16));

}  // namespace
}  // namespace moebius
