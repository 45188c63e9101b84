#include "plan/fit.h"

#include <gmock/gmock.h>

#include <cmath>

#include "io/files.h"
#include "io/testing.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Key;

// Writes a file of one row, with other keys of the file before it.
std::string file_of(const TestDir& dir, const std::string& beside, const std::string& name = "a") {
  const std::string path = dir.path("rows.json");
  write_file_atomic(path, "{" + beside + R"("rows": [{"source": "b", "recipe": "recipes/bench_cpu.toml",
      "machine": "epyc2", "tokens_per_s": 400, "name": ")" +
                              name + "\"}]}");
  return path;
}

TEST(Fits, RefuseFilesWhoseNamesAreNotKnown) {
  TestDir dir;
  const auto answer = [&](const std::string& beside, const std::string& name = "a") {
    return refused([&] { read_fit_rows(file_of(dir, beside, name), kSource); }, ErrorKind::input);
  };
  EXPECT_EQ(answer(""), "not refused");
  EXPECT_THAT(answer(R"("befor": {}, )"),
              HasSubstr("unknown key \"befor\"; the keys are about, families, before, rows"));
  EXPECT_THAT(answer(R"("families": {"x": ["epyc2"], "y": ["epyc2"]}, )"),
              HasSubstr("expected each machine in one family, once; got epyc2 in x and y"));
  EXPECT_THAT(answer("", "a\\nb"), HasSubstr("row 1: expected a text of one line in \"name\"; got \"a\\nb\""));
  EXPECT_THAT(answer(R"("before": {"epyc": {}}, )"),
              HasSubstr("expected a family, or a machine of a family or a row, in before.epyc; correct the name"));
  EXPECT_EQ(answer(R"("families": {"x": ["xeon2"]}, "before": {"x": {}, "xeon2": {}, "epyc2": {}}, )"), "not refused");
  EXPECT_THAT(answer("", ""), HasSubstr("row 1: expected a text of one line in \"name\"; got \"\""));
}

// With a share of 0 a prediction would be no number.
TEST(Fits, RefuseSharesBeforeThatNoMachineHas) {
  TestDir dir;
  const auto answer = [&](const std::string& before) {
    std::map<std::string, PlanMachine> machines{{"epyc2", machine("epyc2")}};
    const std::string path = file_of(dir, R"("families": {"x": ["xeon2"]}, "before": )" + before + ", ");
    return refused([&] { set_shares_before(path, machines); }, ErrorKind::input);
  };
  EXPECT_EQ(answer(R"({"epyc2": {"moebius.products": 0.5}, "x": {"spread": 0}, "xeon2": {}})"), "not refused");
  EXPECT_THAT(answer(R"({"epyc2": {"moebius.products": 0}})"),
              HasSubstr("before.epyc2.moebius.products must give a value from 0.001 to 1.5; got 0"));
  EXPECT_THAT(answer(R"({"epyc2": {"moebius.products": {"times": 100}}})"), HasSubstr("from 0.001 to 1.5; got "));
  EXPECT_THAT(answer(R"({"epyc2": {"spread": 2}})"),
              HasSubstr("before.epyc2.spread must give a value from 0 to 1; got 2"));
}

// The planner reads the files that a fit writes.
TEST(Fits, WriteMachineFilesThatCanBeRead) {
  FitResult result;
  result.machines["some/where/mine.toml"] = result.machines["h200"] = machine("h200");
  EXPECT_THAT(machine_files(result), ElementsAre(Key("h200.toml"), Key("mine.toml")));
  result.machines["h200"].of(PlanSystem::moebius)[0] = 6;
  EXPECT_THAT(refused([&] { machine_files(result); }, ErrorKind::input),
              HasSubstr("has no machine file for h200: machine h200:"));
  result.machines["h200"] = result.machines["other/h200.toml"] = machine("h200");
  EXPECT_THAT(refused([&] { machine_files(result); }, ErrorKind::input),
              HasSubstr("two machines whose file would be h200.toml"));
}

TEST(Fits, ABarInANameBeginsNoCell) {
  FitRow row{.name = "a|b", .measured = 1};
  FitResult result;
  result.rows.push_back({.row = &row, .after = 1});
  EXPECT_THAT(fit_text(result), HasSubstr("| a\\|b |"));
}

// Links were measured by themselves, and runs of several kinds of work do not move them far from that.
TEST(Fits, LinksStayNearTheirMeasuredRates) {
  std::map<std::string, PlanMachine> measured;
  for (const char* name : {"h100", "h200", "gb200", "gb300"}) measured.emplace(name, machine(name));
  set_shares_before(kSource + "/docs/measurements/plan_rows.json", measured);
  for (auto& [name, before] : measured) {
    PlanMachine shipped = machine(name.c_str());
    for (const PlanSystem system : {PlanSystem::moebius, PlanSystem::megatron})
      for (const Share link : {Share::inside, Share::across}) {
        const auto i = static_cast<size_t>(link);
        EXPECT_NEAR(std::log(shipped.of(system)[i] / before.of(system)[i]), 0, 0.08) << name << " " << name_of(link);
      }
  }
}

}  // namespace
}  // namespace moebius
