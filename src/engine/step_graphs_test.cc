// The host's work around the capture and replay of parts of a step, on a device that captures nothing.
#include "engine/step_graphs.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "io/testing.h"

namespace moebius {
namespace {

using Lines = std::vector<std::string>;

// Records the requested calls. Its graphs do no work.
class NotedGraphs final : public GraphDevice {
 public:
  explicit NotedGraphs(Lines& lines) : lines_(lines) {}
  std::function<void()> capture(GraphCapture&, const std::function<void()>& body) override {
    lines_.push_back("capture");
    body();
    const int number = num_graphs_++;
    return [this, number] { lines_.push_back("launch " + std::to_string(number)); };
  }

 private:
  Lines& lines_;
  int num_graphs_ = 0;
};

class StepGraphsTest : public ::testing::Test {
 protected:
  // Returns the lines that one run of the part leaves.
  Lines run(const StepPart& part, Trace* trace = nullptr) {
    lines_.clear();
    Stream s(DeviceKind::cpu, pool_, trace);
    graphs_.run(part, s, [&](Stream& on) {
      lines_.push_back("body");
      if (on.capture()) on.capture()->after_replay([&] { lines_.push_back("after replay"); });
    });
    EXPECT_EQ(s.capture(), nullptr) << "the caller's stream is not the captured one";
    return lines_;
  }

  ThreadPool pool_{1};
  Lines lines_;
  StepGraphs graphs_{std::make_unique<NotedGraphs>(lines_)};
};

TEST_F(StepGraphsTest, TheThirdLaunchIsCapturedAndLaterOnesReplayed) {
  const Lines eager{"body"};
  EXPECT_EQ(run(StepPart::update()), eager);
  EXPECT_EQ(run(StepPart::update()), eager);
  EXPECT_EQ(run(StepPart::update()), (Lines{"capture", "body", "launch 0", "after replay"}));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(run(StepPart::update()), (Lines{"launch 0", "after replay"}));
}

TEST_F(StepGraphsTest, EachPartHasItsOwnGraph) {
  const StepPart parts[] = {StepPart::passes(true, false),
                            StepPart::passes(false, false),
                            StepPart::passes(false, true),
                            StepPart::passes(true, true),
                            StepPart::passes(true, true, /*cps=*/{2}),
                            StepPart::update(),
                            StepPart::end_of_step()};
  for (int i = 0; i < 2; ++i)
    for (const StepPart& part : parts) EXPECT_EQ(run(part), Lines{"body"});
  for (size_t i = 0; i < std::size(parts); ++i) EXPECT_EQ(run(parts[i])[2], "launch " + std::to_string(i));
  for (size_t i = 0; i < std::size(parts); ++i) EXPECT_EQ(run(parts[i])[0], "launch " + std::to_string(i));
}

// The passes of a pipeline are those of all micro-batches of a step.
TEST_F(StepGraphsTest, EachSequenceOfCpHasItsOwnGraph) {
  const StepPart parts[] = {StepPart::passes(true, true, {1, 1, 2}), StepPart::passes(true, true, {1, 2, 2}),
                            StepPart::passes(true, true, {2, 2, 2}), StepPart::passes(true, true, {2, 2})};
  for (int i = 0; i < 2; ++i)
    for (const StepPart& part : parts) EXPECT_EQ(run(part), Lines{"body"});
  for (size_t i = 0; i < std::size(parts); ++i) EXPECT_EQ(run(parts[i])[2], "launch " + std::to_string(i));
  for (size_t i = 0; i < std::size(parts); ++i) EXPECT_EQ(run(parts[i])[0], "launch " + std::to_string(i));
}

// Micro-batches of one cp do not count, since there are few values of cp.
TEST_F(StepGraphsTest, SequencesOfCpBeyondTheLimitStayEager) {
  const auto mixed = [](int64_t i, bool pending = false) { return StepPart::passes(true, true, {1, i + 2}, pending); };
  for (int64_t i = 0; i < StepGraphs::kMaxSequences; ++i) {
    for (int launch = 0; launch < 3; ++launch) run(mixed(i));
  }
  const StepPart more = mixed(StepGraphs::kMaxSequences), same = StepPart::passes(true, true, {4, 4});
  for (int launch = 0; launch < 5; ++launch) EXPECT_EQ(run(more), Lines{"body"});
  for (int launch = 0; launch < 2; ++launch) run(same);
  EXPECT_EQ(run(same)[0], "capture");
  EXPECT_EQ(run(mixed(0, /*pending=*/true))[0], "capture") << "its sequence is known";
  EXPECT_EQ(run(mixed(1))[0], "launch 1");
}

// A traced launch counts, so that ranks that trace capture in the same step as ranks that do not.
TEST_F(StepGraphsTest, ATracedLaunchIsEagerAndCounts) {
  Trace trace;
  EXPECT_EQ(run(StepPart::update()), Lines{"body"});
  EXPECT_EQ(run(StepPart::update(), &trace), Lines{"body"});
  EXPECT_EQ(run(StepPart::update())[0], "capture");
  EXPECT_EQ(run(StepPart::update(), &trace), Lines{"body"});
  EXPECT_EQ(run(StepPart::update())[0], "launch 0");
}

TEST_F(StepGraphsTest, WithoutADeviceAllIsEager) {
  graphs_ = StepGraphs();
  EXPECT_FALSE(graphs_.captures());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(run(StepPart::update()), Lines{"body"});
}

TEST_F(StepGraphsTest, AFailedCaptureIsRetried) {
  Stream s(DeviceKind::cpu, pool_);
  const auto fails = [](Stream& on) {
    if (on.capture()) MOEBIUS_FAIL(usage, "not now");
  };
  for (int i = 0; i < 2; ++i) graphs_.run(StepPart::update(), s, fails);
  expect_error(ErrorKind::usage, "not now", [&] { graphs_.run(StepPart::update(), s, fails); });
  EXPECT_EQ(run(StepPart::update()), (Lines{"capture", "body", "launch 0", "after replay"}));
}

TEST(GraphCapture, KeepsAStateForEachParticipant) {
  GraphCapture capture;
  int a = 0, b = 0;
  EXPECT_EQ(capture.state_of(&a), nullptr);
  capture.state_of(&a) = std::make_shared<int>(7);
  EXPECT_EQ(capture.state_of(&b), nullptr);
  EXPECT_EQ(*static_cast<int*>(capture.state_of(&a).get()), 7);
}

}  // namespace
}  // namespace moebius
