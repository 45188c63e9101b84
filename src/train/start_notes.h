// Notes and warnings that a run prints before its first step.
#pragma once

#include <string>
#include <vector>

#include "config/check/run_notes.h"
#include "config/dispatcher_choice.h"
#include "config/run_spec.h"
#include "data/dataset_order.h"
#include "device/gpus_found.h"

namespace moebius {

using StartNote = RunNote;

// On a GPU the kernels that the run has on the first of gpus, and a warning of products that precision.recipe makes
// slower; the dispatcher of the MoE layers and why it is chosen; and these if they are so: nothing balances the
// experts, checkpoints are saved at the end alone, the learning rate is 0 in every step. Then those of run_notes().
std::vector<StartNote> start_notes(const RunSpec& run, const DispatcherChoice& dispatcher, const GpusFound& gpus,
                                   int64_t num_ranks);

// The note of a run without model.init_from: a warning where model.hf names a model that has
// weights of its own.
StartNote random_weights_note(const RunSpec& run);

// Returns the tokens per step, and how often the run reads each dataset of data.train.
std::string data_text(const RunSpec& run, const DatasetOrder& order);

}  // namespace moebius
