// Low-rank adapters (Hu et al., LoRA, arXiv 2106.09685). A matrix W of the model computes
//   y = W x + (alpha / rank) B (A x)       A [rank, in], B [out, rank]
// and training changes A and B alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

// The format of the frozen matrices of projections and experts while adapters are trained.
enum class LoraBase {
  compute,    // in the dtype of the computation
  fp8_block,  // E4M3 with an f32 scale for each block of 128 x 128 (core/quantized.h, square_blocks)
  mxfp4,      // routed experts in E2M1 with a scale for each 32 elements of a row (mx_blocks)
};

struct LoraSpec {    // [lora]
  int64_t rank = 0;  // 0: no adapters; the model itself is trained
  double alpha = 8.0;
  double dropout = 0.0;  // dropout of the input of A in training: the probability that an element is 0
  // Patterns (* and ?) of names of matrices, or of their ends after a dot (model/lora/adapter_params.h).
  std::vector<std::string> targets = {};
  std::string init_from = {};  // a folder that weights/adapter.h can read; empty: A is random and B zero
  LoraBase base = LoraBase::compute;
  bool is_on() const { return rank > 0; }
  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  bool operator==(const LoraSpec&) const = default;
};

}  // namespace moebius
