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

// Returns the patterns of precision.keep that name all parts of a parameter.
std::string keep_text(const ParamSpec& spec) {
  std::vector<std::string> patterns;
  for (const ParamPart& part : spec.parts) {
    std::string pattern = fmt::format("\"{}\"", without_numbers(part.name));
    if (std::ranges::find(patterns, pattern) == patterns.end()) patterns.push_back(std::move(pattern));
  }
  return fmt::format("add {} to precision.keep", fmt::join(patterns, ", "));
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

// Returns why no kernel computes the products of a parameter with fp8_block on a GPU; empty if one does.
std::string why_not_in_blocks(const ModelSpec& model, const LoraSpec& lora, const ParamSpec& spec) {
  const int64_t rows = spec.shape[spec.shape.rank() - 2], columns = spec.shape[spec.shape.rank() - 1];
  const bool is_experts = spec.kind == ParamKind::experts;
  if (is_experts && (model.swiglu_limit != 0 || model.expert_proj_bias))
    return "experts without biases and without a clamp; got experts with them";
  if (!has_f8_products(spec.shape) || !has_f8_parts(model, spec))
    return fmt::format("rows and columns in multiples of 16; got {} x {}", rows, columns);
  const bool is_gated = spec.name.find("gate_up_proj") != std::string::npos, is_fused = is_experts || !lora.is_on();
  if (is_gated && is_fused && rows / 2 % 128 != 0)
    return fmt::format("an inner width in multiples of 128; got {}", rows / 2);
  return "";
}

bool is_hopper(const GpuFound& gpu) { return gpu.capability_major == 9 && gpu.capability_minor == 0; }

}  // namespace

void set_f8_kernels(RunSpec& run, const GpusFound& gpus, int64_t num_ranks) {
  const auto num = static_cast<size_t>(std::max<int64_t>(1, num_ranks));
  const std::span used = std::span(gpus.visible).first(std::min(num, gpus.visible.size()));
  const bool has = run.kernels == KernelChoice::automatic && std::ranges::all_of(used, is_hopper);
  run.precision.has_f8_kernels = run.precision.has_f8_kernels && has;
}

std::vector<std::string> quantised_products(const RunSpec& run) {
  if (run.precision.recipe == PrecisionRecipe::none) return {};
  Products all = products_of(run);
  std::vector<std::string> names = std::move(all.on_kernels);
  for (std::string& name : all.emulated) names.push_back(std::move(name));
  return names;
}

void check_quantised_products(const ModelSpec& model, const PrecisionSpec& precision, const LoraSpec& lora,
                              DeviceKind device) {
  const bool is_nvfp4 = precision.recipe == PrecisionRecipe::nvfp4,
             is_in_blocks = precision.recipe == PrecisionRecipe::fp8_block && device == DeviceKind::cuda;
  if (!is_nvfp4 && !is_in_blocks) return;
  const ModelCatalog catalog(model, model.num_mtp_layers > 0);
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const ParamSpec& spec = entry.spec;
    const ParamPart& part = spec.parts.front();
    if (!has_quantised_product(spec, part) || matches_any(precision.keep, part.name)) continue;
    const int64_t rows = spec.shape[spec.shape.rank() - 2], columns = spec.shape[spec.shape.rank() - 1];
    const std::string name = without_numbers(spec.name);
    MOEBIUS_CHECK(usage, !is_nvfp4 || (rows % 2 == 0 && columns % 2 == 0),
                  "precision.recipe = \"nvfp4\" stores two elements in a byte, so {} needs even rows and columns; got "
                  "{} x {}; change the width, or {}",
                  name, rows, columns, keep_text(spec));
    const std::string why = is_in_blocks ? why_not_in_blocks(model, lora, spec) : "";
    MOEBIUS_CHECK(usage, why.empty(),
                  "precision.recipe = \"fp8_block\" on a GPU: the products of {} need {}; {}, set the recipe to "
                  "\"fp8_tensor\", which emulates what no kernel computes, or set run.device = \"cpu\"",
                  name, why, keep_text(spec));
  }
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
