#include "model/catalog.h"

#include <algorithm>

#include "config/nearest.h"
#include "model/stage.h"

namespace moebius {

StageSpec whole_stage(const ModelSpec& model, bool with_mtp) {
  return {.embedding = true,
          .num_layers = model.num_layers,
          .norm = true,
          .num_mtp = with_mtp ? model.num_mtp_layers : 0,
          .loss = true};
}

std::vector<std::string> with_idle_modules(std::vector<std::string> freeze, const ModelSpec& model, int64_t num_mtp) {
  for (int64_t layer = model.num_layers; num_mtp == 0 && layer < model.num_layers_and_mtp(); ++layer)
    freeze.push_back(fmt::format("model.layers.{}.*", layer));
  return freeze;
}

namespace {

// The stages declare into `table`; they are dropped, and what they declared stays.
void declare_stages(const CatalogSpec& c, const Mesh& mesh, MemoryPlan& plan, ParamTable& table) {
  const Tensor no_rope_table, no_loss_sum, no_mtp_loss_sum;
  // The smallest micro-batch that every mesh can cut.
  const BatchShape shape{.batch = 1, .seq = 2 * mesh.shape().tp, .num_mtp = c.num_mtp};
  const StageContext context{.layers = {.params = table,
                                        .plan = plan,
                                        .model = c.model,
                                        .balance = c.balance,
                                        .mesh = mesh,
                                        .rope_table_Pd = no_rope_table,
                                        .shape = shape},
                             .loss_sum_1 = no_loss_sum,
                             .mtp_loss_sum_D = no_mtp_loss_sum};
  const std::vector<StageSpec> whole{whole_stage(c.model, c.holds_mtp)};
  for (const StageSpec& stage : c.stages.empty() ? whole : c.stages) Stage(context, stage);
}

}  // namespace

ModelCatalog::ModelCatalog(const CatalogSpec& c)
    : model_(c.model), holds_mtp_(c.holds_mtp && c.model.num_mtp_layers > 0) {
  const Mesh one_rank{MeshShape{}};
  MemoryPlan plan;
  ParamTable table(plan, c.use, with_idle_modules(c.freeze, c.model, c.num_mtp));
  declare_stages(c, c.mesh ? *c.mesh : one_rank, plan, table);
  for (const Param& p : table.all()) {
    params_.push_back({.spec = p.spec, .frozen = p.frozen});
    parts_.insert(parts_.end(), p.spec.parts.begin(), p.spec.parts.end());
  }
}

ModelCatalog::ModelCatalog(const ModelSpec& model, bool holds_mtp)
    : ModelCatalog(CatalogSpec{.model = model, .holds_mtp = holds_mtp}) {}

void check_freeze(const ModelCatalog& whole, const std::vector<std::string>& patterns) {
  std::vector<std::string> names;
  bool any_trained = false;
  for (const auto& [spec, frozen] : whole.params()) {
    any_trained = any_trained || spec.trainable;
    if (!spec.trainable && !frozen) continue;
    for (const ParamPart& part : spec.parts) names.push_back(part.name);
  }
  for (const std::string& pattern : patterns) {
    const bool found =
        std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches_any({pattern}, name); });
    MOEBIUS_CHECK(usage, found,
                  "train.freeze: expected patterns (*, ? and [classes]) of parameter names; \"{}\" matches none, the "
                  "nearest is {}",
                  pattern, nearest(pattern, names));
  }
  MOEBIUS_CHECK(usage, any_trained,
                "train.freeze: expected to leave something to train; got patterns that match every parameter; freeze "
                "less");
}

}  // namespace moebius
