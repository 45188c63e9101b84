#include "plan/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
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
  EXPECT_EQ(html.find("http"), std::string::npos);                                       // no other file, no network
  EXPECT_THAT(html, HasSubstr("<meta name=\"viewport\" content=\"width=device-width"));  // for a phone
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
    if (event["ph"] == "M" || event["pid"] != 0) continue;
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

// Each axis has a row of its own on each pipeline rank, whose events have the axis' bytes.
TEST(Timelines, ShowCommunicationByAxis) {
  PartLibrary parts;
  const Prediction p =
      predict(parts, recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2", "parallel.ep=2", "parallel.tp=2"}), 8,
              machine("h200"), {});
  const auto trace = nlohmann::json::parse(plan_trace(p));
  std::map<int64_t, std::string> rows;
  std::map<std::string, double> bytes, end_us;
  for (const auto& event : trace["traceEvents"]) {
    if (event["pid"] != 1) continue;
    const auto tid = event["tid"].get<int64_t>();
    if (event["ph"] == "M") {
      if (event["name"] == "thread_name") rows[tid] = event["args"]["name"];
      continue;
    }
    ASSERT_TRUE(rows.contains(tid)) << "a row is named before its events";
    const std::string row = rows[tid], axis = event["name"];
    EXPECT_TRUE(row.ends_with(", " + axis)) << row;
    EXPECT_GE(event["ts"].get<double>(), end_us[row] - 0.002) << row << ": events of a row do not overlap";
    end_us[row] = event["ts"].get<double>() + event["dur"].get<double>();
    if (event["args"]["of"] != "gradients and weights") bytes[axis] += event["args"]["bytes"].get<double>();
  }
  for (const char* axis : {"tp", "ep", "pp"})
    for (const char* rank : {"pp rank 0, ", "pp rank 1, "})
      EXPECT_EQ(end_us.contains(std::string(rank) + axis),
                std::string(rank) != "pp rank 1, " || axis != std::string("pp"))
          << rank << axis;
  ASSERT_EQ(p.schedule.shape.num_micro_batches, p.num_micro_batches);
  EXPECT_NEAR(bytes["ep"], 2 * p.axes.at("ep").bytes, 1e-3 * bytes["ep"]) << "two pipeline ranks";
  EXPECT_NEAR(bytes["pp"], p.message_bytes * static_cast<double>(p.num_micro_batches), 1);
}

}  // namespace
}  // namespace moebius
