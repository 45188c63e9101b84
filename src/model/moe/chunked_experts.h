// Routed experts that take the tokens of a long micro-batch in chunks, one after the other, so that
// their scratch does not grow with its length. A chunk is forwarded, and passed backward with its
// weight gradients, as a micro-batch of that many tokens is.
//
// How many tokens a chunk has follows from the number of tokens and of the ranks that share experts alone.
// So runs with the same numbers sum weight gradients in one order, whatever they keep or recompute, and
// with every dispatcher.
#pragma once

#include <memory>
#include <vector>

#include "model/moe/routed_experts.h"

namespace moebius {

// Tokens of a chunk on each of num_ranks ranks with T tokens in a micro-batch: the largest divisor of T up to
//   most = min(32768, 262144 / num_ranks)
// T itself where it is not longer, or where no divisor of at least most / 4 is: short chunks would cost time.
// A chunk of all ranks has 262144 tokens at most, and any rank may get a row of each of them. So memory for rows
// that arrive does not grow with the number of ranks beyond that.
int64_t expert_chunk(int64_t T, int64_t num_ranks = 1);
// The same for the experts of a model, which num_ranks ranks share (etp ep). Those whose adapters drop elements
// take T at once, since what is dropped depends on a token's place in the micro-batch.
int64_t expert_chunk(int64_t T, const LoraSpec& lora, int64_t num_ranks = 1);

class ChunkedExperts final : public RoutedExperts {
 public:
  // A part of the route, sorted anew.
  struct Chunk {
    Route route;
    std::unique_ptr<RoutedExperts::Saved> experts;
  };
  struct Saved final : RoutedExperts::Saved {
    std::vector<Chunk> chunks;
    bool weights_follow = true;  // backward_weight of a chunk runs right after its backward_input
  };
  // experts: made for `chunk` tokens, which divide those of a micro-batch.
  ChunkedExperts(const LayerContext& c, std::unique_ptr<RoutedExperts> experts, int64_t chunk);
  std::unique_ptr<RoutedExperts::Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;

  using RoutedExperts::forward;
  // parallel.expert_overlap hides nothing between chunks: `meanwhile` runs before the first.
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& saved,
               const Meanwhile& meanwhile) const override;
  void recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& saved) const override;
  // Adds to the weights' gradients too where no other pass comes between.
  void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                      RoutedExperts::Saved& saved) const override;
  void backward_weight(Step& step, const RoutedExperts::Saved& saved) const override;
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& saved,
                const Meanwhile& meanwhile) const override;

 private:
  // Sorts the rows of the chunk's tokens by expert.
  Route route_of(Step& step, const Chunk& chunk, const Route& whole, int64_t begin, int64_t end) const;

  int64_t T_, K_, E_, chunk_;
  std::unique_ptr<RoutedExperts> experts_;
};

}  // namespace moebius
