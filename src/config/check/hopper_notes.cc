#include "config/check/hopper_notes.h"

#include <fmt/format.h>

#include "config/check/batch_split_check.h"

namespace moebius {

std::vector<std::string> hopper_notes(const RunSpec& run) {
  std::vector<std::string> notes;
  if (run.device != DeviceKind::cuda) return notes;
  const auto add = [&](const char* setting, const char* instead) {
    notes.push_back(
        fmt::format("{} needs the kernels of a GPU of compute capability 9.0; on another one the run ends before its "
                    "first step, and {} runs there",
                    setting, instead));
  };
  if (run.precision.recipe == PrecisionRecipe::fp8_block)
    add("precision.recipe = \"fp8_block\"", "precision.recipe = \"fp8_tensor\" (emulated) or \"none\"");
  if (run.optimizer.fuse_grad) add("optimizer.fuse_grad = true", "optimizer.fuse_grad = false");
  if (const std::string split = split_kernels_note(run); !split.empty()) notes.push_back(split);
  return notes;
}

}  // namespace moebius
