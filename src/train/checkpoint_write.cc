#include "train/checkpoint_write.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/error.h"
#include "core/fault.h"
#include "io/files.h"
#include "io/hash.h"
#include "io/safetensors.h"
#include "train/checkpoint_folder.h"
#include "train/checkpoint_manifest.h"

namespace moebius {
namespace {

using Shard = std::vector<NamedTensor>;

constexpr int64_t kPieceBytes = int64_t{16} << 20;  // hashed while still in the cache

std::vector<Shard> split(const std::vector<NamedTensor>& tensors, int64_t shard_bytes) {
  std::vector<Shard> shards;
  int64_t room = 0;
  for (const NamedTensor& t : tensors) {
    if (shards.empty() || t.tensor.num_bytes() > room) {
      shards.emplace_back();
      room = shard_bytes;
    }
    shards.back().push_back(t);
    room -= t.tensor.num_bytes();
  }
  return shards;
}

std::vector<int64_t> dims_of(const Shape& shape) {
  std::vector<int64_t> dims(shape.rank());
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
  return dims;
}

void write_tensor(SafetensorsWriter& writer, const NamedTensor& t) {
  const auto* bytes = static_cast<const std::byte*>(t.tensor.data);
  for (int64_t done = 0; done < t.tensor.num_bytes(); done += kPieceBytes) {
    writer.write(t.name, bytes + done, std::min(kPieceBytes, t.tensor.num_bytes() - done));
    fault_point("checkpoint.mid_shard");
  }
}

// The first tensor of a file starts where its header ends.
int64_t header_bytes_of(const SafetensorsWriter& writer) {
  int64_t header_bytes = writer.file_bytes();
  for (const SafetensorsEntry& e : writer.entries()) header_bytes -= e.bytes;
  return header_bytes;
}

std::string hash_of_start(const std::string& path, int64_t bytes) {
  std::string start(bytes, '\0');
  File::open_read(path).read_at(start.data(), bytes, 0);
  return to_hex(hash_bytes(start.data(), bytes));
}

void write_shard(CheckpointManifest& manifest, const std::string& folder, const Shard& shard) {
  const std::string name = shard_name(manifest);
  std::vector<SafetensorsDecl> decls;
  for (const NamedTensor& t : shard) decls.push_back({t.name, t.tensor.dtype, dims_of(t.tensor.shape)});
  SafetensorsWriter writer(folder + "/" + name, std::move(decls), {{"format", "pt"}});
  for (const NamedTensor& t : shard) write_tensor(writer, t);
  close_shard(manifest, folder, name, writer);
}

void write_folder(const std::string& folder, const CheckpointContent& content, int64_t shard_bytes) {
  make_dirs(folder);
  fault_point("checkpoint.after_mkdir");
  CheckpointManifest manifest{.step = content.step, .meta = content.meta};
  for (const Shard& shard : split(content.tensors, shard_bytes)) write_shard(manifest, folder, shard);
  fault_point("checkpoint.before_manifest");
  write_manifest(folder, to_text(manifest));
  fault_point("checkpoint.after_manifest");
  sync_dir(folder);
}

void publish(const std::string& unfinished, const std::string& dir, int64_t step) {
  const std::string folder = dir + "/" + step_folder_name(step);
  fault_point("checkpoint.before_rename");
  std::error_code unknown;  // then the rename says it better
  if (std::filesystem::is_directory(folder, unknown)) {
    exchange_folders(unfinished, folder);
  } else {
    rename_folder(unfinished, folder);
  }
  sync_dir(dir);
  fault_point("checkpoint.after_rename");
}

}  // namespace

std::string shard_name(const CheckpointManifest& manifest) {
  return fmt::format("shard-{:05}.safetensors", manifest.files.size());
}

void close_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 SafetensorsWriter& writer) {
  writer.close();
  fault_point("checkpoint.after_shard");
  for (const SafetensorsEntry& e : writer.entries()) {
    manifest.tensors[e.name] = {name, e.offset, e.bytes, e.dtype, e.shape, to_hex(writer.hash(e.name))};
  }
  const int64_t header_bytes = header_bytes_of(writer);
  manifest.files[name] = {writer.file_bytes(), header_bytes, hash_of_start(folder + "/" + name, header_bytes)};
}

void write_manifest(const std::string& folder, const std::string& text) {
  const int64_t half = static_cast<int64_t>(text.size()) / 2;
  File file = File::create(folder + "/" + kManifestName);
  file.write_at(text.data(), half, 0);
  fault_point("checkpoint.mid_manifest");
  file.write_at(text.data() + half, static_cast<int64_t>(text.size()) - half, half);
  file.sync();
  file.close();
}

void write_checkpoint(const std::string& dir, const CheckpointContent& content, int64_t shard_bytes) {
  const std::string unfinished = dir + "/" + unfinished_name(content.step);
  try {
    write_folder(unfinished, content, shard_bytes);
    publish(unfinished, dir, content.step);
  } catch (const Error& e) {
    std::error_code ignored;  // the first error is the one to tell
    std::filesystem::remove_all(unfinished, ignored);
    int64_t bytes = 0;
    for (const NamedTensor& t : content.tensors) bytes += t.tensor.num_bytes();
    throw Error(e.kind(), fmt::format("checkpoint: save of step {}, {} tensors of {} bytes, to {}: {}; the checkpoints "
                                      "before it are as they were",
                                      content.step, content.tensors.size(), bytes, dir, e.what()));
  }
}

}  // namespace moebius
