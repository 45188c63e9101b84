#include "model/gpu_products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <span>
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

Products products_of(const RunSpec& run) {
  Products all;
  const ModelCatalog catalog(run.model, run.num_mtp() > 0);
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const ParamSpec& spec = entry.spec;
    const ParamPart& part = spec.parts.front();
    if (!has_quantised_product(spec, part) || matches_any(run.precision.keep, part.name)) continue;
    const bool is_on_kernels = gpu_products_of(run.precision, run.model, spec) == GpuProducts::f8_kernels;
    std::vector<std::string>& names = is_on_kernels ? all.on_kernels : all.emulated;
    const std::string name = without_numbers(spec.name);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return all;
}

bool is_hopper(const GpuFound& gpu) { return gpu.capability_major == 9 && gpu.capability_minor == 0; }

}  // namespace

void set_f8_kernels(RunSpec& run, const GpusFound& gpus, int64_t num_ranks) {
  const auto num = static_cast<size_t>(std::max<int64_t>(1, num_ranks));
  const std::span used = std::span(gpus.visible).first(std::min(num, gpus.visible.size()));
  const bool has = run.kernels == KernelChoice::automatic && std::ranges::all_of(used, is_hopper);
  run.precision.has_f8_kernels = run.precision.has_f8_kernels && has;
}

std::string gpu_products_text(const RunSpec& run, bool knows_gpus) {
  if (!is_emulated(run.precision.recipe, run.device, GpuProducts::emulated)) return "";
  const std::string recipe = fmt::format("precision.recipe = \"{}\"", name_of(run.precision.recipe)),
                    how = fmt::format("operands are quantised, and multiplied in {}", name_of(run.precision.compute));
  Products products;
  if (run.precision.recipe == PrecisionRecipe::fp8_tensor) products = products_of(run);
  if (products.on_kernels.empty())
    return fmt::format("{} is emulated on a GPU: {}; a step takes more time than without a recipe", recipe, how);
  const std::string kernels =
                        knows_gpus ? ": Hopper's FP8 kernels compute" : " on a Hopper GPU: its FP8 kernels compute",
                    others = knows_gpus ? "" : "; on other GPUs all are emulated";
  if (products.emulated.empty())
    return fmt::format("{}{} all quantised products{}{}", recipe, kernels, others,
                       knows_gpus ? "" : fmt::format(" ({})", how));
  return fmt::format("{}{} the products of {}; emulated ({}): {}{}", recipe, kernels,
                     fmt::join(products.on_kernels, ", "), how, fmt::join(products.emulated, ", "), others);
}

}  // namespace moebius
