// Times of products in bf16 and with the recipe fp8_block, measured on a Hopper GPU by
// `moebius bench precision` (docs/measurements/performance.md). They tell which products of a model the
// recipe would make slower, where a shape like the model's was timed.
#pragma once

#include <cstdint>

namespace moebius {

// The product of a linear map, or of the experts of a layer.
struct ProductShape {
  bool is_experts = false;
  int64_t rows = 0;         // tokens of a micro-batch; of experts the even share of one
  int64_t out = 0, in = 0;  // of the matrix; of experts that of gate and up
};

// Milliseconds of a pass in bf16 and with the recipe. Quantising is part of it.
struct PassPair {
  double plain_ms = 0, quantised_ms = 0;
  double ratio() const { return quantised_ms / plain_ms; }
};

struct MeasuredProduct {
  ProductShape shape;
  PassPair forward, backward_input, backward_weight;
};

inline constexpr const char* kMeasuredProductsGpu = "an H200";

// Those of the nearest shape that was timed; null where rows, out or in differ by a factor of more than 2 from all
// of them.
const MeasuredProduct* measured_product(const ProductShape& shape);

}  // namespace moebius
