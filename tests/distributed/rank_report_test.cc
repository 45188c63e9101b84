// The report on ranks in a step's line of metrics, over every transport.
#include "train/rank_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

struct ReportCase {
  const char* name;
  int ranks;
  ParallelSpec layout;
  std::vector<Axis> axes;  // the axes that communicate
};

void PrintTo(const ReportCase& c, std::ostream* out) { *out << c.name; }

const ReportCase kCases[] = {
    {"dp3", 3, {}, {Axis::dp_cp}},
    {"ep4_over_tp2_cp2", 4, {.tp = 2, .cp = 2, .ep = 4}, {Axis::tp, Axis::cp, Axis::ep, Axis::tp_cp_dp}},
    {"pp2_ep2_etp2", 8, {.pp = 2, .ep = 2, .etp = 2}, {Axis::pp, Axis::pp_back, Axis::etp_ep, Axis::dp_cp}},
};

class RankReports : public ::testing::TestWithParam<ReportCase> {};

TEST_P(RankReports, EveryRankHasTheReportsOfAll) {
  const ReportCase& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    Engine engine(layout_engine_spec(world, {}, c.layout));
    init_layout(engine, {});
    const CommCounters before = comm_counters(engine.mesh());
    const StepReport step = layout_step(engine, {}, 1);
    const double r = world.rank();
    const RanksReport report = gather_ranks(engine, {.load_s = r, .passes_s = 10 + r, .optimizer_s = 20 + r},
                                            comm_since(engine.mesh(), before), step.layers);
    ASSERT_EQ(report.ranks.size(), static_cast<size_t>(c.ranks));
    for (int q = 0; q < c.ranks; ++q) {
      EXPECT_EQ(report.ranks[q].load_s, q);
      EXPECT_EQ(report.ranks[q].passes_s, 10 + q);
      EXPECT_EQ(report.ranks[q].optimizer_s, 20 + q);
      EXPECT_GT(report.ranks[q].waiting_s, 0);
    }
    const auto json = to_json(report);
    for (const Axis axis : c.axes) {
      const auto& of_axis = json.at("comm").at(std::string(name_of(axis)));
      EXPECT_GT(of_axis.at("sent_bytes").get<int64_t>(), 0) << name_of(axis);
      EXPECT_GT(of_axis.at("exposed_s").get<double>(), 0) << name_of(axis);
      EXPECT_NE(comm_text(report).find(std::string(name_of(axis)) + " "), std::string::npos);
    }
    // The tokens of every expert count at its rank of ep.
    std::vector<int64_t> tokens(engine.mesh().shape().ep);
    for (const MoeLayerReport& layer : step.layers)
      for (size_t e = 0; e < layer.load.size(); ++e) tokens[e * tokens.size() / layer.load.size()] += layer.load[e];
    EXPECT_EQ(report.tokens_of_ep_rank, tokens);
    EXPECT_EQ(json.at("tokens_of_ep_rank").get<std::vector<int64_t>>(), tokens);
    EXPECT_EQ(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}), 24 * 8 * 2 * 3)
        << "sequences, tokens, experts of each, layers";
  });
}

TEST(RankReport, HasSecondsToTheMicrosecond) {
  RanksReport report;
  report.ranks = {{.load_s = 1.0 / 3, .waiting_s = 2e-7}, {}};
  report.axes = {{.axis = Axis::ep, .sent_bytes = 1, .exposed_s = 2.0 / 3, .rank_s = {1.0 / 3, 2.0 / 3}}};
  const auto json = to_json(report);
  EXPECT_EQ(json.at("ranks").at("load_s").dump(), "[0.333333,0.0]");
  EXPECT_EQ(json.at("ranks").at("waiting_s").dump(), "[0.0,0.0]");
  EXPECT_EQ(json.at("comm").at("ep").dump(), R"({"sent_bytes":1,"exposed_s":0.666667,"rank_s":[0.333333,0.666667]})");
}

INSTANTIATE_TEST_SUITE_P(Everywhere, RankReports, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

}  // namespace
}  // namespace moebius
