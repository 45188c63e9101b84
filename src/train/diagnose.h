// Where a number first stopped being finite. The step is replayed: it is deterministic, and a gradient norm that is not finite has
// changed no weight.
#pragma once

#include <string>

#include "train/engine.h"
#include "train/loader.h"

namespace moebius {

// A sentence naming the first tensor that holds a NaN or Inf in the order of computation: weights, then for each micro-batch of the step
// that the loader has begun what each layer keeps, the loss, and the gradients from the last layer back.
std::string find_first_nonfinite(Engine& engine, Loader& loader, int64_t num_micro_batches);

}  // namespace moebius
