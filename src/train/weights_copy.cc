#include "train/weights_copy.h"

#include <filesystem>
#include <random>
#include <system_error>

#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

bool holds_weights(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
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
                              std::vector<NotFinite>* not_finite) {
  std::vector<SafetensorsDecl> decls;
  for (const TensorCopy& t : shard) decls.push_back({t.name, t.dtype, dims_of(t.shape)});
  SafetensorsWriter writer(path, std::move(decls), {{"format", "pt"}});
  std::vector<char> stored, converted;
  for (const TensorCopy& t : shard) {
    const WeightsEntry& from = reader.entries()[t.entry];
    MOEBIUS_CHECK(input, holds_weights(from.dtype),
                  "model weights: expected f32, bf16, f16 or f64 for {}; got {}; convert the weights first", from.name,
                  name_of(from.dtype));
    stored.resize(from.bytes());
    reader.read(t.entry, stored.data());
    add_not_finite(not_finite, from.name, count_not_finite(stored.data(), from.dtype, t.shape.numel()));
    if (t.dtype == from.dtype) {
      writer.write(t.name, stored.data(), t.bytes());
      continue;
    }
    converted.resize(t.bytes());
    convert_elements(converted.data(), t.dtype, stored.data(), from.dtype, t.shape.numel(), from.name);
    writer.write(t.name, converted.data(), t.bytes());
  }
  return writer;
}

NewFolder::NewFolder(std::string path) : path_(std::move(path)) {
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
  MOEBIUS_CHECK(usage, !fs::exists(path_),
                "{}: expected the name of a folder to make; got one that exists; remove it or "
                "choose another name",
                path_);
  std::random_device random;
  unfinished_ = fmt::format("{}.tmp-{:08x}{:08x}", path_, random(), random());
  std::error_code error;
  fs::create_directories(unfinished_, error);
  check_folder(error, "create folder", unfinished_);
}

NewFolder::~NewFolder() {
  std::error_code ignored;  // there is nothing there after commit()
  fs::remove_all(unfinished_, ignored);
}

void NewFolder::commit() {
  sync_dir(unfinished_);
  std::error_code error;
  fs::rename(unfinished_, path_, error);
  check_folder(error, "rename a finished folder to", path_);
  sync_dir(parent_dir(path_));
}

int64_t copy_other_files(const std::string& from, const std::string& to) {
  int64_t num_files = 0;
  for (auto it = fs::recursive_directory_iterator(from); it != fs::recursive_directory_iterator(); ++it) {
    if (it->path().filename().string().starts_with(".")) {
      it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file() || is_weights_or_config(it->path())) continue;
    const fs::path target = fs::path(to) / fs::relative(it->path(), from);
    fs::create_directories(target.parent_path());
    fs::copy_file(it->path(), target);  // of a link: what it points to
    ++num_files;
  }
  return num_files;
}

}  // namespace moebius
