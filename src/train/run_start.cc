#include "train/run_start.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "config/dispatcher_choice.h"
#include "config/recipe/table.h"
#include "train/state.h"
#include "weights/adapter.h"
#include "weights/load.h"
#include "weights/source.h"

namespace moebius {
namespace {

// Returns a notice when frozen parameters may have lost bits; empty when they have not.
std::string rounding_notice(const ParamTable& params) {
  const auto is_rounded = [](const Param& p) { return p.frozen && p.w.dtype == DType::bf16; };
  if (std::none_of(params.all().begin(), params.all().end(), is_rounded)) return "";
  return "frozen parameters are held and saved in bf16 (precision.compute): weights of a wider dtype were rounded to "
         "it";
}

// Returns a text with the alternatives to resuming the run.
std::string new_run_text(const std::string& dir) {
  return fmt::format(
      "choose another run.dir, where model.init_from = \"{}\" begins with the weights reached here (not the "
      "optimizer's state)",
      dir);
}

std::string starting_over_text(const std::string& dir) {
  return fmt::format(
      "start over here with checkpoint.resume=false, which moves the checkpoints to {}/checkpoints/old-N", dir);
}

// Returns the run that saved a checkpoint. Recipes of older checkpoints leave out queries without a latent, although
// the default of the family is a latent; there the checkpoint's config.json has a null.
RunSpec saved_run(const CheckpointReader& checkpoint) {
  const nlohmann::json& meta = checkpoint.meta();
  RunSpec run = parse_run_spec(meta.at("recipe").get<std::string>(), "the checkpoint's recipe", {});
  const nlohmann::json& model = meta.at("model");
  if (const auto it = model.find("q_lora_rank"); it != model.end() && it->is_null()) run.model.q_lora_rank = 0;
  return run;
}

}  // namespace

RunSpec with_mtp_of_weights(RunSpec run) {
  if (run.model.num_mtp_layers == 0 || !std::filesystem::is_directory(run.init_from)) return run;
  run.model = with_mtp_of(find_weights(run.init_from), run.model);
  if (run.model.num_mtp_layers == 0) run.train.mtp_coeff = LoopSpec{}.mtp_coeff;
  return run;
}

void log_note(Log& log, const StartNote& note) {
  note.is_warning ? log.warn("{}", note.text) : log.info("{}", note.text);
}

int64_t RunStart::start() {
  if (run_.lora.is_on()) {
    check_base_is_elsewhere();
    inputs_.base = fingerprint_of_base();
  }
  if (run_.checkpoint.resume) {
    if (const int64_t step = resume(); step > 0) return step;
  }
  fill_weights();
  start_adapters();
  if (!run_.checkpoint.resume) set_old_checkpoints_aside();  // last, so that unreadable weights change nothing
  return 0;
}

void RunStart::fill_weights() { run_.init_from.empty() ? start_from_random_weights() : start_from_weights(); }

// Checkpoints of adapters do not contain the model, so the model must not be one of the checkpoints that this
// run sets aside.
void RunStart::check_base_is_elsewhere() const {
  const auto of_run = [&](const std::filesystem::path& path) {
    const std::string run = std::filesystem::weakly_canonical(run_.dir).string() + "/";
    return (std::filesystem::weakly_canonical(path).string() + "/").starts_with(run);
  };
  MOEBIUS_CHECK(usage, !of_run(run_.init_from),
                "model.init_from = \"{}\" is inside run.dir = \"{}\", where checkpoints of the adapters replace it; "
                "choose another run.dir",
                run_.init_from, run_.dir);
}

// Each rank reads samples of some tensors, so that the time falls with their number.
WeightsFingerprint RunStart::fingerprint_of_base() {
  WeightsFingerprint all;
  std::string mine;
  control_.together([&] {
    const auto weights = open_weights(find_weights(run_.init_from), ModelCatalog(run_.model, /*holds_mtp=*/false));
    const auto rank = static_cast<size_t>(control_.rank()), size = static_cast<size_t>(control_.size());
    mine = to_text(fingerprint_of(*weights, run_.model, {.first = rank, .step = size}));
  });
  for (const std::string& text : control_.gather(mine)) all = all + parse_fingerprint(text, "train");
  return all;
}

void RunStart::start_adapters() {
  if (!run_.lora.is_on()) return;
  Stream s = engine_.stream();
  if (run_.lora.init_from.empty()) {
    engine_.model().params().init_adapters(s, run_.seed);
    return engine_.gather_weights(s);  // with sharded gradients an owner draws its own elements alone
  }
  std::optional<WeightsFingerprint> base;
  control_.together([&] { base = load_adapter(s, engine_.model(), run_.lora, run_.lora.init_from); });
  engine_.gather_weights(s);  // with a remainder, their owners round them in another way
  log_.info("adapters from {}", run_.lora.init_from);
  if (base && base->values != inputs_.base->values)
    log_.warn(
        "lora.init_from = \"{}\": its adapters were trained on other weights than those in model.init_from = \"{}\", and "
        "are trained further on these",
        run_.lora.init_from, run_.init_from);
}

void RunStart::start_from_random_weights() {
  Stream s = engine_.stream();
  engine_.with_memory_advice([&] { engine_.init_weights(s, run_.seed); });
  log_note(log_, random_weights_note(run_));
}

void RunStart::start_from_weights() {
  std::vector<NotFinite> not_finite;
  Stream s = engine_.stream();
  control_.together(
      [&] { engine_.with_memory_advice([&] { not_finite = load_weights(s, engine_.model(), run_.init_from); }); });
  engine_.gather_weights(s);  // with a remainder, their owners round them in another way
  // Replicas hold the same values.
  const std::vector<std::string> said = control_.gather(not_finite_warning(run_.init_from, not_finite));
  for (const std::string& warning : std::set<std::string>(said.begin(), said.end()))
    if (!warning.empty()) log_.warn("{}", warning);
  log_.info("weights from {}", run_.init_from);
  for (const std::string& notice : control_.gather(rounding_notice(engine_.model().params())))
    if (!notice.empty()) return log_.info("{}", notice);
}

void RunStart::set_old_checkpoints_aside() {
  const std::string old = store_.set_aside({run_.dir + "/metrics.jsonl", run_.dir + "/events.jsonl"});
  if (old.empty()) return;
  control_.on_root([&] { std::filesystem::remove(run_.dir + "/events.jsonl"); });  // its copy is in that folder
  log_.info("checkpoint.resume = false: the checkpoints and metrics that were here are now in {}; nothing removes it",
            old);
}

// Loads the newest checkpoint that is undamaged; damaged ones are skipped with a warning. Returns its step, 0 if there
// is none.
int64_t RunStart::resume() {
  const std::vector<CheckpointInfo> found = store_.list();
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    std::string problem = it->problem;
    if (problem.empty()) {
      try {
        std::optional<CheckpointReader> checkpoint;
        control_.together([&] { checkpoint.emplace(it->folder, /*check_files=*/false); });  // list() has
        check_same_run(*checkpoint);
        read_state(*checkpoint, it->folder);
        return checkpoint->step();
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::input) throw;
        problem = e.what();
      }
    }
    log_.warn("passed over: {}", problem);
  }
  MOEBIUS_CHECK(input, found.empty(),
                "resume: {}/checkpoints holds {} checkpoints and none can be read (see the warnings); {}", run_.dir,
                found.size(), starting_over_text(run_.dir));
  return 0;
}

void RunStart::read_state(const CheckpointReader& checkpoint, const std::string& folder) {
  if (run_.lora.is_on()) fill_weights();  // the checkpoint has only the adapters
  Stream s = engine_.stream();
  checkpoint.read_all(control_, training_state(engine_), &s);
  engine_.model().params().sync(s);
  engine_.gather_weights(s);
  log_.info("resumed from {}", folder);
}

void RunStart::check_same_run(const CheckpointReader& checkpoint) const {
  const RunSpec saved = saved_run(checkpoint);
  const auto diff = config_diff(saved, run_);
  std::string lines;
  for (const std::string& line : diff) lines += "\n  " + line;
  const std::string saved_data = checkpoint.meta().value("data", "");
  MOEBIUS_CHECK(usage, saved_data == inputs_.data,
                "resume: the datasets of data.train are not those that {} was trained on; a line a dataset, the "
                "checkpoint's:\n{}\nnow:\n{}\nbring them back; or {}; or {}",
                run_.dir, saved_data, inputs_.data, new_run_text(run_.dir), starting_over_text(run_.dir));
  MOEBIUS_CHECK(usage, diff.empty(),
                "resume: {} holds another training run; the checkpoint's value -> the recipe's:{}\nrestore these; or "
                "{}; or {}",
                run_.dir, lines, new_run_text(run_.dir), starting_over_text(run_.dir));
  if (inputs_.base) check_same_base(checkpoint);
  if (checkpoint.step() < run_.train.steps) warn_of_new_schedule(saved);
  warn_of_new_dispatcher(checkpoint, saved);
  log_conversions(saved, checkpoint.step());
}

// "auto" may choose another dispatcher by another machine file, or where ranks reach each other's memory no more.
// Another layout is expected to.
void RunStart::warn_of_new_dispatcher(const CheckpointReader& checkpoint, const RunSpec& saved) const {
  const std::string was = checkpoint.meta().value("dispatcher", "");
  const bool is_auto = run_.parallel.dispatcher == DispatcherKind::automatic;
  if (was.empty() || was == inputs_.dispatcher || !is_auto || !(saved.parallel == run_.parallel)) return;
  const std::string text = fmt::format("parallel.dispatcher = \"auto\" was {} up to step {} and is {} from there on",
                                       was, checkpoint.step(), inputs_.dispatcher);
  // Direct adds nodes in another order than all-gather and two-level (docs/design/expert-parallelism.md).
  const ParallelSpec& p = run_.parallel;
  const auto adds_alike = [&](const std::string& name) {
    return name != name_of(DispatcherKind::alltoall) &&
           (name != name_of(DispatcherKind::direct) || p.ep * p.etp <= p.ranks_per_node);
  };
  if (adds_alike(was) && adds_alike(inputs_.dispatcher)) return log_.info("{}, with the same bits", text);
  log_.warn("{}, which adds sums in another order; set parallel.dispatcher = \"{}\" to keep the bits of the run", text,
            was);
}

void RunStart::check_same_base(const CheckpointReader& checkpoint) const {
  const std::string saved = checkpoint.meta().value(kBaseKey, ""), now = to_text(*inputs_.base);
  if (saved.empty())
    return log_.info(
        "the checkpoint has no fingerprint of the weights in model.init_from = \"{}\", so they were not "
        "compared; the next checkpoint has one",
        run_.init_from);
  MOEBIUS_CHECK(
      usage, saved == now,
      "resume: the weights in model.init_from = \"{}\" are not those that the adapters in {} were trained on; "
      "the checkpoint's fingerprint is\n  {}\nand now it is\n  {}\nbring them back; or train the adapters "
      "further on these weights in another run.dir, with lora.init_from = \"{}\"; or {}",
      run_.init_from, run_.dir, saved, now, run_.dir, starting_over_text(run_.dir));
}

void RunStart::log_conversions(const RunSpec& saved, int64_t step) const {
  std::vector<std::string> rounding;
  for (const RecipeKey& key : recipe_table()) {
    const bool is_stored = key.name == "optimizer.state" || key.name == "optimizer.master",
               is_rounding = key.name.starts_with("precision.") && key.name != "precision.weights";
    const nlohmann::json was = key.write(saved), is = key.write(run_);
    if ((!is_stored && !is_rounding) || was == is) continue;
    const std::string change = fmt::format("{} was {} and is {}", key.name, was.dump(), is.dump());
    if (is_rounding) {
      rounding.push_back(change);
    } else {
      log_.info("{}: what the checkpoint holds is converted, and rounded where the new format is narrower", change);
    }
  }
  if (!rounding.empty())
    log_.warn("{}: operands are rounded in another way from step {} on", fmt::join(rounding, ", "), step + 1);
}

void RunStart::warn_of_new_schedule(const RunSpec& saved) const {
  if (saved.train.steps == run_.train.steps || run_.optimizer.schedule == LrSchedule::constant) return;
  log_.warn(
      "train.steps was {} and is {}: from here on the learning rate follows the curve of {} steps, and the run is not "
      "the one that a run of {} steps from the start would be",
      saved.train.steps, run_.train.steps, run_.train.steps, run_.train.steps);
}

}  // namespace moebius
