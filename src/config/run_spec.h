// A run: all specs together. They are read from a TOML recipe with --set overrides, and the origin
// of each value is kept.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/exchange_rates.h"
#include "config/lora_spec.h"
#include "config/model_spec.h"
#include "config/parallel_spec.h"
#include "config/policy_spec.h"
#include "config/train_spec.h"
#include "core/tensor.h"
#include "device/kernel_choice.h"

namespace moebius {

// The provenance has this entry if the table of YaRN has no factor, which then follows from max_position_embeddings.
inline constexpr const char* kYarnFactor = "model.rope_scaling.factor";

struct RunSpec {
  // [run]
  std::string dir;
  uint64_t seed = 0;
  DeviceKind device = DeviceKind::cpu;
  int64_t threads = 0;  // CPU threads; 0: all that this process may use
  bool graph = true;    // on a GPU: the step is captured once in CUDA graphs, which are then replayed
  KernelChoice kernels = KernelChoice::automatic;  // kernels that a GPU uses
  std::string machine;  // not a key: the machine file by whose rates dispatcher = "auto" chooses; empty: none is named
  // Not a key: the rates of that file. None: the usual ones.
  std::optional<ExchangeRates> rates;

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
  bool offload_weights = false;  // "weights" in memory.offload: those of layers are on the host; changes no bit
  LoraSpec lora;
  CheckpointSpec checkpoint;
  LogSpec log;

  // The origin of each key's value: "default", "recipe.toml:12", "--set", "config.json",
  // "moe.balance", "model.hf". After a load every key that to_toml prints has an entry.
  std::map<std::string, std::string> provenance;

  // Throws Error{usage} if a value is out of its range, a spec's own check() fails, or two specs do not
  // fit each other. A run without data or folder passes, so that `config` and `bench` need neither.
  void check(int64_t world_size) const;
  // Returns the depths of multi-token prediction that are trained.
  int64_t num_mtp() const { return train.mtp_coeff > 0 ? model.num_mtp_layers : 0; }
  // Throws Error{usage} if something is missing that `train` needs beyond check(): run.dir, data.train,
  // data.valid if an evaluation is asked for, the tokenizer, a folder for log.trace.
  void check_trainable() const;
  bool operator==(const RunSpec&) const = default;
};

// Reads PATH, then applies the overrides "section.key=value". A value is TOML; if it is not, it is taken as
// a string. model.hf = DIR takes the model from DIR/config.json, and data.tokenizer from DIR if the recipe
// does not give it. Other keys of the model together with model.hf are an error. moe.balance with "bias" turns
// model.expert_bias on if the family has one ("moebius"). Retired keys with their accepted value are
// ignored (config/recipe/table.h).
// Throws Error{usage} with file:line for unknown keys (it names the nearest), wrong types and values out
// of range. Throws Error{io} if the recipe or DIR/config.json cannot be read.
// Throws Error{input} if DIR/config.json is not a model that Moebius computes.
// It does not call check().
RunSpec load_run_spec(const std::string& path, const std::vector<std::string>& overrides);
// Returns the same from the text of a recipe. Messages and provenance give `name` as its file.
RunSpec parse_run_spec(const std::string& text, const std::string& name, const std::vector<std::string>& overrides);

// Returns the resolved recipe as TOML. load_run_spec reads it back to the same spec, except for
// provenance. Floats have the fewest digits that read back to the same value. A model that
// came from a config.json is held whole in model.config, so that its folder is not needed
// again. with_provenance adds its origin to the line of each value, and shows the keys of such
// a model as comments.
std::string to_toml(const RunSpec& spec, bool with_provenance);

// Every key that a recipe may hold, as "section.key", sorted. A test compares this list, so that no key is
// added by accident.
std::vector<std::string> recipe_keys();

// "key: a -> b" for each key that changes what is trained and whose values differ. These keys are not among
// them and may change on resume: run.* except the seed, train.steps, the evaluation, [parallel], [memory],
// [checkpoint], [log].
std::vector<std::string> config_diff(const RunSpec& a, const RunSpec& b);
// Returns the keys that change what is trained with their values, one "key = value" a line. Two texts are equal if
// and only if config_diff is empty.
std::string train_identity(const RunSpec& spec);

}  // namespace moebius
