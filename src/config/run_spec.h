// A run: every spec together, read from a TOML recipe with --set overrides; each value knows where it came from.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "config/parallel_spec.h"
#include "config/policy_spec.h"
#include "config/train_spec.h"
#include "core/tensor.h"

namespace moebius {

struct RunSpec {
  // [run]
  std::string dir;
  uint64_t seed = 0;
  DeviceKind device = DeviceKind::cpu;
  int64_t threads = 0;              // CPU threads; 0: all this process may use
  bool deterministic = true;

  ModelSpec model;
  std::string model_hf;             // model.hf
  std::string init_from;            // model.init_from
  DataSpec data;
  LoopSpec train;
  OptimizerSpec optimizer;
  BalanceSpec moe;
  ParallelSpec parallel;
  PrecisionSpec precision;
  MemorySpec memory;
  CheckpointSpec checkpoint;
  LogSpec log;

  // Where each key's value came from: "default", "recipe.toml:12", "--set", "config.json".
  std::map<std::string, std::string> provenance;

  // Relations between specs; each spec's own check() included. Error{usage}.
  void check(int64_t world_size) const;
};

// Reads PATH and applies "section.key=value" overrides (TOML values; a bare word is a string).
// Error{usage} for unknown keys (naming the nearest known), wrong types and values out of range, with file:line;
// Error{io} when the recipe cannot be read. Does not call check().
RunSpec load_run_spec(const std::string& path, const std::vector<std::string>& overrides);

// The resolved recipe as TOML that load_run_spec reads back to the same spec; with_provenance adds "# from ..." to each line.
std::string to_toml(const RunSpec& spec, bool with_provenance);

// Every key a recipe may hold, "section.key", sorted. A test holds this list: adding a key is a visible act.
std::vector<std::string> recipe_keys();

}  // namespace moebius
