// Routed experts that take the tokens of a long micro-batch in chunks, one after the other, so that
// their scratch does not grow with its length. A chunk is forwarded, and passed backward with its
// weight gradients, as a micro-batch of that many tokens is.
//
// How many tokens a chunk has follows from the number of tokens alone. So runs with as many tokens on
// a rank sum weight gradients in one order, whatever they keep or recompute.
#pragma once

#include <memory>
#include <vector>

#include "model/moe/routed_experts.h"

namespace moebius {

// Tokens of a chunk on a rank with T tokens in a micro-batch: the largest divisor of T up to 32768. T
// itself where it is not longer, or where no divisor of at least 8192 is: short chunks would cost time.
int64_t expert_chunk(int64_t T);
// The same for the experts of a model. Those whose adapters drop elements take T at once, since what is dropped
// depends on a token's place in the micro-batch.
int64_t expert_chunk(int64_t T, const LoraSpec& lora);

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
  // parallel.expert_overlap hides nothing between chunks: `concurrent` runs before the first.
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& saved,
               const ConcurrentWork& concurrent) const override;
  void recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& saved) const override;
  // Adds to the weights' gradients too where no other pass comes between.
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
