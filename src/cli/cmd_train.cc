#include "cli/bench/machine_file.h"
#include "cli/command.h"
#include "cli/config_checks.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "comm/control.h"
#include "config/run_spec.h"
#include "device/accelerator.h"
#include "model/gpu_products.h"
#include "plan/memory/memory_of_ranks.h"
#include "train/loader.h"
#include "train/loop.h"

namespace moebius {
namespace {

struct TrainArgs {
  std::string recipe, machine;
  std::vector<std::string> overrides;
  int64_t ranks = 1;
  std::optional<double> timeout_s;
};

// The recipe, or the error of reading it. A rank that cannot read it reports the error after the rendezvous, so that
// all ranks end together.
struct Recipe {
  RunSpec run;
  std::exception_ptr error;
};

Recipe read_recipe(const TrainArgs& args, int num_ranks) {
  Recipe recipe;
  try {
    recipe.run = load_run_spec(args.recipe, args.overrides);
    recipe.run.check(num_ranks);
    recipe.run.check_trainable();
    recipe.run.machine = args.machine;
    set_machine_rates(recipe.run);
    if (recipe.run.device == DeviceKind::cuda) set_f8_kernels(recipe.run, gpus_found(), num_ranks);
  } catch (const Error&) {
    recipe.error = std::current_exception();
  }
  return recipe;
}

void check_device(const RunSpec& run) {
  if (run.device != DeviceKind::cuda) return;
  const std::string why = Accelerator::why_missing();
  MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; or set run.device = \"cpu\"", why);
}

const char* gpu_text(int num_ranks) { return num_ranks > 1 ? "on GPUs, " : "a GPU, "; }

// Checks that all ranks have the same recipe before one of them begins, and the same rates, by which they choose a
// dispatcher. Datasets are compared once they are open.
void check_same_recipe(Control& control, const RunSpec& run) {
  if (control.size() == 1) return;
  check_agree(control, {"the recipe", to_toml(run, /*with_provenance=*/false)});
  const ExchangeRates rates = run.rates.value_or(ExchangeRates{});
  check_agree(control, {"the machine file", fmt::format("{} {} {} {} {}", rates.across_bytes_s, rates.inside_bytes_s,
                                                        rates.across_call_s, rates.inside_call_s, rates.source)});
}

// A step may take minutes, and the run ends after it. In a terminal a progress line may have no line break yet.
const char* signal_notice(const Log& log) {
  if (log.is_quiet()) return nullptr;
  constexpr const char* kNotice =
      "\nsignal: the run saves and ends after its current step; a second signal ends it at once, and leaves the "
      "newest checkpoint as it is\n";
  return log.redraws() ? kNotice : kNotice + 1;
}

int train_rank(Transport& world, const Recipe& recipe, const std::string& launched, Cli& cli) {
  Control control(world);
  check_same_program(control, "train");
  control.together([&] {
    if (recipe.error) std::rethrow_exception(recipe.error);
    check_device(recipe.run);
    check_datasets_are_there(recipe.run.data);
    check_init(recipe.run);
  });
  check_same_recipe(control, recipe.run);
  RunSpec run = recipe.run;
  const ChosenMemory chosen = choose_memory_of_ranks(control, run, world);
  chosen.apply(run);
  if (control.is_root() && !chosen.text.empty()) cli.log.info("{}", chosen.text);
  if (run.threads == 0) run.threads = cpu_share(control);
  if (control.is_root())
    cli.log.info("{}, {}{} CPU threads{}", launched, run.device == DeviceKind::cuda ? gpu_text(world.size()) : "",
                 run.threads, world.size() > 1 ? " each" : "");
  if (control.is_root()) cli.signal_notice = signal_notice(cli.log);
  TrainingRun training(run, cli.log, cli.signal, &world);
  return training.run();
}

int train(const TrainArgs& args, Cli& cli) {
  Launch launch = detect_launch(process_environment());
  if (args.ranks != 1) launch = launch_threads(args.ranks, launch);
  const Recipe recipe = read_recipe(args, launch.num_ranks);
  const WorldOptions options = world_options(args.timeout_s, [&] {
    if (recipe.error) std::rethrow_exception(recipe.error);
    return mesh_shape(recipe.run.parallel, launch.num_ranks);
  });
  if (recipe.error && launch.kind != Launch::Kind::mpi && launch.kind != Launch::Kind::tcp)
    std::rethrow_exception(recipe.error);
  std::atomic<int> signal{0};  // the signal on which all ranks agree; 0: none
  run_ranks(launch, options, [&](Transport& world) { signal = train_rank(world, recipe, launch_text(launch), cli); });
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace

void add_train(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "train", "trains the model of a recipe; resumes from the newest checkpoint in run.dir");
  auto args = std::make_shared<TrainArgs>();
  command->add_option("RECIPE", args->recipe, "the recipe, a TOML file")->required();
  command->add_option("--set", args->overrides, "SECTION.KEY=VALUE, instead of the recipe's value; may be repeated")
      ->repeatable();
  command->add_option("--machine", args->machine, kMachineOptionText);
  add_ranks_options(*command, args->ranks, args->timeout_s);
  add_example(*command, "moebius train recipes/demo.toml --set train.steps=100");
  command->callback([&cli, args] { cli.run = [&cli, args] { return train(*args, cli); }; });
}

}  // namespace moebius
