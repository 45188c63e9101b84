// Which elements of a global tensor one rank holds, and what two such holdings have in common: how state that was saved
// on one layout is found again on another.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/params.h"

namespace moebius {

// Elements [begin, end) of a block of a global tensor, counted through the block in row-major order. The block is what
// tensor, expert and stage parallelism leave to a rank, the range what a sharded optimizer leaves to it of that.
struct TensorSlice {
  std::vector<int64_t> shape;  // of the global tensor
  Shard shard;                 // the block
  int64_t begin = 0, end = 0;
  int64_t numel() const { return end - begin; }
  bool operator==(const TensorSlice&) const = default;
};

TensorSlice whole_slice(std::vector<int64_t> shape);
std::vector<int64_t> dims_of(const Shape& shape);
int64_t numel_of(const std::vector<int64_t>& shape);  // -1 when it is no shape, or too large
int64_t block_numel(const TensorSlice& slice);        // REQUIRES: is_legal
bool is_whole(const TensorSlice& slice);
// A block inside the shape, a range inside the block: for slices that come from a file.
bool is_legal(const TensorSlice& slice);

// "w" for all of it, "w[4:8]" for rows, "w[:, 4:8]" for columns, "w[4:8].flat[10:20]" for a range of that block: what
// numpy would take.
std::string slice_name(const std::string& name, const TensorSlice& slice);

// `count` elements that are one after another in both; positions are counted from a.begin and b.begin.
struct CommonRun {
  int64_t in_a = 0, in_b = 0, count = 0;
  bool operator==(const CommonRun&) const = default;
};
// All that both hold, by rising position, in as few runs as can be. REQUIRES: legal slices of one shape.
std::vector<CommonRun> common_runs(const TensorSlice& a, const TensorSlice& b);

// Empty when the slices together hold each element of the tensor once, as layouts do: blocks along one dimension, each
// cut into ranges. Else what is wrong. REQUIRES: legal slices of one shape.
std::string partition_problem(std::vector<TensorSlice> slices);

}  // namespace moebius
