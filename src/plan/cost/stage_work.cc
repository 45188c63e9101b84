#include "plan/cost/stage_work.h"

#include <algorithm>
#include <utility>

namespace moebius {
namespace {

// The parts of a stage.
struct StageParts {
  // Neighbouring layers that are alike.
  struct Layers {
    const PartWork* part = nullptr;
    int64_t count = 1;
    bool has_backward = true, is_moe = false;
    bool is_like(const Layers& o) const { return part == o.part && has_backward == o.has_backward; }
    bool operator==(const Layers&) const = default;
  };
  const PartWork* ends = nullptr;
  bool mtp_is_moe = false, norm = false;
  std::vector<Layers> layers;
  bool operator==(const StageParts&) const = default;
};

StageParts parts_of(const ModelSpec& model, LayoutParts& parts, const StageSpec& stage) {
  const bool has_mtp = stage.num_mtp > 0 && parts.spec().shape.num_mtp > 0;
  StageParts all{
      .ends = &parts.ends(stage), .mtp_is_moe = has_mtp && model.is_moe_layer(model.num_layers), .norm = stage.norm};
  for (int64_t layer = stage.first_layer; layer < stage.first_layer + stage.num_layers; ++layer) {
    const StageParts::Layers one{.part = &parts.layer(layer),
                                 .has_backward = layer >= parts.first_backward(),
                                 .is_moe = model.is_moe_layer(layer)};
    if (!all.layers.empty() && all.layers.back().is_like(one))
      ++all.layers.back().count;
    else
      all.layers.push_back(one);
  }
  return all;
}

StageWork work_of(const TimeContext& c, const StageParts& parts, PartTimes& times) {
  StageWork work;
  const auto add = [&](const PartTime& t, int64_t count, bool has_backward) {
    const double n = static_cast<double>(count);
    work.forward.add(t.forward, n);
    work.forward.add(t.loss, n);
    work.copies.add(t.copies, n);
    if (!has_backward) return;
    work.backward.add(t.backward, n);
    work.backward_weight.add(t.backward_weight, n);
    work.stored_first.add(t.stored_first, n);
  };
  const PartTime* last = nullptr;
  for (const StageParts::Layers& l : parts.layers) {
    last = &times.of(c, *l.part, l.is_moe, true);
    add(*last, l.count, l.has_backward);
  }
  if (last && !parts.norm) work.forward += last->leave;
  work.layers_forward = work.forward;
  add(times.of(c, *parts.ends, parts.mtp_is_moe, false), 1, true);
  return work;
}

}  // namespace

StageWorks stage_works(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, PartTimes& times) {
  StageWorks works;
  works.kind_of_.reserve(layout.stages.size());
  std::vector<StageParts> known;  // of works.kinds_
  for (const StageSpec& stage : layout.stages) {
    StageParts own = parts_of(c.spec.model, parts, stage);
    const auto found = std::find(known.begin(), known.end(), own);
    works.kind_of_.push_back(static_cast<size_t>(found - known.begin()));
    if (found != known.end()) continue;
    works.kinds_.push_back(work_of(c, own, times));
    known.push_back(std::move(own));
  }
  return works;
}

double exposed_copies(const TimeContext& c, const StageWork& stage, double bytes, double copies_back) {
  const double passes = static_cast<double>(c.spec.num_micro_batches * c.spec.pipeline.num_virtual);
  const double merged = c.assume.merged_overlap ? merged_passes(c.spec) / passes : 0;
  const auto at_rate = [&](double link) {
    const double copy = bytes / link;
    return std::max(0.0, copy - stage.forward.total()) + std::max(0.0, copies_back * copy - stage.backward.total());
  };
  return (1 - merged) * at_rate(c.machine.one_way_link()) + merged * at_rate(c.machine.link_gb_s * 1e9);
}

}  // namespace moebius
