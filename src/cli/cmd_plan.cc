#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/options.h"
#include "plan/print.h"

namespace moebius {
namespace {

struct Options {
  std::string recipe, machine;
  std::vector<std::string> overrides, assume;
  int64_t ranks = 1;
  bool json = false;
};

// The machines of the working directory, or those beside the folder of the program.
std::string machines_folder() {
  if (std::filesystem::is_directory("machines")) return "machines";
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return (program.parent_path().parent_path() / "machines").string();
}

int run(const Options& o) {
  MOEBIUS_CHECK(usage, o.ranks >= 1, "--ranks: expected at least 1; got {}", o.ranks);
  const Machine machine = load_machine(o.machine, machines_folder());
  const Assumptions assume = parse_assumptions(o.assume);
  const RunSpec run = load_run_spec(o.recipe, o.overrides);
  PartLibrary parts;
  const Prediction p = predict(parts, run, o.ranks, machine, assume);
  o.json ? print_json(plan_json(p, run, machine, assume)) : fmt::print("{}", plan_text(p, run, machine, assume));
  return 0;
}

}  // namespace

void add_plan(Cli& cli) {
  CLI::App* command = cli.app.add_subcommand(
      "plan", "predicted memory and time of a run on any machine, and the layout to choose; nothing is run");
  const auto o = std::make_shared<Options>();
  command->add_option("RECIPE", o->recipe, "recipe (TOML)")->required();
  command->add_option("--set", o->overrides, "section.key=value")->take_all()->allow_extra_args(false);
  command->add_option("--ranks", o->ranks, "size of the run")->capture_default_str();
  command->add_option("--machine", o->machine, "a name of machines/, or a machine file")->required();
  command->add_option("--assume", o->assume, "KEY=VALUE that no recipe says: system, dispatcher, graphs, load, ...")
      ->take_all()
      ->allow_extra_args(false);
  add_json_option(*command, o->json);
  command->callback([&cli, o] { cli.run = [o] { return run(*o); }; });
}

}  // namespace moebius
