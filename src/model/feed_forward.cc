#include "model/feed_forward.h"

#include <type_traits>

#include "model/layer_of.h"
#include "model/layers/chunked_mlp.h"
#include "model/layers/row_chunks.h"

namespace moebius {
namespace {

template <class Layer>
class FeedForwardOf final : public LayerOf<FeedForward, Layer> {
  using Base = LayerOf<FeedForward, Layer>;
  using Base::layer_, Base::own;

 public:
  using Base::Base;
  using typename Base::Saved;

  std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override {
    return Base::declare(plan, prefix + (kIsMoe ? ".moe" : ".mlp"));
  }
  void forward_normed(Step& step, Tensor y_tD, const RmsNormFwd& norm, Saved& saved) const override {
    if constexpr (kIsMoe) return layer_.forward_normed(step, y_tD, norm, own(saved));
    rms_norm_fwd(step.stream, norm);
    layer_.forward(step, y_tD, norm.y_TD, own(saved));
  }
  void recompute(Step& step, Tensor x_tD, Saved& saved) const override { layer_.recompute(step, x_tD, own(saved)); }
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const override {
    layer_.backward_input(step, dx_tD, dy_tD, own(saved));
  }
  void backward(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const override {
    if constexpr (kHasBackward) return layer_.backward(step, dx_tD, dy_tD, own(saved));
    layer_.backward_input(step, dx_tD, dy_tD, own(saved));
    layer_.backward_weight(step, own(saved));
  }
  const Moe* moe() const override {
    if constexpr (kIsMoe) return &layer_;
    return nullptr;
  }
  const Moe::Saved* moe_saved(const Saved& saved) const override {
    if constexpr (kIsMoe) return &own(saved);
    return nullptr;
  }

 private:
  static constexpr bool kIsMoe = std::is_same_v<Layer, Moe>;
  static constexpr bool kHasBackward = kIsMoe || std::is_same_v<Layer, Mlp>;
};

}  // namespace

std::unique_ptr<FeedForward> make_feed_forward(const LayerContext& c, const std::string& prefix, int64_t layer) {
  if (c.model.is_moe_layer(layer)) return std::make_unique<FeedForwardOf<Moe>>(c, prefix, layer);
  const int64_t chunk = row_chunk(c);
  if (chunk == c.stream_rows()) return std::make_unique<FeedForwardOf<Mlp>>(c, prefix, c.model.intermediate_size);
  return std::make_unique<FeedForwardOf<ChunkedMlp>>(c, prefix, c.model.intermediate_size, chunk);
}

}  // namespace moebius
