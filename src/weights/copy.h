// Copies a model's tensors into the shards of a new folder, one tensor in memory at a time: for
// import and export.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "core/stopped.h"
#include "hub/fused_experts.h"
#include "io/safetensors.h"
#include "weights/not_finite.h"
#include "weights/source.h"

namespace moebius {

// An entry of a WeightsReader that is a part of the tensor to be written.
struct FusedEntry {
  size_t entry = 0;
  FusedPlace place;
};

// A tensor to be written: the entry of a WeightsReader that it is read from, and its name, shape
// and dtype in the file.
struct TensorCopy {
  enum class Form : uint8_t {
    values,
    released_scales,  // those of WeightsReader::released_scales()
    block_fp8,        // as to_block_fp8() makes it: the data, and
    block_scales,     // the scales
  };

  size_t entry = 0;
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  std::vector<FusedEntry> parts = {};  // in place of entry: its parts, those of expert 0 first
  Form form = Form::values;
  int64_t bytes() const { return shape.numel() * size_of(dtype); }
};

using ShardCopy = std::vector<TensorCopy>;

// Splits the tensors in order. Each shard has at most shard_bytes of tensors, or one tensor.
std::vector<ShardCopy> into_shards(std::vector<TensorCopy> tensors, int64_t shard_bytes);

// Writes the header of a shard at `path`, then its tensors, each converted to its dtype, and leaves
// it open. Elements that are not finite are written, and counted. should_stop is asked before each tensor. Throws
// Error{input} naming the tensor for a dtype that cannot hold weights.
SafetensorsWriter write_shard(const std::string& path, const ShardCopy& shard, const WeightsReader& reader,
                              const ShouldStop& should_stop, std::vector<NotFinite>* not_finite);

// A folder that appears under its name only when it is whole. Without commit() the
// destructor removes it.
class NewFolder {
 public:
  explicit NewFolder(std::string path);  // throws Error{usage} when the path exists
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  const std::string& path() const { return unfinished_; }  // where to write
  void commit();

 private:
  std::string path_, unfinished_;
  std::vector<std::string> made_;  // folders above it that did not exist, the lowest first
};

// Copies a Hugging Face folder and the folders below it, without config.json, weights (safetensors
// and their index, pickles) and hidden files. Creates `to` when there is something to copy. should_stop is asked before
// each file. Returns the number of files.
int64_t copy_other_files(const std::string& from, const std::string& to, const ShouldStop& should_stop);

}  // namespace moebius
