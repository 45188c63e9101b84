#include "weights/export.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "core/error.h"
#include "hub/fused_experts.h"
#include "hub/hf_names.h"
#include "weights/import.h"
#include "weights/load.h"

namespace moebius {

namespace {

bool is_of_a_run(const WeightsFolder& from) {
  return from.kind == WeightsFolder::Kind::checkpoint && !CheckpointReader(from.path).meta().contains(kImportedKey);
}

// A run saves frozen parameters in the dtype of its computation.
std::string widened_notice(const WeightsReader& weights) {
  const auto is_narrow = [](const WeightsEntry& e) { return e.dtype == DType::bf16; };
  const auto count = std::count_if(weights.entries().begin(), weights.entries().end(), is_narrow);
  if (count == 0) return "";
  return fmt::format(
      "tensors that the run froze and held in bf16 ({}) are written in f32 like the others, the same numbers; --dtype "
      "bf16 writes all in bf16",
      count);
}

void check_exportable(const WeightsFolder& from, const ModelSpec& model) {
  MOEBIUS_CHECK(
      input, model.family != "moebius",
      "export: expected a model of a Hugging Face family; got {}, of model_type \"moebius\", for which Hugging "
      "Face has no class; it evaluates and generates here, and a model to be exported is trained with another "
      "model_type and the keys of that family (docs/reference/formats.md has the table)",
      from.path);
  hf_family(model.family);
}

void check_block_fp8(const WeightsFolder& from, const ModelSpec& model) {
  const std::string expert = "model.layers.0.mlp.experts.0.down_proj.weight";
  const bool is_fused = fused_place(hf_family(model.family), expert, {model.hidden_size, model.moe_intermediate_size},
                                    std::max<int64_t>(1, model.num_experts))
                            .has_value();
  MOEBIUS_CHECK(input, !is_fused,
                "export --dtype fp8_block: expected a family with a tensor for each expert; got {}, of model_type "
                "\"{}\", whose experts are one tensor, which has no block scales; choose bf16",
                from.path, model.family);
}

}  // namespace

ExportResult export_hugging_face(const ExportSpec& spec) {
  const WeightsFolder from = find_weights(spec.model);
  const ModelSpec model = read_model_spec(from.path);
  check_exportable(from, model);  // refused before the weights are read
  if (spec.block_fp8) check_block_fp8(from, model);
  MOEBIUS_CHECK(input, spec.files.empty() || std::filesystem::is_directory(spec.files),
                "export: expected a folder of files to copy; got {}; check it", spec.files);
  const ModelSpec held = with_mtp_of(from, model);
  const std::unique_ptr<WeightsReader> reader = open_weights(from, ModelCatalog(held));
  const bool is_plain = !spec.dtype && is_of_a_run(from), in_f32 = is_plain && !spec.block_fp8;
  HubFolderResult result = write_hub_folder({.out = spec.out,
                                             .model = model,
                                             .weights = *reader,
                                             .dtype = in_f32     ? DType::f32
                                                      : is_plain ? DType::bf16
                                                                 : spec.dtype,
                                             .block_fp8 = spec.block_fp8,
                                             .files = spec.files.empty() ? other_files_of(from) : spec.files,
                                             .shard_bytes = spec.shard_bytes,
                                             .should_stop = spec.should_stop});
  if (held.num_mtp_layers < model.num_mtp_layers) result.notices.push_back(missing_mtp_notice(from, model));
  if (in_f32) result.notices.push_back(widened_notice(*reader));
  return result;
}

}  // namespace moebius
