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
  int64_t threads = 0;  // CPU threads; 0: all this process may use
  bool graph = true;    // on a GPU: record the step once (a CUDA graph) and replay it

  ModelSpec model;
  std::string model_hf;   // model.hf
  std::string init_from;  // model.init_from
  DataSpec data;
  LoopSpec train;
  OptimizerSpec optimizer;
  BalanceSpec moe;
  ParallelSpec parallel;
  PrecisionSpec precision;
  MemorySpec memory;
  CheckpointSpec checkpoint;
  LogSpec log;

  // Where each key's value came from: "default", "recipe.toml:12", "--set", "config.json", "moe.balance", "model.hf".
  // Every key that to_toml prints has an entry after a load.
  std::map<std::string, std::string> provenance;

  // Every value in its range, each spec's own check() and the relations between specs. Error{usage}.
  // A run without data or folder passes, so that `config`, `plan` and `bench` need neither.
  void check(int64_t world_size) const;
  // Depths of multi-token prediction that are trained.
  int64_t num_mtp() const { return train.mtp_coeff > 0 ? model.num_mtp_layers : 0; }
  // What `train` needs beyond check(): run.dir, data.train, data.valid when the evaluation is asked for, a folder for
  // log.trace. Error{usage}.
  void check_trainable() const;
  bool operator==(const RunSpec&) const = default;
};

// Reads PATH and applies "section.key=value" overrides (TOML values; what is not TOML is a string). model.hf = DIR
// takes the model from DIR/config.json (inline keys beside it are an error) and, where it is not given, data.tokenizer.
// moe.balance with "bias" turns model.expert_bias on where the family has one ("moebius").
// Error{usage} for unknown keys (naming the nearest known), wrong types and values out of range, with file:line;
// Error{io} when the recipe or DIR/config.json cannot be read, Error{input} when DIR/config.json is no model of ours.
// Does not call check().
RunSpec load_run_spec(const std::string& path, const std::vector<std::string>& overrides);
// The same from the text of a recipe; name stands for the file in messages and provenance.
RunSpec parse_run_spec(const std::string& text, const std::string& name, const std::vector<std::string>& overrides);

// The resolved recipe as TOML that load_run_spec reads back to the same spec (but for provenance): floats with the
// fewest digits that read back to the same value. A model that came from a config.json is held whole in model.config,
// so that its folder is not needed again. with_provenance adds where each value came from to its line, and shows the
// keys of such a model as comments.
std::string to_toml(const RunSpec& spec, bool with_provenance);

// Every key a recipe may hold, "section.key", sorted. A test holds this list: adding a key is a visible act.
std::vector<std::string> recipe_keys();

// "key: a -> b" for each key that changes what is trained and differs. Not among them, so free to change on resume:
// run.* but the seed, train.steps, the evaluation, [parallel], [memory], [checkpoint] and [log].
std::vector<std::string> config_diff(const RunSpec& a, const RunSpec& b);
// Those keys and their values, one "key = value" a line: equal texts iff config_diff is empty.
std::string train_identity(const RunSpec& spec);

}  // namespace moebius
