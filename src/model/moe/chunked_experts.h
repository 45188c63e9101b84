// Routed experts that compute a long micro-batch in chunks of tokens, one after another, so that their scratch does not
// grow with its length. Each chunk has its own forward and backward passes.
//
// The size of a chunk depends only on the number of tokens and on the number of ranks that share the experts. So runs
// with the same numbers sum weight gradients in the same order, with every dispatcher and whatever they recompute.
#pragma once

#include <memory>
#include <vector>

#include "model/moe/routed_experts.h"

namespace moebius {

// Returns the number of tokens of a chunk on each of num_ranks ranks, for T tokens of a micro-batch on a rank. It is
// the largest divisor of T up to
//   most = min(32768, 262144 / num_ranks).
// It is T if T is at most `most`, or has no divisor of at least most / 4 (short chunks would be slow).
// A chunk has at most 262144 tokens on all ranks together, and each rank may get a row of each of them. So the memory
// for rows that arrive does not grow with the number of ranks beyond that.
int64_t expert_chunk(int64_t T, int64_t num_ranks = 1);
// Returns the same for the experts of a model that num_ranks = etp * ep ranks share. Experts with dropout in their
// adapters compute T at once, since the draws depend on a token's position in the micro-batch.
int64_t expert_chunk(int64_t T, const LoraSpec& lora, int64_t num_ranks = 1);

class ChunkedExperts final : public RoutedExperts {
 public:
  // The route of a chunk, sorted by expert again.
  struct Chunk {
    Route route;
    std::unique_ptr<RoutedExperts::Saved> experts;
  };
  struct Saved final : RoutedExperts::Saved {
    std::vector<Chunk> chunks;
    bool weights_follow = true;  // backward_weight of a chunk runs right after its backward_input
  };
  // experts: for `chunk` tokens. REQUIRES: chunk divides the tokens of a micro-batch.
  ChunkedExperts(const LayerContext& c, std::unique_ptr<RoutedExperts> experts, int64_t chunk);
  std::unique_ptr<RoutedExperts::Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;

  using RoutedExperts::forward;
  // parallel.expert_overlap overlaps nothing between chunks: `concurrent` overlaps with the first chunk.
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& saved,
               const ConcurrentWork& concurrent) const override;
  void recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& saved) const override;
  // Also adds to the gradients of weights, if no other pass comes before backward_weight.
  void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                      RoutedExperts::Saved& saved) const override;
  void backward_weight(Step& step, const RoutedExperts::Saved& saved) const override;
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& saved,
                const ConcurrentWork& concurrent) const override;

 private:
  // Sorts the rows of the chunk's tokens by expert.
  Route route_of(Step& step, const Chunk& chunk, const Route& whole, int64_t begin, int64_t end) const;

  int64_t T_, K_, E_, chunk_;
  std::unique_ptr<RoutedExperts> experts_;
};

}  // namespace moebius
