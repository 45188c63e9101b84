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
  Engine shapes({.model = model, .shape = {.batch = 1, .seq = 1}, .device = DeviceKind::null});
  const std::unique_ptr<WeightsReader> reader = open_weights(from, shapes.model());
  return write_hub_folder({.out = spec.out,
                           .model = model,
                           .weights = *reader,
                           .dtype = spec.dtype,
                           .files = spec.files.empty() ? other_files_of(from) : spec.files,
                           .shard_bytes = spec.shard_bytes});
}

}  // namespace moebius
