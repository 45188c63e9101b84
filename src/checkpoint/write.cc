#include "checkpoint/write.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/fault.h"
#include "io/files.h"
#include "io/hash.h"
#include "io/safetensors.h"
#include "ops/optimizer/rounding.h"

namespace moebius {
namespace {

constexpr int64_t kPieceBytes = CheckpointStore::kPieceBytes;

// The slice that a rank writes of one tensor, and its name in the file.
struct Entry {
  std::string name;
  const NamedTensor* tensor;
  TensorSlice slice;
};
using ShardEntries = std::vector<Entry>;

// A tensor without elements is written too, so that the checkpoint has its name.
bool is_written(const NamedTensor& t, const TensorSlice& slice) {
  return !t.is_replica && (slice.numel() > 0 || numel_of(slice.shape) == 0);
}

std::vector<ShardEntries> split(const std::vector<NamedTensor>& tensors, int64_t shard_bytes) {
  std::vector<ShardEntries> shards;
  int64_t room = 0;
  for (const NamedTensor& t : tensors) {
    TensorSlice slice = t.slice ? *t.slice : whole_slice(dims_of(t.tensor.shape));
    if (!is_written(t, slice)) continue;
    if (shards.empty() || t.saved_bytes() > room) {
      shards.emplace_back();
      room = shard_bytes;
    }
    shards.back().push_back({slice_name(t.name, slice), &t, std::move(slice)});
    room -= t.saved_bytes();
  }
  return shards;
}

// A block keeps its shape; a range of a block is one row.
std::vector<int64_t> shape_of(const TensorSlice& slice) {
  if (slice.numel() != block_numel(slice)) return {slice.numel()};
  std::vector<int64_t> shape = slice.shape;
  if (slice.shard.dim >= 0) shape[slice.shard.dim] = slice.shard.count;
  return shape;
}

// Returns n elements of a tensor in host memory: `piece`, to which they are copied from a device, or where they are.
const void* on_host(const Tensor& t, int64_t first, int64_t n, std::byte* piece, Stream* device) {
  const Tensor rows = t.view({t.numel()}).rows(first, first + n);
  if (!device) return rows.data;
  copy_to_host(*device, piece, rows.data, rows.num_bytes());
  return piece;
}

// Joins the halves, in pieces that have two halves in the host buffer.
void write_joined(SafetensorsWriter& file, const Entry& e, const CheckpointWriter& writer) {
  constexpr int64_t kMost = kPieceBytes / static_cast<int64_t>(sizeof(float));
  const Tensor& weights = e.tensor->tensor;
  const int64_t n = weights.numel();
  std::vector<float> values(static_cast<size_t>(std::min(kMost, n)));
  for (int64_t done = 0; done < n; done += kMost) {
    const int64_t count = std::min(kMost, n - done);
    std::byte* second = writer.piece ? writer.piece + kPieceBytes / 2 : nullptr;
    const auto* high = static_cast<const bf16*>(on_host(weights, done, count, writer.piece, writer.device));
    const auto* low = static_cast<const uint16_t*>(on_host(*e.tensor->remainder, done, count, second, writer.device));
    for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = joined(high[i], low[i]);
    file.write(e.name, values.data(), count * static_cast<int64_t>(sizeof(float)));
    fault_point("checkpoint.mid_shard");
  }
}

void write_tensor(SafetensorsWriter& file, const Entry& e, const CheckpointWriter& writer) {
  if (e.tensor->remainder) return write_joined(file, e, writer);
  const Tensor& t = e.tensor->tensor;
  const auto* bytes = static_cast<const std::byte*>(t.data);
  for (int64_t done = 0; done < t.num_bytes(); done += kPieceBytes) {
    const int64_t count = std::min(kPieceBytes, t.num_bytes() - done);
    if (writer.device) copy_to_host(*writer.device, writer.piece, bytes + done, count);
    file.write(e.name, writer.device ? writer.piece : bytes + done, count);
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

// Closes a shard and enters the file in the manifest; the caller enters its tensors.
void close_file(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                SafetensorsWriter& writer) {
  writer.close();
  fault_point("checkpoint.after_shard");
  const int64_t header_bytes = header_bytes_of(writer);
  manifest.files[name] = {writer.file_bytes(), header_bytes, hash_of_start(folder + "/" + name, header_bytes)};
}

CheckpointPiece piece_of(const std::string& file, const SafetensorsWriter& writer, const SafetensorsEntry& e,
                         TensorSlice slice) {
  CheckpointPiece piece{.file = file, .offset = e.offset, .bytes = e.bytes, .slice = std::move(slice)};
  for (const Hash128& hash : writer.hashes(e.name)) piece.xxh3.push_back(to_hex(hash));
  return piece;
}

void write_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 const ShardEntries& shard, const CheckpointWriter& by) {
  std::vector<SafetensorsDecl> decls;
  std::map<std::string, const Entry*> by_name;
  for (const Entry& e : shard) {
    decls.push_back({e.name, e.tensor->saved_dtype(), shape_of(e.slice)});
    by_name[e.name] = &e;
  }
  SafetensorsWriter writer(folder + "/" + name, std::move(decls), {{"format", "pt"}});
  for (const Entry& e : shard) write_tensor(writer, e, by);
  close_file(manifest, folder, name, writer);
  for (const SafetensorsEntry& e : writer.entries()) {
    const Entry& from = *by_name.at(e.name);
    CheckpointTensor& t = manifest.tensors[from.tensor->name];
    t.dtype = e.dtype;
    t.shape = from.slice.shape;
    t.pieces.push_back(piece_of(name, writer, e, from.slice));
  }
}

void rename_unfinished(const std::string& unfinished, const std::string& dir, int64_t step) {
  const std::string folder = dir + "/" + step_folder_name(step);
  fault_point("checkpoint.before_rename");
  std::error_code unknown;  // the rename then reports the error
  if (std::filesystem::is_directory(folder, unknown)) {
    exchange_folders(unfinished, folder);
  } else {
    rename_folder(unfinished, folder);
  }
  sync_dir(dir);
  fault_point("checkpoint.after_rename");
}

}  // namespace

std::string shard_name(const CheckpointManifest& manifest, const CheckpointWriter& writer) {
  const std::string shard = fmt::format("shard-{:05}.safetensors", manifest.files.size());
  return writer.num_ranks == 1 ? shard : fmt::format("rank-{:05}-{}", writer.rank, shard);
}

void close_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 SafetensorsWriter& writer) {
  close_file(manifest, folder, name, writer);
  for (const SafetensorsEntry& e : writer.entries())
    manifest.tensors[e.name] = {e.dtype, e.shape, {piece_of(name, writer, e, whole_slice(e.shape))}};
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

CheckpointManifest write_share(const std::string& folder, const CheckpointContent& content,
                               const CheckpointWriter& writer) {
  CheckpointManifest manifest{.step = content.step, .num_ranks = writer.num_ranks, .meta = content.meta};
  for (const ShardEntries& shard : split(content.tensors, writer.shard_bytes))
    write_shard(manifest, folder, shard_name(manifest, writer), shard, writer);
  return manifest;
}

void publish_checkpoint(const std::string& dir, const std::string& unfinished, const CheckpointManifest& manifest) {
  fault_point("checkpoint.before_manifest");
  write_manifest(unfinished, to_text(manifest));
  fault_point("checkpoint.after_manifest");
  sync_dir(unfinished);
  rename_unfinished(unfinished, dir, manifest.step);
}

}  // namespace moebius
