#include "model/catalog.h"

#include <algorithm>

#include "config/nearest.h"
#include "model/layers/precision_of.h"
#include "model/lora/adapter_params.h"
#include "model/lora/shared_a.h"
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

// Constructs all stages, which declare their parameters in `table`, and destroys them; the declarations remain.
void declare_stages(const CatalogSpec& c, const Mesh& mesh, MemoryPlan& plan, ParamTable& table) {
  const Tensor no_rope_table, no_loss_sum, no_mtp_loss_sum;
  const PrecisionSpec plain;  // names and shapes do not depend on it
  // The smallest micro-batch that every mesh can cut.
  const BatchShape shape{.batch = 1, .seq = 2 * mesh.shape().tp, .num_mtp = c.num_mtp};
  const StageContext context{.layers = {.params = table,
                                        .plan = plan,
                                        .model = c.model,
                                        .balance = c.balance,
                                        .mesh = mesh,
                                        .rope_table_Pd = no_rope_table,
                                        .precision = plain,
                                        .shape = shape,
                                        .dispatcher = DispatcherKind::allgather,  // any: none has parameters
                                        .lora = c.lora},
                             .loss_sum_1 = no_loss_sum,
                             .mtp_loss_sum_D = no_mtp_loss_sum};
  const std::vector<StageSpec> whole{whole_stage(c.model, c.holds_mtp)};
  for (const StageSpec& stage : c.stages.empty() ? whole : c.stages) Stage(context, stage);
}

// Returns all runs of `count` consecutive dotted parts of a name.
std::vector<std::string> runs_of_parts(const std::string& name, int64_t count) {
  std::vector<size_t> begins{0};
  for (size_t at = 0; (at = name.find('.', at)) != name.npos;) begins.push_back(++at);
  begins.push_back(name.size() + 1);  // as if the name ended with a dot
  std::vector<std::string> runs;
  for (int64_t i = 0; i + count < std::ssize(begins); ++i) {
    const size_t begin = begins[static_cast<size_t>(i)], end = begins[static_cast<size_t>(i + count)];
    runs.push_back(name.substr(begin, end - 1 - begin));
  }
  return runs;
}

// Returns the part of a name that is most like the pattern without the * and the dots at its ends. ends_only: the part
// is the end of the name.
std::string nearest_to_pattern(const std::string& pattern, const std::vector<std::string>& names,
                               bool ends_only = false) {
  const size_t begin = pattern.find_first_not_of("*."), end = pattern.find_last_not_of("*.");
  const std::string core = begin == pattern.npos ? pattern : pattern.substr(begin, end + 1 - begin);
  const int64_t count = std::count(core.begin(), core.end(), '.') + 1;
  std::string best = names.front(), its_name = best;
  for (const std::string& name : names) {
    for (const std::string& run : runs_of_parts(name, count)) {
      if (ends_only && !name.ends_with(run)) continue;
      if (edit_distance(core, run) >= edit_distance(core, best)) continue;
      best = run;
      its_name = name;
    }
  }
  return best == its_name ? best : fmt::format("{} of {}", best, its_name);
}

// Throws Error{usage} unless each of the patterns of a key matches a name.
void check_patterns(const char* key, const std::vector<std::string>& patterns, const std::vector<std::string>& names) {
  for (const std::string& pattern : patterns) {
    const bool found =
        std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches_any({pattern}, name); });
    MOEBIUS_CHECK(
        usage, found,
        "{}: expected patterns (*, ? and [classes]) of parameter names; \"{}\" matches none, the nearest is {}; "
        "correct it, or leave it out (moebius checkpoint ls MODEL lists the names)",
        key, pattern, nearest_to_pattern(pattern, names));
  }
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

namespace {

// Scales of quantised weights are not parameters of the model.
int64_t numel_of(const ModelCatalog::Entry& entry) {
  if (entry.spec.name.ends_with(scales_name(""))) return 0;
  int64_t count = 0;
  for (const ParamPart& part : entry.spec.parts) count += part.shape.numel();
  return count;
}

}  // namespace

int64_t ModelCatalog::num_trained() const {
  int64_t count = 0;
  for (const Entry& entry : params_) count += entry.spec.trainable ? numel_of(entry) : 0;
  return count;
}

int64_t ModelCatalog::num_frozen() const {
  int64_t count = 0;
  for (const Entry& entry : params_) count += entry.frozen ? numel_of(entry) : 0;
  return count;
}

std::vector<std::string> adaptable_matrices(const ModelSpec& model) {
  // A matrix can have an adapter if it gets one when everything is a target.
  const ModelCatalog with_all({.model = model, .holds_mtp = false, .lora = {.rank = 1, .targets = {"*"}}});
  std::vector<std::string> names;
  for (const ParamPart& part : with_all.parts()) {
    if (part.name.ends_with(kLoraA)) names.push_back(adapted_matrix(part.name));
  }
  return names;
}

namespace {

std::string without_weight(const std::string& target) {
  constexpr std::string_view kWeight = ".weight";
  return target.ends_with(kWeight) ? target.substr(0, target.size() - kWeight.size()) : target;
}

bool matches_one(const std::string& target, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return is_lora_target({target}, name); });
}

}  // namespace

void check_lora_targets(const ModelCatalog& whole, const LoraSpec& lora) {
  const std::vector<std::string> names = adaptable_matrices(whole.model());
  std::vector<std::string> gate_ups, adapted;
  for (const std::string& name : names)
    if (matrix_of_shared_a(name) != name) gate_ups.push_back(matrix_of_shared_a(name));
  for (const ParamPart& part : whole.parts())
    if (part.name.ends_with(kLoraA)) adapted.push_back(adapted_matrix(part.name));
  for (const std::string& target : lora.targets) {
    MOEBIUS_CHECK(
        usage, target != "all-linear",
        "lora.targets: expected patterns of the names of matrices; got \"all-linear\" of PEFT; write \"*\" for "
        "all matrices that can have an adapter, which are routers too");
    if (matches_one(target, adapted) || matches_one(target, names)) continue;
    MOEBIUS_CHECK(usage, !matches_one(target, gate_ups),
                  "lora.targets: \"{}\" gives gate_proj and up_proj of an expert one A for both, and another pattern "
                  "gives one of the two its own; remove one of these patterns",
                  target);
    MOEBIUS_FAIL(
        usage,
        "lora.targets: expected patterns (*, ? and [classes]) of the names of matrices, or of their ends after "
        "a dot, without .weight; \"{}\" matches none that can have an adapter, the nearest is {}; correct it, or leave "
        "it out",
        target, nearest_to_pattern(without_weight(target), names, /*ends_only=*/true));
  }
}

void check_keep(const ModelCatalog& whole, const std::vector<std::string>& patterns) {
  std::vector<std::string> names;
  for (const auto& [spec, frozen] : whole.params()) {
    if (spec.kind != ParamKind::matrix && spec.kind != ParamKind::experts) continue;
    for (const ParamPart& part : spec.parts) names.push_back(part.name);
  }
  check_patterns("precision.keep", patterns, names);
}

void check_freeze(const ModelCatalog& whole, const std::vector<std::string>& patterns) {
  std::vector<std::string> names;
  bool any_trained = false;
  for (const auto& [spec, frozen] : whole.params()) {
    any_trained = any_trained || spec.trainable;
    if (!spec.trainable && !frozen) continue;
    for (const ParamPart& part : spec.parts) names.push_back(part.name);
  }
  check_patterns("train.freeze", patterns, names);
  MOEBIUS_CHECK(usage, any_trained,
                "train.freeze: expected to leave something to train; got patterns that match every parameter; freeze "
                "less");
}

}  // namespace moebius
