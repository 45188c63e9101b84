// A training run begins in one of three ways: from its newest checkpoint, from weights, or from random weights.
#pragma once

#include <string>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "core/log.h"
#include "engine/engine.h"
#include "train/start_notes.h"
#include "train/state.h"

namespace moebius {

// Returns the run, without multi-token prediction if the weights that it starts from have none, whatever
// their config says.
RunSpec with_mtp_of_weights(RunSpec run);

void log_note(Log& log, const StartNote& note);

// The parts of a run that its start needs; all of them outlive it.
struct RunParts {
  const RunSpec& run;
  Control& control;
  Log& log;
  Engine& engine;
  CheckpointStore& store;
};

class RunStart {
 public:
  // start() fills inputs.base.
  RunStart(const RunParts& parts, RunInputs& inputs)
      : run_(parts.run),
        control_(parts.control),
        log_(parts.log),
        engine_(parts.engine),
        store_(parts.store),
        inputs_(inputs) {}

  // Fills weights and optimizer. Returns the step of the checkpoint that the run resumed from, 0
  // for a new run. All ranks call it together. Throws Error{usage} when the folder holds another run,
  // Error{input} when nothing in it can be read.
  int64_t start();

 private:
  void fill_weights();  // for a new run: everything that a checkpoint of adapters does not hold
  void start_from_random_weights();
  void start_from_weights();
  void check_base_is_elsewhere() const;
  WeightsFingerprint fingerprint_of_base();
  void start_adapters();
  void set_old_checkpoints_aside();
  int64_t resume();
  void read_state(const CheckpointReader& checkpoint, const std::string& folder);
  void check_same_run(const CheckpointReader& checkpoint) const;
  void check_same_base(const CheckpointReader& checkpoint) const;
  void warn_of_new_schedule(const RunSpec& saved) const;
  void warn_of_new_dispatcher(const CheckpointReader& checkpoint, const RunSpec& saved) const;
  void log_conversions(const RunSpec& saved, int64_t step) const;

  const RunSpec& run_;
  Control& control_;
  Log& log_;
  Engine& engine_;
  CheckpointStore& store_;
  RunInputs& inputs_;
};

}  // namespace moebius
