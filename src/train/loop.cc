#include "train/loop.h"

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>

#include "core/fault.h"
#include "io/files.h"
#include "ops/elementwise/elementwise.h"
#include "train/diagnose.h"
#include "train/host_memory.h"
#include "train/state.h"
#include "weights/load.h"
#include "weights/source.h"

namespace moebius {
namespace {

std::string duration_text(double seconds) {
  const int64_t s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}m{:02}s", s / 60, s % 60);
}

std::string make_run_dir(Control& control, const std::string& dir) {
  control.on_root([&] {
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    MOEBIUS_CHECK(io, !error, "run.dir: {} cannot be made: {}; set run.dir to a folder that can be written", dir,
                  error.message());
  });
  return dir;
}

EngineSpec engine_spec(const RunSpec& run, Transport& world) {
  EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, world.size()));
  spec.world = &world;
  return spec;
}

// Weights to start from that have no multi-token prediction start a run without it, whatever their config promises.
RunSpec with_mtp_of_weights(RunSpec run) {
  if (run.model.num_mtp_layers == 0 || !std::filesystem::is_directory(run.init_from)) return run;
  run.model = with_mtp_of(find_weights(run.init_from), run.model);
  if (run.model.num_mtp_layers == 0) run.train.mtp_coeff = LoopSpec{}.mtp_coeff;
  return run;
}

// Files that a rank cannot read end all ranks with what it says.
Loader open_loader(Control& control, const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle,
                   const DataShare& share) {
  std::optional<Loader> loader;
  control.together([&] { loader.emplace(datasets, run, shuffle, share); });
  return std::move(*loader);
}

std::string fingerprint_of(Control& control, const Loader& loader) {
  std::string lines;
  control.together([&] { lines = loader.fingerprint(); });
  return lines;
}

// Sums over the ranks that are threads of this rank's process; all ranks of the world together.
struct OfProcess {
  int64_t sum(int64_t mine) const {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    const std::string process = fmt::format("{} {} ", ::getpid(), host);
    int64_t total = 0;
    for (const std::string& said : control.gather(process + std::to_string(mine)))
      if (said.starts_with(process)) total += std::stoll(said.substr(process.size()));
    return total;
  }
  Control& control;
};

// What a rank says of its frozen parameters when they may have lost bits; empty when they have not.
std::string rounding_notice(const ParamTable& params) {
  const auto is_rounded = [](const Param& p) { return p.frozen && p.w.dtype == DType::bf16; };
  if (std::none_of(params.all().begin(), params.all().end(), is_rounded)) return "";
  return "frozen parameters are held and saved in bf16 (precision.compute): "
         "weights of a wider dtype were rounded to it";
}

// The ways on for a run that cannot be resumed as it is asked to.
std::string new_run_text(const std::string& dir) {
  return fmt::format(
      "choose another run.dir, where model.init_from = \"{}\" begins "
      "with the weights reached here (not the optimizer's state)",
      dir);
}

std::string starting_over_text(const std::string& dir) {
  return fmt::format(
      "start over here with checkpoint.resume=false, which moves the checkpoints to {}/checkpoints/old-N", dir);
}

}  // namespace

TrainingRun::TrainingRun(const RunSpec& run, Log& log, const std::atomic<int>& signal, Transport* world)
    : run_(with_mtp_of_weights(run)),
      alone_(world ? nullptr : make_self_transport()),
      world_(world ? *world : *alone_),
      control_(world_),
      log_(control_.is_root() ? log : quiet_),
      signal_(signal),
      engine_(engine_spec(run_, world_)),
      loader_(open_loader(control_, run.data.train, run_, /*shuffle=*/true, engine_.data_share())),
      data_fingerprint_(fingerprint_of(control_, loader_)),
      store_(control_, make_run_dir(control_, run.dir) + "/checkpoints", run.checkpoint.keep,
             run.checkpoint.async_save) {
  check_agree(control_, {"the training data", data_fingerprint_});
  if (!run.data.valid.empty())
    valid_ = open_loader(control_, run.data.valid, run_, /*shuffle=*/false, engine_.data_share());
  if (run_.model.num_mtp_layers < run.model.num_mtp_layers)
    log_.warn("{}", missing_mtp_notice(find_weights(run.init_from), run.model));
}

int TrainingRun::run() {
  log_.line(engine_.plan().table());
  if (const std::string links = engine_.links_text(); !links.empty()) log_.info("{}", links);
  predict_memory();
  start();
  control_.on_root([&] { open_logs(); });
  const int64_t steps = run_.train.steps;
  say_before_steps();
  int signal = 0;
  if (!metrics_hold_eval_of(first_step_ - 1)) {
    evaluate_if_due(first_step_ - 1);
    agreed_signal();  // throws when it could not be written
  }
  for (int64_t step = first_step_; step <= steps && signal == 0; ++step) {
    const StepReport report = train_step(step);
    if (step == first_step_) warn_of_fallback_kernels(log_, control_, engine_);
    check_finite(report);
    engine_.end_of_step();
    report_step(report);
    store_.check();  // a save that failed behind our back ends the run now, not at the next save
    const bool due = run_.checkpoint.every > 0 && step % run_.checkpoint.every == 0;
    if (due || step == steps) save(step);
    evaluate_if_due(step);  // after the save: an evaluation that dies costs nothing but itself
    signal = agreed_signal();
    if (signal != 0) save(step);
  }
  store_.wait();
  if (signal != 0)
    log_.info("signal {}: saved step {}, ending; the same command goes on from there", signal, saved_step_);
  if (!ranks_.ranks.empty())
    log_.info("communication of the last step, the most that a rank sent and waited: {}", comm_text(ranks_));
  if (first_step_ <= steps) compare_memory();
  return signal;
}

void TrainingRun::say_before_steps() {
  const int64_t steps = run_.train.steps;
  if (first_step_ > steps)
    return log_.info("nothing to do: step {} of {} is done; raise train.steps, or choose another run.dir",
                     first_step_ - 1, steps);
  log_.info("{}", data_text(run_, loader_.order()));
  for (const StartNote& note : start_notes(run_)) say(note);
}

void TrainingRun::say(const StartNote& note) {
  note.is_warning ? log_.warn("{}", note.text) : log_.info("{}", note.text);
}

// What rank 0 does while no other waits for it. Its error is kept for agreed_signal(), where all ranks meet.
void TrainingRun::on_root_alone(const std::function<void()>& body) {
  if (!control_.is_root() || root_error_) return;
  try {
    body();
  } catch (const Error& e) {
    if (control_.size() == 1) throw;
    root_error_ = e;
  }
}

int TrainingRun::agreed_signal() {
  constexpr int64_t kError = 1 << 16;  // above all signals
  const int64_t said = control_.max(root_error_ ? kError : int64_t{signal_});
  if (said < kError) return static_cast<int>(said);
  store_.wait();
  control_.on_root([&] { throw Error(*root_error_); });
  return 0;
}

void TrainingRun::start() {
  if (run_.checkpoint.resume && resume()) return;
  if (run_.init_from.empty()) {
    Stream s = engine_.stream();
    engine_.with_memory_advice([&] { engine_.model().params().init(s, run_.seed); });
    say(random_weights_note(run_));
  } else {
    start_from_weights();
  }
  if (!run_.checkpoint.resume) set_old_checkpoints_aside();  // last, so that weights that cannot be read change nothing
}

void TrainingRun::start_from_weights() {
  std::vector<NotFinite> not_finite;
  Stream s = engine_.stream();
  control_.together(
      [&] { engine_.with_memory_advice([&] { not_finite = load_weights(s, engine_.model(), run_.init_from); }); });
  // Replicas say the same.
  const std::vector<std::string> said = control_.gather(not_finite_warning(run_.init_from, not_finite));
  for (const std::string& warning : std::set<std::string>(said.begin(), said.end()))
    if (!warning.empty()) log_.warn("{}", warning);
  log_.info("weights from {}", run_.init_from);
  for (const std::string& notice : control_.gather(rounding_notice(engine_.model().params())))
    if (!notice.empty()) return log_.info("{}", notice);
}

void TrainingRun::set_old_checkpoints_aside() {
  const std::string old = store_.set_aside({run_.dir + "/metrics.jsonl"});
  if (old.empty()) return;
  log_.info("checkpoint.resume = false: the checkpoints and metrics that were here are now in {}; nothing removes it",
            old);
}

// From the newest checkpoint whose every byte is what was saved; damaged ones are passed over, loudly.
bool TrainingRun::resume() {
  const std::vector<CheckpointInfo> found = store_.list();
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    std::string problem = it->problem;
    if (problem.empty()) {
      try {
        std::optional<CheckpointReader> checkpoint;
        control_.together([&] { checkpoint.emplace(it->folder, /*check_files=*/false); });  // list() has
        check_same_run(*checkpoint);
        Stream s = engine_.stream();
        checkpoint->read_all(control_, training_state(engine_), &s);
        go_on_from(*checkpoint, it->folder);
        return true;
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
  return false;
}

void TrainingRun::go_on_from(const CheckpointReader& checkpoint, const std::string& folder) {
  Stream s = engine_.stream();
  engine_.model().params().sync(s);
  engine_.optimizer().gather(s);
  first_step_ = checkpoint.step() + 1;
  saved_step_ = checkpoint.step();
  log_.info("resumed from {}", folder);
}

void TrainingRun::check_same_run(const CheckpointReader& checkpoint) const {
  const RunSpec saved =
      parse_run_spec(checkpoint.meta().at("recipe").get<std::string>(), "the checkpoint's recipe", {});
  const auto diff = config_diff(saved, run_);
  std::string lines;
  for (const std::string& line : diff) lines += "\n  " + line;
  const std::string saved_data = checkpoint.meta().value("data", "");
  MOEBIUS_CHECK(usage, saved_data == data_fingerprint_,
                "resume: the datasets of data.train are not those that {} was trained on; "
                "a line a dataset, the checkpoint's:\n{}\nnow:\n{}\nbring them back; or {}; or {}",
                run_.dir, saved_data, data_fingerprint_, new_run_text(run_.dir), starting_over_text(run_.dir));
  MOEBIUS_CHECK(usage, diff.empty(),
                "resume: {} holds another training run; the checkpoint's value -> the recipe's:{}\nrestore these; or "
                "{}; or {}",
                run_.dir, lines, new_run_text(run_.dir), starting_over_text(run_.dir));
  warn_of_new_schedule(saved);
}

void TrainingRun::warn_of_new_schedule(const RunSpec& saved) const {
  if (saved.train.steps == run_.train.steps || run_.optimizer.schedule == LrSchedule::constant) return;
  log_.warn(
      "train.steps was {} and is {}: from here on the learning rate follows the curve of {} steps, and the run is not "
      "the one that a run of "
      "{} steps from the start would be",
      saved.train.steps, run_.train.steps, run_.train.steps, run_.train.steps);
}

void TrainingRun::open_logs() {
  write_file_atomic(run_.dir + "/recipe.resolved.toml", to_toml(run_, false));
  const std::string path = run_.dir + "/metrics.jsonl";
  if (const int64_t damaged = truncate_jsonl_after(path, first_step_ - 1); damaged > 0) {
    log_.warn("{}: {} damaged lines were dropped", path, damaged);
  }
  metrics_.emplace(path);
  if (run_.log.tensorboard) tensorboard_.emplace(run_.dir + "/tensorboard");
}

StepReport TrainingRun::train_step(int64_t step) {
  const double begin = now_us();
  const double lr = run_.optimizer.lr_at(step, run_.train.steps);
  // The second, since the first one warms up; or the only one. Of every rank: a
  // collective is recorded by all or by none.
  const bool traced = !run_.log.trace.empty() && step == std::min(first_step_ + 1, run_.train.steps);
  if (traced) engine_.set_trace(&trace_);
  const CommCounters counters = comm_counters(engine_.mesh());
  loader_.begin_step(step);
  const double drawn_s = (now_us() - begin) * 1e-6;
  engine_.train_step(step, lr, [&](MicroBatch& batch, int64_t m) {
    fault_point("train.mid_step");
    loader_.fill(batch, m);
  });
  const CommCounters comm = comm_since(engine_.mesh(), counters);  // without what the metrics below gather
  if (traced) {
    Stream s = engine_.stream();
    synchronize(s);  // the end of the step's own phase is known
    engine_.set_trace(nullptr);
    on_root_alone([&] { write_file_atomic(run_.log.trace, trace_.chrome_json()); });
    trace_.clear();
  }
  const double seconds = (now_us() - begin) * 1e-6;
  seconds_training_ += seconds;
  StepReport report =
      read_step(engine_, step, lr, engine_.batch().loss_scale,
                static_cast<double>(run_.train.global_batch * run_.train.seq_len), run_.moe.z_coeff, seconds);
  ranks_ = gather_ranks(engine_,
                        {.load_s = drawn_s + engine_.fill_seconds(),
                         .passes_s = engine_.passes_seconds(),
                         .optimizer_s = engine_.optimizer_seconds()},
                        comm, report.layers);
  return report;
}

std::string TrainingRun::newest_text() const {
  return saved_step_ > 0 ? fmt::format("the newest checkpoint is of step {}", saved_step_)
                         : "there is no checkpoint yet";
}

void TrainingRun::check_finite(const StepReport& report) {
  if (std::isfinite(report.loss) && std::isfinite(report.grad_norm)) return;
  store_.wait();
  const std::string where = find_first_nonfinite(engine_, loader_, control_);
  MOEBIUS_FAIL(
      numerics,
      "step {}: the loss is {} and the gradient norm {}; first not finite: {}. This step changed no weight; {}. "
      "Lower optimizer.lr, lengthen the warm-up, or look at the data of this step",
      report.step, report.loss, report.grad_norm, where, newest_text());
}

void TrainingRun::report_step(const StepReport& report) {
  on_root_alone([&] { write_step(report); });
  show_progress(report);
  watch_balance(report);
}

void TrainingRun::write_step(const StepReport& report) {
  nlohmann::ordered_json json = to_json(report);
  if (!ranks_.ranks.empty()) json.update(to_json(ranks_));
  metrics_->append(json);
  if (!tensorboard_) return;
  const auto scalar = [&](const std::string& tag, double value) {
    tensorboard_->add_scalar(tag, report.step, static_cast<float>(value));
  };
  scalar("train/loss", report.loss);
  scalar("train/aux_loss", report.aux_loss);
  scalar("train/z_loss", report.z_loss);
  if (report.mtp_loss > 0) scalar("train/mtp_loss", report.mtp_loss);
  scalar("train/grad_norm", report.grad_norm);
  scalar("train/lr", report.lr);
  scalar("speed/tokens_per_s", report.tokens / report.step_time_s);
  scalar("speed/model_tflops_per_rank", report.model_tflops_per_rank);
  scalar("memory/peak_bytes", static_cast<double>(report.memory_peak_bytes));
  scalar("moe/load_max_over_mean", report.expert_load_max_over_mean);
  scalar("moe/dropped_tokens", static_cast<double>(report.dropped_tokens));
  for (const MoeLayerReport& layer : report.layers) {
    const std::string prefix = fmt::format("moe_layer_{}/", layer.layer);
    scalar(prefix + "load_max_over_mean", layer.load_max_over_mean);
    scalar(prefix + "entropy", layer.entropy);
    scalar(prefix + "aux_loss", layer.aux_loss);
    scalar(prefix + "dropped", static_cast<double>(layer.dropped));
  }
}

// Every balance loss is about 1 or more on a healthy router. Far below, scores
// vanish (sigmoid) or the loss is being gamed.
void TrainingRun::watch_balance(const StepReport& report) {
  const double at_balance = run_.moe.aux_coeff * (run_.moe.aux + run_.moe.seq_aux + run_.moe.global_aux);
  if (at_balance == 0 || warned_of_balance_) return;
  for (const MoeLayerReport& layer : report.layers) {
    if (layer.aux_loss >= 0.5 * at_balance) continue;
    log_.warn(
        "layer {}: its balance losses are {:.3g} of their value under perfect balance at step {}; its router's scores "
        "may be collapsing",
        layer.layer, layer.aux_loss / at_balance, report.step);
    warned_of_balance_ = true;
  }
}

void TrainingRun::show_progress(const StepReport& r) {
  const int64_t steps = run_.train.steps;
  const double per_step = seconds_training_ / static_cast<double>(r.step - first_step_ + 1);
  const bool keep = r.step == steps || r.step == first_step_ || (run_.log.every > 0 && r.step % run_.log.every == 0);
  log_.progress(
      fmt::format("step {:>{}}/{}  loss {:.4f}  {:.0f} tokens/s  balance {:.2f}  grad {:.2f}  lr {:.2e}  {} left",
                  r.step, std::to_string(steps).size(), steps, r.loss, r.tokens / r.step_time_s,
                  r.expert_load_max_over_mean, r.grad_norm, r.lr,
                  duration_text(per_step * static_cast<double>(steps - r.step))),
      keep);
}

// A signal leaves an evaluation undone: the run that goes on from this step's checkpoint does it first.
void TrainingRun::evaluate_if_due(int64_t step) {
  const bool due =
      step > 0 && (step == run_.train.steps || (run_.train.eval_every > 0 && step % run_.train.eval_every == 0));
  const auto stop = [&] { return agreed_signal() != 0; };
  if (!valid_ || !due) return;
  const EvalResult result = evaluate(engine_, *valid_, run_.train.eval_batches, stop);
  engine_.sample_peak_memory();
  if (!result.complete) return;
  MOEBIUS_CHECK(numerics, std::isfinite(result.loss),
                "eval at step {}: the loss is {}: the weights after this step are not usable; {}. Lower "
                "optimizer.lr or lengthen the warm-up",
                step, result.loss, newest_text());
  report_eval(step, result);
}

void TrainingRun::report_eval(int64_t step, const EvalResult& result) {
  log_.info("eval at step {}: loss {:.4f}{}", step, result.loss,
            result.bits_per_byte ? fmt::format(", {:.4f} bits per byte", *result.bits_per_byte) : "");
  on_root_alone([&] { write_eval(step, result); });
}

void TrainingRun::write_eval(int64_t step, const EvalResult& result) {
  nlohmann::ordered_json json{
      {"kind", "eval"}, {"step", step}, {"loss", result.loss}, {"tokens", static_cast<int64_t>(result.tokens)}};
  if (result.bits_per_byte) json["bits_per_byte"] = *result.bits_per_byte;
  metrics_->append(json);
  if (!tensorboard_) return;
  tensorboard_->add_scalar("eval/loss", step, static_cast<float>(result.loss));
  if (result.bits_per_byte)
    tensorboard_->add_scalar("eval/bits_per_byte", step, static_cast<float>(*result.bits_per_byte));
}

// Whether the evaluation of a step that was resumed from is in the metrics already; the first rank knows.
bool TrainingRun::metrics_hold_eval_of(int64_t step) {
  bool holds = false;
  control_.on_root([&] { holds = file_holds_eval_of(step); });
  return control_.max(holds) != 0;
}

bool TrainingRun::file_holds_eval_of(int64_t step) const {
  std::istringstream lines(read_file(run_.dir + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line);
    if (record.value("kind", "") == "eval" && record.value("step", int64_t{0}) == step) return true;
  }
  return false;
}

void TrainingRun::save(int64_t step) {
  if (step == saved_step_) return;
  const std::vector<NamedTensor> state = training_state(engine_);
  control_.together([&] { check_state_is_finite(step, state); });
  control_.on_root([&] { metrics_->sync(); });
  Stream s = engine_.stream();
  store_.save(step, state, checkpoint_meta(run_, step, data_fingerprint_), &s);
  engine_.sample_peak_memory();
  saved_step_ = step;
}

// A checkpoint that cannot be trained on must not take the place of one that can.
void TrainingRun::check_state_is_finite(int64_t step, const std::vector<NamedTensor>& state) {
  Stream s = engine_.stream();
  for (const NamedTensor& t : state) {
    const int64_t at = find_nonfinite(s, t.tensor);
    MOEBIUS_CHECK(numerics, at < 0,
                  "step {} is not saved: {} {} is not finite at element {} after its update; {}. Lower "
                  "optimizer.lr or lengthen the warm-up",
                  step, t.name, to_string(t.tensor), at, newest_text());
  }
}

// Before the first step: what will be held at the peak, of the GPU where there is one.
void TrainingRun::predict_memory() {
  const HostMemory host = host_memory(engine_, run_.checkpoint.async_save);
  if (engine_.spec().device == DeviceKind::cuda) control_.together([&] { store_.hold_piece(); });
  const HostMemory here = of_this_machine(control_, host);
  control_.together([&] { check_snapshot(here, engine_.plan(), available_memory_bytes()); });
  if (engine_.spec().device == DeviceKind::cuda) {
    const DeviceMemory gpu = engine_.shared_device_memory();
    predicted_bytes_ = gpu.total_bytes();
    return log_.info("memory: {}; {}", gpu.text(), host.text());
  }
  // Outside the plan: packed blocks of matrix products, 2.3 MiB a thread, and what files and logs buffer.
  const int64_t libraries =
      (int64_t{1} << 20) + std::min(engine_.spec().threads, num_available_cpus()) * (int64_t{23} << 20) / 10;
  // Now the process holds the program and the datasets' indices; the plan's pages come with their first use. Ranks that
  // are its threads are measured together.
  const int64_t held = current_rss_bytes();
  const OfProcess of{control_};
  const int64_t num_ranks = of.sum(1), plan = of.sum(engine_.plan().total_bytes());
  const int64_t program = held + of.sum(libraries), snapshot = of.sum(host.snapshot_bytes);
  predicted_bytes_ = program + plan + snapshot;
  log_.info("memory: predicted peak {} (plan {}, program and data indices {}, checkpoint snapshot {}){}",
            bytes_text(predicted_bytes_), bytes_text(plan), bytes_text(program), bytes_text(snapshot),
            num_ranks == 1 ? "" : fmt::format(", of the {} ranks of this process", num_ranks));
}

void TrainingRun::compare_memory() {
  engine_.sample_peak_memory();
  const int64_t measured = engine_.peak_bytes();
  log_.info("memory: predicted peak {}, measured {}, {:+.1f} %", bytes_text(predicted_bytes_), bytes_text(measured),
            100.0 * (static_cast<double>(measured) / static_cast<double>(predicted_bytes_) - 1));
}

}  // namespace moebius
