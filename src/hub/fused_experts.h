// The tensors of all experts of a layer in one, of families whose checkpoints have no others. gpt_oss:
//
//   mlp.experts.gate_up_proj [E, H, 2I], whose columns are a gate and an up in turn    gate_up_proj_bias [E, 2I], alike
//   mlp.experts.down_proj    [E, I, H]                                                 down_proj_bias    [E, H]
//
// and with 4-bit weights (MXFP4), which lie the other way round, rows of a gate and an up in turn:
//   mlp.experts.gate_up_proj_blocks [E, 2I, H / 32, 16], _scales [E, 2I, H / 32]
//   mlp.experts.down_proj_blocks    [E, H, I / 32, 16], ...
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hub/hf_names.h"

namespace moebius {

// Element [r, c] of the expert's own tensor, seen as rows x cols, is element offset + r * row_stride + c * col_stride
// of the fused one.
struct FusedPlace {
  std::string name;
  std::vector<int64_t> shape;
  int64_t rows = 0, cols = 0;
  int64_t offset = 0, row_stride = 0, col_stride = 1;
};

// Of a tensor of one expert under its canonical name, of the shape that it has on its own ([I, H] or [H, I]; biases [I]
// or [H]). Nothing for other tensors, and for families whose checkpoints have tensors per expert.
std::optional<FusedPlace> fused_place(HfFamily family, const std::string& canonical, const std::vector<int64_t>& shape,
                                      int64_t num_experts);
// The same in 4-bit blocks: as if rows of numbers lay there, [E, 2I, H] and [E, H, I]. REQUIRES: not a bias.
FusedPlace packed_place(const ExpertName& expert, const std::vector<int64_t>& shape, int64_t num_experts);

// An expert's own tensor, row by row, into the fused one, of which `fused` holds the elements from `first` on.
void put_into_fused(void* fused, const void* own, const FusedPlace& place, int64_t first, int64_t element_bytes);

}  // namespace moebius
