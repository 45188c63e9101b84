// The file traffic of a run: it reads its data, and writes and reads checkpoints (docs/reference/formats.md).
#pragma once

#include "config/run_spec.h"
#include "plan/machine.h"

namespace moebius {

struct FileWork {
  double data_bytes = 0;        // bytes of tokens that all ranks together read for a step
  double checkpoint_bytes = 0;  // bytes of tensors that all ranks together write for a checkpoint
  double save_s = 0;            // time to write the files of a checkpoint
  double load_s = 0;            // time to read them
  double stall_s = 0;           // time that a step waits for a save: the copy to the host if asynchronous, else save_s
  int64_t saves = 0;            // checkpoints of the whole run, with the one at its end; 0: train.steps is not set
};

// Returns the bytes of a token in a dataset: uint16 for fewer than 65500 ids, else int32.
int64_t token_bytes(const ModelSpec& model);
// Returns the bytes of an element of a parameter in a checkpoint: its master, or weight, and the optimizer's state.
double checkpoint_bytes(const OptimizerSpec& optimizer);

// Returns the file traffic of a run. saved_numel: elements of parameters that all ranks together save. owned_numel: the
// maximum that one rank saves. tokens, step_s: of one step. A step waits if the save before the next one still runs.
FileWork file_work(const RunSpec& run, const PlanMachine& machine, int64_t ranks, double saved_numel,
                   double owned_numel, double tokens, double step_s);

}  // namespace moebius
