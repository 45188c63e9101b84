// Training from a recipe: resume or start, step, report, evaluate, save.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/engine.h"
#include "train/evaluate.h"
#include "train/loader.h"
#include "train/memory_forecast.h"
#include "train/metrics.h"
#include "train/rank_report.h"
#include "train/run_log.h"
#include "train/state.h"
#include "train/watch/host_link.h"

namespace moebius {

class TrainingRun {
 public:
  // signal: nonzero when the run should save and end; read after every step.
  // world: the transport of this rank; null for a run on one rank. Every rank constructs its own TrainingRun; rank 0
  // writes metrics and logs.
  TrainingRun(const RunSpec& run, Log& log, const std::atomic<int>& signal, Transport* world = nullptr);

  // Returns the signal that ended the run, or 0 if every step was done. A signal to any rank, or an I/O error of rank
  // 0's metrics, logs or trace, ends all ranks after the same step. Throws Error{numerics} when the loss or the
  // gradient norm is not finite, with the first such tensor (train/diagnose.h). The newest
  // checkpoint is then unchanged.
  int run();

 private:
  void start();
  bool is_finished();  // no step and no evaluation is left; all ranks call it together
  void log_finished();
  void log_before_steps();
  bool is_traced(int64_t step) const;
  StepReport train_step(int64_t step);
  void end_trace();
  void check_finite(const StepReport& report);
  void report_step(const StepReport& report);
  void evaluate_before_steps();
  bool evaluate_if_due(int64_t step);  // returns whether it was due
  void report_eval(int64_t step, const EvalResult& result);
  bool metrics_hold_eval_of(int64_t step);
  void save_if_due(int64_t step);
  void save(int64_t step);
  void check_state_is_finite(int64_t step, const std::vector<NamedTensor>& state);
  std::string newest_text() const;  // for messages: how far a restart goes back
  void log_after_steps(int signal);
  void log_start_event();

  void on_root_only(const std::function<void()>& body);
  // Returns the outcome of a step on this rank: 0, the number of its signal, or a code for an error of rank 0.
  int64_t outcome() const;
  // Returns the signal in the largest outcome of the ranks. Throws the error of on_root_only on all of them.
  int signal_of(int64_t outcome_of_ranks);
  int agreed_signal();  // exchanges the outcomes, and does the same; all ranks call it together

  RunSpec run_;
  std::unique_ptr<Transport> self_transport_;  // only in a run on one rank
  Transport& world_;
  Control control_;
  Log quiet_{stderr, false, true};  // used by all ranks but the first
  Log& log_;
  const std::atomic<int>& signal_;
  Trace trace_;  // outlives the engine, which may still write to it
  Engine engine_;
  Loader loader_;
  RunInputs inputs_;
  std::optional<Loader> valid_;
  CheckpointStore store_;
  RunLog run_log_{run_, log_};
  MemoryForecast memory_{engine_, control_, log_};
  std::optional<Error> root_error_;  // of on_root_only
  std::vector<std::string> hosts_;   // the machine of each rank
  RanksReport ranks_;                // the report of the last step
  HostLink host_link_;               // the link to states on the host of a GPU
  int64_t first_step_ = 1;           // first step of this process
  int64_t saved_step_ = 0;
};

}  // namespace moebius
