// Muon (K. Jordan et al., 2024) for the matrices of layers, AdamW for all else: embeddings, heads, routers, norms,
// biases, sinks, adapters. Learning rate and weight decay are those of AdamW, since an update is scaled to AdamW's
// usual size (arXiv 2502.16982, equation 4). With the gradient g of a matrix [M, N], clipped:
//   m = momentum m + g;  u = momentum m + g
//   w = w (1 - lr wd) - lr 0.2 sqrt(max(M, N)) newton_schulz(u)
//
// Matrices are those of Hugging Face: q, k and v are three, and so are gate, up and down of each expert. A rank
// computes every matrix of which it owns an element, and updates its own elements. It gets u of the other elements from
// their owners: the ranks that share the gradient, and those with other shards of the matrix (tp or etp). So results
// are never sent, and experts whose gradient no other rank shares need no messages. The products are of whole matrices,
// so the layout changes no bit. Neighbours of one shape, such as the experts of a layer, are computed in batches.
//
// u is stored in the memory of the gradient. It is computed from the f32 momentum; where the state is in fewer bits,
// the momentum is rounded stochastically after that.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "parallel/optim/trained_params.h"

namespace moebius {

class MuonOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 3> kStatePrefixes{"muon_m.", "adam_m.", "adam_v."};
  static int64_t num_moments(const OptimizerSpec&, bool is_matrix) { return is_matrix ? 1 : 2; }

  // context: as for make_optimizer(), with mesh and sharding.
  explicit MuonOptimizer(const OptimizerContext& context);

  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  std::vector<OptimizerState> state() const override;

 private:
  struct Workspace {
    Tensor valid_1, whole_n, arrived_n, newton_schulz;
  };
  // Matrices of one shape that are adjacent in a parameter.
  using Batch = std::span<const TrainedParams::OfPart>;
  static std::vector<Batch> batches_of(const std::vector<TrainedParams::OfPart>& parts);
  // Replaces the gradient of the owned elements by u.
  void add_momentum(Stream& s, Batch batch, const Workspace& work, const OptimizerStepArgs& args) const;
  void orthogonalise(Stream& s, Batch batch, const Workspace& work, const OptimizerStepArgs& args) const;

  OptimizerSpec spec_;
  const ParamTable& table_;
  const Mesh& mesh_;
  Sharding& sharding_;
  TrainedParams matrices_, others_;
  UpdateScratch scratch_;
};

}  // namespace moebius
