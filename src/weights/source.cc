#include "weights/source.h"

#include <cstring>
#include <filesystem>

#include "checkpoint/list.h"
#include "hub/peft.h"
#include "model/device_support.h"
#include "weights/adapter.h"

namespace moebius {

namespace fs = std::filesystem;

WeightsFolder find_weights(const std::string& path) {
  MOEBIUS_CHECK(input, fs::is_directory(path), "model {}: expected a folder; got {}; check the path", path,
                fs::exists(path) ? "a file" : "nothing there");
  if (fs::exists(path + "/manifest.json")) return {WeightsFolder::Kind::checkpoint, path};
  if (fs::exists(path + "/config.json")) return {WeightsFolder::Kind::hugging_face, path};
  for (const std::string& dir : {path, path + "/checkpoints"}) {
    if (const auto newest = newest_checkpoint(dir, nullptr)) return {WeightsFolder::Kind::checkpoint, *newest};
  }
  MOEBIUS_CHECK(
      input, !fs::exists(path + "/" + kPeftConfig),
      "model {0}: expected the weights of a model; got only an adapter of PEFT; give its model and --adapter {0} "
      "to eval, generate and chat, or merge both with moebius import MODEL CHECKPOINT --adapter {0}",
      path);
  MOEBIUS_FAIL(input,
               "model {}: expected a Hugging Face folder (config.json), a checkpoint (manifest.json) or a run's folder "
               "with a complete "
               "checkpoint; got none of them; check the path",
               path);
}

std::unique_ptr<WeightsReader> open_weights(const WeightsFolder& from, const ModelCatalog& catalog,
                                            const AddedAdapter& adapter) {
  if (!adapter.path.empty()) return open_merged(from, adapter, catalog);
  check_device(catalog.model(), DeviceKind::cpu, {});
  if (from.kind == WeightsFolder::Kind::hugging_face) return open_hugging_face(from.path, catalog);
  const std::string base = base_of_adapters(from.path);
  return base.empty() ? open_checkpoint(from.path, catalog)
                      : open_merged(find_weights(base), {.path = from.path}, catalog);
}

void WeightsReader::read_blocks(size_t, const Shard&, int64_t, int64_t, void*, void*) const {
  MOEBIUS_ASSERT(false);  // blocks_on_disk() is none
}

void WeightsReader::read_slice(size_t entry, const TensorSlice& slice, void* dst) const {
  const WeightsEntry& e = entries()[entry];
  std::vector<char> all(e.bytes());
  read(entry, all.data());
  const int64_t size = size_of(e.dtype);
  for (const CommonRun& run : common_runs(whole_slice(slice.shape), slice))
    std::memcpy(static_cast<char*>(dst) + run.in_b * size, all.data() + run.in_a * size, run.count * size);
}

bool is_training_state(const std::string& name) { return name.ends_with(".last_load"); }

}  // namespace moebius
