// Adapters on disk: in PEFT's format (hub/peft.h), or in a checkpoint of a run with [lora].
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/lora_spec.h"
#include "core/stopped.h"
#include "hub/peft_experts.h"
#include "model/model.h"
#include "weights/fingerprint.h"
#include "weights/source.h"

namespace moebius {

// The adapters of one model, each tensor read on its own.
class AdapterReader {
 public:
  virtual ~AdapterReader() = default;
  virtual const std::string& path() const = 0;
  virtual const LoraSpec& lora() const = 0;  // rank and alpha
  // Canonical names of A and B, as adapter_params() gives them: an A of an expert's gate_up_proj is that of its
  // gate_proj and of its up_proj.
  virtual const std::vector<WeightsEntry>& entries() const = 0;
  virtual void read(size_t entry, void* dst) const = 0;  // its bytes, in the dtype on disk
  // Returns that of lora(), or twice it for experts whose gate and up share such an A (hub/peft_experts.h).
  virtual int64_t rank_of(size_t entry) const;
  std::vector<float> read_f32(size_t entry) const;
  // Returns the fingerprint of the weights that the adapters were trained on; nothing if the folder has none.
  virtual std::optional<WeightsFingerprint> base() const = 0;
  // Returns the name of these weights, such as a folder; it may be empty.
  virtual std::string base_name() const = 0;
  // Returns whether the folder has one tensor for all experts of a layer (hub/peft_experts.h).
  virtual bool has_fused_experts() const { return false; }
  // Returns the names of the A tensors without their suffixes, sorted. As lora.targets they give the same adapters.
  std::vector<std::string> matrices() const;
};

// Returns the family and the sizes of experts by which their adapters are found in PEFT's tensors.
ExpertAdapters expert_adapters_of(const ModelSpec& model, int64_t rank);

// path: a folder of PEFT, a checkpoint or a run's folder. model: whose adapters they are. Throws Error{input} when
// there are no adapters, and when a tensor has another shape than rank and model require, or A or B is missing.
std::unique_ptr<AdapterReader> open_adapter(const std::string& path, const ModelSpec& model);

// Fills the adapters of the model, masters and weights, on the stream s of its device. Returns AdapterReader::base() of
// the folder. Throws Error{input} naming rank, alpha or tensors where the folder's adapters are not those of the model,
// as where rank_of() differs.
std::optional<WeightsFingerprint> load_adapter(Stream& s, Model& model, const LoraSpec& lora, const std::string& path);

// Returns the folder of the model for which a checkpoint's adapters were trained; empty for a checkpoint of
// a whole model. Throws Error{input} when it has adapters and no such folder, or when that model is made of
// the same adapters.
std::string base_of_adapters(const std::string& checkpoint);

// Returns the weights of a model with adapters added: W + scale * B A in f32 where there is an adapter, and
// what the model has elsewhere. A slice of a matrix is computed alone, with the same bits. Throws Error{input} if
// the adapter has a fingerprint of other weights than those of the model (by WeightsFingerprint::values), unless any
// may be its base.
std::unique_ptr<WeightsReader> open_merged(const WeightsFolder& base, const AddedAdapter& adapter,
                                           const ModelCatalog& catalog);

struct AdapterExport {
  std::string out;              // folder to make
  std::string model;            // a run's folder or a checkpoint with adapters
  bool fused_experts = false;   // all experts of a layer are one parameter, as in transformers 5
  ShouldStop should_stop = {};  // asked before each tensor
};
struct AdapterExportResult {
  int64_t num_tensors = 0, bytes = 0;
  // True if PEFT, which converts the names of transformers 4 for transformers 5, would lose or refuse some of them:
  // those of MLPs of an MoE model that are no routed experts, and those of gate or up alone. Of qwen2_moe it is those
  // of routed experts and routers.
  bool needs_fused_experts = false;
};
// Writes a folder of PEFT, tensors in f32. It appears whole or not at all. Without fused_experts the names are those of
// transformers 4, unless that has no place for one of the adapters: an A of gate_up_proj, experts of gpt_oss, and some
// routers. Throws Error{input} for a checkpoint without adapters.
AdapterExportResult export_adapter(const AdapterExport& spec);

}  // namespace moebius
