#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/files.h"
#include "io/testing.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

using testing::HasSubstr;

const std::string kOlmoe = MOEBIUS_SOURCE_DIR "/recipes/bench_olmoe_1b_7b.toml";
const std::string kH200 = MOEBIUS_SOURCE_DIR "/machines/h200.toml";

TEST(CliPlan, PredictsARun) {
  TestDir dir;
  const auto run = run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--ranks", "2", "--set", "parallel.pp=2",
                                     "--trace", "trace.json", "--html", "page.html", "--json"});
  EXPECT_EQ(run.code, 0) << run.err;
  const auto json = nlohmann::json::parse(run.out);
  for (const char* key : {"step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "memory_peak_bytes"})
    EXPECT_GT(json.at(key).get<double>(), 0) << key;
  EXPECT_TRUE(json.at("axes").at("pp").contains("hidden_s"));
  EXPECT_FALSE(nlohmann::json::parse(read_file(dir.path("trace.json"))).at("traceEvents").empty());
  EXPECT_THAT(read_file(dir.path("page.html")), HasSubstr("<svg"));
}

TEST(CliPlan, SearchesAndSweeps) {
  TestDir dir;
  const auto found = run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--ranks", "2", "--search", "--json"});
  EXPECT_EQ(found.code, 0) << found.err;
  const auto layouts = nlohmann::json::parse(found.out).at("layouts");
  ASSERT_GT(layouts.size(), 1U);
  EXPECT_FALSE(layouts[0].at("set").empty());
  EXPECT_LE(layouts[0].at("step_time_s").get<double>(), layouts[1].at("step_time_s").get<double>());
  const auto swept = run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--ranks", "2", "--sweep", "parallel.ep=1,2",
                                       "--csv", "t.csv", "--svg", "t.svg"});
  EXPECT_EQ(swept.code, 0) << swept.err;
  EXPECT_THAT(read_file(dir.path("t.csv")), HasSubstr("parallel.ep,step_time_s"));
}

TEST(CliPlan, ErrorsNameTheOption) {
  TestDir dir;
  expect_refused(run_moebius(dir, {"plan", kOlmoe}), 2, "expected a recipe and --machine NAME or FILE; got no machine");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", "h300"}), 2, "no machine is called \"h300\"");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--ranks", "3"}), 2, "3");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--csv", "t.csv"}), 2, "need --sweep");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--assume", "graphs=many"}), 2,
                 "expected one of recipe, none, partial, full");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--search", "--html", "p.html"}), 2,
                 "--trace and --html show one layout");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--assume", "precision=nvfp4"}), 2,
                 "has no products in 4 bits (rank.nvfp4_tflops = 0)");
  const auto refused = [&](std::vector<std::string> more, const char* why) {
    std::vector<std::string> args{"plan", kOlmoe, "--machine", kH200};
    args.insert(args.end(), more.begin(), more.end());
    expect_refused(run_moebius(dir, args), 2, why);
  };
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", "h300.toml"}), 2,
                 "no machine is called \"h300.toml\", and there is no such file; the folder");
  refused({"--assume", "generation=1"}, "--assume generation: generation is not predicted, only training");
  refused({"--sweep", "parallel.ep=1,2,1"}, "--sweep parallel.ep: 1 is given twice; leave one of them out");
  refused({"--memory-gb", "3"}, "need --search");
  refused({"--search", "--memory-gb", "-5"}, "--memory-gb: expected a number from 0 to 1000000; got -5");
  refused({"--search", "--memory-gb", "nan"}, "--memory-gb: expected a number");
  refused({"--search", "--max-tp", "-2"}, "--max-tp: expected 0 or more; got -2");
  refused({"--search", "--memory-gb", "200"}, "(rank.memory_gb); got 200; give less");
  refused({"--search", "--recipes", "none,fp8_block,none"}, "--recipes: none is given twice");
  refused({"--search", "--recipes", "none", "--set", "precision.recipe=\"fp8_block\""},
          "--recipes and --set both give precision.recipe; leave one of them out");
  refused({"--sweep", "parallel.ep=1,2", "--set", "parallel.ep=2"},
          "--set and --sweep both give parallel.ep; leave one of them out");
  for (const char* ranks : {"1", "4"})  // 1 is the default
    refused({"--sweep", "ranks=1,2", "--ranks", ranks},
            "--ranks and --sweep both give the ranks; leave one of them out");
  refused({"--sweep", "precision.recipe=none,mxfp8", "--search", "--recipes", "mxfp8"},
          "--recipes and --sweep both give precision.recipe; leave one of them out");
  refused({"--sweep", "parallel.ep=1,2", "--set", " parallel.ep =2"},
          "--set and --sweep both give parallel.ep; leave one of them out");
  refused({"--sweep", "parallel.ep=1,2", "--set", "parallel.ep"},
          "--set parallel.ep: expected SECTION.KEY=VALUE, as in --set train.steps=100");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--trace", "."}), 4,
                 "--trace: expected a file; got the folder .; give a file in it, or another one");
  refused({"--trace", "same", "--html", "same"}, "--trace and --html would both write same; give two files");
  expect_refused(run_moebius(dir, {"plan", kOlmoe, "--machine", kH200, "--html", "none/p.html"}), 4,
                 "--html: there is no folder none; make it, or choose another file");
  expect_refused(
      run_moebius(dir, {"plan", kOlmoe, "--machine", MOEBIUS_SOURCE_DIR "/machines/xeon2.toml", "--node-ranks", "1"}),
      2, "whose hosts have rank.threads / run.threads ranks each; set run.threads");
  expect_refused(run_moebius(dir, {"plan", "--fit", "rows.json", "--html", "p.html"}), 2,
                 "leave out all options but --leave-one-out, --write-machines and --json");
  refused({"--leave-one-out"}, "need --fit ROWS.json");
  refused({"--fit", "rows.json"}, "the rows of --fit name their recipes");
  refused({"--ranks", "4294967296"}, "--ranks: expected 1 to 16777216; got 4294967296");
  refused({"--sweep", "parallel.epp=1,2"}, "none of 2 points can be predicted");
}

// A folder of other machines does not hide those of the program.
TEST(CliPlan, AFolderOfMachinesDoesNotHideThoseOfTheProgram) {
  TestDir dir;
  std::filesystem::create_directory(dir.path("machines"));
  write_file_atomic(dir.path("machines/mine.toml"), read_file(kH200));
  for (const char* name : {"mine", "h200"})
    EXPECT_EQ(run_moebius(dir, {"plan", kOlmoe, "--machine", name, "--json"}).code, 0) << name;
}

}  // namespace
}  // namespace moebius
