// Loss on held-out data.
#pragma once

#include <optional>

#include "train/engine.h"
#include "train/loader.h"

namespace moebius {

struct EvalResult {
  double loss = 0;                        // nats per target token
  double tokens = 0;                      // targets that counted
  std::optional<double> bits_per_byte;    // of the text; only when each dataset says how many bytes it stands for
};

// One pass over the loader's data in order, at most max_batches micro-batches (0: all). Uses the engine's batch and saved tensors, and
// leaves its loss sum at zero: never call it between the micro-batches of a step.
EvalResult evaluate(Engine& engine, Loader& loader, int64_t max_batches);

}  // namespace moebius
