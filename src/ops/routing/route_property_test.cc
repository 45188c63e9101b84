// The properties that every route has, whatever the scores and the rule.
#include <rapidcheck.h>

#include <cstdlib>

#include "ops/routing/route_testing.h"

namespace moebius {
namespace {

RouteRule arbitrary_rule(int64_t E, int64_t K) {
  RouteRule rule;
  rule.score = *rc::gen::element(ScoreFunction::softmax, ScoreFunction::sigmoid);
  rule.choice = *rc::gen::element(RouteChoice::scores, RouteChoice::scores, RouteChoice::sinkhorn, RouteChoice::forced);
  rule.normalize = *rc::gen::arbitrary<bool>();
  rule.drop = *rc::gen::element(RouteDrop::probs, RouteDrop::position);
  rule.capacity = *rc::gen::inRange<int64_t>(0, 40);
  rule.group_score = *rc::gen::element(GroupScore::max, GroupScore::sum_of_top);
  const bool grouped = rule.choice == RouteChoice::scores && E % 2 == 0 && K <= E / 2 && *rc::gen::arbitrary<bool>();
  if (grouped) rule.num_groups = 2;
  return rule;
}

TEST(RouteProperty, MapsAreInverseSortedAndBounded) {
  ::setenv("RC_PARAMS", "seed=1", 0);  // the same cases each time, unless set otherwise
  EXPECT_TRUE(rc::check([] {
    const auto T = *rc::gen::inRange<int64_t>(0, 300), E = *rc::gen::inRange<int64_t>(1, 40);
    const auto K = *rc::gen::inRange<int64_t>(1, std::min<int64_t>(E, 9) + 1);
    const RouteRule rule = arbitrary_rule(E, K);
    // Few different values: ties are the rule.
    const auto values = *rc::gen::container<std::vector<int>>(T * E, rc::gen::inRange(-3, 4));
    ThreadPool pool(*rc::gen::inRange(1, 4));
    for (const DeviceKind device : testing::devices()) {
      Stream s = testing::stream_on(device, pool);
      testing::Routing r(T, E, K);
      r.run(s, testing::Array::of({T, E}, DType::f32, {values.begin(), values.end()}), testing::Array(), rule);
      testing::expect_consistent(r);
      RC_ASSERT(!::testing::Test::HasFailure());
      if (rule.capacity == 0) continue;
      for (const double count : r.plan.counts.values()) RC_ASSERT(count <= static_cast<double>(rule.capacity));
    }
  }));
}

}  // namespace
}  // namespace moebius
