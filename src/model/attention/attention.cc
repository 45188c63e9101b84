#include "model/attention/attention.h"

#include "model/attention/gqa.h"
#include "model/attention/mla.h"

namespace moebius {
namespace {

// Hands the calls of the interface to a layer, with the layer's own kind of Saved.
template <class Layer>
class AttentionOf final : public Attention {
 public:
  template <class... Args>
  explicit AttentionOf(Args&&... args) : layer_(std::forward<Args>(args)...) {}

  std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override {
    auto own = std::make_unique<Own>();
    layer_.declare_saved(plan, prefix, own->saved);
    return own;
  }
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const override {
    layer_.forward(step, y_tD, x_tD, own(saved));
  }
  void recompute(Step& step, Tensor x_tD, Saved& saved) const override { layer_.recompute(step, x_tD, own(saved)); }
  void output(Step& step, Tensor y_tD, const Saved& saved) const override { layer_.output(step, y_tD, own(saved)); }
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const override {
    layer_.backward_input(step, dx_tD, dy_tD, own(saved));
  }
  void backward_weight(Step& step, const Saved& saved) const override { layer_.backward_weight(step, own(saved)); }
  void forward_cached(Step& step, Tensor y_tD, Tensor x_tD, const KvCache& cache, int64_t first) const override {
    layer_.forward_cached(step, y_tD, x_tD, cache, first);
  }
  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t max_tokens, KvCache& cache) const override {
    layer_.declare_cache(plan, prefix, max_tokens, cache);
  }
  std::vector<KeptTensor> kept(const Saved& saved) const override { return Layer::kept(own(saved)); }

 private:
  struct Own final : Saved {
    typename Layer::Saved saved;
  };
  static typename Layer::Saved& own(Saved& saved) { return static_cast<Own&>(saved).saved; }
  static const typename Layer::Saved& own(const Saved& saved) { return static_cast<const Own&>(saved).saved; }

  Layer layer_;
};

}  // namespace

std::unique_ptr<Attention> make_attention(const LayerContext& c, const std::string& prefix, int64_t layer) {
  if (c.model.is_latent()) return std::make_unique<AttentionOf<Mla>>(c, prefix);
  return std::make_unique<AttentionOf<Gqa>>(c, prefix, c.model.window_of(layer));
}

}  // namespace moebius
