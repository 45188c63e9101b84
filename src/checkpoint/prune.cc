#include "checkpoint/prune.h"

#include <algorithm>

#include "checkpoint/folder.h"
#include "checkpoint/list.h"
#include "core/error.h"
#include "core/fault.h"

namespace moebius {
namespace {

// The folder is renamed first, so that an unfinished removal leaves nothing that looks
// like a checkpoint.
void remove_checkpoint(const std::string& dir, const CheckpointInfo& old) {
  const std::string unfinished = dir + "/" + unfinished_name(old.step);
  rename_folder(old.folder, unfinished);
  fault_point("checkpoint.mid_prune");
  remove_folder(unfinished);
}

// The checkpoints older than the newest `keep` good ones; empty if fewer are good.
template <class IsGood>
std::vector<CheckpointInfo> older_than(const std::vector<CheckpointInfo>& by_step, int64_t keep, IsGood&& is_good) {
  int64_t num_good = 0;
  for (auto it = by_step.rbegin(); it != by_step.rend(); ++it) {
    if (is_good(*it) && ++num_good == keep) return {by_step.begin(), it.base() - 1};
  }
  return {};
}

}  // namespace

void remove_unfinished(const std::string& dir) {
  for (const std::string& folder : unfinished_folders(dir)) remove_folder(folder);
}

void prune_after_save(const std::string& dir, int64_t step, int64_t keep) {
  std::vector<CheckpointInfo> infos = list_checkpoints(dir);
  while (!infos.empty() && infos.back().step > step) {
    remove_checkpoint(dir, infos.back());
    infos.pop_back();
  }
  const auto is_complete = [](const CheckpointInfo& info) { return info.problem.empty(); };
  for (const CheckpointInfo& old : older_than(infos, keep, is_complete)) remove_checkpoint(dir, old);
}

std::vector<std::string> prune_checkpoints(const std::string& dir, int64_t keep) {
  MOEBIUS_CHECK(usage, keep >= 1,
                "checkpoint: expected at least 1 to be kept; got {}; remove {} by hand if none is wanted", keep, dir);
  MOEBIUS_CHECK(input, !list_checkpoints(dir).empty(),
                "checkpoint prune: expected a folder of checkpoints; got none in {}; check the path", dir);
  const CheckpointLock lock(dir);
  const auto verifies = [](const CheckpointInfo& info) { return verify_checkpoint(info.folder).ok(); };
  std::vector<std::string> removed;
  for (const CheckpointInfo& old : older_than(list_checkpoints(dir), keep, verifies)) {
    remove_checkpoint(dir, old);
    removed.push_back(old.folder);
  }
  remove_unfinished(dir);
  return removed;
}

}  // namespace moebius
