// Adapters on disk: in PEFT's format (hub/peft.h), or in a checkpoint of a run with [lora].
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/lora_spec.h"
#include "model/model.h"
#include "weights/source.h"

namespace moebius {

// The adapters of one model, each tensor read on its own.
class AdapterReader {
 public:
  virtual ~AdapterReader() = default;
  virtual const std::string& path() const = 0;
  virtual const LoraSpec& lora() const = 0;                      // rank and alpha
  virtual const std::vector<WeightsEntry>& entries() const = 0;  // canonical names of A and B
  virtual void read(size_t entry, void* dst) const = 0;          // its bytes, in the dtype on disk
  // Returns the names of the matrices that have an adapter, without ".weight", sorted.
  std::vector<std::string> matrices() const;
};

// path: a folder of PEFT, a checkpoint or a run's folder. model: whose adapters they are. Throws Error{input} when
// there are no adapters, and when a tensor has not the shape that rank and model give it, or has no partner.
std::unique_ptr<AdapterReader> open_adapter(const std::string& path, const ModelSpec& model);

// Fills the adapters of the model, masters and weights, on the stream s of its device. Throws Error{input}
// naming rank, alpha or tensors where the folder's adapters are not those of the model.
void load_adapter(Stream& s, Model& model, const LoraSpec& lora, const std::string& path);

// Returns the folder of the model beside which a checkpoint's adapters were trained; empty for a checkpoint that holds
// a whole model. Throws Error{input} when it has adapters and no such folder, or when that model is made of
// the same adapters.
std::string base_of_adapters(const std::string& checkpoint);

// Returns the weights of a model with adapters added: W + scale * B A in f32 where there is an adapter, and
// what the model has elsewhere. adapter: as for open_adapter().
std::unique_ptr<WeightsReader> open_merged(const WeightsFolder& base, const std::string& adapter,
                                           const ModelCatalog& catalog);

struct AdapterExport {
  std::string out;    // folder to make
  std::string model;  // a run's folder or a checkpoint with adapters
};
struct AdapterExportResult {
  int64_t num_tensors = 0, bytes = 0;
};
// Writes a folder of PEFT, tensors in f32. It appears whole or not at all. Throws Error{input} for a checkpoint without
// adapters, and for matrices that are no linear layer in transformers.
AdapterExportResult export_adapter(const AdapterExport& spec);

}  // namespace moebius
