// The properties that simulate() shows of any schedule, whatever the shape and the times.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <map>
#include <tuple>

#include "core/error.h"
#include "parallel/pipeline/simulate.h"

namespace moebius {
namespace {

PipelineShape arbitrary_shape() {
  PipelineShape shape;
  shape.num_ranks = *rc::gen::inRange<int64_t>(1, 7);
  shape.num_virtual = shape.num_ranks == 1 ? 1 : *rc::gen::inRange<int64_t>(1, 5);
  if (shape.num_virtual == 1) {
    shape.num_micro_batches = *rc::gen::inRange<int64_t>(1, 14);
    return shape;
  }
  shape.group = shape.num_ranks + *rc::gen::inRange<int64_t>(0, 4);
  const int64_t rest = *rc::gen::element<int64_t>(0, shape.num_ranks, shape.group - 1);
  shape.num_micro_batches = shape.group * *rc::gen::inRange<int64_t>(1, 3) + (rest < shape.num_ranks ? 0 : rest);
  return shape;
}

PipelineTimes arbitrary_times(const PipelineShape& shape) {
  PipelineTimes times;
  for (int64_t s = 0; s < shape.num_stages(); ++s) {
    const auto time = [] { return 0.25 * *rc::gen::inRange(0, 20); };
    times.stages.push_back({.forward = time(), .backward_input = time(), .backward_weight = time()});
  }
  times.transfer = 0.25 * *rc::gen::inRange(0, 20);
  return times;
}

using Ends = std::map<std::tuple<Pass, int64_t, int64_t>, double>;  // pass, micro-batch, stage

// A pass begins no earlier than its input can arrive, and ends after its own time.
void expect_causal(const SimulatedSchedule& r, const PipelineTimes& times) {
  Ends ends;
  for (const RankSimulation& rank : r.ranks) {
    double last = 0;
    for (const auto& [a, begin, end] : rank.runs) {
      const StageTime& time = times.stages[static_cast<size_t>(a.stage)];
      RC_ASSERT(begin >= last);
      RC_ASSERT(end == begin + (time.of(a.pass)));
      ends[{a.pass, a.micro_batch, a.stage}] = last = end;
    }
    RC_ASSERT(last <= r.duration);
  }
  RC_ASSERT(std::ssize(ends) == kNumPasses * r.shape.num_stages() * r.shape.num_micro_batches);
  for (const RankSimulation& rank : r.ranks) {
    for (const auto& [a, begin, end] : rank.runs) {
      const int64_t from = a.stage + (a.pass == Pass::forward ? -1 : 1);
      if (r.shape.has_input(a.pass, a.stage)) {
        RC_ASSERT(begin >= (ends.at({a.pass, a.micro_batch, from}) + times.transfer));
      }
      if (a.pass == Pass::backward_input) RC_ASSERT(begin >= ends.at({Pass::forward, a.micro_batch, a.stage}));
      if (a.pass == Pass::backward_weight) RC_ASSERT(begin >= ends.at({Pass::backward_input, a.micro_batch, a.stage}));
    }
  }
}

TEST(SimulateProperty, ZbH1IsCausalAtAnyTimes) {
  ::setenv("RC_PARAMS", "seed=1", 0);
  EXPECT_TRUE(rc::check([] {
    const PipelineShape shape{.num_ranks = *rc::gen::inRange<int64_t>(1, 7),
                              .num_micro_batches = *rc::gen::inRange<int64_t>(1, 14)};
    const PipelineTimes times = arbitrary_times(shape);
    const Schedule schedule = schedule_zb_h1(shape);
    expect_causal(simulate(schedule, times), times);
    expect_causal(simulate(without_overlap(schedule), times), times);
  }));
}

TEST(SimulateProperty, TimelinesAreCausalAtAnyTimes) {
  ::setenv("RC_PARAMS", "seed=1", 0);  // the same cases each time, unless set otherwise
  EXPECT_TRUE(rc::check([] {
    const PipelineShape shape = arbitrary_shape();
    const Schedule schedule = schedule_1f1b(shape);
    const PipelineTimes times = arbitrary_times(shape);
    const SimulatedSchedule r = simulate(schedule, times);
    expect_causal(r, times);
    RC_ASSERT(r.bubble() >= 0);
    const SimulatedSchedule equal = simulate(schedule, equal_times(shape));
    for (size_t p = 0; p < r.ranks.size(); ++p) RC_ASSERT(r.ranks[p].peak_in_flight == equal.ranks[p].peak_in_flight);
  }));
}

// No action is there for nothing: without any one of them the schedule is refused.
TEST(SimulateProperty, EveryActionIsNeeded) {
  ::setenv("RC_PARAMS", "seed=1", 0);
  EXPECT_TRUE(rc::check([] {
    Schedule schedule = schedule_1f1b(arbitrary_shape());
    auto& list = schedule.actions[*rc::gen::inRange<size_t>(0, schedule.actions.size())];
    list.erase(list.begin() + *rc::gen::inRange<int64_t>(0, std::ssize(list)));
    RC_ASSERT_THROWS_AS(simulate(schedule, equal_times(schedule.shape)), Error);
  }));
}

// Any order of a rank's actions is simulated or refused: a simulated one is causal.
TEST(SimulateProperty, SwappedActionsAreSimulatedOrRefused) {
  ::setenv("RC_PARAMS", "seed=1", 0);
  EXPECT_TRUE(rc::check([] {
    Schedule schedule = schedule_1f1b(arbitrary_shape());
    for (auto& list : schedule.actions) {
      const auto at = *rc::gen::inRange<size_t>(0, list.size());
      const auto to = std::min(list.size() - 1, at + *rc::gen::inRange<size_t>(0, 5));
      std::swap(list[at], list[to]);
    }
    const PipelineTimes times = equal_times(schedule.shape, {1, 1, 1}, 0.5);
    bool replayed = true;
    try {
      expect_causal(simulate(schedule, times), times);
    } catch (const Error& e) {
      RC_ASSERT(e.kind() == ErrorKind::usage);
      replayed = false;
    }
    RC_TAG(replayed ? "replayed" : "refused");
  }));
}

}  // namespace
}  // namespace moebius
