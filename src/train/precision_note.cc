#include "train/precision_note.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "model/catalog.h"
#include "model/layers/precision_of.h"

namespace moebius {
namespace {

// A product of the model for which a similar shape was timed.
struct Timed {
  std::string name;  // of the first matrix of its shape
  const MeasuredProduct* figures;
};

ProductShape shape_of(const RunSpec& run, const ParamSpec& spec) {
  const int64_t T = run.train.micro_batch * run.train.seq_len / run.parallel.cp;
  const int rank = spec.shape.rank();
  const bool is_experts = spec.kind == ParamKind::experts;
  const int64_t rows = is_experts ? T * run.model.top_k / run.model.num_experts : T;
  return {.is_experts = is_experts,
          .rows = std::max<int64_t>(rows, 1),
          .out = spec.shape[rank - 2],
          .in = spec.shape[rank - 1]};
}

// Experts are listed by their first matrix.
std::vector<Timed> timed_products(const RunSpec& run, std::span<const MeasuredProduct> measured) {
  std::vector<Timed> all;
  std::set<const MeasuredProduct*> seen;
  const ModelCatalog catalog(run.model, run.num_mtp() > 0);
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const ParamSpec& spec = entry.spec;
    if (!has_quantised_product(spec, spec.parts.front())) continue;
    if (spec.kind == ParamKind::experts && !spec.name.ends_with(".experts.gate_up_proj")) continue;
    if (matches_any(run.precision.keep, spec.parts.front().name)) continue;
    const MeasuredProduct* figures = measured_product(shape_of(run, spec), measured);
    if (figures && seen.insert(figures).second) all.push_back({spec.name, figures});
  }
  return all;
}

// Returns the time of all passes that were timed with the recipe, relative to bf16.
double ratio(const MeasuredProduct& f, WeightGradientPrecision weight_gradients) {
  const PassPair dw = f.backward_weight.value_or(PassPair{});
  const double dw_ms = weight_gradients == WeightGradientPrecision::recipe ? dw.quantised_ms : dw.plain_ms;
  return (f.forward.quantised_ms + f.backward_input.quantised_ms + dw_ms) /
         (f.forward.plain_ms + f.backward_input.plain_ms + dw.plain_ms);
}

}  // namespace

std::optional<StartNote> precision_note(const RunSpec& run, std::span<const MeasuredProduct> measured) {
  const PrecisionRecipe recipe = run.precision.recipe;
  const bool is_emulated = run.kernels == KernelChoice::portable || !run.precision.has_f8_kernels;
  if (run.device != DeviceKind::cuda || recipe == PrecisionRecipe::none || is_emulated ||
      run.parallel.tp * run.parallel.etp > 1)
    return std::nullopt;
  std::vector<std::string> slower, slower_gradients;
  for (const Timed& product : timed_products(run, measured)) {
    const double all = ratio(*product.figures, run.precision.weight_gradients);
    const auto& dw = product.figures->backward_weight;
    const double gradients = dw ? dw->ratio() : 0;
    if (all > 1) slower.push_back(fmt::format("{} {:.2f}", product.name, all));
    if (run.precision.weight_gradients == WeightGradientPrecision::recipe && gradients > 1)
      slower_gradients.push_back(fmt::format("{} {:.2f}", product.name, gradients));
  }
  const auto note = [&](const char* what, const std::vector<std::string>& names, const char* advice) {
    return StartNote{fmt::format("precision.recipe = \"{}\": {} took more time than in bf16 on {}, in shapes like "
                                 "these: {} times; {}, or time yours with `moebius bench precision`",
                                 name_of(recipe), what, kMeasuredProductsGpu, fmt::join(names, ", "), advice),
                     /*is_warning=*/true};
  };
  if (!slower.empty()) return note("products", slower, "name them in precision.keep");
  if (!slower_gradients.empty())
    return note("gradients of weights", slower_gradients, "set precision.weight_gradients = \"compute\"");
  return std::nullopt;
}

std::optional<StartNote> precision_note(const RunSpec& run) {
  return precision_note(run, measured_products(run.precision.recipe));
}

}  // namespace moebius
