// Where a canonical parameter lies in a Hugging Face folder, whichever of the layouts for experts its writer chose:
//
//   one tensor per expert and projection   [I, H] or [H, I]        the hub's layout
//   fused, out before in   mlp.experts.gate_up_proj [E, 2I, H] (gate rows, then up rows), down_proj [E, H, I]
//   fused, in before out   mlp.experts.gate_up_proj [E, H, 2I], down_proj [E, I, H]
//   of gpt_oss             fused, or in 4-bit blocks, as hub/fused_experts.h says, and no other
//
// A source is a strided view of the tensor on disk, so the loader copies without knowing layouts. A matrix in 8-bit
// floats, whose "{name}_scale_inv" [ceil(rows / block), ceil(cols / block)] (f32) multiplies its blocks, is delivered
// in f32, one in 4-bit blocks with their scales in bf16, which holds it exactly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "hub/hf_folder.h"
#include "hub/hf_names.h"
#include "hub/packed_weights.h"

namespace moebius {

// Element [r, c] of the parameter, seen as rows x cols, is element offset + r * row_stride + c * col_stride on disk.
struct TensorSource {
  std::string hf_name;
  DType dtype = DType::f32;  // of what read_tensor gives: as on disk, unless there are scales
  int64_t rows = 0, cols = 0;
  int64_t offset = 0, row_stride = 0, col_stride = 1;
  std::string scale_name;  // of the tensor with the scales; empty: none
  WeightPacking packing;
};

struct WantedTensor {
  std::string name;            // canonical
  std::vector<int64_t> shape;  // of the parameter
  int64_t num_experts = 0;     // of the layer; only read for expert tensors
};

// Error{input} when the folder has no such tensor, has it in two layouts, has another shape, and for packed numbers
// without their scales. A fused tensor whose shape fits both orientations (2I == H or I == H) lies as the other one of
// its layer, whose shape then fits one alone; Error{input} without it, and where the two disagree. In gpt_oss the kind
// of file says the orientation, whatever the shape.
TensorSource locate_tensor(const HfFolder& folder, HfFamily family, const WantedTensor& wanted);

// Rows [row_begin, row_end) and columns [col_begin, col_end) of it.
TensorSource part_of(const TensorSource& source, int64_t row_begin, int64_t row_end, int64_t col_begin,
                     int64_t col_end);

// rows * cols elements of source.dtype, row by row. Reads this part of the tensor, not the others. Error{input} for a
// scale that is not a number.
void read_tensor(const HfFolder& folder, const TensorSource& source, void* dst);

}  // namespace moebius
