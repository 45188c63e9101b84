#include <cstdlib>

#include "cli/command.h"
#include "config/run_spec.h"
#include "core/accelerator.h"
#include "train/loop.h"

namespace moebius {
namespace {

struct TrainArgs {
  std::string recipe;
  std::vector<std::string> overrides;
};

// A launcher that started several of us wants several ranks; each would train the whole run and overwrite the others.
void check_started_alone() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = std::getenv(name);
    MOEBIUS_CHECK(usage, value == nullptr || std::string(value) == "1" || *value == 0,
                  "train: this version runs on one rank; got {}={} from the launcher; start it alone, or unset {}",
                  name, value, name);
  }
}

int train(const TrainArgs& args, Cli& cli) {
  check_started_alone();
  const RunSpec run = load_run_spec(args.recipe, args.overrides);
  run.check(/*world_size=*/1);
  run.check_trainable();
  if (run.device == DeviceKind::cuda) {
    const std::string why = Accelerator::why_missing();
    MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; set run.device = \"cpu\"", why);
  }
  cli.log.info("one rank, {}{} CPU threads", run.device == DeviceKind::cuda ? "a GPU, " : "",
               run.threads > 0 ? run.threads : num_available_cpus());
  TrainingRun training(run, cli.log, cli.signal);
  const int signal = training.run();
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace

void add_train(Cli& cli) {
  CLI::App* command =
      cli.app.add_subcommand("train", "train from a recipe; resumes from the newest checkpoint in run.dir");
  auto args = std::make_shared<TrainArgs>();
  command->add_option("recipe", args->recipe, "recipe (TOML)")->required();
  command->add_option("--set", args->overrides, "section.key=value, over the recipe; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->callback([&cli, args] { cli.run = [&cli, args] { return train(*args, cli); }; });
}

}  // namespace moebius
