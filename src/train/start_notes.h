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

// Returns the notes of a run: on a GPU its kernels on the first of gpus, and a warning of products that a recipe makes
// slower; the dispatcher and the reason for it; notes of a run that does not balance its experts, saves only at
// its end, or has a learning rate of 0 in every step; and those of run_notes() and
// block_states_note().
std::vector<StartNote> start_notes(const RunSpec& run, const DispatcherChoice& dispatcher, const GpusFound& gpus,
                                   int64_t num_ranks);

// The note of a run without model.init_from: a warning where model.hf names a model that has
// weights of its own.
StartNote random_weights_note(const RunSpec& run);

// Returns the tokens per step, and how often the run reads each dataset of data.train.
std::string data_text(const RunSpec& run, const DatasetOrder& order);

}  // namespace moebius
