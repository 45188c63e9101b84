// The file traffic of a run: it reads its data, and writes and reads checkpoints (docs/reference/formats.md).
#pragma once

#include "config/run_spec.h"
#include "plan/machine.h"

namespace moebius {

struct FileWork {
  double data_bytes = 0;        // of tokens, that all ranks together read for a step
  double checkpoint_bytes = 0;  // of tensors, that all ranks together write for a checkpoint
  double save_s = 0;            // time to write the files of a checkpoint
  double load_s = 0;            // time to read them
  double stall_s = 0;           // that a step waits for a save: the copy to the host if it is asynchronous, else save_s
  int64_t saves = 0;            // that the run's steps make, the one at the end among them; 0: train.steps is not set
};

// Returns the bytes of a token in a dataset: uint16 for fewer than 65500 ids, else int32.
int64_t token_bytes(const ModelSpec& model);
// Returns the bytes of an element of a parameter in a checkpoint: its master, or weight, and the optimizer's state.
double checkpoint_bytes(const OptimizerSpec& optimizer);

// saved_numel: elements of parameters that all ranks together save. owned_numel: the maximum that one rank saves.
// tokens: of a step. step_s: the time of a step. A step waits if the next save begins before the last one has ended.
FileWork file_work(const RunSpec& run, const PlanMachine& machine, int64_t ranks, double saved_numel,
                   double owned_numel, double tokens, double step_s);

}  // namespace moebius
