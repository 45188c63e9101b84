#include "plan/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "plan/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(Timelines, ShowEveryPass) {
  PartLibrary parts;
  const Prediction p = predict(parts, recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2"}), 2, machine("h200"), {});
  const auto trace = nlohmann::json::parse(plan_trace(p));
  int64_t passes = 0;
  for (const auto& event : trace["traceEvents"])
    passes += event["name"].get<std::string>().find(", stage ") == std::string::npos ? 0 : 1;
  EXPECT_EQ(passes, 2 * 2 * p.num_micro_batches);
  const std::string html = plan_html(p, "a <title>", "text");
  EXPECT_THAT(html, HasSubstr("a &lt;title&gt;"));
  EXPECT_EQ(html.find("http"), std::string::npos);  // no other file, no network
}

// With zb_h1 a rank after the first one delays its gradients of weights, which the timeline names apart.
TEST(Timelines, ShowDelayedGradientsOfWeights) {
  PartLibrary parts;
  const auto delayed = [&](const char* schedule) {
    const Prediction p =
        predict(parts, recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2", schedule}), 2, machine("h200"), {});
    int64_t passes = 0;
    const auto trace = nlohmann::json::parse(plan_trace(p));
    for (const auto& event : trace["traceEvents"])
      passes += event["name"].get<std::string>().starts_with("weight gradients ");
    return passes / p.num_micro_batches;
  };
  EXPECT_EQ(delayed("parallel.schedule=\"1f1b\""), 0);
  EXPECT_EQ(delayed("parallel.schedule=\"zb_h1\""), 1);
}

// After its passes a rank shows every other phase of the step, one after another.
TEST(Timelines, ShowEveryPhase) {
  PartLibrary parts;
  const RunSpec run =
      recipe("bench_olmoe_1b_7b.toml", {"model.num_hidden_layers=2", "model.qk_norm=false", "optimizer.name=\"muon\"",
                                        "optimizer.momentum=0.95", "optimizer.qk_clip=100"});
  const Prediction p = predict(parts, run, 2, machine("h200"), {});
  std::set<std::string> shown;
  double end_us = 0, after_us = 0;
  const auto trace = nlohmann::json::parse(plan_trace(p));
  for (const auto& event : trace["traceEvents"]) {
    const auto name = event["name"].get<std::string>();
    end_us = std::max(end_us, event["ts"].get<double>() + event["dur"].get<double>());
    if (name.find(", stage ") == std::string::npos) shown.insert(name);
  }
  const std::set<std::string> of_passes{"forward", "backward", "communication", "host", "bubble"};
  for (const auto& [name, seconds] : p.phases) {
    if (of_passes.contains(name) || seconds <= 0) continue;
    EXPECT_TRUE(shown.contains(name)) << name;
    after_us += 1e6 * seconds;
  }
  EXPECT_TRUE(shown.contains("matrices") && shown.contains("attention logits"));
  EXPECT_NEAR(end_us, 1e6 * p.schedule.duration + after_us, 0.1);
}

}  // namespace
}  // namespace moebius
