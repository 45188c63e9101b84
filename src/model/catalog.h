// The names, shapes and kinds of a model's parameters, as a function of its spec.
//
// The layers declare into a table whose plan is never given memory. So names and shapes have
// one source: the declarations of the layers themselves. A catalog costs no memory but its
// own texts, and needs no device.
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
  std::vector<std::string> freeze = {};  // as in ParamTable
  bool holds_mtp = true;                 // whether the modules of multi-token prediction are part of it
  int64_t num_mtp = 0;                   // how many of them are computed; 0: they are held, and frozen
  std::vector<StageSpec> stages = {};    // the stages whose parameters are listed; none: the whole model
  const Mesh* mesh = nullptr;            // the rank whose shards are listed; null: one that holds all
  LoraSpec lora = {};                    // adapters, which are parameters too
};

class ModelCatalog {
 public:
  struct Entry {
    ParamSpec spec;       // trainable is false of a frozen parameter, too
    bool frozen = false;  // by CatalogSpec::freeze, or as a module that is not computed
  };

  // The errors are those of the layers: Error{usage} when the mesh does not divide the model, or
  // when only some parts of a parameter are frozen.
  explicit ModelCatalog(const CatalogSpec& spec);
  // The whole model as it is on disk: with the modules of multi-token prediction that its spec
  // counts, or without.
  explicit ModelCatalog(const ModelSpec& model, bool holds_mtp = true);

  const ModelSpec& model() const { return model_; }
  bool holds_mtp() const { return holds_mtp_; }  // false too where the model has none
  // In the order in which the model declares them.
  const std::vector<Entry>& params() const& { return params_; }
  const std::vector<Entry>& params() const&& = delete;  // a loop over them would outlive the catalog
  // The named global tensors of all parameters in the same order, in the Hugging Face spelling.
  const std::vector<ParamPart>& parts() const& { return parts_; }
  const std::vector<ParamPart>& parts() const&& = delete;
  int64_t num_trained() const;  // elements of the parameters that are trained
  int64_t num_frozen() const;   // elements of those that could be trained and are not

 private:
  ModelSpec model_;
  bool holds_mtp_;
  std::vector<Entry> params_;
  std::vector<ParamPart> parts_;
};

// The model as one stage, with or without its modules of multi-token prediction.
StageSpec whole_stage(const ModelSpec& model, bool with_mtp = true);

// Returns whether a model in this use holds its modules of multi-token prediction. Modules that are not
// computed use no memory, but training saves the ones that it was given. num_mtp: as in BatchShape.
inline bool holds_mtp_modules(ModelUse use, int64_t num_mtp) { return use == ModelUse::training || num_mtp > 0; }

// Returns freeze, and patterns of the modules that are held but not computed, since those have no gradient.
std::vector<std::string> with_idle_modules(std::vector<std::string> freeze, const ModelSpec& model, int64_t num_mtp);

// Error{usage} unless each of the patterns matches a parameter, and something is left to train. The
// catalog must be made with these patterns.
void check_freeze(const ModelCatalog& whole, const std::vector<std::string>& patterns);

// The names, without ".weight", of the matrices of a model that can have an adapter.
std::vector<std::string> adaptable_matrices(const ModelSpec& model);

// Error{usage} unless each of lora.targets matches a matrix that can have an adapter.
void check_lora_targets(const ModelCatalog& whole, const LoraSpec& lora);

// Error{usage} unless each pattern of precision.keep matches a matrix of a projection or of experts.
void check_keep(const ModelCatalog& whole, const std::vector<std::string>& patterns);

}  // namespace moebius
