#include "train/run_log.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

constexpr int64_t kHistograms = 200;  // the approximate number in a run; TensorBoard shows fewer

std::string duration_text(double seconds) {
  const int64_t s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  return fmt::format("{}m{:02}s", s / 60, s % 60);
}

// Removes copies of a file that runs did not finish, since they were killed (PendingFile). This run has the folder's lock.
void remove_unfinished(const std::string& folder, const std::string& file) {
  std::vector<std::filesystem::path> unfinished;
  for (const auto& each : std::filesystem::directory_iterator(folder))
    if (each.path().filename().string().starts_with(file + ".tmp-")) unfinished.push_back(each.path());
  for (const std::filesystem::path& path : unfinished) std::filesystem::remove(path);
}

}  // namespace

void RunLog::open(int64_t first_step) {
  for (const char* file : {"recipe.resolved.toml", "metrics.jsonl"}) remove_unfinished(run_.dir, file);
  write_file_atomic(run_.dir + "/recipe.resolved.toml", to_toml(run_, /*with_provenance=*/false));
  const std::string path = run_.dir + "/metrics.jsonl";
  if (const int64_t damaged = truncate_jsonl_after(path, first_step - 1); damaged > 0) {
    log_.warn("{}: dropped {}", path, counted(damaged, "damaged line"));
  }
  metrics_.emplace(path);
  events_.emplace(run_.dir + "/events.jsonl");
  if (run_.log.tensorboard) tensorboard_.emplace(run_.dir + "/tensorboard");
}

void RunLog::write_step(const StepReport& report, const RanksReport& ranks) {
  nlohmann::ordered_json json = to_json(report);
  json.update(to_json(ranks));
  metrics_->append(json);
  if (tensorboard_) add_scalars(report);
}

void RunLog::write_event(std::string_view kind, int64_t step, const nlohmann::ordered_json& facts) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  nlohmann::ordered_json json{
      {"kind", kind}, {"time", 1e-3 * static_cast<double>(now / std::chrono::milliseconds(1))}, {"step", step}};
  json.update(facts);
  events_->append(json);
}

void RunLog::add_scalars(const StepReport& report) {
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
  const int64_t interval = std::max<int64_t>(1, run_.train.steps / kHistograms);
  if (report.step % interval == 0 || report.step == run_.train.steps) add_histograms(report);
}

void RunLog::add_histograms(const StepReport& report) {
  for (const MoeLayerReport& layer : report.layers) {
    const double sum = std::accumulate(layer.load.begin(), layer.load.end(), 0.0);
    if (sum == 0) continue;
    std::vector<double> over_mean;
    for (const int64_t tokens : layer.load)
      over_mean.push_back(static_cast<double>(tokens) * static_cast<double>(layer.load.size()) / sum);
    tensorboard_->add_histogram(fmt::format("moe_layer_{}/expert_load_over_mean", layer.layer), report.step, over_mean);
  }
}

// Every balance loss is about 1 or more on a healthy router. If it is far below 1, the scores
// vanish (sigmoid), or the loss is low without any balance.
void RunLog::watch_balance(const StepReport& report) {
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

void RunLog::watch_links(const RanksReport& ranks) {
  if (slow_steps_ == kSlowSteps) return;
  const std::string text = slow_links_text(ranks.slow_links, /*only_slow=*/true);
  slow_steps_ = text.empty() ? 0 : slow_steps_ + 1;
  if (slow_steps_ == kSlowSteps) log_.warn("a link between ranks is slow: {}", text);
}

void RunLog::show_progress(const StepReport& r) {
  seconds_ += r.step_time_s;
  ++steps_shown_;
  const int64_t steps = run_.train.steps;
  const double per_step = seconds_ / static_cast<double>(steps_shown_);
  const bool keep = r.step == steps || steps_shown_ == 1 || (run_.log.every > 0 && r.step % run_.log.every == 0);
  log_.progress(
      fmt::format("step {:>{}}/{}  loss {:.4f}  {:.0f} tokens/s  balance {:.2f}  grad {:.2f}  lr {:.2e}  {} left",
                  r.step, std::to_string(steps).size(), steps, r.loss, r.tokens / r.step_time_s,
                  r.expert_load_max_over_mean, r.grad_norm, r.lr,
                  duration_text(per_step * static_cast<double>(steps - r.step))),
      keep);
}

void RunLog::write_eval(int64_t step, const EvalResult& result) {
  nlohmann::ordered_json json{
      {"kind", "eval"}, {"step", step}, {"loss", result.loss}, {"tokens", static_cast<int64_t>(result.tokens)}};
  if (result.bits_per_byte) json["bits_per_byte"] = *result.bits_per_byte;
  metrics_->append(json);
  if (!tensorboard_) return;
  tensorboard_->add_scalar("eval/loss", step, static_cast<float>(result.loss));
  if (result.bits_per_byte)
    tensorboard_->add_scalar("eval/bits_per_byte", step, static_cast<float>(*result.bits_per_byte));
}

bool RunLog::holds_eval_of(int64_t step) const { return jsonl_holds(run_.dir + "/metrics.jsonl", "eval", step); }

}  // namespace moebius
