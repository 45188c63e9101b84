// Finds where a value first stopped being finite. The step is run again: it is deterministic, and a
// gradient norm that is not finite has changed no weight.
#pragma once

#include <string>

#include "comm/control.h"
#include "engine/engine.h"
#include "train/loader.h"

namespace moebius {

// A sentence naming the first tensor that holds a NaN or Inf in the order of computation: weights,
// then for each micro-batch of the step that the loader has begun what each layer keeps, the loss,
// and the gradients from the last layer back.
// All ranks call it together and get the same sentence. If several ranks find something at the same
// point, the sentence is that of the first of them.
std::string find_first_nonfinite(Engine& engine, Loader& loader, Control& control);

}  // namespace moebius
