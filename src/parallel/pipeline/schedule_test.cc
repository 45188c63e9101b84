#include "parallel/pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "parallel/pipeline/step_schedule.h"

namespace moebius {
namespace {

using testing::HasSubstr;

// Forwards and backwards; that each backward is two passes is EveryBackwardIsTwoPasses.
std::string compute_order(const Schedule& schedule, size_t pp_rank) {
  std::string order;
  for (const Action& a : schedule.actions[pp_rank]) {
    if (a.verb != Verb::run || a.pass == Pass::backward_weight) continue;
    order += fmt::format("{}{}.{} ", a.pass == Pass::forward ? "f" : "b", a.micro_batch, a.stage);
  }
  return order;
}

TEST(Schedule, OfOneRankHasOnlyTheActionsOfThatRank) {
  for (const PipelineShape& shape : {PipelineShape{.num_ranks = 3, .num_micro_batches = 7},
                                     PipelineShape{.num_ranks = 2, .num_virtual = 3, .num_micro_batches = 4}}) {
    const Schedule all = schedule_1f1b(shape);
    for (int64_t r = 0; r < shape.num_ranks; ++r) {
      const Schedule one = step_schedule_of(PipelineSchedule::one_f_one_b, shape, r);
      for (int64_t other = 0; other < shape.num_ranks; ++other)
        EXPECT_EQ(one.actions[other], other == r ? all.actions[r] : std::vector<Action>{});
    }
  }
}

TEST(Schedule1f1b, OrderOfFourRanks) {
  const Schedule s = schedule_1f1b({.num_ranks = 4, .num_micro_batches = 5});
  ASSERT_EQ(s.actions.size(), 4u);
  EXPECT_EQ(compute_order(s, 0), "f0.0 f1.0 f2.0 f3.0 b0.0 f4.0 b1.0 b2.0 b3.0 b4.0 ");
  EXPECT_EQ(compute_order(s, 2), "f0.2 f1.2 b0.2 f2.2 b1.2 f3.2 b2.2 f4.2 b3.2 b4.2 ");
  EXPECT_EQ(compute_order(s, 3), "f0.3 b0.3 f1.3 b1.3 f2.3 b2.3 f3.3 b3.3 f4.3 b4.3 ");
}

TEST(Schedule1f1b, OrderOfVirtualStages) {
  const Schedule s = schedule_1f1b({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 4});
  EXPECT_EQ(compute_order(s, 0), "f0.0 f1.0 f0.2 f1.2 f2.0 b0.2 f3.0 b1.2 f2.2 b0.0 f3.2 b1.0 b2.2 b3.2 b2.0 b3.0 ");
  EXPECT_EQ(compute_order(s, 1), "f0.1 f1.1 f0.3 b0.3 f1.3 b1.3 f2.1 b0.1 f3.1 b1.1 f2.3 b2.3 f3.3 b3.3 b2.1 b3.1 ");
}

TEST(Schedule1f1b, OrderWithAShorterLastGroup) {
  const Schedule s = schedule_1f1b({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 5, .group = 3});
  EXPECT_EQ(compute_order(s, 1),
            "f0.1 f1.1 f2.1 f0.3 b0.3 f1.3 b1.3 f2.3 b2.3 f3.1 b0.1 f4.1 b1.1 f3.3 b2.1 f4.3 b3.3 b4.3 b3.1 b4.1 ");
}

// Every action of a middle rank: where transfers start and end is part of the schedule.
TEST(Schedule1f1b, MessagesOfAMiddleRank) {
  const Schedule s = schedule_1f1b({.num_ranks = 3, .num_micro_batches = 3});
  const auto f = Pass::forward, b = Pass::backward_input, w = Pass::backward_weight;
  const std::vector<Action> expected = {
      {Verb::receive, f, 0, 1}, {Verb::receive, f, 1, 1}, {Verb::receive, b, 0, 1}, {Verb::run, f, 0, 1},
      {Verb::send, f, 0, 1},    {Verb::receive, f, 2, 1}, {Verb::run, f, 1, 1},     {Verb::send, f, 1, 1},
      {Verb::receive, b, 1, 1}, {Verb::run, b, 0, 1},     {Verb::run, w, 0, 1},     {Verb::send, b, 0, 1},
      {Verb::wait, f, 0, 1},    {Verb::run, f, 2, 1},     {Verb::send, f, 2, 1},    {Verb::receive, b, 2, 1},
      {Verb::run, b, 1, 1},     {Verb::run, w, 1, 1},     {Verb::send, b, 1, 1},    {Verb::wait, b, 0, 1},
      {Verb::run, b, 2, 1},     {Verb::run, w, 2, 1},     {Verb::send, b, 2, 1},    {Verb::wait, f, 1, 1},
      {Verb::wait, f, 2, 1},    {Verb::wait, b, 1, 1},    {Verb::wait, b, 2, 1}};
  ASSERT_EQ(s.actions[1].size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(s.actions[1][i], expected[i]) << i << describe(expected[i]);
}

TEST(Schedule1f1b, EveryBackwardIsTwoPasses) {
  for (const Schedule& s : {schedule_1f1b({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 4}),
                            sequential_schedule({.num_ranks = 3, .num_micro_batches = 2})}) {
    for (const std::vector<Action>& list : s.actions) {
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].verb != Verb::run || list[i].pass == Pass::forward) continue;
        ASSERT_EQ(list[i].pass, Pass::backward_input);
        const Action weight{Verb::run, Pass::backward_weight, list[i].micro_batch, list[i].stage};
        ASSERT_LT(++i, list.size());
        EXPECT_EQ(list[i], weight) << describe(list[i]);
      }
    }
  }
}

TEST(Schedule1f1b, OneRankSendsNothing) {
  const Schedule s = schedule_1f1b({.num_micro_batches = 2});
  EXPECT_EQ(compute_order(s, 0), "f0.0 b0.0 f1.0 b1.0 ");
  EXPECT_EQ(s.actions[0].size(), 6u);
}

// Returns the runs of a rank as text: f is forward, b backward_input and w backward_weight, each with its micro-batch.
std::string passes(const Schedule& schedule, size_t pp_rank) {
  std::string order;
  for (const Action& a : schedule.actions[pp_rank]) {
    const char* name = a.pass == Pass::forward ? "f" : a.pass == Pass::backward_input ? "b" : "w";
    if (a.verb == Verb::run) order += fmt::format("{}{} ", name, a.micro_batch);
  }
  return order;
}

TEST(ScheduleZbH1, RankRDelaysWeightsByRMicroBatches) {
  const Schedule s = schedule_zb_h1({.num_ranks = 3, .num_micro_batches = 4});
  EXPECT_EQ(passes(s, 0), "f0 f1 f2 b0 w0 f3 b1 w1 b2 w2 b3 w3 ");
  EXPECT_EQ(passes(s, 1), "f0 f1 b0 f2 b1 w0 f3 b2 w1 b3 w2 w3 ");
  EXPECT_EQ(passes(s, 2), "f0 b0 f1 b1 f2 b2 w0 f3 b3 w1 w2 w3 ");
  EXPECT_EQ(passes(schedule_zb_h1({.num_ranks = 3, .num_micro_batches = 1}), 2), "f0 b0 w0 ");
  EXPECT_EQ(schedule_zb_h1({.num_micro_batches = 2}).actions, schedule_1f1b({.num_micro_batches = 2}).actions);
}

// The rank before waits for the result of backward_input, so it is sent before any backward_weight runs.
TEST(ScheduleZbH1, SendsGradientsBeforeWeights) {
  const auto f = Pass::forward, b = Pass::backward_input, w = Pass::backward_weight;
  const std::vector<Action> expected = {{Verb::receive, f, 0, 1}, {Verb::run, f, 0, 1},  {Verb::receive, f, 1, 1},
                                        {Verb::run, b, 0, 1},     {Verb::send, b, 0, 1}, {Verb::run, f, 1, 1},
                                        {Verb::run, b, 1, 1},     {Verb::send, b, 1, 1}, {Verb::run, w, 0, 1},
                                        {Verb::run, w, 1, 1},     {Verb::wait, b, 0, 1}, {Verb::wait, b, 1, 1}};
  EXPECT_THAT(schedule_zb_h1({.num_ranks = 2, .num_micro_batches = 2}).actions[1],
              testing::UnorderedElementsAreArray(expected));
}

TEST(ScheduleZbH1, RefusesVirtualStages) {
  EXPECT_THAT([] { schedule_zb_h1({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 4}); },
              testing::ThrowsMessage<Error>(
                  HasSubstr("zb_h1\" needs one stage per rank (parallel.vpp = 1); got parallel.vpp = 2")));
}

TEST(Schedule1f1b, WarmupForwards) {
  EXPECT_EQ(num_warmup_forwards({.num_ranks = 4, .num_micro_batches = 8}, 0), 3);
  EXPECT_EQ(num_warmup_forwards({.num_ranks = 4, .num_micro_batches = 2}, 0), 2);
  EXPECT_EQ(num_warmup_forwards({.num_ranks = 4, .num_virtual = 3, .num_micro_batches = 8}, 1), 2 * 2 + 2 * 4);
  EXPECT_EQ(num_warmup_forwards({.num_ranks = 4, .num_virtual = 3, .num_micro_batches = 10, .group = 5}, 3), 2 * 5);
  EXPECT_EQ(num_warmup_forwards({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 4}, 0), 8);
}

TEST(PipelineShape, RefusesWithTheEquation) {
  const auto error = [](const PipelineShape& shape) -> std::string {
    try {
      schedule_1f1b(shape);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return e.what();
    }
    return "none";
  };
  EXPECT_EQ(
      error({.num_ranks = 4, .num_micro_batches = 0}),
      "pipeline: ranks, virtual stages and micro-batches must be at least 1; got pp = 4, vpp = 1, 0 micro-batches");
  EXPECT_EQ(error({.num_virtual = 2, .num_micro_batches = 4}),
            "pipeline: vpp > 1 splits the stages of a pipeline, pp > 1; got pp = 1, vpp = 2");
  EXPECT_THAT(error({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 3}),
              HasSubstr("vpp = 2 needs pp <= group <= micro-batches; got 4 <= 4 <= 3; raise the micro-batches"));
  EXPECT_THAT(error({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 8, .group = 3}),
              HasSubstr("got 4 <= 3 <= 8"));
  EXPECT_THAT(error({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 10}),
              HasSubstr("needs micro-batches mod group = 0 or >= pp = 4; got 10 mod 4 = 2; change"));
  EXPECT_EQ(error({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 14, .group = 5}), "none");
}

}  // namespace
}  // namespace moebius
