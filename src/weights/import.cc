#include "weights/import.h"

#include "checkpoint/manifest.h"
#include "checkpoint/write.h"
#include "io/json_text.h"
#include "weights/adapter.h"
#include "weights/copy.h"
#include "weights/load.h"

namespace moebius {
namespace {

std::vector<TensorCopy> as_stored(const WeightsReader& reader) {
  std::vector<TensorCopy> tensors;
  for (size_t i = 0; i < reader.entries().size(); ++i) {
    const WeightsEntry& entry = reader.entries()[i];
    tensors.push_back({i, entry.name, entry.shape, entry.dtype});
    const ReleasedScales released = reader.released_scales(i);
    if (released.empty()) continue;
    tensors.push_back({.entry = i,
                       .name = entry.name + kScaleSuffix,
                       .shape = block_scales_shape(entry.shape, released.block_rows, released.block_cols),
                       .form = TensorCopy::Form::released_scales});
  }
  return tensors;
}

}  // namespace

ImportResult import_hugging_face(const ImportSpec& spec) {
  const WeightsFolder from = find_weights(spec.model);
  MOEBIUS_CHECK(input, from.kind == WeightsFolder::Kind::hugging_face,
                "import: expected a Hugging Face folder; got {}, a checkpoint already; use it as it is", from.path);
  const ModelSpec said = read_model_spec(from.path), model = with_mtp_of(from, said);
  const ModelCatalog catalog(model);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, catalog, spec.adapter);
  const std::vector<ShardCopy> shards = into_shards(as_stored(*reader), spec.shard_bytes);

  NewFolder folder(spec.out);
  ImportResult result{.num_tensors = static_cast<int64_t>(reader->entries().size()),
                      .num_shards = static_cast<int64_t>(shards.size())};
  CheckpointManifest manifest{.meta = {{"model", read_json(from.path + "/config.json")}, {kImportedKey, true}}};
  if (model.num_mtp_layers < said.num_mtp_layers) result.notices.push_back(missing_mtp_notice(from, said));
  for (const ShardCopy& shard : shards) {
    for (const TensorCopy& t : shard) result.bytes += t.bytes();
    const std::string name = shard_name(manifest);
    SafetensorsWriter writer =
        write_shard(folder.path() + "/" + name, shard, *reader, spec.should_stop, &result.not_finite);
    close_shard(manifest, folder.path(), name, writer);
  }
  result.num_files = copy_other_files(from.path, folder.path() + "/" + kImportedFiles, spec.should_stop);
  write_manifest(folder.path(), to_text(manifest));
  folder.commit();
  return result;
}

}  // namespace moebius
