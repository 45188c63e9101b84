// Adapters in the format of PEFT (huggingface/peft): adapter_config.json, and adapter_model.safetensors
// with two tensors for each matrix,
//   base_model.model.{module}.lora_A.weight  [rank, in]
//   base_model.model.{module}.lora_B.weight  [out, rank]
// where module is the name of a linear layer in transformers. In transformers 4 the projections of experts are such
// layers. Later versions have one parameter for all experts of a layer; hub/peft_experts.h has its two tensors.
// Canonical names are those of model/lora/adapter_params.h.
#pragma once

#include <cstddef>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/lora_spec.h"
#include "hub/hf_names.h"
#include "hub/peft_experts.h"
#include "io/safetensors.h"

namespace moebius {

inline constexpr const char *kPeftConfig = "adapter_config.json", *kPeftWeights = "adapter_model.safetensors";

// The key of the weights' metadata that has the fingerprint of the base model (weights/fingerprint.h). PEFT ignores it.
inline constexpr const char* kPeftBaseKey = "moebius_base";

// Returns whether transformers 4 has a linear layer for the matrix, which PEFT can adapt. It has none for experts that
// are one tensor, and for some routers. canonical: a name without ".weight".
bool has_peft_module(HfFamily family, const std::string& model_type, const std::string& canonical);

// Returns the name of a matrix in transformers for its canonical name; both are without ".weight".
std::string hf_module(HfFamily family, const std::string& canonical);
std::string canonical_module(HfFamily family, const std::string& module);

// The targets of an adapter, in names of transformers.
struct PeftTargets {
  std::vector<std::string> modules, all_modules;        // linear layers that have an adapter, and those that could
  std::vector<std::string> parameters, all_parameters;  // the same of target_parameters
  std::vector<std::string> stacked;                     // those of parameters that have twice the rank and alpha
};
// Returns the adapter_config.json of these adapters. Names of modules that differ only in their numbers and are all
// targets become one pattern in target_modules, and such names of parameters become their end. lora_dropout is 0 if
// PEFT could not load the adapter otherwise.
nlohmann::json peft_config(const LoraSpec& lora, const std::string& base_model, const PeftTargets& targets);

// Returns the rank and alpha of an adapter_config.json. who: the file, for messages.
// Throws Error{input} for an adapter other than LoRA. Throws it also for a setting that changes the result of an
// adapter and that Moebius does not have (DoRA, rank patterns, biases, saved modules, ...). The message
// names the setting. Patterns that give gate_up_proj of experts twice the rank and twice alpha are those of stacked
// adapters (hub/peft_experts.h), and are accepted.
LoraSpec parse_peft_config(std::string_view text, const std::string& who);

// An open folder in the format of PEFT.
class PeftFolder {
 public:
  // model: its family and sizes; the rank is that of the folder. Throws Error{input} for a folder without the two
  // files, for a config that parse_peft_config() refuses, for tensors with other names, for a matrix with two tensors
  // of the same kind, and for experts' tensors that is_exchanged() refuses.
  PeftFolder(const std::string& dir, const ExpertAdapters& model);

  const LoraSpec& lora() const { return lora_; }  // rank and alpha; targets are empty
  struct Entry {
    std::string name;  // canonical
    std::vector<int64_t> shape;
    SafetensorsEntry stored;
    std::optional<FusedPlace> place;  // place in the tensor of all experts
    int64_t rank = 0;                 // that of lora(), or twice it where gate and up share an A (hub/peft_experts.h)
  };
  const std::vector<Entry>& entries() const { return entries_; }  // sorted by name
  // Both are empty if the folder has none: the text at kPeftBaseKey, and base_model_name_or_path.
  std::string base_fingerprint() const;
  const std::string& base_name() const { return base_name_; }
  bool has_fused_experts() const { return has_fused_experts_; }  // whether some tensor holds all experts
  void read(const Entry& entry, void* dst) const;

 private:
  void add_experts(ExpertAdapters x, const std::vector<SafetensorsEntry>& stored, const nlohmann::json& config);
  const std::vector<std::byte>& whole(const SafetensorsEntry& stored) const;

  std::string dir_;
  SafetensorsFile file_;
  LoraSpec lora_;
  std::string base_name_;
  std::vector<Entry> entries_;
  bool has_fused_experts_ = false;
  // The most recently read tensors of all experts. Only one thread may read at a time.
  mutable std::deque<std::pair<std::string, std::vector<std::byte>>> read_;
};

}  // namespace moebius
