#include "precision/measured_products.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moebius {
namespace {

// Measured with `moebius bench precision` on one H200, 2026-11-29 (docs/measurements/precision.md, "Times of
// products"). Experts of few rows are bound by the sums of their gradients in memory.
constexpr std::array kFp8Block = {
    // bench_qwen3_30b_a3b_8layers, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 5120, 2048}, {0.862, 0.620}, {0.863, 0.673}, PassPair{0.876, 0.777}},
    MeasuredProduct{{false, 32768, 2048, 4096}, {0.688, 0.539}, {0.692, 0.508}, PassPair{0.673, 0.569}},
    MeasuredProduct{{true, 2048, 1536, 2048}, {3.570, 2.855}, {3.746, 3.269}, PassPair{3.464, 3.337}},
    // bench_olmoe_1b_7b, 16384 tokens in a micro-batch
    MeasuredProduct{{false, 16384, 6144, 2048}, {0.519, 0.380}, {0.516, 0.404}, PassPair{0.514, 0.426}},
    MeasuredProduct{{false, 16384, 2048, 2048}, {0.180, 0.156}, {0.182, 0.156}, PassPair{0.170, 0.167}},
    MeasuredProduct{{true, 2048, 2048, 2048}, {2.301, 1.829}, {2.471, 2.097}, PassPair{2.319, 2.094}},
    // bench_qwen3_30b_a3b_8layers, 4096 tokens in a micro-batch
    MeasuredProduct{{false, 4096, 5120, 2048}, {0.119, 0.091}, {0.114, 0.098}, PassPair{0.115, 0.119}},
    MeasuredProduct{{false, 4096, 2048, 4096}, {0.092, 0.079}, {0.096, 0.076}, PassPair{0.098, 0.092}},
    MeasuredProduct{{true, 256, 1536, 2048}, {0.514, 0.425}, {0.589, 0.480}, PassPair{1.961, 1.626}},
    // mixtral_8x7b, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 6144, 4096}, {2.027, 1.383}, {2.036, 1.430}, PassPair{2.035, 1.499}},
    MeasuredProduct{{false, 32768, 4096, 4096}, {1.369, 0.960}, {1.370, 0.959}, PassPair{1.350, 1.032}},
    MeasuredProduct{{true, 8192, 28672, 4096}, {30.428, 20.372}, {30.808, 22.305}, PassPair{37.049, 20.082}},
    // bench_dense_3b, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 2560, 2048}, {0.433, 0.347}, {0.435, 0.350}, PassPair{0.432, 0.510}},
    MeasuredProduct{{false, 32768, 2048, 2048}, {0.352, 0.290}, {0.379, 0.290}, PassPair{0.304, 0.313}},
    MeasuredProduct{{false, 32768, 22016, 2048}, {3.660, 2.457}, {3.643, 2.843}, PassPair{3.696, 2.903}},
    MeasuredProduct{{false, 32768, 2048, 11008}, {1.838, 1.482}, {1.867, 1.269}, PassPair{1.862, 1.546}},
    // moe_one_gpu, 65536 tokens in a micro-batch; its experts compute in chunks, and both gradients together
    MeasuredProduct{{false, 65536, 1536, 1024}, {0.277, 0.263}, {0.271, 0.271}, PassPair{0.257, 0.310}},
    MeasuredProduct{{false, 65536, 1024, 1024}, {0.190, 0.198}, {0.191, 0.198}, PassPair{0.168, 0.220}},
};

constexpr std::array kFp8Tensor = {
    // bench_qwen3_30b_a3b_8layers, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 5120, 2048}, {0.865, 0.612}, {0.861, 0.698}, PassPair{0.875, 0.836}},
    MeasuredProduct{{false, 32768, 2048, 4096}, {0.686, 0.563}, {0.694, 0.509}, PassPair{0.674, 0.639}},
    MeasuredProduct{{true, 2048, 1536, 2048}, {3.573, 2.778}, {3.757, 3.275}, PassPair{3.457, 4.170}},
    // bench_olmoe_1b_7b, 16384 tokens in a micro-batch
    MeasuredProduct{{false, 16384, 6144, 2048}, {0.520, 0.377}, {0.514, 0.423}, PassPair{0.517, 0.469}},
    MeasuredProduct{{false, 16384, 2048, 2048}, {0.180, 0.165}, {0.182, 0.166}, PassPair{0.168, 0.204}},
    MeasuredProduct{{true, 2048, 2048, 2048}, {2.304, 1.764}, {2.472, 2.102}, PassPair{2.312, 2.625}},
    // bench_qwen3_30b_a3b_8layers, 4096 tokens in a micro-batch
    MeasuredProduct{{false, 4096, 5120, 2048}, {0.119, 0.090}, {0.113, 0.103}, PassPair{0.114, 0.141}},
    MeasuredProduct{{false, 4096, 2048, 4096}, {0.094, 0.085}, {0.095, 0.077}, PassPair{0.097, 0.104}},
    MeasuredProduct{{true, 256, 1536, 2048}, {0.515, 0.405}, {0.593, 0.495}, PassPair{1.961, 1.726}},
    // mixtral_8x7b, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 6144, 4096}, {2.036, 1.349}, {2.067, 1.406}, PassPair{2.006, 1.556}},
    MeasuredProduct{{false, 32768, 4096, 4096}, {1.367, 0.950}, {1.372, 0.955}, PassPair{1.350, 1.095}},
    MeasuredProduct{{true, 8192, 28672, 4096}, {30.371, 18.952}, {30.895, 21.176}, PassPair{37.238, 22.549}},
    // bench_dense_3b, 32768 tokens in a micro-batch
    MeasuredProduct{{false, 32768, 2560, 2048}, {0.435, 0.362}, {0.440, 0.373}, PassPair{0.429, 0.449}},
    MeasuredProduct{{false, 32768, 2048, 2048}, {0.351, 0.309}, {0.354, 0.309}, PassPair{0.335, 0.373}},
    MeasuredProduct{{false, 32768, 22016, 2048}, {3.671, 2.367}, {3.645, 2.888}, PassPair{3.738, 3.035}},
    MeasuredProduct{{false, 32768, 2048, 11008}, {1.852, 1.453}, {1.853, 1.230}, PassPair{1.869, 1.531}},
    // moe_one_gpu, 65536 tokens in a micro-batch
    MeasuredProduct{{false, 65536, 1536, 1024}, {0.278, 0.282}, {0.271, 0.303}, PassPair{0.257, 0.389}},
    MeasuredProduct{{false, 65536, 1024, 1024}, {0.192, 0.221}, {0.191, 0.222}, PassPair{0.167, 0.290}},
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
