#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "core/error.h"
#include "io/hash.h"
#include "io/safetensors.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "moebius-checkpoint";
constexpr int64_t kVersion = 2, kOneRankVersion = 1;
constexpr std::string_view kSealBegin = ",\n \"manifest_xxh3\": \"";
constexpr std::string_view kSealEnd = "\"\n}\n";
constexpr size_t kHashDigits = 32;
constexpr size_t kSealBytes = kSealBegin.size() + kHashDigits + kSealEnd.size();

std::string seal(std::string_view body) {
  return fmt::format("{}{}{}", kSealBegin, to_hex(hash_bytes(body.data(), body.size())), kSealEnd);
}

void check_seal(std::string_view text, const std::string& who) {
  const size_t body_bytes = text.size() < kSealBytes ? 0 : text.size() - kSealBytes;
  MOEBIUS_CHECK(
      input, text.substr(body_bytes) == seal(text.substr(0, body_bytes)),
      "checkpoint {}: expected {} bytes that end with their own hash; got others, the manifest is damaged or cut "
      "short; remove the folder or use the checkpoint before it",
      who, text.size());
}

json to_json(const CheckpointPiece& p) {
  json j{{"file", p.file}, {"offset", p.offset}, {"bytes", p.bytes}, {"xxh3", p.xxh3}};
  const Shard& block = p.slice.shard;
  if (block.dim >= 0) j["block"] = {block.dim, block.begin, block.count};
  if (p.slice.numel() != block_numel(p.slice)) j["range"] = {p.slice.begin, p.slice.end};
  return j;
}

json to_json(const CheckpointTensor& t) {
  json pieces = json::array();
  for (const CheckpointPiece& p : t.pieces) pieces.push_back(to_json(p));
  return {{"dtype", safetensors_name(t.dtype)}, {"shape", t.shape}, {"pieces", std::move(pieces)}};
}

TensorSlice slice_from(const json& piece, const std::vector<int64_t>& shape) {
  TensorSlice slice{.shape = shape, .shard = {}, .begin = 0, .end = 0};
  if (piece.contains("block")) {
    const auto block = piece.at("block").get<std::array<int64_t, 3>>();
    slice.shard = {.dim = narrow<int>(block[0]), .begin = block[1], .count = block[2]};
  }
  if (piece.contains("range")) {
    const auto range = piece.at("range").get<std::array<int64_t, 2>>();
    slice.begin = range[0];
    slice.end = range[1];
  } else if (is_legal(slice)) {
    slice.end = block_numel(slice);
  }
  return slice;
}

CheckpointPiece piece_from(const json& j, const std::vector<int64_t>& shape) {
  return {.file = j.at("file").get<std::string>(),
          .offset = j.at("offset").get<int64_t>(),
          .bytes = j.at("bytes").get<int64_t>(),
          .slice = slice_from(j, shape),
          .xxh3 = j.at("xxh3").is_string() ? std::vector{j.at("xxh3").get<std::string>()}
                                           : j.at("xxh3").get<std::vector<std::string>>()};
}

CheckpointTensor tensor_from(const json& j, int64_t version, const std::string& who) {
  CheckpointTensor t{.dtype = dtype_of_safetensors(j.at("dtype").get<std::string>(), who),
                     .shape = j.at("shape").get<std::vector<int64_t>>()};
  if (version == kOneRankVersion) {
    t.pieces.push_back(piece_from(j, t.shape));
  } else {
    for (const json& piece : j.at("pieces")) t.pieces.push_back(piece_from(piece, t.shape));
  }
  return t;
}

CheckpointManifest manifest_from(const json& j, const std::string& who) {
  const json& version = j.at("version");
  MOEBIUS_CHECK(input, j.at("format") == kFormat && (version == kVersion || version == kOneRankVersion),
                "checkpoint {}: expected format {} version {} or {}; "
                "got {} version {}; load it with the program that wrote it",
                who, kFormat, kOneRankVersion, kVersion, j.at("format").dump(), version.dump());
  CheckpointManifest manifest{
      .step = j.at("step").get<int64_t>(), .num_ranks = j.at("world").at("ranks").get<int64_t>(), .meta = j.at("meta")};
  for (const auto& [name, file] : j.at("files").items()) {
    manifest.files[name] = {.bytes = file.at("bytes").get<int64_t>(),
                            .header_bytes = file.at("header_bytes").get<int64_t>(),
                            .header_xxh3 = file.at("header_xxh3").get<std::string>()};
  }
  for (const auto& [name, tensor] : j.at("tensors").items())
    manifest.tensors[name] = tensor_from(tensor, version.get<int64_t>(), who);
  return manifest;
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

void check_piece(const CheckpointManifest& manifest, const std::string& name, const CheckpointTensor& t,
                 const CheckpointPiece& p, const std::string& who) {
  const auto file = manifest.files.find(p.file);
  int64_t bytes = -1;
  const bool holds_slice =
      is_legal(p.slice) && !__builtin_mul_overflow(p.slice.numel(), size_of(t.dtype), &bytes) && bytes == p.bytes;
  const int64_t num_chunks = 1 + std::max<int64_t>(0, p.bytes - 1) / SafetensorsWriter::kHashedBytes;
  MOEBIUS_CHECK(
      input,
      holds_slice && file != manifest.files.end() && p.offset >= 0 && p.bytes <= file->second.bytes &&
          p.offset <= file->second.bytes - p.bytes && (p.xxh3.size() == 1 || std::ssize(p.xxh3) == num_chunks),
      "checkpoint {}: expected every tensor inside a file of the manifest; got \"{}\", {}[{}], {} bytes at {} of "
      "\"{}\" with {} hashes; do not use it",
      who, name, name_of(t.dtype), fmt::join(t.shape, ", "), p.bytes, p.offset, p.file, p.xxh3.size());
}

void check_places(const CheckpointManifest& manifest, const std::string& who) {
  for (const auto& [name, f] : manifest.files) {
    MOEBIUS_CHECK(
        input, is_plain_name(name) && f.header_bytes >= 0 && f.header_bytes <= f.bytes,
        "checkpoint {}: expected files of this folder with a header inside; got \"{}\", {} of {} bytes; do not use it",
        who, name, f.header_bytes, f.bytes);
  }
  for (const auto& [name, t] : manifest.tensors)
    for (const CheckpointPiece& p : t.pieces) check_piece(manifest, name, t, p, who);
}

// Adds the pieces of a tensor that another rank wrote.
void add_pieces(CheckpointTensor& into, const CheckpointTensor& from, const std::string& name) {
  if (into.pieces.empty()) {
    into = from;
    return;
  }
  MOEBIUS_CHECK(distributed, into.dtype == from.dtype && into.shape == from.shape,
                "checkpoint: expected the same \"{}\" on every rank; got {}[{}] in {} and {}[{}] in {}", name,
                name_of(into.dtype), fmt::join(into.shape, ", "), into.pieces[0].file, name_of(from.dtype),
                fmt::join(from.shape, ", "), from.pieces[0].file);
  into.pieces.insert(into.pieces.end(), from.pieces.begin(), from.pieces.end());
}

// In ascending order of place in the tensor. A piece that several ranks wrote must be the same, and
// counts once.
void drop_replicas(CheckpointTensor& t, const std::string& name) {
  const auto key = [](const CheckpointPiece& p) {
    const TensorSlice& s = p.slice;
    return std::tuple(s.shard.dim, s.shard.begin, s.shard.count, s.begin, s.end);
  };
  std::stable_sort(t.pieces.begin(), t.pieces.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  const auto is_replica = [&](const CheckpointPiece& first, const CheckpointPiece& second) {
    if (key(first) != key(second)) return false;
    MOEBIUS_CHECK(
        distributed, first.xxh3 == second.xxh3,
        "checkpoint: expected {} to be the same on every rank that holds it; got different elements in {} and "
        "in {}: the ranks have diverged; resume from an earlier checkpoint",
        slice_name(name, first.slice), first.file, second.file);
    return true;
  };
  t.pieces.erase(std::unique(t.pieces.begin(), t.pieces.end(), is_replica), t.pieces.end());
}

}  // namespace

std::string to_text(const CheckpointManifest& manifest) {
  nlohmann::ordered_json j{{"format", kFormat},
                           {"version", kVersion},
                           {"step", manifest.step},
                           {"world", {{"ranks", manifest.num_ranks}}},
                           {"meta", manifest.meta},
                           {"files", nlohmann::ordered_json::object()},
                           {"tensors", nlohmann::ordered_json::object()}};
  for (const auto& [name, f] : manifest.files) {
    j["files"][name] = {{"bytes", f.bytes}, {"header_bytes", f.header_bytes}, {"header_xxh3", f.header_xxh3}};
  }
  for (const auto& [name, t] : manifest.tensors) j["tensors"][name] = to_json(t);
  std::string text = j.dump(1);
  text.resize(text.size() - 2);  // the last brace, and the newline before it
  return text + seal(text);
}

CheckpointManifest parse_manifest(std::string_view text, const std::string& who) {
  check_seal(text, who);
  try {
    CheckpointManifest manifest = manifest_from(json::parse(text), who);
    check_places(manifest, who);
    return manifest;
  } catch (const json::exception& e) {
    MOEBIUS_FAIL(input, "checkpoint {}: expected the manifest of a checkpoint; got {}; do not use it", who, e.what());
  }
}

void check_complete(const CheckpointManifest& manifest, const std::string& who) {
  for (const auto& [name, t] : manifest.tensors) {
    std::vector<TensorSlice> slices;
    for (const CheckpointPiece& p : t.pieces) slices.push_back(p.slice);
    const std::string problem = partition_problem(std::move(slices));
    MOEBIUS_CHECK(input, problem.empty(),
                  "checkpoint {}: expected pieces that hold each element of \"{}\" once; got others: {}; do not use it",
                  who, name, problem);
  }
}

CheckpointManifest merge_manifests(std::vector<CheckpointManifest> parts) {
  CheckpointManifest all{.step = parts[0].step, .num_ranks = parts[0].num_ranks, .meta = std::move(parts[0].meta)};
  for (CheckpointManifest& part : parts) {
    all.files.merge(part.files);
    for (const auto& [name, tensor] : part.tensors) add_pieces(all.tensors[name], tensor, name);
  }
  for (auto& [name, tensor] : all.tensors) drop_replicas(tensor, name);
  return all;
}

}  // namespace moebius
