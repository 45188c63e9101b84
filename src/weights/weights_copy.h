// What import and export share: a model's tensors into the shards of a new folder, one tensor in memory at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "hub/fused_experts.h"
#include "io/safetensors.h"
#include "weights/not_finite.h"
#include "weights/weights_source.h"

namespace moebius {

// An entry of a WeightsReader that is a part of the tensor to be written.
struct FusedEntry {
  size_t entry = 0;
  FusedPlace place;
};

// A tensor to be written: which entry of a WeightsReader, and as what.
struct TensorCopy {
  size_t entry = 0;
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  std::vector<FusedEntry> parts = {};  // instead of entry: its parts, those of expert 0 first
  int64_t bytes() const { return shape.numel() * size_of(dtype); }
};

using ShardCopy = std::vector<TensorCopy>;

// In order, each shard at most shard_bytes of tensors, or one tensor.
std::vector<ShardCopy> into_shards(std::vector<TensorCopy> tensors, int64_t shard_bytes);

// The header of a shard at `path`, then its tensors, each from the reader in its
// own dtype or converted. Not closed yet. Elements that are not finite are written,
// and counted. Error{input} naming the tensor for a dtype that holds no weights.
SafetensorsWriter write_shard(const std::string& path, const ShardCopy& shard, const WeightsReader& reader,
                              std::vector<NotFinite>* not_finite);

// A folder that appears under its name only when it is whole. Destroyed without commit() it leaves nothing behind.
class NewFolder {
 public:
  explicit NewFolder(std::string path);  // Error{usage} when something stands there
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  const std::string& path() const { return unfinished_; }  // where to write
  void commit();

 private:
  std::string path_, unfinished_;
};

// Everything of a Hugging Face folder but its config.json and its weights (safetensors and their index, pickles), with
// the folders below; hidden files stay. Creates `to` when there is something to copy. Returns the number of files.
int64_t copy_other_files(const std::string& from, const std::string& to);

}  // namespace moebius
