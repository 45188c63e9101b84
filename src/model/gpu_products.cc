#include "model/gpu_products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <vector>

#include "model/catalog.h"
#include "model/layers/precision_of.h"

namespace moebius {
namespace {

// The name with "*" in place of each number between dots.
std::string without_numbers(const std::string& name) {
  std::string text;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool is_number = !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c); });
    text += (begin > 0 ? "." : "") + (is_number ? "*" : part);
    begin = end + 1;
  }
  return text;
}

struct Products {
  std::vector<std::string> on_kernels, emulated;  // names of parameters, each once
};

Products products_of(const RunSpec& run, const PrecisionSpec& precision) {
  Products all;
  const ModelCatalog catalog(run.model, run.num_mtp() > 0);
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const ParamSpec& spec = entry.spec;
    if (spec.parts.empty() || (spec.kind != ParamKind::matrix && spec.kind != ParamKind::experts)) continue;
    if (matches_any(precision.keep, spec.parts.front().name)) continue;
    const bool is_on_kernels = gpu_products_of(precision, run.model, spec) == GpuProducts::f8_kernels;
    std::vector<std::string>& names = is_on_kernels ? all.on_kernels : all.emulated;
    const std::string name = without_numbers(spec.name);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return all;
}

}  // namespace

std::string gpu_products_text(const RunSpec& run, bool has_hopper) {
  if (!is_emulated(run.precision.recipe, run.device)) return "";
  const char* recipe = name_of(run.precision.recipe);
  const std::string how = fmt::format("operands are quantised, and multiplied in {}", name_of(run.precision.compute));
  Products products;
  if (run.precision.recipe == PrecisionRecipe::fp8_tensor) {
    PrecisionSpec precision = run.precision;
    precision.has_f8_kernels = has_hopper && run.kernels == KernelChoice::automatic;
    products = products_of(run, precision);
  }
  if (products.on_kernels.empty()) {
    return fmt::format(
        "precision.recipe = \"{}\" is emulated on a GPU: {}; a step takes more time than without a recipe", recipe,
        how);
  }
  if (products.emulated.empty())
    return fmt::format("precision.recipe = \"{}\": Hopper's FP8 kernels compute all quantised products", recipe);
  return fmt::format("precision.recipe = \"{}\": Hopper's FP8 kernels compute the products of {}; emulated ({}): {}",
                     recipe, fmt::join(products.on_kernels, ", "), how, fmt::join(products.emulated, ", "));
}

}  // namespace moebius
