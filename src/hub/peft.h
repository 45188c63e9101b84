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

// Returns whether PEFT has a linear layer for the matrix: not for experts that are one tensor, nor
// for routers that are no linear layer. canonical: without ".weight".
bool has_peft_module(HfFamily family, const std::string& model_type, const std::string& canonical);

// The name of a matrix in transformers, and back; without ".weight".
std::string hf_module(HfFamily family, const std::string& canonical);
std::string canonical_module(HfFamily family, const std::string& module);

// The config of these adapters. modules: all that have an adapter; all_modules: all that could.
// Where names that differ in their numbers alone are all targets, target_modules is one pattern.
nlohmann::json peft_config(const LoraSpec& lora, const std::string& base_model, const std::vector<std::string>& modules,
                           const std::vector<std::string>& all_modules);

// Rank and alpha of an adapter_config.json; who: the file. Error{input} for another kind of adapter
// than LoRA, and for settings that change what an adapter computes and that Moebius does not have
// (DoRA, rank patterns, biases, saved modules, ...): the message names the setting.
LoraSpec parse_peft_config(std::string_view text, const std::string& who);

// A folder of PEFT, open for reading.
class PeftFolder {
 public:
  // Error{input} for a folder without the two files, for a config as parse_peft_config() says, and for
  // tensors of other names, or of the same matrix.
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
