#include "train/loop.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "io/files.h"
#include "train/diagnose.h"
#include "train/state.h"
#include "train/weights.h"

namespace moebius {
namespace {

std::string duration_text(double seconds) {
  const int64_t s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}m{:02}s", s / 60, s % 60);
}

std::string make_run_dir(const std::string& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  MOEBIUS_CHECK(io, !error, "run.dir: {} cannot be made: {}; set run.dir to a folder that can be written", dir, error.message());
  return dir;
}

}  // namespace

TrainingRun::TrainingRun(const RunSpec& run, Log& log, const std::atomic<int>& signal)
    : run_(run), log_(log), signal_(signal), base_rss_bytes_(current_rss_bytes()), engine_(training_engine_spec(run)),
      loader_(run.data.train, run, /*shuffle=*/true),
      store_(make_run_dir(run.dir) + "/checkpoints", run.checkpoint.keep, run.checkpoint.async_save) {
  if (!run.data.valid.empty()) valid_.emplace(run.data.valid, run, /*shuffle=*/false);
}

int TrainingRun::run() {
  log_.line(engine_.plan().table());
  start();
  open_logs();
  const int64_t steps = run_.train.steps;
  if (first_step_ > steps) log_.info("nothing to do: step {} of {} is done", first_step_ - 1, steps);
  for (int64_t step = first_step_; step <= steps; ++step) {
    const StepReport report = train_step(step);
    check_finite(report);
    engine_.end_of_step();
    report_step(report);
    const bool last = step == steps || signal_ != 0;
    if (valid_ && (step == steps || (run_.train.eval_every > 0 && step % run_.train.eval_every == 0))) evaluate_and_report(step);
    if (last || (run_.checkpoint.every > 0 && step % run_.checkpoint.every == 0)) save(step);
    if (signal_ != 0 && step < steps) {
      store_.wait();
      log_.info("signal {}: saved step {}, ending; the same command goes on from there", signal_.load(), step);
      return signal_;
    }
  }
  store_.wait();
  if (first_step_ <= steps) compare_memory();
  return 0;
}

void TrainingRun::start() {
  if (run_.checkpoint.resume && resume()) return;
  Stream s = engine_.stream();
  if (run_.init_from.empty()) {
    engine_.model().params().init(s, run_.seed);
  } else {
    load_weights(s, engine_.model(), run_.init_from);
    log_.info("weights from {}", run_.init_from);
  }
}

bool TrainingRun::resume() {
  std::vector<std::string> rejected;
  const auto folder = store_.newest_complete(&rejected);
  for (const std::string& why : rejected) log_.warn("passed over: {}", why);
  if (!folder) return false;
  const CheckpointReader checkpoint(*folder);
  check_same_run(checkpoint);
  checkpoint.read_all(training_state(engine_));
  Stream s = engine_.stream();
  engine_.model().params().sync(s);
  first_step_ = checkpoint.step() + 1;
  saved_step_ = checkpoint.step();
  log_.info("resumed from {}", *folder);
  return true;
}

void TrainingRun::check_same_run(const CheckpointReader& checkpoint) const {
  const RunSpec saved = parse_run_spec(checkpoint.meta().at("recipe").get<std::string>(), "the checkpoint's recipe", {});
  const auto diff = config_diff(saved, run_);
  std::string lines;
  for (const std::string& line : diff) lines += "\n  " + line;
  MOEBIUS_CHECK(usage, diff.empty(),
                "resume: {} holds another training run; the checkpoint's value -> the recipe's:{}\nrestore these, choose another run.dir, or "
                "start over there with checkpoint.resume=false",
                run_.dir, lines);
}

void TrainingRun::open_logs() {
  write_file_atomic(run_.dir + "/recipe.resolved.toml", to_toml(run_, false));
  const std::string path = run_.dir + "/metrics.jsonl";
  truncate_jsonl_after(path, first_step_ - 1);
  metrics_.emplace(path);
  if (run_.log.tensorboard) tensorboard_.emplace(run_.dir + "/tensorboard");
}

StepReport TrainingRun::train_step(int64_t step) {
  const double begin = now_us();
  const int64_t num_micro_batches = run_.train.global_batch / run_.train.micro_batch;
  const double lr = run_.optimizer.lr_at(step, run_.train.steps);
  Trace trace;
  const bool traced = !run_.log.trace.empty() && step == first_step_ + 1;  // the second: the first one warms up
  if (traced) engine_.set_trace(&trace);
  loader_.begin_step(step);
  for (int64_t m = 0; m < num_micro_batches; ++m) {
    loader_.fill(engine_.batch(), m);
    engine_.forward_backward();
  }
  engine_.optimizer_step(step, lr);
  if (traced) {
    engine_.set_trace(nullptr);
    write_file_atomic(run_.log.trace, trace.chrome_json());
  }
  const double seconds = (now_us() - begin) * 1e-6;
  seconds_training_ += seconds;
  return read_step(engine_, step, lr, engine_.batch().loss_scale, static_cast<double>(run_.train.global_batch * run_.train.seq_len),
                   run_.moe.z_coeff, seconds);
}

void TrainingRun::check_finite(const StepReport& report) {
  if (std::isfinite(report.loss) && std::isfinite(report.grad_norm)) return;
  store_.wait();
  const std::string where = find_first_nonfinite(engine_, loader_, run_.train.global_batch / run_.train.micro_batch);
  MOEBIUS_FAIL(numerics,
               "step {}: the loss is {} and the gradient norm {}; first not finite: {}. No weight was changed; the newest checkpoint is of step "
               "{}. Lower optimizer.lr, lengthen the warm-up, or look at the data of this step",
               report.step, report.loss, report.grad_norm, where, saved_step_);
}

void TrainingRun::report_step(const StepReport& report) {
  metrics_->append(to_json(report));
  show_progress(report);
  if (!tensorboard_) return;
  const auto scalar = [&](const std::string& tag, double value) { tensorboard_->add_scalar(tag, report.step, static_cast<float>(value)); };
  scalar("train/loss", report.loss);
  scalar("train/aux_loss", report.aux_loss);
  scalar("train/z_loss", report.z_loss);
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

void TrainingRun::show_progress(const StepReport& r) {
  const int64_t steps = run_.train.steps;
  const double per_step = seconds_training_ / static_cast<double>(r.step - first_step_ + 1);
  const bool keep = r.step == steps || r.step == first_step_ || (run_.log.every > 0 && r.step % run_.log.every == 0);
  log_.progress(fmt::format("step {:>{}}/{}  loss {:.4f}  {:.0f} tokens/s  balance {:.2f}  grad {:.2f}  lr {:.2e}  {} left", r.step,
                            std::to_string(steps).size(), steps, r.loss, r.tokens / r.step_time_s, r.expert_load_max_over_mean, r.grad_norm,
                            r.lr, duration_text(per_step * static_cast<double>(steps - r.step))),
                keep);
}

void TrainingRun::evaluate_and_report(int64_t step) {
  const EvalResult result = evaluate(engine_, *valid_, run_.train.eval_batches);
  nlohmann::ordered_json json{{"kind", "eval"}, {"step", step}, {"loss", result.loss}, {"tokens", static_cast<int64_t>(result.tokens)}};
  if (result.bits_per_byte) json["bits_per_byte"] = *result.bits_per_byte;
  metrics_->append(json);
  log_.info("eval at step {}: loss {:.4f}{}", step, result.loss,
            result.bits_per_byte ? fmt::format(", {:.4f} bits per byte", *result.bits_per_byte) : "");
  if (!tensorboard_) return;
  tensorboard_->add_scalar("eval/loss", step, static_cast<float>(result.loss));
  if (result.bits_per_byte) tensorboard_->add_scalar("eval/bits_per_byte", step, static_cast<float>(*result.bits_per_byte));
}

void TrainingRun::save(int64_t step) {
  if (step == saved_step_) return;
  store_.save(step, training_state(engine_), checkpoint_meta(run_, step));
  saved_step_ = step;
}

void TrainingRun::compare_memory() {
  // Outside the plan: packed blocks of matrix products, 2.3 MiB a thread, and what files and logs buffer.
  const int64_t library_bytes = (int64_t{1} << 20) + engine_.spec().threads * (int64_t{23} << 20) / 10;
  const int64_t predicted = base_rss_bytes_ + library_bytes + engine_.plan().total_bytes() + store_.snapshot_bytes();
  const int64_t measured = peak_rss_bytes();
  log_.info("memory: predicted {} (plan {}, program {}, snapshot {}), measured peak {}, {:+.1f} %", bytes_text(predicted),
            bytes_text(engine_.plan().total_bytes()), bytes_text(base_rss_bytes_ + library_bytes), bytes_text(store_.snapshot_bytes()), bytes_text(measured),
            100.0 * (static_cast<double>(measured) / static_cast<double>(predicted) - 1));
}

}  // namespace moebius
