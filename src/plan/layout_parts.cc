#include <algorithm>

#include "plan/memory/rank_memory.h"
#include "plan/part.h"

namespace moebius {
namespace {

// Returns whether layers of a kind may differ, since a pattern names some of them.
bool names_layers(const EngineSpec& spec) {
  const auto has_layer = [](const std::string& pattern) { return pattern.find("layers") != pattern.npos; };
  const auto any = [&](const auto& patterns) { return std::any_of(patterns.begin(), patterns.end(), has_layer); };
  return any(spec.freeze) || any(spec.lora.targets) || any(spec.precision.keep);
}

EngineSpec with_offload(EngineSpec spec, const OffloadSpec& offload) {
  spec.offload = offload;
  return spec;
}

// Returns the offload for a part of one layer, whose tensors are all moved.
OffloadSpec whole(OffloadSpec offload) {
  offload.fraction = 1;
  return offload;
}

}  // namespace

LayoutParts::LayoutParts(PartLibrary& library, const EngineSpec& spec)
    : library_(library),
      spec_(spec),
      policy_(library.policy_of(spec)),
      names_layers_(names_layers(spec)),
      is_offloaded_(static_cast<size_t>(spec.model.num_layers)),
      splits_(static_cast<size_t>(spec.model.num_layers)),
      layers_(static_cast<size_t>(spec.model.num_layers)) {
  if (spec.offload.any()) {
    on_device_ = with_offload(spec, {});
    on_host_ = with_offload(spec, whole(spec.offload));
  }
  find_split_stages();
  if (!spec.freeze.empty()) find_lowest_trained();
  if (spec.offload.any()) choose_offloaded();
}

void LayoutParts::find_split_stages() {
  if (spec_.mesh.pp == 1) return;
  StageLayout layout;  // made when a stage is found
  for (int64_t r = 0; r < spec_.mesh.pp; ++r) {
    const std::vector<bool>& splits = pipeline(r).splits;
    if (std::find(splits.begin(), splits.end(), true) == splits.end()) continue;
    if (layout.stages.empty()) layout = stages_of(spec_);
    for (int64_t v = 0; v < layout.num_virtual(); ++v) {
      if (!splits[static_cast<size_t>(v)]) continue;
      const StageSpec& stage = layout.at(r, v);
      split_stages_.push_back(stage);
      std::fill_n(splits_.begin() + stage.first_layer, stage.num_layers, true);
    }
  }
}

// Does the same as Stage::find_lowest_trained() of the first stage.
void LayoutParts::find_lowest_trained() {
  const StageSpec first = stages_of(spec_).stages.front();
  const PartWork& of_ends = ends(first);
  if (of_ends.params.front().has_grad || of_ends.rows.pages_of_pass > 0) return;
  const auto is_trained = [&](int64_t i) {
    const std::vector<ParamSize>& params = layer(i).params;
    return std::any_of(params.begin(), params.end(), [](const ParamSize& p) { return p.has_grad; });
  };
  while (first_backward_ < first.num_layers && !is_trained(first_backward_)) ++first_backward_;
}

void LayoutParts::choose_offloaded() {
  for (const StageSpec& stage : stages_of(spec_).stages) {
    const int64_t first = std::max(stage.first_layer, first_backward_),
                  n = stage.first_layer + stage.num_layers - first;
    for (int64_t i = 0; i < n; ++i) is_offloaded_[static_cast<size_t>(first + i)] = spec_.offload.moves(i, n);
  }
  std::fill(layers_.begin(), layers_.end(), nullptr);
}

const PartWork& LayoutParts::layer(int64_t layer) {
  const PartWork*& own = layers_[static_cast<size_t>(layer)];
  if (own) return *own;
  const ModelSpec& m = spec_.model;
  const auto is_alike = [&](int64_t other) {
    return m.is_moe_layer(other) == m.is_moe_layer(layer) && m.window_of(other) == m.window_of(layer) &&
           is_offloaded_[static_cast<size_t>(other)] == is_offloaded_[static_cast<size_t>(layer)] &&
           splits_[static_cast<size_t>(other)] == splits_[static_cast<size_t>(layer)] &&
           (spec_.recompute.ranges.empty() || spec_.recompute.of(other) == spec_.recompute.of(layer));
  };
  int64_t first = names_layers_ ? layer : 0;  // the layer that represents its kind
  while (first < layer && !is_alike(first)) ++first;
  const PartWork*& part = layers_[static_cast<size_t>(first)];
  const std::optional<EngineSpec>& moved = is_offloaded_[static_cast<size_t>(layer)] ? on_host_ : on_device_;
  if (!part)
    part =
        &part_of(moved ? *moved : spec_, {.first_layer = first, .num_layers = 1}, splits_[static_cast<size_t>(layer)]);
  own = part;
  return *part;
}

const PartWork& LayoutParts::ends(const StageSpec& stage) {
  const bool splits = std::find(split_stages_.begin(), split_stages_.end(), stage) != split_stages_.end();
  StageSpec ends = stage;
  ends.first_layer = ends.num_layers = 0;
  for (const Ends& known : ends_)
    if (known.stage == ends && known.splits == splits) return *known.part;
  ends_.push_back({ends, splits, &part_of(on_device_ ? *on_device_ : spec_, ends, splits)});
  return *ends_.back().part;
}

const PartWork& LayoutParts::part_of(const EngineSpec& spec, const StageSpec& stage, bool splits) {
  return times_only_ ? library_.timed_part(spec, stage, policy_, splits) : library_.part(spec, stage, policy_, splits);
}

}  // namespace moebius
