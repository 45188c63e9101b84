// The products of a model's projections and experts, timed in the dtype of the computation and
// quantised by the recipe of the run. A recipe pays only where its products are faster by more than
// quantising their operands takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/run_spec.h"

namespace moebius {

// Medians of the passes of a layer, as a micro-batch runs them: activations and gradients are quantised in their
// passes, and the two backward passes follow each other, so that one pass may quantise what both read.
//
// backward_input has operands of weight gradients that are not quantised, and backward_weight is the rest of both
// passes. So quantising these operands is part of backward_weight, whichever pass does it: it has no time of its own.
// backward_input and both passes run in turns, and backward_weight is the median of the differences between two runs
// that follow each other. Where noise makes that negative, it is 0.
// backward_weight is a mean over the micro-batches of a step, the first of which stores what the others add.
// Experts that compute a micro-batch in chunks (model/moe/chunked_experts.h) are timed with one chunk. Their times are
// those of all chunks, without the index of rows that each chunk makes.
struct PassTimes {
  double forward_ms = 0, backward_input_ms = 0, backward_weight_ms = 0;
  double total_ms() const { return forward_ms + backward_input_ms + backward_weight_ms; }
};

// Returns the median of whole - part over runs in turns, [run]; 0 where that is negative.
double median_of_rest(const std::vector<double>& part_ms, const std::vector<double>& whole_ms);

// All projections of one shape, or all layers of experts.
struct PrecisionLine {
  std::string name;      // name of the first one
  std::string shape;     // "[4096, 2048]"
  int64_t rows = 0;      // rows of its products; for experts, the even share of one expert
  int64_t count = 1;     // how many the model has
  bool is_kept = false;  // true if precision.keep names it: never quantised, so it is timed once
  PassTimes plain, quantised;
  double weights_ms = 0;  // quantising the weights, once a step
  // Returns the time of a micro-batch with the recipe, relative to the time without.
  double ratio(int64_t micro_batches) const {
    return (quantised.total_ms() + weights_ms / static_cast<double>(micro_batches)) / plain.total_ms();
  }
};

struct PrecisionBench {
  PrecisionRecipe recipe = PrecisionRecipe::none;
  int64_t rows = 0, micro_batches = 1;  // rows of a micro-batch; micro-batches of a step
  std::vector<PrecisionLine> lines;
  // Returns the time of a micro-batch through all that are not kept, in relation to the time without the recipe.
  double ratio() const;
};

// Times each distinct projection and the experts of the model, one after another, with memory for one
// at a time. Tokens are routed evenly. runs: as in BenchSpec.
// Throws Error{usage} for a recipe "none", and the errors of the layers.
PrecisionBench bench_precision(const RunSpec& run, int64_t runs);

}  // namespace moebius
