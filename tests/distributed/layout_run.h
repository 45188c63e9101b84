// Trains a tiny model on the ranks of a world under one layout. The results are global numbers, so
// that layouts can be compared with one rank.
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

// The model to train, which is the same for every layout.
struct LayoutModel {
  bool skewed = false;      // two experts get every token, the others none
  bool sigmoid = false;     // sigmoid scores, groups and a correction bias that is updated, instead of softmax
  bool tied = false;        // head and embedding share one table
  bool latent_qkv = false;  // latent attention, with a latent for queries
  bool latent_kv = false;   // latent attention without it
  // These depend on all tokens of a micro-batch, and replace the auxiliary losses or join them.
  bool capacity = false;   // experts drop late pairs; by weight, rounding would choose among equal tokens
  bool by_weight = false;  // experts drop light pairs; all tokens of a micro-batch differ
  bool sinkhorn = false;
  bool jitter = false;
  int64_t mtp = 0;           // depths of multi-token prediction
  bool latent = false;       // latent attention
  bool gpt_oss = false;      // sinks, a window in every other layer, biases, clamped activation, experts in every layer
  bool latent_bias = false;  // latent_qkv with attention_bias
  bool clipped = false;      // q and k normed over all heads, clip_qkv and attention_bias, as an olmoe may have
  bool whole_norm = false;   // q and k normed over all heads, which are divided over ranks
  std::vector<std::string> freeze = {};  // patterns of parameters that are not trained
  bool lora = false;                     // adapters beside every matrix that can have one; nothing else is trained
  bool dropout = false;                  // of the input of adapters
  int64_t seq = 8, sequences = 24;       // tokens of a sequence; sequences of a global batch
  // Products of a recipe. The widths are such that two ranks of tp, and two of etp, split no block. The gradients of
  // weights are not quantised by default, since their blocks are of the tokens that a rank computes together.
  bool quantised = false;
  PrecisionRecipe recipe = PrecisionRecipe::fp8_block;
  WeightGradientPrecision weight_gradients = WeightGradientPrecision::compute;
  std::vector<std::string> keep = {};  // quantised: patterns of parameters whose products are not
  uint64_t seed = 0;                   // of the weights; 0: that of layout_seed
  bool wide = false;                   // the widths of quantised, which tensor cores take
  bool narrow_rows = false;            // quantised: rows are sent to experts in 8 bits
  bool held_in_8_bits = false;         // quantised: weights are held and exchanged in 8 bits
  bool saved_in_8_bits = false;        // quantised: pre-activations are saved in 8 bits
  auto operator<=>(const LayoutModel&) const = default;
};

// Patterns for LayoutModel::freeze: parts of every kind; everything on the first of two stages; layers of one kind
// below the lowest trained parameter, which share what they save; the table that both ends share; the modules after the
// model and the parts of it that only they use; small weights.
inline const std::vector<std::string> kParts = {"model.layers.0.*", "model.layers.1.mlp.experts.*",
                                                "model.layers.2.self_attn.o_proj.weight",
                                                "model.layers.3.mlp.gate.weight", "*norm*"},
                                      kStage = {"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.*"},
                                      kBelow = {"model.embed_tokens.weight", "model.layers.[0-2].*"},
                                      kTable = {"model.embed_tokens.weight", "model.layers.2.*"},
                                      kAhead = {"model.embed_tokens.weight", "model.layers.4.*",
                                                "model.layers.5.eh_proj.weight"},
                                      kSmall = {"*.sinks", "*.bias"};

struct LayoutOutcome {
  std::vector<StepReport> steps;
  // Whole tensors by global name: f32 masters of trained parameters, and router state. `first` is
  // after the first step, `last` after the last.
  std::map<std::string, std::vector<float>> first, last;
  // train_alone: the smallest gap of a choice of experts (choice_gap.h).
  double choice_gap = std::numeric_limits<double>::infinity();
};

// Settings of the run of the steps. On one kind of device, they do not change the numbers, but for the last two
// and num_micro_batches.
struct LayoutWay {
  bool overlap = true;
  RecomputeSpec recompute = {};
  OffloadSpec offload = {};
  DeviceKind device = DeviceKind::cpu;
  bool graph = true;
  double expert_rows = 0;  // the budget of rows of experts
  DType compute = DType::f32;
  KernelChoice kernels = KernelChoice::automatic;  // of a GPU
  bool fsdp = false;                               // sharded weights of layers
  // Sharded sums of gradients. The numbers are the same where each rank has one micro-batch.
  bool shard_gradients = false;
  int64_t num_micro_batches = 0;  // of a step on each rank; 0: those of the whole global batch
  int64_t fsdp_shard = 0;         // ranks that share a layer; changes no bit
  bool offload_weights = false;   // weights of layers are on the host; changes no bit
  double qk_clip = 0;             // changes the numbers
  // Sequences of a micro-batch; 0: two. With a number the loss `aux`, which is defined on a micro-batch, is left out.
  int64_t micro_batch = 0;
};

inline constexpr int64_t kLayoutVocab = 60;

ModelSpec layout_model_spec(const LayoutModel& what);
// Returns the seed of the weights, with which no choice of experts is near a tie on one rank.
uint64_t layout_seed(const LayoutModel& what);

// Returns the layout with other work during the exchanges of MoE layers, which must give the same bits.
inline ParallelSpec with_expert_overlap(ParallelSpec layout) {
  layout.expert_overlap = ExpertOverlap::layer;
  return layout;
}

// These give the engine of a rank, its first weights, and one of its steps, counted from 1.
EngineSpec layout_engine_spec(Transport& world, const LayoutModel& what, const ParallelSpec& layout,
                              const LayoutWay& way = {});
void init_layout(Engine& engine, const LayoutModel& what);
StepReport layout_step(Engine& engine, const LayoutModel& what, int64_t step);

// Runs on all ranks of the world, of which the layout must make a mesh. The outcome is the
// same on each. Fails (EXPECT) when ranks report different numbers, a rank's weights are not those
// of their owners, or a frozen one has changed.
LayoutOutcome train_on(Transport& world, const LayoutModel& what, const ParallelSpec& layout, int64_t num_steps,
                       const LayoutWay& way = {});
LayoutOutcome train_alone(const LayoutModel& what, int64_t num_steps);

// Trains two short steps, for runs that are compared with each other and not with one rank: the second step computes
// with the weights of the first, and each has enough micro-batches to fill a pipeline.
LayoutOutcome train_briefly(Transport& world, const LayoutModel& what, const ParallelSpec& layout, LayoutWay way = {});

// Returns the element of the global tensor that is element `local` of a part.
int64_t flat_index(const ParamPart& part, int64_t local);

// Expects the same numbers up to the order of f32 sums. bound: relative, for losses and norms;
// parameters by relative L2.
void expect_same(const LayoutOutcome& got, const LayoutOutcome& alone);
void expect_same_step(const StepReport& got, const StepReport& alone, double bound);

// Expects the same bits of weights, losses and norms, for runs that differ in their LayoutWay only.
void expect_same_bits(const LayoutOutcome& got, const LayoutOutcome& expected);

}  // namespace moebius
