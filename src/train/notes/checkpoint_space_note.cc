#include "train/notes/checkpoint_space_note.h"

#include <fmt/format.h>

#include <algorithm>

#include "memory/plan.h"

namespace moebius {

int64_t added_checkpoints(const RunSpec& run, int64_t first_step, int64_t num_there) {
  const int64_t steps = run.train.steps, every = run.checkpoint.every, keep = run.checkpoint.keep;
  if (first_step > steps) return 0;
  int64_t saves = 1;  // the last step
  if (every > 0) saves += (steps - 1) / every - (first_step - 1) / every;
  if (keep == 0) return saves;
  return std::min(saves, std::max<int64_t>(1, keep + 1 - num_there));
}

std::optional<RunNote> checkpoint_space_note(const RunSpec& run, int64_t first_step, const CheckpointSpace& space) {
  const int64_t added = added_checkpoints(run, first_step, space.num_there);
  if (space.free_bytes < 0 || added == 0 || space.bytes <= space.free_bytes / added) return std::nullopt;
  const bool is_first_too_large = space.bytes > space.free_bytes;
  const std::string more = added == 1 ? ""
                                      : fmt::format(", and the run adds up to {} (checkpoint.keep = {}{})", added,
                                                    run.checkpoint.keep, run.checkpoint.keep == 0 ? " keeps all" : "");
  return RunNote{fmt::format("run.dir: {} has {} free, and a checkpoint takes {}{}: {} fails and ends the run; free "
                             "space, {}or choose another run.dir",
                             run.dir, bytes_text(space.free_bytes), bytes_text(space.bytes), more,
                             is_first_too_large ? "the first save" : "a later save",
                             is_first_too_large ? "" : "keep fewer checkpoints, "),
                 /*is_warning=*/true};
}

}  // namespace moebius
