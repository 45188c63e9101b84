// The keys of JSON are documented in docs/reference/commands.md, and scripts rely on them.
#include "plan/print.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "io/files.h"
#include "plan/testing.h"

namespace moebius {
namespace {

TEST(Texts, OfSmallValuesHaveSignificantDigits) {
  EXPECT_EQ(rate_text(351.23), "351.2");
  EXPECT_EQ(rate_text(0.0123456), "0.01235");
  EXPECT_EQ(seconds_text(1.25), "1.250 s");
  EXPECT_EQ(seconds_text(0.00125), "1.25 ms");
}

TEST(Texts, OfDaysAndHoursHaveThreeDigits) {
  EXPECT_EQ(quantity_text(0.19004), "0.19");
  EXPECT_EQ(quantity_text(23.44), "23.4");
  EXPECT_EQ(quantity_text(31863.6), "31864");
}

TEST(Texts, NameTheGpuThatARunNeeds) {
  const auto text = [](const char* overlap) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml",
                               {"model.num_hidden_layers=1", "parallel.ep=2", "parallel.dispatcher=\"direct\"",
                                fmt::format("parallel.expert_overlap=\"{}\"", overlap)});
    PartLibrary parts;
    return plan_text(predict(parts, run, 2, machine("h200"), {}, {.simulate = false}), run, machine("h200"), {});
  };
  EXPECT_THAT(text("batch_split"),
              testing::HasSubstr("\n  parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of a GPU of "
                                 "compute capability 9.0; on another one the run ends before its first step\n"));
  EXPECT_THAT(text("layer"), testing::Not(testing::HasSubstr("compute capability")));
}

TEST(Texts, SayThatARunWouldRefuseTheDispatcher) {
  PartLibrary parts;
  const auto text = [&](int64_t ep, const char* dispatcher) {
    const RunSpec run = recipe("qwen3_30b_a3b.toml", {"model.num_hidden_layers=1", fmt::format("parallel.ep={}", ep),
                                                      fmt::format("parallel.dispatcher=\"{}\"", dispatcher)});
    return plan_text(predict(parts, run, 16, machine("h100"), {}, {.simulate = false}), run, machine("h100"), {});
  };
  EXPECT_THAT(
      text(16, "direct"),
      testing::HasSubstr("\n  dispatcher direct: parallel.dispatcher asks for it; a run would refuse it, because "
                         "the 16 ranks that share experts are not on one machine (NVIDIA H100 SXM: 8 ranks of a domain "
                         "are on one host)\n"));
  EXPECT_THAT(text(8, "direct"), testing::HasSubstr("\n  dispatcher direct: parallel.dispatcher asks for it\n"));
  EXPECT_THAT(text(16, "two_level"), testing::Not(testing::HasSubstr("\n  dispatcher")));
}

using Keys = std::set<std::string>;

// Adds the keys of an object as the tables of the reference write them. NAME and KEY depend on the run.
void add_keys(const nlohmann::ordered_json& json, const std::string& path, Keys& keys) {
  static const Keys named{"phases", "kernels", "axes"};
  if (json.is_array() && !json.empty() && json[0].is_object()) {
    for (const auto& each : json) add_keys(each, path + "[]", keys);
    return;
  }
  if (!json.is_object()) {
    keys.insert(path);
    return;
  }
  for (const auto& [key, value] : json.items()) {
    bool is_name = named.contains(path);
    for (int life = 0; life < kNumLives; ++life)
      is_name = is_name || (path == "memory[]" && key == name_of(static_cast<Life>(life)));
    const std::string shown = path == "points[].set" ? "KEY" : is_name ? "NAME" : key;
    add_keys(value, (path.empty() ? "" : path + ".") + shown, keys);
  }
}

Keys keys_of(const nlohmann::ordered_json& json) {
  Keys keys;
  add_keys(json, "", keys);
  return keys;
}

// Returns the keys of the tables below a heading of the reference.
Keys documented(const std::string& heading) {
  std::string text = read_file(kSource + "/docs/reference/commands.md");
  const size_t at = text.find("\n### " + heading + "\n");
  EXPECT_NE(at, std::string::npos) << heading;
  text = text.substr(at + 1);
  text = text.substr(0, text.find("\n##"));
  Keys keys;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| `")) continue;
    const std::string cell = line.substr(2, line.find(" | ", 2) - 2);
    for (size_t begin = 0; (begin = cell.find('`', begin)) != std::string::npos;) {
      const size_t end = cell.find('`', begin + 1);
      keys.insert(cell.substr(begin + 1, end - begin - 1));
      begin = end + 1;
    }
  }
  return keys;
}

nlohmann::ordered_json plan_of_two() {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2"});
  return plan_json(predict(parts, run, 2, machine("h200"), {}), machine("h200"), {});
}

TEST(ResultsJson, OfAPlanHasTheDocumentedKeys) {
  const Keys keys = keys_of(plan_of_two());
  EXPECT_EQ(keys, documented("plan --json"));
  for (const char* key : {"step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "memory_peak_bytes",
                          "phases.NAME", "axes.NAME.bytes", "axes.NAME.exposed_s", "axes.NAME.hidden_s", "bubble"})
    EXPECT_TRUE(keys.contains(key)) << key;
}

// Gradients of weights are a separate pass only in zb_h1.
TEST(ResultsJson, HasTheGradientsOfWeightsOfEachStage) {
  PartLibrary parts;
  for (const char* schedule : {"1f1b", "zb_h1"}) {
    const RunSpec run =
        recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2", std::string("parallel.schedule=") + schedule});
    const nlohmann::ordered_json json = plan_json(predict(parts, run, 2, machine("h200"), {}), machine("h200"), {});
    ASSERT_EQ(json["stages"].size(), 2U);
    const double first = json["stages"][0]["backward_weight_s"], last = json["stages"][1]["backward_weight_s"];
    EXPECT_EQ(first, 0) << "nothing comes between the two passes of the first rank";
    if (std::string_view(schedule) == "zb_h1")
      EXPECT_GT(last, 0.1 * json["stages"][1]["backward_s"].get<double>());
    else
      EXPECT_EQ(last, 0);
    EXPECT_LT(last, json["stages"][1]["backward_s"].get<double>());
  }
}

TEST(ResultsJson, OfASearchHasTheDocumentedKeys) {
  PartLibrary parts;
  const SearchResult found = search(parts, recipe("bench_olmoe_1b_7b.toml"), 2, machine("h200"), {}, {.keep = 3});
  const nlohmann::ordered_json json = search_json(found, machine("h200"), {});
  Keys of_plan = keys_of(plan_json(found.layouts[0].prediction, machine("h200"), {})), beside;
  for (const std::string& key : keys_of(json))
    if (!of_plan.contains(key) && !key.starts_with("layouts[].")) beside.insert(key);
  // The objects of `layouts` have the keys of a plan, and others.
  for (const auto& [key, value] : json["layouts"][0].items())
    if (!json.contains(key)) beside.insert("layouts[]." + key);
  beside.insert("layouts[]");
  EXPECT_EQ(beside, documented("plan --search --json"));
  const nlohmann::ordered_json plan = plan_of_two();
  for (const auto& layout : json["layouts"])
    for (const auto& [key, value] : plan.items()) EXPECT_TRUE(layout.contains(key)) << key;
}

TEST(ResultsJson, OfASweepHasTheDocumentedKeys) {
  PartLibrary parts;
  const SweepBase base{.recipe = kRecipes + "bench_olmoe_1b_7b.toml", .ranks = 4, .search = SearchOptions{.keep = 1}};
  const Sweep swept = sweep(parts, base, {parse_sweep("ranks=2,17")}, machine("h200"), {});
  EXPECT_EQ(keys_of(sweep_json(swept)), documented("plan --sweep --json"));
}

TEST(ResultsJson, OfAFitHasTheDocumentedKeys) {
  FitRow row;
  row.name = "a";
  row.measured = 2;
  FitResult result;
  result.rows.push_back({.row = &row, .before = 1, .after = 3, .left_out = 4});
  EXPECT_EQ(keys_of(fit_json(result)), documented("plan --fit --json"));
  EXPECT_EQ(fit_json(result)["rows"][0]["error"], 0.5);
}

// An assumption that would change nothing is refused.
TEST(Assumptions, MegatronAssumptionsNeedItsSystem) {
  for (const char* text : {"permutation=plain", "recompute=moe"}) {
    EXPECT_THAT(refused([&] { parse_assumptions({text}); }), testing::HasSubstr("add --assume system=megatron"))
        << text;
    EXPECT_NO_THROW(parse_assumptions({"system=megatron", text})) << text;
  }
}

// The planner has no model of a step whose time is mostly between kernels, and the text warns of it.
TEST(PlanText, NamesStepsOfSmallKernels) {
  PartLibrary parts;
  const auto text = [&](const RunSpec& run) {
    const Prediction p = predict(parts, run, 1, machine("h100"), {});
    EXPECT_GT(p.launch_s, 0);
    return plan_text(p, run, machine("h100"), {});
  };
  EXPECT_THAT(text(recipe("demo.toml")), testing::HasSubstr("% of the step is between kernels"));
  EXPECT_THAT(text(recipe("bench_olmoe_1b_7b.toml")), testing::Not(testing::HasSubstr("small kernels")));
}

// The busiest of two ranks has 6 of 8 rows of the first layer, and 5 of 8 of the second.
TEST(Assumptions, LoadOfARunIsThatOfItsExperts) {
  const std::string path = ::testing::TempDir() + "/load_of_a_run.jsonl";
  std::ofstream(path) << R"({"kind": "train", "expert_load_max_over_mean": 2.5, )"
                      << R"("moe": [{"load": [5, 1, 2, 0]}, {"load": [1, 2, 1, 4]}]})"
                      << "\n";
  const PlanLoad load = parse_assumptions({"load=" + path}).load;
  EXPECT_DOUBLE_EQ(load.busiest_rank(4, 2), (6.0 / 4 + 5.0 / 4) / 2);
  EXPECT_DOUBLE_EQ(load.busiest_rank(4, 4), (5.0 / 2 + 4.0 / 2) / 2);
  EXPECT_DOUBLE_EQ(load.busiest_rank(8, 8), 2.5) << "a model with other experts";
  EXPECT_DOUBLE_EQ(load.busiest_rank(8, 2), 1.75);
  EXPECT_DOUBLE_EQ(PlanLoad{.busiest_expert = 7}.busiest_rank(4, 2), 2) << "no rank has more than all rows";
}

// A run that was killed may leave a part of its last line; the record before it counts.
TEST(Assumptions, LoadIgnoresAnUnfinishedLine) {
  const std::string path = ::testing::TempDir() + "/unfinished.jsonl";
  std::ofstream(path) << R"({"expert_load_max_over_mean": 1.5})"
                      << "\n"
                      << R"({"expert_load_max_over_mean": 3.)";
  EXPECT_EQ(parse_assumptions({"load=" + path}).load.busiest_expert, 1.5);
}

// Such rows would make the time of a step negative, or no number.
TEST(Assumptions, InvalidRowsOfExpertsNameTheirLine) {
  const std::string path = ::testing::TempDir() + "/invalid_rows.jsonl";
  for (const char* rows : {"-1, 5", "1e308, 1e308"}) {
    std::ofstream(path) << "{}\n"
                        << fmt::format(R"({{"expert_load_max_over_mean": 2, "moe": [{{"load": [{}]}}]}})", rows);
    EXPECT_THAT(refused([&] { parse_assumptions({"load=" + path}); }, ErrorKind::input),
                testing::HasSubstr(
                    "invalid_rows.jsonl:2: expected rows of an expert from 0 to 1000000000000000 in \"load\"; got"))
        << rows;
  }
  std::ofstream(path) << R"({"expert_load_max_over_mean": 0.5})";
  EXPECT_THAT(refused([&] { parse_assumptions({"load=" + path}); }, ErrorKind::input),
              testing::HasSubstr("no train record with an expert_load_max_over_mean of at least 1"));
}

TEST(Assumptions, InvalidLoadErrorListsTheChoices) {
  for (const char* text : {"load=zipf", "load=1.5", "load=runs/none/metrics.jsonl"})
    EXPECT_THAT(
        refused([&] { parse_assumptions({text}); }),
        testing::HasSubstr("expected balanced, zipf:EXPONENT, rank:FACTOR, or the path of a run's metrics.jsonl; got"));
}

}  // namespace
}  // namespace moebius
