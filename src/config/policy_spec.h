// Policies of a step: precision, which changes rounding; recompute and offload, which change no bit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace moebius {

// The format of the quantised operands of matrix products (precision/product_precision.h).
enum class PrecisionRecipe : uint8_t {
  none,        // the dtype of the computation
  fp8_block,   // E4M3, scales of 1 x 128 elements, of 128 x 128 in weights and in x of dW
  fp8_tensor,  // E4M3, gradients E5M2, one scale per tensor
  mxfp8,       // E4M3, scales of 1 x 32 elements
  nvfp4,       // E2M1, scales of 1 x 16 elements, of 16 x 16 in weights, and one scale per tensor
};

inline constexpr std::pair<const char*, PrecisionRecipe> kPrecisionRecipeNames[] = {
    {"none", PrecisionRecipe::none},
    {"fp8_block", PrecisionRecipe::fp8_block},
    {"fp8_tensor", PrecisionRecipe::fp8_tensor},
    {"mxfp8", PrecisionRecipe::mxfp8},
    {"nvfp4", PrecisionRecipe::nvfp4}};

constexpr const char* name_of(PrecisionRecipe recipe) { return kPrecisionRecipeNames[static_cast<int>(recipe)].first; }

// The operands of the products that compute weight gradients.
enum class WeightGradientPrecision : int {
  recipe,   // quantised as the recipe says
  compute,  // in the dtype of precision.compute
};

inline constexpr std::pair<const char*, WeightGradientPrecision> kWeightGradientPrecisionNames[] = {
    {"recipe", WeightGradientPrecision::recipe}, {"compute", WeightGradientPrecision::compute}};

// The format of data that may be stored or sent either in precision.compute or in the format of the recipe.
enum class PrecisionChoice : int { compute, recipe };

inline constexpr std::pair<const char*, PrecisionChoice> kPrecisionChoiceNames[] = {
    {"compute", PrecisionChoice::compute}, {"recipe", PrecisionChoice::recipe}};

struct PrecisionSpec {
  DType compute = DType::bf16;  // f32 | bf16; master weights, gradients and optimizer state are f32
  PrecisionRecipe recipe = PrecisionRecipe::none;
  WeightGradientPrecision weight_gradients = WeightGradientPrecision::recipe;
  PrecisionChoice weights = PrecisionChoice::compute;  // dtype of quantised products' weights, in training
  bool weight_copies = true;  // quantised copies of weights are kept for a step; otherwise each use makes them
  PrecisionChoice dispatch = PrecisionChoice::compute;     // rows that are sent to experts
  PrecisionChoice activations = PrecisionChoice::compute;  // pre-activations of gated layers, kept for backward
  std::vector<std::string> keep;  // patterns of parameter names whose products are not quantised
  // Not a key: whether a GPU of the run has kernels for FP8 products; only Hopper has, with run.kernels = "auto".
  // Without them fp8_tensor is emulated.
  bool has_f8_kernels = true;
  // Returns whether the products of weight gradients have operands of the dtype of computation.
  bool has_plain_dw() const {
    return recipe == PrecisionRecipe::none || weight_gradients == WeightGradientPrecision::compute;
  }
  bool operator==(const PrecisionSpec&) const = default;
};

struct RecomputeSpec;

// One name of memory.recompute for a range of layers. Modules of multi-token prediction count as layers after the last.
struct RecomputeRange {
  bool RecomputeSpec::*what = nullptr;
  int64_t first = 0, last = 0;
  bool operator==(const RecomputeRange&) const = default;
};

// The tensors that backward recomputes instead of reading them from memory. This changes no bit; a step needs less
// memory and more time.
struct RecomputeSpec {
  bool norm = false;                   // outputs of a layer's norms
  bool qkv = false;                    // queries, keys and values: the outputs of their projection
  bool mla_up_proj = false;            // the part of qkv that latent attention computes from its latents
  bool attention = false;              // attention's output
  bool mlp = false;                    // pre-activations of dense feed-forward layers
  bool shared_expert = false;          // pre-activations of shared experts, and their gated output
  bool expert_up = false;              // pre-activations of the experts
  bool layer = false;                  // all of these, and the residual stream between attention and feed-forward
  std::vector<RecomputeRange> ranges;  // what some layers recompute in addition

  // Returns the names that apply to a layer, without ranges.
  RecomputeSpec of(int64_t layer) const;
  // Returns whether the names, without ranges, cover the tensors of the name `what`.
  bool covers(bool RecomputeSpec::*what) const {
    return layer || this->*what || (what == &RecomputeSpec::mla_up_proj && qkv);
  }
  bool operator==(const RecomputeSpec&) const = default;
};

// The names of these fields in memory.recompute.
inline constexpr std::pair<const char*, bool RecomputeSpec::*> kRecomputeNames[] = {
    {"norm", &RecomputeSpec::norm},
    {"qkv", &RecomputeSpec::qkv},
    {"mla_up_proj", &RecomputeSpec::mla_up_proj},
    {"attention", &RecomputeSpec::attention},
    {"mlp", &RecomputeSpec::mlp},
    {"shared_expert", &RecomputeSpec::shared_expert},
    {"expert_up", &RecomputeSpec::expert_up},
    {"layer", &RecomputeSpec::layer}};

inline RecomputeSpec RecomputeSpec::of(int64_t layer) const {
  RecomputeSpec own = *this;
  own.ranges.clear();
  for (const RecomputeRange& range : ranges)
    if (range.first <= layer && layer <= range.last) own.*range.what = true;
  return own;
}

// The activations that are offloaded to host memory between the forward and the backward pass of their layer
// (memory/activation_offload.h). A recomputed tensor is never offloaded.
struct OffloadSpec {
  bool layer_input = false;  // the residual stream before a layer
  // Tensors by their names in memory.recompute, without ranges. `layer` means all of them, layer_input, and the
  // residual stream between attention and feed-forward.
  RecomputeSpec tensors;
  double fraction = 1.0;  // fraction of the layers of a stage that are offloaded: above 0, at most 1

  bool any() const { return layer_input || tensors != RecomputeSpec{}; }
  bool covers(bool RecomputeSpec::*what) const { return tensors.covers(what); }
  bool covers_layer_input() const { return layer_input || tensors.layer; }
  // Returns whether layer i of a stage of n layers is offloaded. ceil(fraction * n) layers are, spread evenly from the
  // first one on, so that the copies of a layer overlap with the layers that follow it.
  bool moves(int64_t i, int64_t n) const { return i < n && any() && num_moved(i + 1) > num_moved(i); }
  bool operator==(const OffloadSpec&) const = default;

 private:
  // Returns how many of the first n layers are offloaded. (A millionth of a layer is a rounding error of the fraction.)
  int64_t num_moved(int64_t n) const {
    const double exact = fraction * static_cast<double>(n);
    const auto whole = static_cast<int64_t>(exact);
    return exact - static_cast<double>(whole) > 1e-6 ? whole + 1 : whole;
  }
};

// The name of OffloadSpec::layer_input in memory.offload; the other names are kRecomputeNames.
inline constexpr const char* kLayerInputName = "layer_input";

struct MemorySpec {
  RecomputeSpec recompute;
  OffloadSpec offload;
  bool automatic = false;  // chooses recompute so that a rank needs at most fit_bytes (plan/memory/fit_memory.h)
  int64_t fit_bytes = 0;   // device memory of a rank; 0: no limit
  // Planned rows of a rank's experts over the even share; 0: the worst case of any routing (model/moe/expert_rows.h).
  // Empty: "auto", which expert_rows_budget() resolves (config/check/expert_rows_bound.h).
  std::optional<double> expert_rows;
  bool operator==(const MemorySpec&) const = default;
};

}  // namespace moebius
