// Finds the first tensor with a NaN or Inf in a step whose loss or gradient norm is not finite. The step is run again:
// it is deterministic, and the failed step has changed no weight.
#pragma once

#include <string>

#include "comm/control.h"
#include "engine/engine.h"
#include "train/loader.h"

namespace moebius {

// Returns a sentence that names this tensor. The order is that of computation: weights; then for each micro-batch of
// the loader's current step the tensors that each layer saves, the loss, and the gradients from the last layer back.
// All ranks call it together and get the same sentence. If several ranks find a tensor at the same point, it is that of
// the lowest rank.
std::string find_first_nonfinite(Engine& engine, Loader& loader, Control& control);

}  // namespace moebius
