#include "train/export.h"

#include <filesystem>

#include "io/hf_names.h"
#include "train/engine.h"
#include "train/weights.h"

namespace moebius {

ExportResult export_hugging_face(const ExportSpec& spec) {
  const WeightsFolder from = find_weights(spec.model);
  const ModelSpec model = read_model_spec(from.path);
  hf_family(model.family);  // refused before the weights are looked at
  MOEBIUS_CHECK(input, spec.files.empty() || std::filesystem::is_directory(spec.files),
                "export: expected a folder of files to copy; got {}; check it", spec.files);
  const ModelSpec held = with_mtp_of(from, model);
  Engine shapes(
      {.model = held, .shape = {.batch = 1, .seq = 1, .num_mtp = held.num_mtp_layers}, .device = DeviceKind::null});
  const std::unique_ptr<WeightsReader> reader = open_weights(from, shapes.model());
  HubFolderResult result = write_hub_folder({.out = spec.out,
                                             .model = model,
                                             .weights = *reader,
                                             .dtype = spec.dtype,
                                             .files = spec.files.empty() ? other_files_of(from) : spec.files,
                                             .shard_bytes = spec.shard_bytes});
  if (held.num_mtp_layers < model.num_mtp_layers) result.notice = missing_mtp_notice(from, model);
  return result;
}

}  // namespace moebius
