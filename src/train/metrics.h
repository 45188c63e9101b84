// The metrics of a step: a JSON object per line in metrics.jsonl, and the same numbers as TensorBoard scalars.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace moebius {

struct MoeLayerReport {
  int64_t layer = 0;
  std::vector<int64_t> load;  // tokens sent to each expert in the global batch, before any drop
  double load_max_over_mean = 0;
  double aux_loss = 0;  // balance losses, coefficient included
  double z_loss = 0;
  double entropy = 0;   // mean over tokens, nats
  int64_t dropped = 0;  // token-expert pairs
};

struct StepReport {
  int64_t step = 0;
  double loss = 0;                  // token cross-entropy alone, mean over the targets of the global batch
  double aux_loss = 0, z_loss = 0;  // the other terms of the objective, each summed over the layers
  double mtp_loss = 0;              // multi-token prediction, mean over its depths, without its coefficient
  double grad_norm = 0, lr = 0;
  double tokens = 0;  // tokens of the global batch
  double step_time_s = 0;
  double model_tflops_per_rank = 0;
  double expert_load_max_over_mean = 0;  // mean over the MoE layers; 1 is perfect balance
  int64_t dropped_tokens = 0;            // token-expert pairs, all layers
  int64_t memory_peak_bytes = 0;
  std::optional<int64_t> offload_bytes;  // with memory.offload: activations that this rank copied to the host
  // With a budget of expert rows (memory.expert_rows).
  struct ExpertRowsReport {
    int64_t spilled_rows = 0;     // rows that backward recomputed, over all ranks
    double spill_time_s = 0;      // seconds of this recomputation on the slowest rank
    double peak_over_budget = 0;  // the most rows that any rank had to keep at a time, relative to the budget
  };
  std::optional<ExpertRowsReport> expert_rows;
  // With log.precision, of the operands that quantising made in a layer, on all ranks: the number of elements that
  // are not zero, shares of them, and the range of their scales (ops/quantize/quantize.h).
  struct PrecisionReport {
    int64_t layer = 0;
    double elements = 0;
    double saturated = 0, zeroed = 0, scale_min = 0, scale_max = 0;
  };
  std::vector<PrecisionReport> precision;
  // With optimizer.qk_clip, of all layers.
  struct QkClipReport {
    int64_t clipped_heads = 0;  // query heads that had a logit above the threshold
    double max_logit = 0;       // the largest logit of all heads, or 0 if all are negative
  };
  std::optional<QkClipReport> qk_clip;
  std::vector<MoeLayerReport> layers;
};

// Reads the sums of the engine's last step. Call it before Engine::end_of_step(), on all ranks together. The numbers
// are those of all ranks, and the same on each, except for time and memory.
StepReport read_step(Engine& engine, double step_time_s);

nlohmann::ordered_json to_json(const StepReport& report);

}  // namespace moebius
