#include "model/attention/attention.h"

#include "model/attention/gqa.h"
#include "model/attention/mla.h"
#include "model/layer_of.h"

namespace moebius {
namespace {

template <class Layer>
class AttentionOf final : public LayerOf<Attention, Layer> {
  using Base = LayerOf<Attention, Layer>;
  using Base::layer_, Base::own;

 public:
  using Base::Base;
  using typename Base::Saved;

  std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override {
    return Base::declare(plan, prefix);
  }
  void recompute(Step& step, const Attention::Input& x, Saved& saved) const override {
    layer_.recompute(step, x, own(saved));
  }
  bool holds_input(const Saved& saved) const override { return layer_.holds_input(own(saved)); }
  void set_input(Tensor x_tD, Saved& saved) const override { own(saved).x_tD = x_tD; }
  Attention::InputGradient backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx,
                                          const Attention::Input& x) const override {
    return layer_.backward_input(step, dy_tD, own(saved), with_dx, x);
  }
  void output(Step& step, Tensor y_tD, const Saved& saved) const override { layer_.output(step, y_tD, own(saved)); }
  void forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                      const CachedRows& rows) const override {
    layer_.forward_cached(step, y_tD, norm, cache, rows);
  }
  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const override {
    layer_.declare_cache(plan, prefix, num_tokens, cache);
  }
};

}  // namespace

std::unique_ptr<Attention> make_attention(const LayerContext& c, const std::string& prefix, int64_t layer) {
  if (c.model.is_latent()) return std::make_unique<AttentionOf<Mla>>(c, prefix);
  return std::make_unique<AttentionOf<Gqa>>(c, prefix, c.model.window_of(layer));
}

}  // namespace moebius
