// Times of products in bf16 and with the recipe fp8_block, measured on a Hopper GPU by
// `moebius bench precision` (docs/measurements/performance.md). A run uses them to warn of products that the
// recipe makes slower.
#pragma once

#include <cstdint>

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
  PassPair forward, backward_input, backward_weight;
};

inline constexpr const char* kMeasuredProductsGpu = "an H200";

// Returns the product with the nearest shape; null if rows, out or in differ by a factor of more than 2 from every
// measured product.
const MeasuredProduct* measured_product(const ProductShape& shape);

}  // namespace moebius
