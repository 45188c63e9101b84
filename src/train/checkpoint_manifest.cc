#include "train/checkpoint_manifest.h"

#include <fmt/format.h>

#include "core/error.h"
#include "io/hash.h"
#include "io/safetensors.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "moebius-checkpoint";
constexpr int64_t kVersion = 1;
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

json to_json(const CheckpointTensor& t) {
  return {{"file", t.file},   {"offset", t.offset}, {"bytes", t.bytes}, {"dtype", safetensors_name(t.dtype)},
          {"shape", t.shape}, {"xxh3", t.xxh3}};
}

CheckpointTensor tensor_from(const json& j, const std::string& who) {
  return {.file = j.at("file").get<std::string>(),
          .offset = j.at("offset").get<int64_t>(),
          .bytes = j.at("bytes").get<int64_t>(),
          .dtype = dtype_of_safetensors(j.at("dtype").get<std::string>(), who),
          .shape = j.at("shape").get<std::vector<int64_t>>(),
          .xxh3 = j.at("xxh3").get<std::string>()};
}

CheckpointManifest manifest_from(const json& j, const std::string& who) {
  MOEBIUS_CHECK(
      input, j.at("format") == kFormat && j.at("version") == kVersion,
      "checkpoint {}: expected format {} version {}; got {} version {}; load it with the program that wrote it", who,
      kFormat, kVersion, j.at("format").dump(), j.at("version").dump());
  CheckpointManifest manifest{
      .step = j.at("step").get<int64_t>(), .num_ranks = j.at("world").at("ranks").get<int64_t>(), .meta = j.at("meta")};
  for (const auto& [name, file] : j.at("files").items()) {
    manifest.files[name] = {.bytes = file.at("bytes").get<int64_t>(),
                            .header_bytes = file.at("header_bytes").get<int64_t>(),
                            .header_xxh3 = file.at("header_xxh3").get<std::string>()};
  }
  for (const auto& [name, tensor] : j.at("tensors").items()) manifest.tensors[name] = tensor_from(tensor, who);
  return manifest;
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

// The bytes of that many elements; -1 when the shape is no shape.
int64_t bytes_of(const CheckpointTensor& t) {
  int64_t bytes = size_of(t.dtype);
  for (const int64_t dim : t.shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) return -1;
  }
  return bytes;
}

void check_places(const CheckpointManifest& manifest, const std::string& who) {
  for (const auto& [name, f] : manifest.files) {
    MOEBIUS_CHECK(
        input, is_plain_name(name) && f.header_bytes >= 0 && f.header_bytes <= f.bytes,
        "checkpoint {}: expected files of this folder with a header inside; got \"{}\", {} of {} bytes; do not "
        "use it",
        who, name, f.header_bytes, f.bytes);
  }
  for (const auto& [name, t] : manifest.tensors) {
    const auto file = manifest.files.find(t.file);
    MOEBIUS_CHECK(
        input,
        file != manifest.files.end() && t.bytes == bytes_of(t) && t.offset >= 0 && t.bytes <= file->second.bytes &&
            t.offset <= file->second.bytes - t.bytes,
        "checkpoint {}: expected every tensor inside a file of the manifest; got \"{}\", {}[{}], {} bytes at {} "
        "of \"{}\"; do not use it",
        who, name, name_of(t.dtype), fmt::join(t.shape, ", "), t.bytes, t.offset, t.file);
  }
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
  text.resize(text.size() - 2);  // the brace that ends it, and the line before
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

}  // namespace moebius
