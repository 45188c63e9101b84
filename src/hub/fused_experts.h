// Fused expert tensors, which hold all experts of a layer. Checkpoints of some families have no
// other form. Those of gpt_oss are:
//
//   mlp.experts.gate_up_proj [E, H, 2I], gate_up_proj_bias [E, 2I]   columns alternate between gate and up
//   mlp.experts.down_proj [E, I, H], down_proj_bias [E, H]
//
// Tensors of 4-bit weights (MXFP4) are transposed, and their rows alternate between gate and up:
//   mlp.experts.gate_up_proj_blocks [E, 2I, H / 32, 16], _scales [E, 2I, H / 32]
//   mlp.experts.down_proj_blocks    [E, H, I / 32, 16], ...
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hub/hf_names.h"

namespace moebius {

// The place of an expert's tensor in the fused one.
// Element [r, c] of the expert's tensor, viewed as rows x cols, is element offset + r * row_stride +
// c * col_stride of the fused one.
struct FusedPlace {
  std::string name;
  std::vector<int64_t> shape;
  int64_t rows = 0, cols = 0;
  int64_t offset = 0, row_stride = 0, col_stride = 1;
};

// Returns the place of one expert's tensor, given its canonical name and its own shape ([I, H] or
// [H, I]; biases [I] or [H]).
// Returns nothing for other tensors, and for families whose checkpoints have tensors per expert.
std::optional<FusedPlace> fused_place(HfFamily family, const std::string& canonical, const std::vector<int64_t>& shape,
                                      int64_t num_experts);
// Returns the place in 4-bit blocks, counted in numbers as if rows of numbers were stored, [E, 2I,
// H] and [E, H, I]. REQUIRES: not a bias.
FusedPlace packed_place(const ExpertName& expert, const std::vector<int64_t>& shape, int64_t num_experts);

// Copies an expert's tensor, row by row, into a part of the fused one. `fused` holds the elements
// from `first` on.
void put_into_fused(void* fused, const void* own, const FusedPlace& place, int64_t first, int64_t element_bytes);
// Copies it out of the whole fused tensor.
void take_from_fused(void* own, const void* fused, const FusedPlace& place, int64_t element_bytes);

}  // namespace moebius
