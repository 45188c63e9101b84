#include "model/feed_forward.h"

#include <type_traits>

namespace moebius {
namespace {

// Hands the calls of the interface to a layer, with the layer's own kind of Saved.
template <class Layer>
class FeedForwardOf final : public FeedForward {
 public:
  template <class... Args>
  explicit FeedForwardOf(Args&&... args) : layer_(std::forward<Args>(args)...) {}

  std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override {
    auto own = std::make_unique<Own>();
    layer_.declare_saved(plan, prefix + (kIsMoe ? ".moe" : ".mlp"), own->saved);
    return own;
  }
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const override {
    layer_.forward(step, y_tD, x_tD, own(saved));
  }
  void recompute(Step& step, Tensor x_tD, Saved& saved) const override { layer_.recompute(step, x_tD, own(saved)); }
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const override {
    layer_.backward_input(step, dx_tD, dy_tD, own(saved));
  }
  void backward_weight(Step& step, const Saved& saved) const override { layer_.backward_weight(step, own(saved)); }
  std::vector<KeptTensor> kept(const Saved& saved) const override { return Layer::kept(own(saved)); }

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
  struct Own final : Saved {
    typename Layer::Saved saved;
  };
  static typename Layer::Saved& own(Saved& saved) { return static_cast<Own&>(saved).saved; }
  static const typename Layer::Saved& own(const Saved& saved) { return static_cast<const Own&>(saved).saved; }

  Layer layer_;
};

}  // namespace

std::unique_ptr<FeedForward> make_feed_forward(const LayerContext& c, const std::string& prefix, int64_t layer) {
  if (c.model.is_moe_layer(layer)) return std::make_unique<FeedForwardOf<Moe>>(c, prefix, layer);
  return std::make_unique<FeedForwardOf<Mlp>>(c, prefix, c.model.intermediate_size);
}

}  // namespace moebius
