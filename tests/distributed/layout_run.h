// A tiny model trained on the ranks of a world under one layout, and what came out as global numbers, so that layouts
// can be compared with one rank.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "comm/transport/transport.h"
#include "config/parallel_spec.h"
#include "engine/engine.h"
#include "train/metrics.h"

namespace moebius {

// What is trained; the layout changes nothing of it.
struct LayoutModel {
  bool skewed = false;      // two experts get every token, the others none
  bool sigmoid = false;     // sigmoid scores, groups and a correction bias that moves, in place of softmax
  bool tied = false;        // head and embedding are one
  bool latent_qkv = false;  // latent attention, with a latent of queries
  bool latent_kv = false;   // the same without
  // What looks at all tokens of a micro-batch, in place of the auxiliary losses or beside them.
  bool capacity = false;   // experts turn late pairs away; by weight, rounding would choose among equal tokens
  bool by_weight = false;  // experts turn light pairs away, of tokens that are all different in a micro-batch
  bool sinkhorn = false;
  bool jitter = false;
  int64_t mtp = 0;       // depths of multi-token prediction
  bool latent = false;   // latent attention
  bool gpt_oss = false;  // sinks, a window in every other layer, biases, the clamped activation, in every layer experts
  bool latent_bias = false;  // latent_qkv with attention_bias
  bool clipped = false;      // q and k normed over all heads, clip_qkv and attention_bias, as an olmoe may have
  bool whole_norm = false;   // q and k normed over all heads, of which ranks share them
  std::vector<std::string> freeze = {};  // patterns of parameters that are not trained
  auto operator<=>(const LayoutModel&) const = default;
};

// For LayoutModel::freeze: parts of every kind; all that the first of two stages has; the table that two ends share;
// modules behind the model and what is theirs alone in it; small weights.
inline const std::vector<std::string> kParts = {"model.layers.0.*", "model.layers.1.mlp.experts.*",
                                                "model.layers.2.self_attn.o_proj.weight",
                                                "model.layers.3.mlp.gate.weight", "*norm*"},
                                      kStage = {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"},
                                      kTable = {"model.embed_tokens.weight", "model.layers.2.*"},
                                      kAhead = {"model.embed_tokens.weight", "model.layers.4.*",
                                                "model.layers.5.eh_proj.weight"},
                                      kSmall = {"*.sinks", "*.bias"};

struct LayoutOutcome {
  std::vector<StepReport> steps;
  // By global name, whole: f32 masters of what is trained, router state. After the first step and after the last.
  std::map<std::string, std::vector<float>> first, last;
  // train_alone: the smallest gap of a choice of experts (choice_gap.h).
  double choice_gap = std::numeric_limits<double>::infinity();
};

// How the steps run; the numbers are the same, of one device.
struct LayoutWay {
  bool overlap = true;
  RecomputeSpec recompute = {};
  DeviceKind device = DeviceKind::cpu;
  bool graph = true;
};

// The engine of a rank, its first weights, and a step of it, counted from 1.
EngineSpec layout_engine_spec(Transport& world, const LayoutModel& what, const ParallelSpec& layout,
                              const LayoutWay& way = {});
void init_layout(Engine& engine, const LayoutModel& what);
StepReport layout_step(Engine& engine, const LayoutModel& what, int64_t step);

// All ranks of the world, of which the layout must make a mesh; the same outcome on each. Fails (EXPECT) when a rank's
// weights are not what their owners have, or a frozen one has changed.
LayoutOutcome train_on(Transport& world, const LayoutModel& what, const ParallelSpec& layout, int64_t num_steps,
                       const LayoutWay& way = {});
LayoutOutcome train_alone(const LayoutModel& what, int64_t num_steps);

// The same numbers, but for the order of f32 sums. bound: relative, of losses and norms; parameters in relative L2.
void expect_same(const LayoutOutcome& got, const LayoutOutcome& alone);
void expect_same_step(const StepReport& got, const StepReport& alone, double bound);

// Of runs that differ in their way alone: weights, losses and norms have the same bits.
void expect_same_bits(const LayoutOutcome& got, const LayoutOutcome& expected);

}  // namespace moebius
