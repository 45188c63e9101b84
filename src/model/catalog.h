// The names, shapes and kinds of a model's parameters, as a function of its spec.
//
// The layers declare their parameters into a table whose plan is never bound. So names and shapes have one source, the
// declarations of the layers. A catalog needs no device and no memory but its own texts.
#pragma once

#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/lora_spec.h"
#include "config/model_spec.h"
#include "config/stage_layout.h"
#include "config/train_spec.h"
#include "model/params.h"

namespace moebius {

struct CatalogSpec {
  const ModelSpec& model;
  ModelUse use = ModelUse::inference;    // training also has state
  BalanceSpec balance = {};              // decides which state there is
  std::vector<std::string> freeze = {};  // patterns of frozen parameters, as in ParamTable
  bool holds_mtp = true;                 // includes the modules of multi-token prediction
  int64_t num_mtp = 0;                   // computed modules of multi-token prediction; 0: they are frozen
  std::vector<StageSpec> stages = {};    // the stages whose parameters are listed; empty: the whole model
  const Mesh* mesh = nullptr;            // the rank whose shards are listed; null: one rank that has everything
  LoraSpec lora = {};                    // adapters, which are parameters too
};

class ModelCatalog {
 public:
  struct Entry {
    ParamSpec spec;       // trainable is false for a frozen parameter too
    bool frozen = false;  // CatalogSpec::freeze names it, or its module is not computed
  };

  // Throws the errors of the layers: Error{usage} when the mesh does not divide the model, or when only some parts of a
  // parameter are frozen.
  explicit ModelCatalog(const CatalogSpec& spec);
  // The catalog of the whole model as it is on disk, with or without its modules of multi-token prediction.
  explicit ModelCatalog(const ModelSpec& model, bool holds_mtp = true);

  const ModelSpec& model() const { return model_; }
  bool holds_mtp() const { return holds_mtp_; }  // false if the model has no modules of multi-token prediction
  // In the order in which the model declares them.
  const std::vector<Entry>& params() const& { return params_; }
  const std::vector<Entry>& params() const&& = delete;  // a loop over them would outlive the catalog
  // The named global tensors of all parameters in the same order, in the Hugging Face spelling.
  const std::vector<ParamPart>& parts() const& { return parts_; }
  const std::vector<ParamPart>& parts() const&& = delete;
  int64_t num_trained() const;  // elements of trained parameters
  int64_t num_frozen() const;   // elements of frozen parameters

 private:
  ModelSpec model_;
  bool holds_mtp_;
  std::vector<Entry> params_;
  std::vector<ParamPart> parts_;
};

// Returns the model as one stage, with or without its modules of multi-token prediction.
StageSpec whole_stage(const ModelSpec& model, bool with_mtp = true);

// Returns whether a model in this use has parameters for its modules of multi-token prediction. Training keeps modules
// that it does not compute, so that checkpoints are complete. num_mtp: as in BatchShape.
inline bool holds_mtp_modules(ModelUse use, int64_t num_mtp) { return use == ModelUse::training || num_mtp > 0; }

// Returns `freeze` with patterns for the modules that are not computed, since these have no gradient.
std::vector<std::string> with_idle_modules(std::vector<std::string> freeze, const ModelSpec& model, int64_t num_mtp);

// Throws Error{usage} unless each pattern matches a parameter, and a trained parameter is left.
// REQUIRES: the catalog was made with these patterns.
void check_freeze(const ModelCatalog& whole, const std::vector<std::string>& patterns);

// Returns the names, without ".weight", of the matrices of a model that can have an adapter.
std::vector<std::string> adaptable_matrices(const ModelSpec& model);

// Throws Error{usage} unless each of lora.targets matches a matrix that can have an adapter.
void check_lora_targets(const ModelCatalog& whole, const LoraSpec& lora);

// Throws Error{usage} unless each pattern of precision.keep matches a matrix of a projection or of experts.
void check_keep(const ModelCatalog& whole, const std::vector<std::string>& patterns);

}  // namespace moebius
