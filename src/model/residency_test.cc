#include "model/residency.h"

#include "io/testing.h"
#include "model/params.h"

namespace moebius {
namespace {

TEST(ResidencyOrder, TakesThePassesOfAStep) {
  ResidencyOrder order;
  const ParamSpan span{1, 3};
  order.ready(span);
  EXPECT_FALSE(order.is_idle());
  order.release(span);
  order.ready(span);
  order.begin_gradient(span);
  order.grad_ready(span);
  order.release(span);
  EXPECT_TRUE(order.is_idle());
}

// An embedding that is also the head is used by both.
TEST(ResidencyOrder, UsesMayBeNested) {
  ResidencyOrder order;
  const ParamSpan outer{0, 2}, inner{1, 2};
  order.ready(outer);
  order.ready(inner);
  order.release(inner);
  order.grad_ready(outer);
  order.release(outer);
  EXPECT_TRUE(order.is_idle());
}

TEST(ResidencyOrder, RefusesCallsOutOfOrder) {
  ResidencyOrder order;
  const ParamSpan span{0, 1};
  expect_error(ErrorKind::internal, "release comes after ready", [&] { order.release(span); });
  expect_error(ErrorKind::internal, "grad_ready comes between", [&] { order.grad_ready(span); });
  expect_error(ErrorKind::internal, "begin_gradient comes between", [&] { order.begin_gradient(span); });
  order.ready(span);
  order.release(span);
  expect_error(ErrorKind::internal, "grad_ready comes between", [&] { order.grad_ready(span); });
  expect_error(ErrorKind::internal, "release comes after ready", [&] { order.release(span); });
}

// Records the names of the calls in order.
struct Recorder final : ParamResidency {
  void gather(Stream&, const ParamSpan& span) override { add("gather", span); }
  void ready(Stream&, const ParamSpan& span) override { add("ready", span); }
  void release(Stream&, const ParamSpan& span) override { add("release", span); }
  void begin_gradient(Stream&, const ParamSpan& span, bool) override { add("begin_gradient", span); }
  void grad_ready(Stream&, const ParamSpan& span) override { add("grad_ready", span); }
  void add(const char* verb, const ParamSpan& span) { calls.push_back(fmt::format("{} {}", verb, span.begin)); }
  std::vector<std::string> calls;
};

TEST(ParamTable, ForwardsResidencyCalls) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  MemoryPlan plan;
  ParamTable params(plan, ModelUse::training);
  params.declare({.name = "w", .shape = {4}});
  Recorder recorder;
  params.set_residency(&recorder);
  params.gather(s, {0, 1});
  params.ready(s, {0, 1});
  EXPECT_FALSE(params.is_idle());
  params.begin_gradient(s, {0, 1}, /*first_of_step=*/true);
  params.grad_ready(s, {0, 1});
  params.release(s, {0, 1});
  EXPECT_TRUE(params.is_idle());
  EXPECT_EQ(recorder.calls,
            (std::vector<std::string>{"gather 0", "ready 0", "begin_gradient 0", "grad_ready 0", "release 0"}));
  expect_error(ErrorKind::internal, "release comes after ready", [&] { params.release(s, {0, 1}); });
  EXPECT_EQ(recorder.calls.size(), 5u);
}

}  // namespace
}  // namespace moebius
