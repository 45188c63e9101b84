// The loss on held-out data.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "train/loader.h"

namespace moebius {

struct DatasetLoss {
  std::string prefix;
  double loss = 0;                      // nats per target token
  double tokens = 0;                    // targets that counted
  std::optional<double> bits_per_byte;  // bits per byte of the text, if PREFIX.json has the number of bytes
};

// The totals weight datasets by their size: all nats over all tokens, and all bits over all bytes of text.
struct EvalResult {
  double loss = 0;
  double tokens = 0;                    // targets that counted, a whole number
  int64_t num_left_out = 0;             // targets at the datasets' ends that fill no sequence
  std::optional<double> bits_per_byte;  // only if each dataset has it
  std::vector<DatasetLoss> datasets;    // in the loader's order
  bool complete = true;                 // false: stopped, and the numbers cover what was read until then
};

// Evaluates each of the loader's datasets, whatever its weight: every sequence once, in order, at most max_batches
// micro-batches per dataset (0: all). Uses the engine's batch and saved tensors, and leaves its loss sum at zero, so it
// must not be called between the micro-batches of a step. The dp ranks take micro-batches round-robin. All ranks call
// it together and get the same result. stop: called before each round of micro-batches, the same on all ranks.
EvalResult evaluate(Engine& engine, Loader& loader, int64_t max_batches, const std::function<bool()>& stop = {});

}  // namespace moebius
