#include "precision/measured_products.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moebius {
namespace {

// Measured with Qwen3-30B-A3B and 32768 tokens in a micro-batch, at 13dbb2f: q, k and v; o; the experts of a layer.
// The kernel of weight gradients is newer than these times, so the last pair is empty.
constexpr std::array kFp8Block = {
    MeasuredProduct{{false, 32768, 5120, 2048}, {0.837, 0.609}, {0.844, 0.662}, {}},
    MeasuredProduct{{false, 32768, 2048, 4096}, {0.680, 0.533}, {0.684, 0.505}, {}},
    MeasuredProduct{{true, 2048, 1536, 2048}, {4.070, 2.910}, {4.377, 3.616}, {}},
};

// Measured likewise on 2026-11-28, with weight gradients (docs/measurements/precision.md, "Times of products").
constexpr std::array kFp8Tensor = {
    MeasuredProduct{{false, 32768, 5120, 2048}, {0.858, 0.613}, {0.862, 0.697}, PassPair{0.883, 0.872}},
    MeasuredProduct{{false, 32768, 2048, 4096}, {0.686, 0.564}, {0.689, 0.517}, PassPair{0.672, 0.658}},
    MeasuredProduct{{true, 2048, 1536, 2048}, {3.586, 2.784}, {3.770, 3.269}, PassPair{3.489, 4.284}},
};

// Returns the largest of the ratios of two shapes' sizes, as a power of two.
double distance(const ProductShape& a, const ProductShape& b) {
  const auto apart = [](int64_t x, int64_t y) {
    return std::abs(std::log2(static_cast<double>(x) / static_cast<double>(y)));
  };
  return std::max({apart(a.rows, b.rows), apart(a.out, b.out), apart(a.in, b.in)});
}

}  // namespace

std::span<const MeasuredProduct> measured_products(PrecisionRecipe recipe) {
  if (recipe == PrecisionRecipe::fp8_block) return kFp8Block;
  if (recipe == PrecisionRecipe::fp8_tensor) return kFp8Tensor;
  return {};
}

const MeasuredProduct* measured_product(const ProductShape& shape, std::span<const MeasuredProduct> all) {
  const MeasuredProduct* nearest = nullptr;
  for (const MeasuredProduct& product : all) {
    if (product.shape.is_experts != shape.is_experts || distance(product.shape, shape) > 1) continue;
    if (!nearest || distance(product.shape, shape) < distance(nearest->shape, shape)) nearest = &product;
  }
  return nearest;
}

}  // namespace moebius
