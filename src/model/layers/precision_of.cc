#include "model/layers/precision_of.h"

#include "core/rng.h"

namespace moebius {
namespace {

bool is_kept(const LayerContext& c, const ParamSpec& spec) {
  const std::string *in = nullptr, *out = nullptr;
  const auto sort = [&](const std::string& name) { (matches_any(c.precision.keep, name) ? in : out) = &name; };
  for (const ParamPart& part : spec.parts) sort(part.name);
  if (spec.parts.empty()) sort(spec.name);
  MOEBIUS_CHECK(usage, !in || !out,
                "precision.keep: expected patterns that match all parts of {} or none; got some that match {} and not "
                "{}; they are one product, keep them together",
                spec.name, *in, *out);
  return in != nullptr;
}

void check_split(PrecisionRecipe recipe, const ParamPart& part) {
  if (part.shard.dim < 0) return;
  const int64_t multiple = split_multiple(recipe), whole = part.shape[part.shard.dim];
  const bool fits = multiple > 0 && part.shard.count % multiple == 0;
  MOEBIUS_CHECK(usage, fits,
                "precision.recipe = \"{}\" has {} that ranks cannot share: the {} {} of {} are split into {}; choose a "
                "smaller parallel.tp or etp, or add the name to precision.keep",
                name_of(recipe), multiple == 0 ? "a scale for each tensor" : fmt::format("blocks of {}", multiple),
                whole, part.shard.dim == 0 ? "rows" : "columns", part.name, part.shard.count);
}

}  // namespace

ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts) {
  if (c.precision.recipe == PrecisionRecipe::none || is_kept(c, spec)) return {};
  for (const ParamPart& part : spec.parts) check_split(c.precision.recipe, part);
  return {c.precision.recipe, c.seed, key_of(spec.name.c_str()), experts};
}

}  // namespace moebius
