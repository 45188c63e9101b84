#include "parallel/pipeline/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "parallel/pipeline/placement.h"
#include "parallel/pipeline/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

constexpr auto f = Pass::forward, b = Pass::backward_input, w = Pass::backward_weight;

// Returns a backward of this time, half of it in each pass.
StageTime stage_time(double forward, double backward) { return {forward, backward / 2, backward / 2}; }

std::string error_of(const Schedule& schedule) {
  try {
    simulate(schedule, equal_times(schedule.shape));
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "none";
}

// Every shape that check() accepts, with the two smallest groups and the largest.
std::vector<PipelineShape> legal_shapes(int64_t max_P, int64_t max_V, int64_t max_M) {
  std::vector<PipelineShape> shapes;
  for (int64_t P = 1; P <= max_P; ++P) {
    for (int64_t M = 1; M <= max_M; ++M) {
      shapes.push_back({.num_ranks = P, .num_micro_batches = M});
      for (int64_t V = 2; V <= max_V && P > 1; ++V) {
        for (int64_t G = P; G <= M; ++G) {
          const bool tried = G <= P + 1 || G == M;
          if (tried && (M % G == 0 || M % G >= P)) shapes.push_back({P, V, M, G});
        }
      }
    }
  }
  return shapes;
}

// Theory, for every valid P <= 8, V <= 4 and M <= 32, with backwards as long as forwards and twice as long. The times
// are whole numbers, so durations are exact.
TEST(SimulatedSchedule, BubbleAndInFlightEqualTheory) {
  size_t num_shapes = 0;
  for (const PipelineShape& shape : legal_shapes(8, 4, 32)) {
    ++num_shapes;
    const int64_t P = shape.num_ranks, V = shape.num_virtual, M = shape.num_micro_batches, G = shape.group_size();
    SCOPED_TRACE(fmt::format("P {} V {} M {} G {}", P, V, M, G));
    const Schedule schedule = schedule_1f1b(shape);
    for (const double backward : {1.0, 2.0}) {
      const SimulatedSchedule r = simulate(schedule, equal_times(shape, stage_time(1, backward)));
      ASSERT_EQ(r.duration, static_cast<double>(V * M + P - 1) * (1 + backward));
      ASSERT_DOUBLE_EQ(1 + r.bubble(), 1 + static_cast<double>(P - 1) / static_cast<double>(V * M + P - 1));
      for (int64_t p = 0; p < P; ++p) {
        const int64_t most = V == 1 ? P - p : 2 * (P - p - 1) + (V - 1) * G + 1;
        ASSERT_EQ(r.ranks[p].peak_in_flight, std::min(most, V * M)) << "rank " << p;
        ASSERT_LE(r.ranks[p].peak_sends, 2 * 2);
        ASSERT_LE(r.ranks[p].peak_receives, 2 * (V == 1 ? 2 : 2 + G - P));
      }
    }
  }
  EXPECT_EQ(num_shapes, 1183u);
}

// Theory for ZB-H1, where W <= F and the steady state keeps every rank busy.
TEST(SimulatedSchedule, BubbleOfZbH1EqualsTheory) {
  for (const PipelineShape& shape : legal_shapes(8, 1, 32)) {
    const int64_t P = shape.num_ranks, M = shape.num_micro_batches;
    if (M < P) continue;
    SCOPED_TRACE(fmt::format("P {} M {}", P, M));
    const Schedule schedule = schedule_zb_h1(shape);
    for (const StageTime& time : {StageTime{1, 1, 1}, StageTime{2, 3, 1}, StageTime{2, 2, 1}}) {
      const SimulatedSchedule r = simulate(schedule, equal_times(shape, time));
      const double F = time.forward, B = time.backward_input, W = time.backward_weight;
      ASSERT_EQ(r.duration, static_cast<double>(M) * (F + B + W) + static_cast<double>(P - 1) * (F + B - W));
      ASSERT_LE(simulate(without_overlap(schedule), equal_times(shape, time)).duration, 2 * r.duration);
      for (int64_t p = 0; p < P; ++p) {
        ASSERT_EQ(r.ranks[p].peak_in_flight, P) << "rank " << p;
        const RankProgram list = place_actions(schedule, p);
        ASSERT_EQ(list.num_saved_sets, r.ranks[p].peak_of_stage);
        ASSERT_EQ(list.splits_backward, std::vector<bool>{p > 0});
      }
    }
  }
}

// Sends that are waited for at once block no rank forever, since receives are opened before them.
// The lists that take one micro-batch at a time can be simulated for any shape.
TEST(SimulatedSchedule, SequentialAndNonOverlappedSchedulesDoNotDeadlock) {
  for (const PipelineShape& shape : legal_shapes(8, 4, 16)) {
    SCOPED_TRACE(fmt::format("P {} V {} M {} G {}", shape.num_ranks, shape.num_virtual, shape.num_micro_batches,
                             shape.group_size()));
    const Schedule schedule = schedule_1f1b(shape);
    const SimulatedSchedule with = simulate(schedule, equal_times(shape)),
                            without = simulate(without_overlap(schedule), equal_times(shape));
    ASSERT_GE(without.duration, with.duration);
    PipelineShape forward = shape;
    forward.backward = false;
    const SimulatedSchedule sequential = simulate(sequential_schedule(shape), equal_times(shape));
    const SimulatedSchedule forwards = simulate(sequential_schedule(forward), equal_times(shape));
    ASSERT_EQ(sequential.duration, 2 * static_cast<double>(shape.num_stages() * shape.num_micro_batches));
    for (size_t p = 0; p < with.ranks.size(); ++p) {
      ASSERT_EQ(without.ranks[p].peak_of_stage, with.ranks[p].peak_of_stage);
      ASSERT_LE(without.ranks[p].peak_sends, 1);
      ASSERT_EQ(sequential.ranks[p].peak_in_flight, shape.num_virtual);
      ASSERT_EQ(forwards.ranks[p].peak_in_flight, 1);
    }
  }
}

// Memory is planned for the tensors that the lists hold at a time, and never for more.
TEST(SimulatedSchedule, PlacedBuffersEqualTheSimulatedPeaks) {
  for (const PipelineShape& shape : legal_shapes(5, 3, 9)) {
    SCOPED_TRACE(fmt::format("P {} V {} M {} G {}", shape.num_ranks, shape.num_virtual, shape.num_micro_batches,
                             shape.group_size()));
    const Schedule schedule = schedule_1f1b(shape);
    const SimulatedSchedule r = simulate(schedule, equal_times(shape));
    for (int64_t p = 0; p < shape.num_ranks; ++p) {
      const RankProgram list = place_actions(schedule, p);
      ASSERT_EQ(list.num_saved_sets, r.ranks[p].peak_of_stage);
      ASSERT_LE(list.num_buffers, r.ranks[p].peak_receives + r.ranks[p].peak_sends + 1);
      const auto backwards = static_cast<size_t>(shape.num_virtual * shape.num_micro_batches);
      ASSERT_EQ(list.actions.size(), schedule.actions[p].size() - backwards);  // each backward is one action
      ASSERT_EQ(list.splits_backward, std::vector<bool>(static_cast<size_t>(shape.num_virtual), false));
    }
  }
}

TEST(Placement, ABufferStaysFromReceiveToWait) {
  const RankProgram list = place_actions(schedule_1f1b({.num_ranks = 3, .num_micro_batches = 3}), 1);
  std::string text;
  for (const PlacedAction& p : list.actions) {
    if (p.action.verb == Verb::run) text += fmt::format("set {} ", p.saved_set);
    if (p.action.pass == f && p.action.micro_batch == 0) text += fmt::format("buffer {} ", p.buffer);
  }
  EXPECT_EQ(text, "buffer 0 set 0 buffer 0 buffer 0 set 1 set 0 buffer 0 set 0 set 1 set 0 ");
  EXPECT_EQ(list.num_saved_sets, std::vector<int64_t>{2});
}

TEST(SimulatedSchedule, PeaksOfVirtualStages) {
  const PipelineShape shape = {.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 8};
  const SimulatedSchedule r = simulate(schedule_1f1b(shape), equal_times(shape));
  EXPECT_EQ(r.ranks[0].peak_of_stage, (std::vector<int64_t>{8, 4}));
  EXPECT_EQ(r.ranks[0].peak_in_flight, 11);
  EXPECT_EQ(r.ranks[3].peak_of_stage, (std::vector<int64_t>{5, 1}));
}

// One micro-batch crosses each of the P - 1 borders there and back, and nothing hides it.
TEST(SimulatedSchedule, TransfersTakeTime) {
  const PipelineShape shape = {.num_ranks = 3, .num_micro_batches = 1};
  const SimulatedSchedule r = simulate(schedule_1f1b(shape), equal_times(shape, stage_time(2, 3), 0.5));
  EXPECT_EQ(r.duration, 3 * (2 + 3) + 2 * 2 * 0.5);
  EXPECT_EQ(r.ranks[1].runs[0].begin, 2.5);
  EXPECT_EQ(r.ranks[1].runs[2].end, 7 + 3 + 0.5 + 3);
}

// The time that transfers add to a step. In 1F1B it grows with each micro-batch, since neighbours
// wait for one another's results. In interleaved 1F1B it is only the time to fill and to drain, and
// less with larger groups.
TEST(SimulatedSchedule, VirtualStagesHideTransfers) {
  const auto added = [](const PipelineShape& shape) {
    const Schedule schedule = schedule_1f1b(shape);
    return simulate(schedule, equal_times(shape, stage_time(1, 2), 0.5)).duration -
           simulate(schedule, equal_times(shape, stage_time(1, 2))).duration;
  };
  EXPECT_EQ(added({.num_ranks = 4, .num_micro_batches = 8}), 8);
  EXPECT_EQ(added({.num_ranks = 4, .num_micro_batches = 32}), 26);
  EXPECT_EQ(added({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 8}), 7);
  EXPECT_EQ(added({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 32}), 7);
  EXPECT_EQ(added({.num_ranks = 4, .num_virtual = 2, .num_micro_batches = 32, .group = 8}), 3);
}

// Two messages of one channel share it: the second starts when the first has moved.
TEST(SimulatedSchedule, AChannelMovesOneMessageAtATime) {
  const PipelineShape shape = {.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 2};
  const SimulatedSchedule r = simulate(schedule_1f1b(shape), equal_times(shape, stage_time(1, 1), 4));
  const auto begin_of = [&](int64_t micro_batch) {
    for (const RankSimulation::Run& run : r.ranks[1].runs) {
      if (run.action == Action{Verb::run, f, micro_batch, 1}) return run.begin;
    }
    return -1.0;
  };
  EXPECT_EQ(begin_of(0), 1 + 4);
  EXPECT_EQ(begin_of(1), 1 + 4 + 4);
}

TEST(SimulatedSchedule, UnevenStagesWaitForTheSlowest) {
  const PipelineShape shape = {.num_ranks = 2, .num_micro_batches = 4};
  const SimulatedSchedule r = simulate(schedule_1f1b(shape), {{stage_time(1, 1), stage_time(2, 4)}});
  EXPECT_EQ(r.duration, 1 + 4 * (2 + 4) + 1);
  EXPECT_EQ(r.ranks[0].busy, 8);
  EXPECT_EQ(r.ranks[1].busy, 24);
  EXPECT_DOUBLE_EQ(r.bubble(), 1 - 32.0 / (2 * 26));
}

Action run(Pass pass, int64_t m, int64_t stage) { return {Verb::run, pass, m, stage}; }
Action receive(Pass pass, int64_t m, int64_t stage) { return {Verb::receive, pass, m, stage}; }
Action send(Pass pass, int64_t m, int64_t stage) { return {Verb::send, pass, m, stage}; }
Action wait(Pass pass, int64_t m, int64_t stage) { return {Verb::wait, pass, m, stage}; }

// Rank 0 needs the gradient of micro-batch 0 before it starts micro-batch 1, rank 1 all forwards before a backward.
TEST(SimulatedSchedule, NamesTheCycleOfADeadlock) {
  const Schedule s = {{.num_ranks = 2, .num_micro_batches = 2},
                      {{receive(b, 0, 0), receive(b, 1, 0), run(f, 0, 0), send(f, 0, 0), run(b, 0, 0), run(w, 0, 0),
                        run(f, 1, 0), send(f, 1, 0), run(b, 1, 0), run(w, 1, 0), wait(f, 0, 0), wait(f, 1, 0)},
                       {receive(f, 0, 1), receive(f, 1, 1), run(f, 0, 1), run(f, 1, 1), run(b, 0, 1), run(w, 0, 1),
                        send(b, 0, 1), run(b, 1, 1), run(w, 1, 1), send(b, 1, 1), wait(b, 0, 1), wait(b, 1, 1)}}};
  EXPECT_EQ(
      error_of(s),
      "simulate: the schedule deadlocks: rank 0 is at input backward of micro-batch 0, stage 0 and waits for rank "
      "1; rank 1 is at forward of micro-batch 1, stage 1 and waits for rank 0");
}

// Each rank waits for its send to leave before it opens the receive that the other's send needs.
TEST(SimulatedSchedule, NamesTheCycleOfBuffers) {
  const Schedule s = {{.num_ranks = 2, .num_micro_batches = 2},
                      {{run(f, 0, 0), send(f, 0, 0), run(f, 1, 0), send(f, 1, 0), wait(f, 1, 0), wait(f, 0, 0),
                        receive(b, 0, 0), run(b, 0, 0), run(w, 0, 0), receive(b, 1, 0), run(b, 1, 0), run(w, 1, 0)},
                       {receive(f, 0, 1), run(f, 0, 1), run(b, 0, 1), run(w, 0, 1), send(b, 0, 1), wait(b, 0, 1),
                        receive(f, 1, 1), run(f, 1, 1), run(b, 1, 1), run(w, 1, 1), send(b, 1, 1), wait(b, 1, 1)}}};
  EXPECT_EQ(error_of(s),
            "simulate: the schedule deadlocks: rank 0 is at the wait for the send after forward of micro-batch 1, "
            "stage 0 and waits for rank 1; rank 1 is at the wait for the send after input backward of micro-batch 0, "
            "stage 1 and waits for rank 0");
}

// Ranks outside of the cycle are not named.
TEST(SimulatedSchedule, NamesOnlyTheRanksOfTheCycle) {
  Schedule s = schedule_1f1b({.num_ranks = 3, .num_micro_batches = 2});
  s.actions[1] = {receive(f, 0, 1), receive(f, 1, 1), receive(b, 0, 1), receive(b, 1, 1), run(f, 0, 1),  send(f, 0, 1),
                  run(b, 0, 1),     run(w, 0, 1),     send(b, 0, 1),    run(f, 1, 1),     send(f, 1, 1), run(b, 1, 1),
                  run(w, 1, 1),     send(b, 1, 1),    wait(f, 0, 1),    wait(f, 1, 1),    wait(b, 0, 1), wait(b, 1, 1)};
  s.actions[2] = {receive(f, 0, 2), receive(f, 1, 2), run(f, 0, 2), run(f, 1, 2),  run(b, 0, 2),  run(w, 0, 2),
                  send(b, 0, 2),    run(b, 1, 2),     run(w, 1, 2), send(b, 1, 2), wait(b, 0, 2), wait(b, 1, 2)};
  EXPECT_EQ(
      error_of(s),
      "simulate: the schedule deadlocks: rank 1 is at input backward of micro-batch 0, stage 1 and waits for rank "
      "2; rank 2 is at forward of micro-batch 1, stage 2 and waits for rank 1");
}

TEST(SimulatedSchedule, AMessageMovesWhenItsReceiveIsOpen) {
  Schedule s = schedule_1f1b({.num_ranks = 2, .num_micro_batches = 2});
  auto& list = s.actions[1];
  EXPECT_EQ(simulate(s, equal_times(s.shape, stage_time(1, 5), 1)).ranks[1].runs[3].begin, 2 + 1 + 5);
  list.erase(std::find(list.begin(), list.end(), receive(f, 1, 1)));
  list.insert(std::find(list.begin(), list.end(), run(f, 1, 1)), receive(f, 1, 1));
  EXPECT_EQ(simulate(s, equal_times(s.shape, stage_time(1, 5), 1)).ranks[1].runs[3].begin, 2 + 1 + 5 + 1);
}

// Zero bubble (arXiv 2401.10241): the stage before waits for the input's gradient alone, so that weight passes may run
// where a rank would be idle. It holds more micro-batches for that, whose tensors the plan keeps.
TEST(SimulatedSchedule, LaterWeightPassesFillTheBubble) {
  const PipelineShape shape = {.num_ranks = 4, .num_micro_batches = 8};
  const PipelineTimes times = equal_times(shape, {.forward = 1, .backward_input = 1, .backward_weight = 1});
  const Schedule schedule = schedule_1f1b(shape);
  const SimulatedSchedule together = simulate(schedule, times);
  for (const int64_t count : {1, 2, 3}) {
    const Schedule delayed = with_delayed_weights(schedule, count);
    const SimulatedSchedule apart = simulate(delayed, times);
    EXPECT_LT(apart.duration, together.duration) << count;
    for (int64_t p = 0; p < shape.num_ranks; ++p) {
      const RankProgram list = place_actions(delayed, p);
      EXPECT_EQ(list.actions.size(), delayed.actions[p].size());
      EXPECT_EQ(list.splits_backward, std::vector<bool>{true});
      EXPECT_EQ(list.num_saved_sets, apart.ranks[p].peak_of_stage);
      EXPECT_EQ(apart.ranks[p].busy, together.ranks[p].busy);
    }
    EXPECT_EQ(apart.ranks[3].peak_in_flight, 1 + count);
  }
}

class SimulateRefuses : public testing::Test {
 protected:
  std::vector<Action>& list(size_t pp_rank) { return s_.actions[pp_rank]; }
  auto place(const Action& a) {
    auto& actions = list(static_cast<size_t>(s_.shape.rank_of(a.stage)));
    return std::find(actions.begin(), actions.end(), a);
  }
  void exchange(const Action& first, const Action& second) { std::iter_swap(place(first), place(second)); }

  Schedule s_ = schedule_1f1b({.num_ranks = 2, .num_micro_batches = 3});
};

TEST_F(SimulateRefuses, ActionsThatARankCannotHave) {
  list(0)[0].micro_batch = 3;
  EXPECT_EQ(
      error_of(s_),
      "simulate: rank 0 lists the receive for input backward of micro-batch 3, stage 0; there are 3 micro-batches and 2 "
      "stages");
  list(0)[0] = run(f, 0, 1);
  EXPECT_EQ(error_of(s_), "simulate: rank 0 lists forward of micro-batch 0, stage 1, which is of rank 1");
  list(0)[0] = receive(f, 0, 0);
  EXPECT_EQ(error_of(s_),
            "simulate: rank 0 lists the receive for forward of micro-batch 0, stage 0, which has no such message");
  s_.actions.pop_back();
  EXPECT_EQ(error_of(s_), "simulate: a schedule of 2 ranks must have as many lists; got 1");
}

TEST_F(SimulateRefuses, MissingAndRepeatedPasses) {
  const Schedule whole = s_;
  list(1).push_back(run(b, 2, 1));
  EXPECT_EQ(error_of(s_), "simulate: rank 1 lists input backward of micro-batch 2, stage 1 twice");
  list(1).pop_back();
  list(0).erase(place(run(w, 2, 0)));
  EXPECT_EQ(error_of(s_), "simulate: rank 0 must list weight backward of micro-batch 2, stage 0; it never does");
  list(0).erase(place(run(b, 2, 0)));
  EXPECT_EQ(error_of(s_), "simulate: rank 0 must list input backward of micro-batch 2, stage 0; it never does");
  s_ = whole;
  list(0).erase(place(wait(f, 2, 0)));
  EXPECT_EQ(error_of(s_),
            "simulate: rank 0 must list the wait for the send after forward of micro-batch 2, stage 0; it never does");
  list(0).erase(place(run(w, 2, 0)));
  list(0).erase(place(run(b, 2, 0)));
  EXPECT_THAT(error_of(s_), HasSubstr("never does"));
}

TEST_F(SimulateRefuses, ABackwardPassInAForwardOnlySchedule) {
  s_.shape.backward = false;
  EXPECT_EQ(error_of(s_),
            "simulate: rank 0 lists the receive for input backward of micro-batch 0, stage 0; the schedule has only "
            "forward passes");
}

TEST_F(SimulateRefuses, PassesOutOfOrder) {
  const Schedule whole = s_;
  exchange(run(f, 1, 1), run(f, 2, 1));
  EXPECT_THAT(error_of(s_),
              HasSubstr("rank 1 must list forward of micro-batch 1, stage 1 before forward of micro-batch "
                        "2, stage 1"));
  s_ = whole;
  exchange(run(f, 0, 1), run(b, 0, 1));
  EXPECT_THAT(error_of(s_),
              HasSubstr("must list forward of micro-batch 0, stage 1 before input backward of micro-batch 0"));
  s_ = whole;
  exchange(run(b, 0, 1), run(w, 0, 1));
  EXPECT_THAT(error_of(s_), HasSubstr("must list input backward of micro-batch 0, stage 1 before weight backward of"));
  s_ = whole;
  exchange(receive(f, 0, 1), run(f, 0, 1));
  EXPECT_THAT(error_of(s_), HasSubstr("must list the receive for forward of micro-batch 0, stage 1 before forward of"));
  s_ = whole;
  exchange(run(f, 1, 0), send(f, 1, 0));
  EXPECT_THAT(error_of(s_), HasSubstr("must list forward of micro-batch 1, stage 0 before the send after forward of"));
  s_ = whole;
  exchange(send(f, 0, 0), wait(f, 0, 0));
  EXPECT_THAT(error_of(s_),
              HasSubstr("must list the send after forward of micro-batch 0, stage 0 before the wait for"));
}

TEST_F(SimulateRefuses, SendsAndReceivesInDifferentOrders) {
  exchange(receive(f, 0, 1), receive(f, 1, 1));
  list(1).insert(list(1).begin(), receive(f, 0, 1));
  list(1).erase(std::find(list(1).begin() + 1, list(1).end(), receive(f, 0, 1)));
  EXPECT_EQ(error_of(s_), "none");  // the same order as before
  std::swap(list(1)[0], list(1)[1]);
  EXPECT_EQ(
      error_of(s_),
      "simulate: both ends of a channel must list its messages in the same order; message 0 from rank 0 is sent for "
      "the receive for forward of micro-batch 0, stage 1, where rank 1 lists the receive for forward of "
      "micro-batch 1, stage 1");
}

TEST_F(SimulateRefuses, InvalidTimes) {
  const auto error = [&](const PipelineTimes& times) -> std::string {
    try {
      simulate(s_, times);
    } catch (const Error& e) {
      return e.what();
    }
    return "none";
  };
  EXPECT_EQ(error({{{1, 1}}}), "simulate: times must be given for pp * vpp = 2 stages; got 1");
  EXPECT_EQ(error({{{1, 1}, {1, -2}}}), "simulate: times must not be negative; got -2");
  EXPECT_EQ(error({{{1, 1}, {1, 2}}, -1}), "simulate: times must not be negative; got -1");
  EXPECT_EQ(error({{{0, 0}, {0, 0}}}), "none");
}

TEST(SchedulePicture, ShowsEachRank) {
  const PipelineShape plain = {.num_ranks = 2, .num_micro_batches = 3};
  EXPECT_EQ(picture(simulate(schedule_1f1b(plain), equal_times(plain, stage_time(1, 2)))),
            "rank 0 a0 a1 .  .  A0 -- a2 A1 -- .  A2 --\n"
            "rank 1 .  a0 A0 -- a1 A1 -- a2 A2 -- .  .\n");
  const PipelineShape folded = {.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 2};
  EXPECT_EQ(picture(simulate(schedule_1f1b(folded), equal_times(folded, stage_time(2, 2))), 2),
            "rank 0 a0 a1 b0 b1 .  B0 .  B1 A0 A1\n"
            "rank 1 .  a0 a1 b0 B0 b1 B1 A0 A1 .\n");
  const Schedule delayed = with_delayed_weights(schedule_1f1b(plain), 1);
  EXPECT_EQ(picture(simulate(delayed, equal_times(plain, {1, 1, 1}))),
            "rank 0 a0  a1  .   A0  a2  A1  A0w .   A2  A1w A2w\n"
            "rank 1 .   a0  A0  a1  A1  A0w a2  A2  A1w A2w .\n");
  EXPECT_THROW(picture(simulate(schedule_1f1b(plain), equal_times(plain)), 0), Error);
}

TEST(SchedulePicture, IsInTheDocumentation) {
  std::stringstream page;
  page << std::ifstream(MOEBIUS_SOURCE_DIR "/docs/design/parallelism.md").rdbuf();
  for (const int64_t V : {1, 2}) {
    const PipelineShape shape = {.num_ranks = 4, .num_virtual = V, .num_micro_batches = 8};
    EXPECT_THAT(page.str(), HasSubstr(picture(simulate(schedule_1f1b(shape), equal_times(shape)))));
  }
  const PipelineShape shape = {.num_ranks = 4, .num_micro_batches = 6};
  EXPECT_THAT(page.str(), HasSubstr(picture(simulate(schedule_zb_h1(shape), equal_times(shape, {1, 1, 1})))));
}

}  // namespace
}  // namespace moebius
