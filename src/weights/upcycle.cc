#include "weights/upcycle.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "config/hf/keys.h"
#include "model/device_support.h"
#include "weights/load.h"
#include "weights/upcycled_weights.h"

namespace moebius {
namespace {

std::string family_of_experts(const ModelSpec& dense) {
  if (dense.family == "llama" || dense.family == "mistral") return "mixtral";
  if (dense.family == "qwen2") return "qwen2_moe";
  if (dense.family == "qwen3") return "qwen3_moe";
  MOEBIUS_FAIL(input, "upcycle: expected a dense model of type llama, mistral, qwen2 or qwen3; got {}; choose another",
               dense.family);
}

void check_counts(const ModelSpec& dense, const UpcycleSpec& spec) {
  const int64_t E = spec.num_experts, G = spec.granularity, F = dense.intermediate_size;
  MOEBIUS_CHECK(usage, G > 0 && F % G == 0,
                "upcycle: expected a granularity that divides intermediate_size = {}; got {}; choose another", F, G);
  MOEBIUS_CHECK(usage, E > 0 && E % G == 0,
                "upcycle: expected a number of experts that is a multiple of granularity = {}; got {}; choose another",
                G, E);
  MOEBIUS_CHECK(usage, spec.top_k > 0 && spec.top_k <= E,
                "upcycle: expected top-k in [1, {}], the experts; got {}; choose another", E, spec.top_k);
}

// Refuses a dense model with a feature that its family of experts has no key for.
void check_carried(const ModelSpec& dense, const ModelSpec& moe) {
  const auto sliding = std::count(dense.sliding_layers.begin(), dense.sliding_layers.end(), true);
  MOEBIUS_CHECK(input, sliding == 0 || has_hf_key(moe.family, "layer_types"),
                "upcycle: expected a {} whose layers all have the sliding window or all have none, as those of {} do; "
                "got {} of {} layers with a window of {}; for sequences of at most {} tokens the window makes no "
                "difference, set use_sliding_window to false in config.json",
                dense.family, moe.family, sliding, dense.num_layers, dense.sliding_window, dense.sliding_window);
  MOEBIUS_CHECK(input, !dense.o_bias || has_hf_key(moe.family, "attention_bias"),
                "upcycle: expected a {} without biases in attention, as {} is; "
                "got attention_bias = true; choose another model",
                dense.family, moe.family);
}

// The keys of the dense family must not stay in the config.json of another family.
JsonObject source_without_model(const ModelSpec& dense) {
  if (!dense.source) return {};
  nlohmann::json source = *dense.source;
  for (const HfKey& key : hf_keys()) {
    if (has_hf_key(dense.family, key.name)) source.erase(key.name);
  }
  for (const char* of_class : {"architectures", "auto_map"}) source.erase(of_class);
  return source;
}

}  // namespace

ModelSpec upcycled_model(const ModelSpec& dense, const UpcycleSpec& spec) {
  MOEBIUS_CHECK(input, dense.num_moe_layers() == 0, "upcycle: expected a dense model; got {} with {} experts; train it",
                dense.family, dense.num_experts);
  ModelSpec moe = dense;
  moe.family = family_of_experts(dense);
  check_counts(dense, spec);
  moe.moe_layers.assign(dense.num_layers, true);
  moe.num_experts = spec.num_experts;
  moe.top_k = spec.top_k;
  moe.moe_intermediate_size = dense.intermediate_size / spec.granularity;
  moe.norm_topk_prob = true;
  if (moe.family == "mixtral") moe.intermediate_size = 0;
  if (moe.family == "qwen2_moe") {
    moe.shared_intermediate_size = moe.moe_intermediate_size;
    moe.shared_expert_gate = true;
  }
  moe.source = source_without_model(dense);
  check_carried(dense, moe);
  moe.check();
  return moe;
}

UpcycleResult upcycle(const UpcycleSpec& spec) {
  const WeightsFolder from = find_weights(spec.model);
  const ModelSpec dense = read_model_spec(from.path), moe = upcycled_model(dense, spec);
  check_device(moe, DeviceKind::cpu, {});
  const std::unique_ptr<WeightsReader> reader = open_weights(from, ModelCatalog(dense, /*holds_mtp=*/false));
  const UpcycledWeights weights(*reader, ModelCatalog(moe, /*holds_mtp=*/false), spec);
  const HubFolderResult folder = write_hub_folder({.out = spec.out,
                                                   .model = moe,
                                                   .weights = weights,
                                                   .files = other_files_of(from),
                                                   .shard_bytes = spec.shard_bytes,
                                                   .should_stop = spec.should_stop});
  return {.folder = folder, .model = moe};
}

}  // namespace moebius
