// A tensor that is saved or loaded by its global name, and its description in a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/tensor_slice.h"
#include "core/block_code.h"
#include "core/tensor.h"

namespace moebius {

struct NamedTensor {
  std::string name;                       // global: the same on every layout
  Tensor tensor;                          // the elements of the slice
  std::optional<TensorSlice> slice = {};  // what this rank holds of the global tensor; none: all of it
  bool is_replica = false;                // another rank saves the same slice
  bool converts = false;                  // the tensor is f32 or bf16, and may be read from either
  // With a code, the tensor can be read from f32, from bf16 and from u8 codes (core/block_code.h), whatever its
  // own dtype is. Where it is u8, scales are the scales of its blocks. They are saved as a tensor of their own.
  std::optional<BlockCode> code = {};
  Tensor scales = {};
  bool is_scales = false;  // it holds the scales of another tensor's codes; absent in a checkpoint without codes
  // u16, as many as in `tensor`, which is bf16: the values are f32, and these are their low halves
  // (ops/optimizer/rounding.h). They are saved as f32, and `converts` is set. None: the tensor has the values.
  std::optional<Tensor> remainder = {};
  DType saved_dtype() const { return remainder ? DType::f32 : tensor.dtype; }
  int64_t saved_bytes() const { return bytes_of(saved_dtype(), tensor.numel()); }
};

inline constexpr std::string_view kScalesSuffix = ".scales";  // after the name of the codes

// The place of a slice in the files of a checkpoint.
struct CheckpointPiece {
  std::string file;
  int64_t offset = 0;  // bytes from the start of the file
  int64_t bytes = 0;
  TensorSlice slice;
  // XXH3-128 of every kHashedBytes of it (SafetensorsWriter) and of the rest; a single hash covers
  // all of it.
  std::vector<std::string> xxh3;  // 32 hex digits each
};

struct CheckpointTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;           // global
  std::vector<CheckpointPiece> pieces;  // each element is in one of them
  int64_t num_bytes() const;            // bytes of the global tensor
};

}  // namespace moebius
