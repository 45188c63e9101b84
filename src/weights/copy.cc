#include "weights/copy.h"

#include <filesystem>
#include <optional>
#include <random>
#include <system_error>

#include "core/error.h"
#include "io/convert_elements.h"
#include "io/files.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

bool holds_weights(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// Reads entries in the form that a tensor needs, one in memory at a time.
class EntryBytes {
 public:
  EntryBytes(const WeightsReader& reader, std::vector<NotFinite>* not_finite)
      : reader_(reader), not_finite_(not_finite) {}
  const char* read(size_t entry, DType dtype) {
    const WeightsEntry& from = reader_.entries()[entry];
    MOEBIUS_CHECK(input, holds_weights(from.dtype),
                  "model weights: expected f32, bf16, f16 or f64 for {}; got {}; convert the weights first", from.name,
                  name_of(from.dtype));
    stored_.resize(from.bytes());
    reader_.read(entry, stored_.data());
    add_not_finite(not_finite_, from.name, count_not_finite(stored_.data(), from.dtype, from.shape.numel(), dtype));
    if (dtype == from.dtype) return stored_.data();
    converted_.resize(from.shape.numel() * size_of(dtype));
    convert_elements(converted_.data(), dtype, stored_.data(), from.dtype, from.shape.numel(), from.name);
    return converted_.data();
  }
  // The entry in a form other than values.
  const void* read(size_t entry, TensorCopy::Form form) {
    if (form == TensorCopy::Form::released_scales) {
      released_ = reader_.released_scales(entry);
      return released_.scales.data();
    }
    if (packed_entry_ != entry) {
      const Shape& shape = reader_.entries()[entry].shape;
      const auto* values = reinterpret_cast<const float*>(read(entry, DType::f32));
      packed_ = to_block_fp8(values, shape[0], shape[1], reader_.released_scales(entry));
      packed_entry_ = entry;
    }
    if (form == TensorCopy::Form::block_fp8) return packed_.data.data();
    return packed_.scales.data();
  }

 private:
  const WeightsReader& reader_;
  std::vector<NotFinite>* not_finite_;
  std::vector<char> stored_, converted_;
  std::optional<size_t> packed_entry_;  // data and scales follow each other
  BlockFp8 packed_;
  ReleasedScales released_;
};

// Writes one expert after the other. The elements between two first indices are complete once their parts
// have been copied.
void write_fused(SafetensorsWriter& writer, const TensorCopy& t, EntryBytes& entries) {
  const int64_t size = size_of(t.dtype), experts = t.shape[0], plane = t.shape.numel() / experts;
  const size_t parts_of_one = t.parts.size() / experts;
  std::vector<char> bytes(plane * size);
  for (size_t i = 0; i < t.parts.size(); ++i) {
    const auto e = static_cast<int64_t>(i / parts_of_one);
    put_into_fused(bytes.data(), entries.read(t.parts[i].entry, t.dtype), t.parts[i].place, e * plane, size);
    if ((i + 1) % parts_of_one == 0) writer.write(t.name, bytes.data(), plane * size);
  }
}

void check_folder(const std::error_code& error, const char* what, const std::string& path) {
  MOEBIUS_CHECK(io, !error, "{} {}: {}; check the folder, its disk and this user's access to it", what, path,
                error.message());
}

bool is_weights_or_config(const fs::path& path) {
  const std::string name = path.filename().string(), ext = path.extension().string();
  for (const char* pickle : {".bin", ".pt", ".pth"}) {
    if (ext == pickle || name.ends_with(std::string(pickle) + ".index.json")) return true;
  }
  return ext == ".safetensors" || name.ends_with(".safetensors.index.json") || name == "config.json";
}

}  // namespace

std::vector<ShardCopy> into_shards(std::vector<TensorCopy> tensors, int64_t shard_bytes) {
  std::vector<ShardCopy> shards;
  int64_t room = 0;
  for (TensorCopy& t : tensors) {
    if (shards.empty() || t.bytes() > room) {
      shards.emplace_back();
      room = shard_bytes;
    }
    room -= t.bytes();
    shards.back().push_back(std::move(t));
  }
  return shards;
}

SafetensorsWriter write_shard(const std::string& path, const ShardCopy& shard, const WeightsReader& reader,
                              const ShouldStop& should_stop, std::vector<NotFinite>* not_finite) {
  std::vector<SafetensorsDecl> decls;
  for (const TensorCopy& t : shard) decls.push_back({t.name, t.dtype, dims_of(t.shape)});
  SafetensorsWriter writer(path, std::move(decls), {{"format", "pt"}});
  EntryBytes entries(reader, not_finite);
  for (const TensorCopy& t : shard) {
    throw_if_stopped(should_stop);
    if (t.form != TensorCopy::Form::values)
      writer.write(t.name, entries.read(t.entry, t.form), t.bytes());
    else if (t.parts.empty())
      writer.write(t.name, entries.read(t.entry, t.dtype), t.bytes());
    else
      write_fused(writer, t, entries);
  }
  return writer;
}

NewFolder::NewFolder(std::string path) : path_(std::move(path)) {
  MOEBIUS_CHECK(usage, !path_.empty(), "expected the name of a folder to make; got an empty one; give a name");
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
  MOEBIUS_CHECK(usage, !fs::exists(fs::symlink_status(path_)),
                "{}: expected the name of a folder to make; got one that exists; remove it or "
                "choose another name",
                path_);
  std::random_device random;
  unfinished_ = fmt::format("{}.tmp-{:08x}{:08x}", path_, random(), random());
  std::error_code error;
  for (fs::path above = fs::path(path_).parent_path(); !above.empty() && !fs::exists(above, error);
       above = above.parent_path())
    made_.push_back(above);
  fs::create_directories(unfinished_, error);
  check_folder(error, "create folder", unfinished_);
}

NewFolder::~NewFolder() {
  std::error_code ignored;  // there is nothing there after commit()
  fs::remove_all(unfinished_, ignored);
  for (const std::string& above : made_) fs::remove(above, ignored);  // which removes only empty ones
}

void NewFolder::commit() {
  sync_dir(unfinished_);
  std::error_code error;
  fs::rename(unfinished_, path_, error);
  check_folder(error, "rename a finished folder to", path_);
  sync_dir(parent_dir(path_));
}

int64_t copy_other_files(const std::string& from, const std::string& to, const ShouldStop& should_stop) {
  int64_t num_files = 0;
  for (auto it = fs::recursive_directory_iterator(from); it != fs::recursive_directory_iterator(); ++it) {
    if (it->path().filename().string().starts_with(".")) {
      it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file() || is_weights_or_config(it->path())) continue;
    throw_if_stopped(should_stop);
    const fs::path target = fs::path(to) / fs::relative(it->path(), from);
    fs::create_directories(target.parent_path());
    fs::copy_file(it->path(), target);  // a link is copied as its target
    ++num_files;
  }
  return num_files;
}

}  // namespace moebius
