// Adapters in the format of PEFT (huggingface/peft): adapter_config.json, and adapter_model.safetensors
// with two tensors for each matrix,
//   base_model.model.{module}.lora_A.weight  [rank, in]
//   base_model.model.{module}.lora_B.weight  [out, rank]
// where module is the name of a linear layer in transformers (4.x, whose experts are layers of their
// own). Canonical names are those of model/lora/adapter_params.h.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "config/lora_spec.h"
#include "hub/hf_names.h"
#include "io/safetensors.h"

namespace moebius {

inline constexpr const char *kPeftConfig = "adapter_config.json", *kPeftWeights = "adapter_model.safetensors";

// Returns whether transformers has a linear layer for the matrix, which PEFT can adapt. It has none for experts that
// are one tensor, and for some routers. canonical: a name without ".weight".
bool has_peft_module(HfFamily family, const std::string& model_type, const std::string& canonical);

// Returns the name of a matrix in transformers for its canonical name; both are without ".weight".
std::string hf_module(HfFamily family, const std::string& canonical);
std::string canonical_module(HfFamily family, const std::string& module);

// Returns the adapter_config.json of these adapters. modules: the linear layers that have an adapter; all_modules:
// those that could have one. Names that differ only in their numbers and are all targets become one
// pattern in target_modules.
nlohmann::json peft_config(const LoraSpec& lora, const std::string& base_model, const std::vector<std::string>& modules,
                           const std::vector<std::string>& all_modules);

// Returns the rank and alpha of an adapter_config.json. who: the file, for messages.
// Throws Error{input} for an adapter other than LoRA. Throws it also for a setting that changes the result of an
// adapter and that Moebius does not have (DoRA, rank patterns, biases, saved modules, ...). The message
// names the setting.
LoraSpec parse_peft_config(std::string_view text, const std::string& who);

// An open folder in the format of PEFT.
class PeftFolder {
 public:
  // Throws Error{input} for a folder without the two files, for a config that parse_peft_config() refuses, for tensors
  // with other names, and for a matrix with two tensors of the same kind.
  PeftFolder(const std::string& dir, HfFamily family);

  const LoraSpec& lora() const { return lora_; }  // rank and alpha; targets are empty
  struct Entry {
    std::string name;  // canonical
    SafetensorsEntry stored;
  };
  const std::vector<Entry>& entries() const { return entries_; }  // sorted by name
  void read(const Entry& entry, void* dst) const { file_.read(entry.stored, dst); }

 private:
  SafetensorsFile file_;
  LoraSpec lora_;
  std::vector<Entry> entries_;
};

}  // namespace moebius
