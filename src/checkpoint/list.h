// Lists the checkpoints of a folder, and checks whether they can be used.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moebius {

struct CheckpointInfo {
  std::string folder;
  int64_t step = 0;
  int64_t bytes = 0;    // bytes of its files; 0 when damaged
  std::string problem;  // the reason why it cannot be used; empty when complete
};

// Returns the step folders of `dir` in ascending order, with their manifests and file sizes checked; empty
// if there is no such folder.
std::vector<CheckpointInfo> list_checkpoints(const std::string& dir);

// Returns the folder of the newest complete checkpoint. `rejected`, unless null, gets a line for each newer
// one that is skipped, with the reason.
std::optional<std::string> newest_checkpoint(const std::string& dir, std::vector<std::string>* rejected);

struct VerifyReport {
  int64_t step = -1;
  int64_t num_tensors = 0, num_files = 0, bytes = 0;
  std::vector<std::string> problems;  // one line each
  bool ok() const { return problems.empty(); }
};

// Reads every byte and compares the hashes. Damage is reported in the result, and never thrown.
VerifyReport verify_checkpoint(const std::string& folder);

}  // namespace moebius
