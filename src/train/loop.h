// Training from a recipe: resume or start, step, report, evaluate, save.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "core/log.h"
#include "io/jsonl.h"
#include "io/tensorboard.h"
#include "train/checkpoint.h"
#include "train/engine.h"
#include "train/evaluate.h"
#include "train/loader.h"
#include "train/metrics.h"

namespace moebius {

class TrainingRun {
 public:
  // signal: nonzero once the run should save and end; looked at after every step.
  TrainingRun(const RunSpec& run, Log& log, const std::atomic<int>& signal);

  // Returns the signal that ended the run, 0 when every step was done.
  // Error{numerics} when the loss or the gradient norm is not finite, saying where that began; the newest checkpoint is as it was.
  int run();

 private:
  void start();                       // from the newest checkpoint, from init_from, or from nothing
  bool resume();
  void check_same_run(const CheckpointReader& checkpoint) const;
  void open_logs();
  StepReport train_step(int64_t step);
  void check_finite(const StepReport& report);
  void report_step(const StepReport& report);
  void evaluate_and_report(int64_t step);
  void save(int64_t step);
  void show_progress(const StepReport& report);
  void compare_memory();

  RunSpec run_;
  Log& log_;
  const std::atomic<int>& signal_;
  int64_t base_rss_bytes_;            // of the process before anything was planned
  Engine engine_;
  Loader loader_;
  std::optional<Loader> valid_;
  CheckpointStore store_;
  std::optional<JsonlWriter> metrics_;
  std::optional<TensorboardWriter> tensorboard_;
  int64_t first_step_ = 1;            // of this process
  int64_t saved_step_ = 0;
  double seconds_training_ = 0;
};

}  // namespace moebius
