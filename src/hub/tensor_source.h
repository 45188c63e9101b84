// Finds the tensor of a canonical parameter in a Hugging Face folder, which may store experts as:
//
//   one tensor per expert and projection   [I, H] or [H, I]        the hub's layout
//   fused, out before in   mlp.experts.gate_up_proj [E, 2I, H] (gate rows, then up rows),
//                          mlp.experts.down_proj [E, H, I]
//   fused, in before out   mlp.experts.gate_up_proj [E, H, 2I], mlp.experts.down_proj [E, I, H]
//   gpt_oss only           fused, or in 4-bit blocks (hub/fused_experts.h)
//
// A source is a strided view of the tensor on disk, so the loader copies without knowing layouts.
// A matrix of 8-bit floats is delivered in f32. The tensor "{name}_scale_inv" [ceil(rows / block),
// ceil(cols / block)] (f32, bf16 or f16) multiplies its blocks.
// A matrix of 4-bit blocks with scales is delivered in bf16, which holds it exactly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/quantized.h"
#include "hub/hf_folder.h"
#include "hub/hf_names.h"
#include "hub/packed_weights.h"

namespace moebius {

// Element [r, c] of the parameter, viewed as rows x cols, is element offset + r * row_stride + c *
// col_stride on disk.
struct TensorSource {
  std::string hf_name;
  DType dtype = DType::f32;  // the dtype that read_tensor writes: the one on disk, unless there are scales
  int64_t rows = 0, cols = 0;
  int64_t offset = 0, row_stride = 0, col_stride = 1;
  std::string scale_name;  // the tensor of scales; empty if there is none
  WeightPacking packing;
};

struct WantedTensor {
  std::string name;            // canonical
  std::vector<int64_t> shape;  // shape of the parameter
  int64_t num_experts = 0;     // experts of the layer; read for expert tensors only
};

// Throws Error{input} when the folder has no such tensor, has it in two layouts, or has another
// shape, and for packed numbers without their scales.
// The shape of a fused tensor may fit both orientations (2I == H or I == H). Then it has the
// orientation of the layer's other fused tensor, whose shape fits only one.
// Throws Error{input} when that one is missing, and when the two disagree. In gpt_oss the kind of
// file gives the orientation, whatever the shape.
TensorSource locate_tensor(const HfFolder& folder, HfFamily family, const WantedTensor& wanted);

// Returns the source of rows [row_begin, row_end) and columns [col_begin, col_end).
TensorSource part_of(const TensorSource& source, int64_t row_begin, int64_t row_end, int64_t col_begin,
                     int64_t col_end);

// Writes rows * cols elements of source.dtype, row by row. Reads only this part of the tensor.
// Throws Error{input} for a scale that is not a number.
void read_tensor(const HfFolder& folder, const TensorSource& source, void* dst);

// Returns how a matrix is quantised on disk: square_blocks for 8-bit floats with a scale for each block of 128 x 128,
// mx_blocks for 4-bit blocks, else none.
ScaleLayout blocks_of(const TensorSource& source);
// Returns elements [first, first + count) of a tensor of scales of 8-bit floats, in f32.
std::vector<float> read_scales(const HfFolder& folder, const std::string& name, int64_t first, int64_t count);
// Writes rows * cols elements as they are on disk, and the scales of their blocks, those of 8-bit floats in f32. Throws
// as read_tensor.
// REQUIRES: blocks_of() is not none; the source begins at a row and a column of blocks.
void read_blocks(const HfFolder& folder, const TensorSource& source, void* data, void* scales);

}  // namespace moebius
