#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "cli/bench/machine_file.h"
#include "cli/command.h"
#include "cli/options.h"
#include "config/recipe/text.h"
#include "io/files.h"
#include "plan/fit.h"
#include "plan/memory/chosen_memory.h"
#include "plan/print.h"
#include "plan/search.h"
#include "plan/sweep.h"
#include "plan/timeline.h"

namespace moebius {
namespace {

struct Options {
  std::string recipe, machine, trace, html, csv, svg, fit, machines_out;
  std::vector<std::string> overrides, assume, sweep;
  int64_t ranks = 1, node_ranks = 0;
  SearchOptions limits;
  bool json = false, search = false, leave_one_out = false;
  bool has_ranks = false;  // --ranks is given, if only as its default
};

PlanMachine machine_of_row(const std::string& path, const FitRow& row, const std::string& name) {
  try {
    return load_named_machine(name);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: row \"{}\": {}", path, row.name, e.what()));
  }
}

int run_fit(const Options& o) {
  const std::vector<FitRow> rows = read_fit_rows(o.fit, ".");
  std::map<std::string, PlanMachine> machines;
  for (const FitRow& row : rows)
    for (const std::string& name : row.relatives)
      if (!machines.contains(name)) machines[name] = machine_of_row(o.fit, row, name);
  set_shares_before(o.fit, machines);
  PartLibrary parts;
  const FitResult result = fit(parts, rows, machines, o.leave_one_out);
  o.json ? print_json(fit_json(result)) : fmt::print("{}", fit_text(result));
  if (o.machines_out.empty()) return 0;
  for (const auto& [file, text] : machine_files(result))
    write_file_atomic(fmt::format("{}/{}", o.machines_out, file), text);
  return 0;
}

int run_search(const Options& o, const RunSpec& run, const PlanMachine& machine, const Assumptions& assume) {
  PartLibrary parts;
  const SearchResult found = search(parts, run, o.ranks, machine, assume, o.limits);
  if (!o.json) {
    fmt::print("{}\nthe best of them\n{}", search_text(found),
               plan_text(found.layouts[0].prediction, run, machine, assume));
    return 0;
  }
  print_json(search_json(found, machine, assume));
  return 0;
}

// Returns whether --set gives this key.
bool is_set(const Options& o, const std::string& key) {
  return std::any_of(o.overrides.begin(), o.overrides.end(),
                     [&](const std::string& text) { return split_assignment(text).first == key; });
}

int run_sweep(const Options& o, const PlanMachine& machine, const Assumptions& assume) {
  std::vector<SweptKey> keys;
  for (const std::string& text : o.sweep) keys.push_back(parse_sweep(text));
  for (const SweptKey& swept : keys)
    MOEBIUS_CHECK(usage, !is_set(o, swept.key), "plan: --set and --sweep both give {}; leave one of them out",
                  swept.key);
  for (const SweptKey& swept : keys) {
    MOEBIUS_CHECK(usage, swept.key != "ranks" || !o.has_ranks,
                  "plan: --ranks and --sweep both give the ranks; leave one of them out");
    MOEBIUS_CHECK(usage, swept.key != "precision.recipe" || o.limits.recipes.empty(),
                  "plan: --recipes and --sweep both give precision.recipe; leave one of them out");
  }
  PartLibrary parts;
  SweepBase base{.recipe = o.recipe, .overrides = o.overrides, .ranks = o.ranks};
  if (o.search) base.search = o.limits;
  const Sweep result = sweep(parts, base, keys, machine, assume);
  o.json ? print_json(sweep_json(result)) : fmt::print("{}", sweep_text(result));
  if (!o.csv.empty()) write_file_atomic(o.csv, sweep_csv(result));
  if (!o.svg.empty()) write_file_atomic(o.svg, sweep_svg(result));
  return 0;
}

PlanMachine machine_of(const Options& o) {
  PlanMachine machine = load_named_machine(o.machine);
  MOEBIUS_CHECK(usage, o.node_ranks == 0 || machine.is_gpu,
                "--node-ranks: expected a machine of GPUs; got {}, a CPU, whose hosts have rank.threads / run.threads "
                "ranks each; set run.threads, or leave --node-ranks out",
                machine.name);
  MOEBIUS_CHECK(usage, o.node_ranks >= 0 && static_cast<double>(o.node_ranks) <= machine.domain_ranks,
                "--node-ranks: expected 0 to {}, the ranks of a domain of the machine (links.domain_ranks); got {}",
                machine.domain_ranks, o.node_ranks);
  MOEBIUS_CHECK(usage, !machine.is_gpu || o.limits.memory_gb <= machine.memory_gb,
                "--memory-gb: expected at most {} GB, the memory of a rank of {} (rank.memory_gb); got {}; give less, "
                "or a machine file with more",
                machine.memory_gb, machine.name, o.limits.memory_gb);
  if (o.node_ranks > 0) machine.domain_ranks = static_cast<double>(o.node_ranks);
  return machine;
}

// Refuses files that could not be written, before the work whose result they would hold.
void check_outputs(const Options& o) {
  std::map<std::string, std::string> options;  // by the file that they write
  for (const auto& [option, path] : {std::pair("--trace", &o.trace), std::pair("--html", &o.html),
                                     std::pair("--csv", &o.csv), std::pair("--svg", &o.svg)}) {
    if (path->empty()) continue;
    std::error_code unknown;
    MOEBIUS_CHECK(io, !std::filesystem::is_directory(*path, unknown),
                  "{}: expected a file; got the folder {}; give a file in it, or another one", option, *path);
    const std::filesystem::path file = std::filesystem::weakly_canonical(*path, unknown);
    if (std::filesystem::exists(file, unknown) && !std::filesystem::is_regular_file(file, unknown)) continue;
    const auto [other, is_new] = options.try_emplace(unknown ? *path : file.string(), option);
    MOEBIUS_CHECK(usage, is_new, "plan: {} and {} would both write {}; give two files", other->second, option, *path);
    const std::filesystem::path folder = std::filesystem::path(*path).parent_path();
    MOEBIUS_CHECK(io, folder.empty() || std::filesystem::is_directory(folder),
                  "{}: there is no folder {}; make it, or choose another file", option, folder.string());
  }
  MOEBIUS_CHECK(io, o.machines_out.empty() || std::filesystem::is_directory(o.machines_out),
                "--write-machines: there is no folder {}; make it, or choose another", o.machines_out);
}

// Refuses options that have no effect without another one.
void check_options(const Options& o) {
  const SearchOptions& limits = o.limits;
  const bool has_limits = limits.memory_gb != 0 || limits.max_tp != 0 || !limits.recipes.empty();
  MOEBIUS_CHECK(usage, o.search || !has_limits,
                "plan: --memory-gb, --max-tp and --recipes need --search; add it, or leave them out");
  MOEBIUS_CHECK(usage, limits.recipes.empty() || !is_set(o, "precision.recipe"),
                "plan: --recipes and --set both give precision.recipe; leave one of them out");
  MOEBIUS_CHECK(usage, limits.memory_gb >= 0 && limits.memory_gb <= 1e6,
                "--memory-gb: expected a number from 0 to 1000000; got {}", limits.memory_gb);
  MOEBIUS_CHECK(usage, limits.max_tp >= 0, "--max-tp: expected 0 or more; got {}", limits.max_tp);
  MOEBIUS_CHECK(usage, !o.fit.empty() || (!o.leave_one_out && o.machines_out.empty()),
                "plan: --leave-one-out and --write-machines need --fit ROWS.json; add it, or leave them out");
  for (size_t i = 0; i < limits.recipes.size(); ++i)
    MOEBIUS_CHECK(usage,
                  std::find(limits.recipes.begin(), limits.recipes.begin() + static_cast<int64_t>(i),
                            limits.recipes[i]) == limits.recipes.begin() + static_cast<int64_t>(i),
                  "--recipes: {} is given twice; leave one of them out", limits.recipes[i]);
  const bool has_run = !o.recipe.empty() || !o.machine.empty() || o.search || !o.sweep.empty() || !o.assume.empty() ||
                       !o.overrides.empty() || o.has_ranks || o.node_ranks != 0 || !o.trace.empty() ||
                       !o.html.empty() || !o.csv.empty() || !o.svg.empty();
  MOEBIUS_CHECK(usage, o.fit.empty() || !has_run,
                "plan: the rows of --fit name their recipes, machines, ranks and assumptions; leave out all options "
                "but --leave-one-out, --write-machines and --json");
  check_outputs(o);
}

int run(const Options& o, Cli& cli) {
  check_options(o);
  if (!o.fit.empty()) return run_fit(o);
  MOEBIUS_CHECK(usage, !o.recipe.empty() && !o.machine.empty(),
                "plan: expected a recipe and --machine NAME or FILE; got {}; or --fit ROWS.json",
                o.recipe.empty() ? "no recipe" : "no machine");
  MOEBIUS_CHECK(usage, o.ranks >= 1 && o.ranks <= kMaxRanks, "--ranks: expected 1 to {}; got {}", kMaxRanks, o.ranks);
  MOEBIUS_CHECK(usage, (o.csv.empty() && o.svg.empty()) || !o.sweep.empty(),
                "plan: --csv and --svg need --sweep KEY=VALUE,VALUE,...; add it, or leave them out");
  MOEBIUS_CHECK(usage, (o.trace.empty() && o.html.empty()) || (o.sweep.empty() && !o.search),
                "plan: --trace and --html show one layout; leave out --search and --sweep, or paste a layout's keys");
  const PlanMachine machine = machine_of(o);
  const Assumptions assume = parse_assumptions(o.assume);
  if (!o.sweep.empty()) return run_sweep(o, machine, assume);
  RunSpec run = load_run_spec(o.recipe, o.overrides);
  if (o.search) return run_search(o, run, machine, assume);
  PartLibrary parts;
  const ChosenMemory chosen = choose_memory(parts, run_on(run, machine, assume.system), o.ranks, machine, assume);
  chosen.apply(run);
  if (!chosen.text.empty()) cli.log.info("{}", chosen.text);
  const Prediction p = predict(parts, run, o.ranks, machine, assume);
  const std::string text = plan_text(p, run, machine, assume);
  if (!o.trace.empty()) write_file_atomic(o.trace, plan_trace(p));
  if (!o.html.empty()) write_file_atomic(o.html, plan_html(p, fmt::format("{} on {}", o.recipe, machine.name), text));
  o.json ? print_json(plan_json(p, machine, assume)) : fmt::print("{}", text);
  return 0;
}

}  // namespace

void add_plan(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "plan", "predicts memory and time of a run on any machine, and searches for a layout; runs nothing");
  const auto o = std::make_shared<Options>();
  o->limits.threads = num_threads(0);
  const auto several = [](Argument* option) { option->repeatable(); };
  command->add_option("RECIPE", o->recipe, "the recipe, a TOML file");
  several(command->add_option("--set", o->overrides, "SECTION.KEY=VALUE, instead of the recipe's value"));
  const Argument* ranks = command->add_option("--ranks", o->ranks, "number of ranks of the run")->capture_default_str();
  command->add_option("--machine", o->machine, "the machine: a name from machines/, such as h100, or a machine file");
  several(command->add_option(
      "--assume", o->assume,
      "an assumption that no recipe has, such as load=zipf:1; docs/reference/commands.md has all of them"));
  command->add_flag("--search", o->search, "search for the best layouts, and print each as keys to paste");
  command
      ->add_option("--memory-gb", o->limits.memory_gb,
                   "with --search: memory that a rank may use; 0: memory.fit, else 95 % of the machine's")
      ->capture_default_str();
  command
      ->add_option("--max-tp", o->limits.max_tp,
                   "with --search: the largest tp and etp; 0: the ranks of a domain, at most 8")
      ->capture_default_str();
  command
      ->add_option("--recipes", o->limits.recipes,
                   "with --search: values of precision.recipe to try, such as none,mxfp8; default: the recipe's own")
      ->delimiter(',');
  command
      ->add_option("--node-ranks", o->node_ranks,
                   "number of ranks that fast links join, at most the machine's domain; 0: that domain")
      ->capture_default_str();
  several(
      command->add_option("--sweep", o->sweep,
                          "KEY=VALUE,VALUE,... or ranks=N,N,...: predict all combinations as a table; with --search "
                          "the best layout of each"));
  command->add_option("--csv", o->csv, "with --sweep: also write the table to this file");
  command->add_option("--svg", o->svg, "with --sweep: also write a plot to this file");
  command->add_option("--trace", o->trace, "write the predicted step to this file, for Perfetto");
  command->add_option("--html", o->html, "write a page with timeline and memory to this file");
  command->add_option("--fit", o->fit,
                      "fit the machines' shares to the measured rows of this file (JSON), and print each row's error");
  command->add_flag("--leave-one-out", o->leave_one_out, "with --fit: also predict each row from the others");
  command->add_option("--write-machines", o->machines_out,
                      "with --fit: write machine files with the fitted shares to this folder");
  add_json_option(*command, o->json);
  add_example(*command, "moebius plan recipes/qwen3_30b_a3b.toml --machine h100 --ranks 16 --search");
  command->callback([&cli, o, ranks] {
    o->has_ranks = ranks->count() > 0;
    cli.run = [o, &cli] { return run(*o, cli); };
  });
}

}  // namespace moebius
