#include "model/layers/precision_of.h"

#include "core/rng.h"

namespace moebius {
namespace {

bool is_kept(const LayerContext& c, const ParamSpec& spec) {
  const std::string *in = nullptr, *out = nullptr;
  const auto sort = [&](const std::string& name) { (matches_any(c.precision.keep, name) ? in : out) = &name; };
  for (const ParamPart& part : spec.parts) sort(part.name);
  if (spec.parts.empty()) sort(spec.name);
  MOEBIUS_CHECK(usage, !in || !out,
                "precision.keep: expected patterns that match all parts of {} or none; got some that match {} and not "
                "{}; they are one product, keep them together",
                spec.name, *in, *out);
  return in != nullptr;
}

void check_split(PrecisionRecipe recipe, const ParamPart& part) {
  if (part.shard.dim < 0) return;
  const int64_t multiple = split_multiple(recipe), whole = part.shape[part.shard.dim];
  const bool fits = multiple > 0 && part.shard.count % multiple == 0;
  MOEBIUS_CHECK(usage, fits,
                "precision.recipe = \"{}\" has {} that ranks cannot share: the {} {} of {} are split into {}; choose a "
                "smaller parallel.tp or etp, or add the name to precision.keep",
                name_of(recipe), multiple == 0 ? "a scale for each tensor" : fmt::format("blocks of {}", multiple),
                whole, part.shard.dim == 0 ? "rows" : "columns", part.name, part.shard.count);
}

}  // namespace

ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts) {
  if (c.precision.recipe == PrecisionRecipe::none || is_kept(c, spec)) return {};
  for (const ParamPart& part : spec.parts) check_split(c.precision.recipe, part);
  return {c.precision.recipe, c.seed, key_of(spec.name.c_str()), experts, c.precision.weight_gradients};
}

class WeightOperands::Copies : public WeightCopies {
 public:
  Copies(MemoryPlan& plan, const Param& param, const ProductPrecision& precision)
      : w(precision.w_form(param.spec.shape)),
        w_for_dx(precision.w_for_dx_form(param.spec.shape)),
        param_(param),
        precision_(precision) {
    declare(plan, w, ".quantised");
    declare(plan, w_for_dx, ".quantised_transposed");
  }
  void make(Stream& s) override {
    precision_.quantise_weights(s, w, param_.w);
    precision_.quantise_weights(s, w_for_dx, param_.w);
  }
  int64_t num_bytes() const override { return bytes_; }

  Operand w, w_for_dx;

 private:
  void declare(MemoryPlan& plan, Operand& q, const char* what) {
    const auto one = [&](Tensor& t, const char* part) {
      if (t.empty()) return;
      plan.declare(t, param_.spec.name + what + part, t.shape, t.dtype, Life::state);
      bytes_ += div_ceil(t.num_bytes(), kAlignBytes) * kAlignBytes;
    };
    one(q.data, "");
    one(q.scales, ".scales");
    one(q.tensor_scale, ".tensor_scale");
  }

  static constexpr int64_t kAlignBytes = MemoryPlan::kAlign * 4;  // of quantised elements and f32

  const Param& param_;
  ProductPrecision precision_;
  int64_t bytes_ = 0;
};

WeightOperands::WeightOperands(const LayerContext& c, const Param& param, const ProductPrecision& precision)
    : param_(param), precision_(precision), params_(&c.params) {
  if (precision_.is_plain() || c.params.use() != ModelUse::training) return;
  auto copies = std::make_unique<Copies>(c.plan, param, precision);
  copies_ = copies.get();
  c.params.own_copies(param, std::move(copies));
}

Operand WeightOperands::w(Step& step) const {
  if (copies_ && params_->holds(*copies_)) return copies_->w;
  return precision_.w(quantize_context(step), param_.w);
}

Operand WeightOperands::w_for_dx(Step& step) const {
  if (copies_ && params_->holds(*copies_)) return copies_->w_for_dx;
  return precision_.w_for_dx(quantize_context(step), param_.w);
}

}  // namespace moebius
