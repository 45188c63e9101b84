#include "train/loop.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "comm/machine.h"
#include "io/files.h"
#include "ops/elementwise/elementwise.h"
#include "train/diagnose.h"
#include "train/notes/checkpoint_space_note.h"
#include "train/run_start.h"
#include "train/state.h"
#include "weights/load.h"
#include "weights/source.h"

namespace moebius {
namespace {

constexpr int64_t kRootError = 1 << 16;  // above all signals

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
  spec.dispatcher = run.parallel.dispatcher;  // the engine tests the ranks' memory access
  spec.overlaps_update = true;
  return spec;
}

// Opens the datasets. If a rank cannot read a file, all ranks end with its error.
Loader open_loader(Control& control, const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle,
                   const DataShare& share) {
  std::optional<Loader> loader;
  control.together([&] { loader.emplace(datasets, run, shuffle, share); });
  return std::move(*loader);
}

// The memory of a CPU is on no link.
HostLink host_link(const Control& control, const Engine& engine) {
  if (engine.spec().device != DeviceKind::cuda || control.size() > 1) return {};
  return {static_cast<double>(bytes_read_from_host(engine)), engine.spec().num_micro_batches};
}

std::string fingerprint_of(Control& control, const Loader& loader) {
  std::string lines;
  control.together([&] { lines = loader.fingerprint(); });
  return lines;
}

}  // namespace

TrainingRun::TrainingRun(const RunSpec& run, Log& log, const std::atomic<int>& signal, Transport* world)
    : run_(with_mtp_of_weights(run)),
      self_transport_(world ? nullptr : make_self_transport()),
      world_(world ? *world : *self_transport_),
      control_(world_),
      log_(control_.is_root() ? log : quiet_),
      signal_(signal),
      engine_(engine_spec(run_, world_)),
      loader_(open_loader(control_, run.data.train, run_, /*shuffle=*/true, engine_.data_share())),
      inputs_{.data = fingerprint_of(control_, loader_), .dispatcher = engine_.dispatcher().name},
      store_(control_, make_run_dir(control_, run.dir) + "/checkpoints", run.checkpoint.keep,
             run.checkpoint.async_save) {
  check_agree(control_, {"the training data", inputs_.data});
  for (const std::string& machine : control_.gather(machine_name()))
    hosts_.push_back(machine.substr(0, machine.find('/')));
  host_link_ = host_link(control_, engine_);
  if (!run.data.valid.empty()) {
    valid_ = open_loader(control_, run.data.valid, run_, /*shuffle=*/false, engine_.data_share());
    control_.together([&] { valid_->check_evaluation(run_.train.eval_batches, "train.eval_batches"); });
  }
  if (run_.model.num_mtp_layers < run.model.num_mtp_layers)
    log_.warn("{}", missing_mtp_notice(find_weights(run.init_from), run.model));
}

int TrainingRun::run() {
  log_.line(engine_.plan().table());
  if (const std::string links = engine_.links_text(); !links.empty()) log_.info("{}", links);
  memory_.predict(store_, run_.checkpoint.async_save);
  start();
  if (is_finished()) {
    log_finished();
    return 0;
  }
  control_.on_root([&] {
    run_log_.open(first_step_);
    log_start_event();
  });
  log_before_steps();
  evaluate_before_steps();
  int signal = 0;
  for (int64_t step = first_step_; step <= run_.train.steps && signal == 0; ++step) {
    const StepReport report = train_step(step);
    if (step == first_step_) warn_of_fallback_kernels(log_, control_, engine_);
    check_finite(report);
    engine_.end_of_step();
    report_step(report);
    store_.check();  // an asynchronous save that has failed ends the run now, not at the next save
    save_if_due(step);
    // After the save, so an evaluation that fails loses nothing else.
    const bool evaluated = evaluate_if_due(step);
    signal = evaluated || step == run_.train.steps ? agreed_signal() : signal_of(ranks_.outcome);
    if (signal != 0) save(step);
  }
  store_.wait();
  log_after_steps(signal);
  return signal;
}

void TrainingRun::start() {
  saved_step_ = RunStart({run_, control_, log_, engine_, store_}, inputs_).start();
  first_step_ = saved_step_ + 1;
}

// A run that ended on a signal may still need the evaluation of its last step.
bool TrainingRun::is_finished() {
  const int64_t steps = run_.train.steps;
  if (saved_step_ < steps) return false;
  return saved_step_ > steps || !valid_ || metrics_hold_eval_of(saved_step_);
}

void TrainingRun::log_finished() {
  const int64_t steps = run_.train.steps;
  const std::string done = saved_step_ > steps
                               ? fmt::format("train.steps = {} is below the step {} that is done", steps, saved_step_)
                               : fmt::format("step {} of {} is done", saved_step_, steps);
  log_.info("nothing to do: {}; raise train.steps, or choose another run.dir", done);
}

void TrainingRun::log_before_steps() {
  if (first_step_ > run_.train.steps) return;  // only an evaluation is left
  log_.info("{}", data_text(run_, loader_.order()));
  for (const StartNote& note : start_notes(run_, engine_.dispatcher(), gpus_found(), control_.size()))
    log_note(log_, note);
  const CheckpointSpace space{.bytes = control_.sum(CheckpointStore::snapshot_bytes_of(training_state(engine_))),
                              .free_bytes = free_bytes(run_.dir),
                              .num_there = std::ssize(store_.list())};
  if (const auto note = checkpoint_space_note(run_, first_step_, space)) log_note(log_, *note);
}

void TrainingRun::log_start_event() {
  nlohmann::ordered_json mesh, memory;
  const MeshShape& shape = engine_.mesh().shape();
  mesh = {{"tp", shape.tp}, {"cp", shape.cp}, {"dp", shape.dp}, {"pp", shape.pp}, {"ep", shape.ep}, {"etp", shape.etp}};
  for (int life = 0; life < kNumLives; ++life)
    memory[std::string(name_of(static_cast<Life>(life)))] = engine_.plan().bytes(static_cast<Life>(life));
  run_log_.write_event("start", saved_step_,
                       {{"ranks", control_.size()},
                        {"device", name_of(run_.device)},
                        {"mesh", mesh},
                        {"parameters", run_.model.num_parameters()},
                        {"active_parameters", run_.model.num_active_parameters()},
                        {"memory_predicted_bytes", memory_.predicted_bytes()},
                        {"memory_bytes", memory}});
}

void TrainingRun::log_after_steps(int signal) {
  if (signal != 0)
    log_.info("signal {}: saved step {}, ending; the same command resumes from there", signal, saved_step_);
  if (ranks_.ranks.size() > 1)
    log_.info("communication of the last step, sent and waited, each the maximum over ranks: {}", comm_text(ranks_));
  if (const std::string links = slow_links_text(ranks_.slow_links); !links.empty())
    log_.info("the slowest connection of the last step: {}", links);
  if (host_link_.is_known()) log_.info("in the last step {}", host_link_.text());
  if (const std::string clipped = run_log_.qk_clip_text(); !clipped.empty()) log_.info("{}", clipped);
  if (first_step_ <= run_.train.steps) memory_.compare();
  const nlohmann::ordered_json facts{{"signal", signal}, {"memory_peak_bytes", engine_.peak_bytes()}};
  control_.on_root([&] { run_log_.write_event("end", saved_step_, facts); });
}

// Does work of rank 0 while no other rank waits for it. Its error is kept until the ranks next exchange the outcome of
// a step: in the exchange of the next step, or after an evaluation or the last step.
void TrainingRun::on_root_only(const std::function<void()>& body) {
  if (!control_.is_root() || root_error_) return;
  try {
    body();
  } catch (const Error& e) {
    if (control_.size() == 1) throw;
    root_error_ = e;
  }
}

int64_t TrainingRun::outcome() const { return root_error_ ? kRootError : int64_t{signal_}; }

int TrainingRun::agreed_signal() { return signal_of(control_.max(outcome())); }

int TrainingRun::signal_of(int64_t outcome_of_ranks) {
  if (outcome_of_ranks < kRootError) return static_cast<int>(outcome_of_ranks);
  store_.wait();
  control_.on_root([&] { throw Error(*root_error_); });
  return 0;
}

// --- a step ---------------------------------------------------------------------------------------------------------

// The second step is traced, since the first one warms up; if there is only one step, that one is.
// Every rank traces it, since a collective is captured in a CUDA graph by all ranks or by none.
bool TrainingRun::is_traced(int64_t step) const {
  return !run_.log.trace.empty() && step == std::min(first_step_ + 1, run_.train.steps);
}

StepReport TrainingRun::train_step(int64_t step) {
  const double begin = now_us();
  if (is_traced(step)) engine_.set_trace(&trace_);
  const CommCounters counters = comm_counters(engine_.mesh());
  engine_.step(loader_, step, run_.optimizer.lr_at(step, run_.train.steps));
  CommCounters comm = comm_since(engine_.mesh(), counters);  // without what the metrics below gather
  comm.links = world_.links();
  if (is_traced(step)) end_trace();
  const StepReport report = read_step(engine_, (now_us() - begin) * 1e-6);
  const StepTimes& times = engine_.step_times();
  const RankTimes mine{.load_s = times.load_s, .passes_s = times.passes_s, .optimizer_s = times.optimizer_s};
  ranks_ = gather_ranks(engine_, mine, comm, report.layers, outcome());
  name_hosts(ranks_.slow_links, hosts_);
  host_link_.add_step(times, report.step_time_s);
  if (host_link_.is_known()) ranks_.host_link_bytes_per_s = host_link_.bytes_per_s();
  world_.default_timeout().step_done((now_us() - begin) * 1e-6);
  return report;
}

void TrainingRun::end_trace() {
  Stream s = engine_.stream();
  synchronize(s);  // now the step's own phase has ended
  engine_.set_trace(nullptr);
  on_root_only([&] { write_file_atomic(run_.log.trace, trace_.chrome_json()); });
  trace_.clear();
}

void TrainingRun::check_finite(const StepReport& report) {
  if (std::isfinite(report.loss) && std::isfinite(report.grad_norm)) return;
  const auto between_steps = control_.between_steps();
  store_.wait();
  const std::string where = find_first_nonfinite(engine_, loader_, control_);
  on_root_only([&] { run_log_.write_event("failed", report.step, {{"not_finite", where}}); });
  MOEBIUS_FAIL(
      numerics,
      "step {}: the loss is {} and the gradient norm {}; first not finite: {}. This step changed no weight; {}. "
      "Lower optimizer.lr, lengthen the warm-up, or inspect the data of this step",
      report.step, report.loss, report.grad_norm, where, newest_text());
}

void TrainingRun::report_step(const StepReport& report) {
  on_root_only([&] { run_log_.write_step(report, ranks_); });
  run_log_.show_progress(report);
  run_log_.watch_balance(report);
  run_log_.watch_links(ranks_);
  run_log_.watch_qk_clip(report);
  if (host_link_.became_slow()) log_.warn("the host is slower than planned: {}", host_link_.text());
}

// --- evaluation -----------------------------------------------------------------------------------------------------

void TrainingRun::evaluate_before_steps() {
  if (metrics_hold_eval_of(first_step_ - 1)) return;
  evaluate_if_due(first_step_ - 1);
  agreed_signal();  // throws when it could not be written
}

// After a signal the evaluation is skipped. The run that resumes from this step's checkpoint does
// it first.
bool TrainingRun::evaluate_if_due(int64_t step) {
  const bool due =
      step > 0 && (step == run_.train.steps || (run_.train.eval_every > 0 && step % run_.train.eval_every == 0));
  const auto stop = [&] { return agreed_signal() != 0; };
  if (!valid_ || !due) return false;
  const EvalResult result = evaluate(engine_, *valid_, run_.train.eval_batches, stop);
  engine_.sample_peak_memory();
  if (!result.complete) return true;
  if (!std::isfinite(result.loss)) store_.wait();  // on several ranks an error aborts a save that is being written
  MOEBIUS_CHECK(numerics, std::isfinite(result.loss),
                "eval at step {}: the loss is {}: the weights after this step are not usable; {}. Lower "
                "optimizer.lr or lengthen the warm-up",
                step, result.loss, newest_text());
  report_eval(step, result);
  return true;
}

void TrainingRun::report_eval(int64_t step, const EvalResult& result) {
  log_.info("eval at step {}: loss {:.4f}{}", step, result.loss,
            result.bits_per_byte ? fmt::format(", {:.4f} bits per byte", *result.bits_per_byte) : "");
  on_root_only([&] { run_log_.write_eval(step, result); });
}

// Returns whether the metrics have the evaluation of this step already. The first rank decides.
bool TrainingRun::metrics_hold_eval_of(int64_t step) {
  bool holds = false;
  control_.on_root([&] { holds = run_log_.holds_eval_of(step); });
  return control_.max(holds) != 0;
}

// --- checkpoints ----------------------------------------------------------------------------------------------------

void TrainingRun::save_if_due(int64_t step) {
  const bool due = run_.checkpoint.every > 0 && step % run_.checkpoint.every == 0;
  if (due || step == run_.train.steps) save(step);
}

void TrainingRun::save(int64_t step) {
  if (step == saved_step_) return;
  const auto between_steps = control_.between_steps();
  engine_.finish_update();
  const std::vector<NamedTensor> state = training_state(engine_);
  Stream s = engine_.stream();
  store_.wait();  // an error below must not abort the save before this one
  control_.together([&] { check_state_is_finite(step, state); });
  control_.on_root([&] { run_log_.sync(); });
  store_.save(step, state, checkpoint_meta(run_, step, inputs_), &s);
  engine_.sample_peak_memory();
  saved_step_ = step;
  on_root_only([&] { run_log_.write_event("checkpoint", step, nlohmann::ordered_json::object()); });
}

// A checkpoint that is not finite must not replace a good one.
void TrainingRun::check_state_is_finite(int64_t step, const std::vector<NamedTensor>& state) {
  Stream s = engine_.stream();
  for (const NamedTensor& t : state) {
    if (t.tensor.dtype == DType::u8) continue;  // its scales are checked instead
    const int64_t at = find_nonfinite(s, t.tensor);
    MOEBIUS_CHECK(numerics, at < 0,
                  "step {} is not saved: {} {} is not finite at element {} after its update; {}. Lower "
                  "optimizer.lr or lengthen the warm-up",
                  step, t.name, to_string(t.tensor), at, newest_text());
  }
}

std::string TrainingRun::newest_text() const {
  return saved_step_ > 0 ? fmt::format("the newest checkpoint is of step {}", saved_step_)
                         : "there is no checkpoint yet";
}

}  // namespace moebius
