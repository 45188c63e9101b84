// Times of products in bf16 and with fp8_block or fp8_tensor, measured on a Hopper GPU by `moebius bench precision`
// (docs/measurements/precision.md). A run uses them to warn of products that the recipe makes slower.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "config/policy_spec.h"

namespace moebius {

// The product of a linear layer, or of the experts of an MoE layer.
struct ProductShape {
  bool is_experts = false;
  int64_t rows = 0;         // tokens of a micro-batch; for experts, the even share of one expert
  int64_t out = 0, in = 0;  // shape of the matrix; for experts, of gate and up
};

// Milliseconds of a pass in bf16, and with the recipe including quantisation.
struct PassPair {
  double plain_ms = 0, quantised_ms = 0;
  double ratio() const { return quantised_ms / plain_ms; }
};

struct MeasuredProduct {
  ProductShape shape;
  PassPair forward, backward_input;
  std::optional<PassPair> backward_weight;  // empty: this pass was not timed with the present kernels
};

inline constexpr const char* kMeasuredProductsGpu = "an H200";

// The products that were measured with a recipe; none for the recipes that are emulated.
// tools/measured_products.py writes these rows from `bench precision --json`.
std::span<const MeasuredProduct> measured_products(PrecisionRecipe recipe);

// Returns the product with the nearest shape; null if rows, out or in differ by a factor of more than 2 from every
// product of `all`.
const MeasuredProduct* measured_product(const ProductShape& shape, std::span<const MeasuredProduct> all);

}  // namespace moebius
