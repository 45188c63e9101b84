// The log of a training run: metrics.jsonl, events.jsonl and TensorBoard files in its folder, and progress lines.
// The first rank writes the files.
#pragma once

#include <optional>

#include "core/log.h"
#include "data/jsonl.h"
#include "io/tensorboard.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/rank_report.h"
#include "train/watch/qk_clip_summary.h"

namespace moebius {

class RunLog {
 public:
  RunLog(const RunSpec& run, Log& log) : run_(run), log_(log) {}  // the references outlive it

  // Opens the files for steps from first_step on, and drops the lines of later steps. Writes the
  // resolved recipe.
  void open(int64_t first_step);
  void write_step(const StepReport& report, const RanksReport& ranks);
  void write_eval(int64_t step, const EvalResult& result);
  // Appends a line to events.jsonl: the kind, the time of day, the step, and these facts. It survives every resume.
  void write_event(std::string_view kind, int64_t step, const nlohmann::ordered_json& facts);
  void sync() { metrics_->sync(); }
  // Returns whether metrics.jsonl has the evaluation after this step. It may be
  // called before open().
  bool holds_eval_of(int64_t step) const;

  // --- called on every rank; only ranks whose Log is not quiet print ---
  void show_progress(const StepReport& report);
  void watch_balance(const StepReport& report);  // warns once when a router's scores may be collapsing
  void watch_links(const RanksReport& ranks);    // warns once when a link has been slow for kSlowSteps steps
  static constexpr int64_t kSlowSteps = 10;
  void watch_qk_clip(const StepReport& report) { qk_clip_.add(report); }
  std::string qk_clip_text() const { return qk_clip_.text(run_.optimizer.qk_clip); }

 private:
  void add_scalars(const StepReport& report);
  void add_histograms(const StepReport& report);  // histograms of the load of each layer's experts over the mean

  const RunSpec& run_;
  Log& log_;
  std::optional<JsonlWriter> metrics_, events_;
  std::optional<TensorboardWriter> tensorboard_;
  double seconds_ = 0;  // time of the steps shown so far
  int64_t steps_shown_ = 0;
  bool warned_of_balance_ = false;
  int64_t slow_steps_ = 0;  // number of consecutive steps with a slow link
  QkClipSummary qk_clip_;   // summary of the steps of this process
};

}  // namespace moebius
