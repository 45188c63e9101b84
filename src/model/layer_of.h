// LayerOf implements an interface of layers (Attention, FeedForward) by a layer, and converts Saved to the layer's own
// type. A derived class implements the calls that the interfaces do not share.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/saved_tensor.h"
#include "model/step.h"

namespace moebius {

template <class Interface, class Layer>
class LayerOf : public Interface {
 public:
  using Saved = typename Interface::Saved;

  template <class... Args>
  explicit LayerOf(Args&&... args) : layer_(std::forward<Args>(args)...) {}

  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const final {
    layer_.forward(step, y_tD, x_tD, own(saved));
  }
  void backward_weight(Step& step, const Saved& saved) const final { layer_.backward_weight(step, own(saved)); }
  std::vector<KeptTensor> kept(const Saved& saved) const final { return Layer::kept(own(saved)); }

 protected:
  std::unique_ptr<Saved> declare(MemoryPlan& plan, const std::string& prefix) const {
    auto own = std::make_unique<Own>();
    layer_.declare_saved(plan, prefix, own->saved);
    return own;
  }
  // Returns the layer's own Saved. REQUIRES: declare() of this kind of layer returned it; std::bad_cast otherwise.
  static typename Layer::Saved& own(Saved& saved) { return dynamic_cast<Own&>(saved).saved; }
  static const typename Layer::Saved& own(const Saved& saved) { return dynamic_cast<const Own&>(saved).saved; }

  Layer layer_;

 private:
  struct Own final : Saved {
    typename Layer::Saved saved;
  };
};

}  // namespace moebius
