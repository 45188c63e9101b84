// Slices: the elements of a global tensor that one rank has, and the elements that two slices have in common. With them
// state that was saved on one layout is loaded on another.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/shard.h"
#include "core/tensor.h"

namespace moebius {

// Elements [begin, end) of a block of a global tensor, counted through the block in row-major
// order. Tensor, expert and pipeline parallelism assign a block to a rank; a sharded optimizer
// assigns it a range of that block.
struct TensorSlice {
  std::vector<int64_t> shape;  // shape of the global tensor
  Shard shard;                 // the block
  int64_t begin = 0, end = 0;
  int64_t numel() const { return end - begin; }
  bool operator==(const TensorSlice&) const = default;
};

// Returns whether a slice of a tensor with has_code_blocks has a part of a block of codes.
bool cuts_block(const TensorSlice& codes);
// Returns the scales of the blocks of codes of a slice. REQUIRES: has_code_blocks, and no block is cut.
TensorSlice scales_slice(const TensorSlice& codes);

TensorSlice whole_slice(std::vector<int64_t> shape);
std::vector<int64_t> dims_of(const Shape& shape);
int64_t numel_of(const std::vector<int64_t>& shape);  // -1 for a negative dimension or a product that overflows
int64_t block_numel(const TensorSlice& slice);        // REQUIRES: is_legal
bool is_whole(const TensorSlice& slice);
// Returns whether the block is inside the shape and the range inside the block. Slices that come
// from a file may be neither.
bool is_legal(const TensorSlice& slice);

// Returns the slice as numpy would index it: "w" for the whole tensor, "w[4:8]" for rows, "w[:, 4:8]" for
// columns, "w[4:8].flat[10:20]" for a range of that block.
std::string slice_name(const std::string& name, const TensorSlice& slice);

// `count` elements that are contiguous in both slices; positions are counted from
// a.begin and b.begin.
struct CommonRun {
  int64_t in_a = 0, in_b = 0, count = 0;
  bool operator==(const CommonRun&) const = default;
};
// Returns the elements that both slices hold, in ascending order of position, in as few runs as possible.
// REQUIRES: legal slices of one shape.
std::vector<CommonRun> common_runs(const TensorSlice& a, const TensorSlice& b);

// Checks that the slices together hold each element of the tensor once, as layouts do: blocks along
// one dimension, each cut into ranges. Returns an empty string, or a description of the problem.
// REQUIRES: legal slices of one shape.
std::string partition_problem(std::vector<TensorSlice> slices);

}  // namespace moebius
