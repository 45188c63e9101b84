#include "config/check/batch_split_check.h"

#include <fmt/format.h>

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

constexpr const char* kKey = "parallel.expert_overlap";
constexpr const char* kNeedsKernels =
    "parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of a GPU of compute capability 9.0";

bool splits(const RunSpec& run) {
  const ParallelSpec& p = run.parallel;
  return p.expert_overlap == ExpertOverlap::batch_split && p.ep * p.etp > 1 && run.model.num_moe_layers() > 0;
}

// The kernels for f32 compute a part of the rows on every device, and so do those of CPUs.
bool needs_hopper(const RunSpec& run) {
  return splits(run) && run.device == DeviceKind::cuda && run.precision.compute == DType::bf16;
}

}  // namespace

bool takes_split_widths(const ModelSpec& model, int64_t etp) {
  return model.hidden_size % 8 == 0 && model.moe_intermediate_size / etp % 8 == 0;
}

void check_split_rows(bool are_plain, const std::string& origin) {
  MOEBIUS_CHECK(usage, are_plain,
                "parallel.expert_overlap = \"batch_split\" computes a rank's own rows from x as it is, so rows and "
                "products must be bf16 or f32, without adapters; set it to \"layer\", or remove precision.recipe and "
                "lora{}",
                origin);
}

void check_split_dispatcher(bool is_direct, const std::string& origin) {
  MOEBIUS_CHECK(usage, is_direct,
                "parallel.expert_overlap = \"batch_split\" needs parallel.dispatcher = \"direct\", which knows the "
                "places of all rows before they are sent; set it, or set expert_overlap to \"layer\"{}",
                origin);
}

void check_split_kernels(bool exist, const std::string& got, const std::string& origin) {
  MOEBIUS_CHECK(usage, exist, "{}; got {}; set parallel.expert_overlap to \"layer\" or \"none\"{}", kNeedsKernels, got,
                origin);
}

std::string split_kernels_note(const RunSpec& run) {
  if (!needs_hopper(run)) return "";
  return fmt::format("{}; on another one the run ends before its first step", kNeedsKernels);
}

void check_batch_split(const RunSpec& run) {
  if (!splits(run)) return;
  const std::string from = origin(run, kKey);
  const PrecisionSpec& precision = run.precision;
  const bool is_quantised = precision.recipe != PrecisionRecipe::none &&
                            (precision.keep.empty() || precision.dispatch == PrecisionChoice::recipe);
  check_split_rows(!is_quantised, from);
  const DispatcherKind kind = run.parallel.dispatcher;
  check_split_dispatcher(kind == DispatcherKind::direct || kind == DispatcherKind::automatic, from);
  if (!needs_hopper(run)) return;
  check_split_kernels(run.kernels == KernelChoice::automatic, fmt::format("run.kernels = \"{}\"", name_of(run.kernels)),
                      from);
  MOEBIUS_CHECK(usage, takes_split_widths(run.model, run.parallel.etp),
                "{}, which take a hidden size and an expert's width on a rank in multiples of 8; got {} and {}; set "
                "parallel.expert_overlap to \"layer\" or \"none\"{}",
                kNeedsKernels, run.model.hidden_size, run.model.moe_intermediate_size / run.parallel.etp, from);
}

}  // namespace moebius
