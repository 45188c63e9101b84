#include "train/notes/block_states_note.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/block_code.h"
#include "model/catalog.h"
#include "parallel/optim/optimizer.h"

namespace moebius {

BlockStates block_states(const RunSpec& run) {
  const ModelCatalog catalog({.model = run.model,
                              .use = ModelUse::training,
                              .balance = run.moe,
                              .freeze = run.train.freeze,
                              .num_mtp = run.num_mtp(),
                              .lora = run.lora});
  BlockStates states{.trained = catalog.num_trained()};
  if (run.optimizer.state != StateFormat::blocks_8bit) return states;
  int64_t most = 0;
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    const std::vector<ParamPart>& parts = entry.spec.parts;
    if (entry.frozen || !entry.spec.trainable || parts.empty()) continue;
    if (std::all_of(parts.begin(), parts.end(), [](const ParamPart& part) { return has_code_blocks(part.shape); }))
      continue;
    for (const ParamPart& part : parts) {
      states.in_f32 += part.shape.numel();
      if (part.shape.numel() <= most) continue;
      most = part.shape.numel();
      states.largest = part.name;
    }
  }
  return states;
}

std::optional<RunNote> block_states_note(const RunSpec& run) {
  if (num_moments(run.optimizer) == 0) return {};
  const BlockStates states = block_states(run);
  if (states.share_in_f32() <= 0.01) return {};
  return RunNote{
      fmt::format("optimizer.state = \"8bit\" keeps moments of {:.3g} % of the parameters in f32, since their "
                  "rows are not a multiple of {} elements; the largest of them is {}",
                  100 * states.share_in_f32(), kCodeBlock, states.largest),
      /*is_warning=*/states.share_in_f32() > 0.5};
}

}  // namespace moebius
