#include "comm/group_cost.h"

#include <gtest/gtest.h>

#include "comm/transport/threads.h"

namespace moebius {
namespace {

// The counter of a group before and after a call.
template <class Call>
double sent_by(Group& g, Call&& call) {
  const int64_t before = g.sent_bytes();
  call();
  return static_cast<double>(g.sent_bytes() - before);
}

class GroupCosts : public testing::TestWithParam<int> {};

TEST_P(GroupCosts, EqualTheCounters) {
  const int n = GetParam();
  run_threads(n, {.timeout_s = 60}, [&](Transport& world) {
    std::vector<int> all;
    for (int r = 0; r < n; ++r) all.push_back(r);
    const auto g = world.make_group("ep", all);
    ThreadPool pool{1};
    Stream s{DeviceKind::cpu, pool};
    const int64_t part = 6;
    std::vector<float> a(static_cast<size_t>(part * n)), b(a.size());
    const Tensor whole = tensor_of(a.data(), {part * n}), other = tensor_of(b.data(), {part * n});
    const Tensor own = tensor_of(b.data(), {part});
    const double bytes = static_cast<double>(whole.num_bytes());
    EXPECT_EQ(sent_by(*g, [&] { g->all_gather(s, whole, own); }), all_gather_cost(bytes, n).wire_bytes);
    EXPECT_EQ(sent_by(*g, [&] { g->reduce_scatter_sum(s, own, whole); }), reduce_scatter_cost(bytes, n).wire_bytes);
    EXPECT_EQ(sent_by(*g, [&] { g->all_reduce_sum(s, whole); }), all_reduce_cost(bytes, n).wire_bytes);
    const std::vector<int64_t> rows(static_cast<size_t>(n), part);
    const double for_others = static_cast<double>(4 * part * (n - 1));
    EXPECT_EQ(
        sent_by(*g, [&] { g->all_to_all_v(s, {.out = other, .in = whole, .recv_rows = rows, .send_rows = rows}); }),
        all_to_all_cost(for_others, n).wire_bytes);
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
  g->all_reduce_sum(s, whole);
  const std::vector<int64_t> rows(static_cast<size_t>(n), 12);
  g->all_to_all_v(s, {.out = whole, .in = whole, .recv_rows = rows, .send_rows = rows});
  const auto totals = trace.totals();
  if (n == 1) {
    EXPECT_TRUE(totals.empty());
    return;
  }
  const double bytes = static_cast<double>(whole.num_bytes());
  EXPECT_EQ(totals.at("ep all_gather").cost.bytes, all_gather_cost(bytes, n).wire_bytes);
  EXPECT_EQ(totals.at("ep all_reduce_sum").cost.bytes, all_reduce_cost(bytes, n).wire_bytes);
  EXPECT_EQ(totals.at("ep all_to_all_v").cost.bytes, bytes * (n - 1) / n);
}

INSTANTIATE_TEST_SUITE_P(All, GroupCosts, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace moebius
